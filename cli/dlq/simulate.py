"""`holdfast dlq simulate`: would the new handler pass? Nothing is sent, nothing stays."""

from collections import Counter
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from holdfast.cli.display import foreign, print_json, print_table, say
from holdfast.cli.dlq.options import MasterKey, dead_letters
from holdfast.cli.dlq.progress import shown_work
from holdfast.cli.dlq.sending import opened_vault
from holdfast.cli.exits import EXIT_NOT_FOUND
from holdfast.cli.opened import existing_database
from holdfast.cli.options import Config, Database, Json
from holdfast.consumer.handlers.trial import Trial
from holdfast.dlq.operations import DeadLetterAdmin
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.replay.simulation import Named, Prediction, cases
from holdfast.dlq.replay.simulation import simulate as simulated


def simulate(
    names: Annotated[list[str], typer.Argument(help="Failure groups, or their first characters.")],
    *,
    config: Config = None,
    database: Database,
    handler: Annotated[str, typer.Option(help="The new handler: module:function.")],
    work: Annotated[
        str | None,
        typer.Option(
            "--handler-database",
            show_default=False,
            help="Where the handler's session works; --database unless given.",
        ),
    ] = None,
    master_key_file: MasterKey = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Try at most so many messages, some of every kind.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a handler on a group in a rolled-back transaction and predict the replay."""
    trial = Trial(Named.load(handler))
    with dead_letters(database) as engine, ExitStack() as closing:
        admin = DeadLetterAdmin(engine)
        groups = {one.group_id: one for one in (admin.group(name) for name in names)}
        found = cases(engine, Selection(groups=tuple(groups)), limit=limit)
        vault = opened_vault(engine, master_key_file)
        target = engine
        if work is not None:
            target = existing_database(work, "--handler-database")
            closing.callback(target.dispose)
        with shown_work("tried", len(found.letters)) as observe:
            predictions = simulated(
                engine, found, trial, database=target, vault=vault, observe=observe
            )
    titles = {group.group_id: group.title for group in groups.values()}
    if as_json:
        print_json([_as_json(one, titles) for one in predictions])
    else:
        _report(predictions, found.beyond)
    if any(one.fails or one.untried for one in predictions) or not _tried(predictions):
        raise SystemExit(EXIT_NOT_FOUND)


def _tried(predictions: list[Prediction]) -> int:
    return sum(one.count for one in predictions)


def _report(predictions: list[Prediction], beyond: int) -> None:
    rows = [
        (one.group_id[:8], one.count, one.passes, one.fails_alike, sum(one.fails_anew.values()),
         one.untried.total())
        for one in predictions
    ]  # fmt: skip
    print_table(("group", "tried", "pass", "fail alike", "fail anew", "not tried"), rows)
    for one in predictions:
        if one.example:
            say(foreign(f"{one.group_id[:8]} fails, e.g. with {one.example}"))
        if one.effects:
            told = ", ".join(f"{n:,}× {name}" for name, n in one.effects.most_common())
            say(f"{one.group_id[:8]} would have these effects, which were left out: {told}")
    tried = _tried(predictions)
    if beyond:
        say(f"tried {tried:,}; {beyond:,} more are beyond --limit")
    untried = sum((one.untried for one in predictions), Counter[str]())
    for why, count in untried.most_common():
        say(f"{count:,} were not tried: {why}")
    failing = sum(one.fails for one in predictions)
    if failing:
        say(f"{failing:,} would fail again: a replay would stop")
    elif tried and not untried:
        say(f"all {tried:,} would pass; next: holdfast dlq replay GROUP --dry-run")
    else:
        say(f"{tried:,} would pass; nobody knows about the others")


def _as_json(one: Prediction, titles: dict[str, str]) -> dict[str, Any]:
    return {"group_id": one.group_id, "title": titles.get(one.group_id, ""),
            "fingerprint": one.fingerprint, "tried": one.count, "passes": one.passes,
            "untried": dict(one.untried), "fails_alike": one.fails_alike,
            "fails_anew": dict(one.fails_anew), "effects": dict(one.effects),
            "example": one.example}  # fmt: skip
