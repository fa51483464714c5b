"""`holdfast dlq simulate`: would the new handler pass? Nothing is sent, nothing stays."""

from typing import Annotated, Any

import typer

from holdfast.cli.display import print_json, print_table, say
from holdfast.cli.dlq.opened import dead_letters, one_group
from holdfast.cli.dlq.options import Database, MasterKey
from holdfast.cli.dlq.sending import opened_vault
from holdfast.cli.failures import EXIT_NOT_FOUND
from holdfast.cli.options import Config, Json
from holdfast.database import open_database
from holdfast.dlq.replay.handlers import Named
from holdfast.dlq.replay.plan import Terms
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.replay.simulation import Prediction
from holdfast.dlq.replay.simulation import simulate as simulated
from holdfast.dlq.replay.surveying import survey


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
    limit: Annotated[int, typer.Option(min=1, help="Try at most so many messages.")] = 10_000,
    as_json: Json = False,
) -> None:
    """Run a handler on a group in a rolled-back transaction and predict the replay."""
    named = Named.load(handler)
    with dead_letters(database) as engine:
        named_groups = [one_group(engine, name) for name in names]
        groups = {group.fingerprint: group for group in named_groups}
        selection = Selection(groups=tuple(group.group_id for group in groups.values()))
        with engine.connect() as db:
            letters = survey(db, selection, Terms()).letters
        target = engine if work is None else open_database(work)
        try:
            vault = opened_vault(engine, master_key_file)
            found = simulated(engine, letters[:limit], named, database=target, vault=vault)
        finally:
            if target is not engine:
                target.dispose()
    titles = {fingerprint: (group.group_id, group.title) for fingerprint, group in groups.items()}
    if as_json:
        print_json([_as_json(one, titles) for one in found])
    else:
        _report(found, titles, len(letters), limit)
    if any(one.fails or one.unread for one in found):
        raise SystemExit(EXIT_NOT_FOUND)


def _report(
    found: list[Prediction], titles: dict[str, tuple[str, str]], count: int, limit: int
) -> None:
    rows = [
        (titles.get(one.fingerprint, ("", ""))[0][:8], one.count, one.passes, one.fails_alike,
         sum(one.fails_anew.values()), ", ".join(f"{n}× {name}" for name, n in one.effects.items()),
         one.example or "")
        for one in found
    ]  # fmt: skip
    headings = ("group", "tried", "pass", "fail alike", "fail anew", "effects not done", "example")
    print_table(headings, rows)
    if count > limit:
        say(f"tried {limit:,} of {count:,}; --limit tries more")
    failing = sum(one.fails for one in found)
    unread = sum(one.unread for one in found)
    if unread:
        why = next(one.unread_because for one in found if one.unread)
        say(f"{unread:,} were not tried, e.g. because {why}")
    if failing:
        say(f"{failing:,} would fail again: a replay would stop")
    elif not unread:
        say("all would pass; next: holdfast dlq replay GROUP --dry-run")


def _as_json(one: Prediction, titles: dict[str, tuple[str, str]]) -> dict[str, Any]:
    group, title = titles.get(one.fingerprint, ("", ""))
    return {"group_id": group, "title": title, "fingerprint": one.fingerprint, "tried": one.count,
            "passes": one.passes, "unread": one.unread, "fails_alike": one.fails_alike,
            "fails_anew": dict(one.fails_anew), "effects": dict(one.effects),
            "example": one.example}  # fmt: skip
