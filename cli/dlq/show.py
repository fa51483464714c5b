"""`show` and `explain`: one group or one dead letter, whole."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from sqlalchemy import select
from sqlalchemy.engine import Engine

from holdfast.cli.display import foreign, print_json, say
from holdfast.cli.dlq.letter import letter_facts, say_next, show_letter
from holdfast.cli.dlq.opened import dead_letters, one_group, one_letter
from holdfast.cli.dlq.options import Correlation, Database
from holdfast.cli.dlq.shown import ago, sparkline, when
from holdfast.cli.options import Config, Json
from holdfast.database import reading
from holdfast.dlq.group import newest
from holdfast.dlq.groups import Group
from holdfast.dlq.replay.edits import Edits
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.rows import PENDING, letter_of
from holdfast.dlq.schema import message, overtaken
from holdfast.dlq.siblings import Around, look_around
from holdfast.dlq.verdicts import MOST, Judged, verdicts
from holdfast.errors import ConfigurationError, NotFound

_VERDICTS = {
    "hold for code": "hold for a fix of the code",
    "hold for data": "hold for a correction of the data",
    "retry": "retry by itself after a while",
    "alert": "tell somebody: nobody knows this",
    "": "not judged",
}
Name = Annotated[str, typer.Argument(help="A group or a dead letter, or its first characters.")]


def show(
    name: Annotated[
        str | None, typer.Argument(help="A group or a dead letter, or its first characters.")
    ] = None,
    *,
    config: Config = None,
    database: Database,
    correlation: Correlation = None,
    as_json: Json = False,
) -> None:
    """Show a group with a sample, or one dead letter with its whole history."""
    with dead_letters(database) as engine:
        if (name is None) == (correlation is None):
            raise ConfigurationError("name a group or a letter, or give --correlation")
        if name is None:
            name = _correlated(engine, str(correlation))
        group = _group(engine, name)
        dlq_id = _sample(engine, group) if group is not None else one_letter(engine, name)
        query = select(message).where(message.c.dlq_id == dlq_id)
        judged = None if group is None else _judged(engine, group)
        with reading(engine).connect() as db:
            row = db.execute(query).mappings().first()
            passed = db.execute(select(overtaken).where(overtaken.c.dlq_id == dlq_id)).first()
            plans = db.execute(
                select(item.c.plan_id, item.c.state, item.c.note, item.c.live)
                .where(item.c.dlq_id == dlq_id)
                .order_by(item.c.plan_id)
            ).all()
        revisions = Edits(engine).revisions(dlq_id)
    found = None if row is None else letter_of(row)
    if as_json:
        print_json({"group": None if group is None else asdict(group),
                    "triage": None if judged is None else _triage(judged[0]),
                    "looks_like": None if judged is None else judged[1].verdict,
                    "letter": None if found is None else letter_facts(found, row),
                    "superseded_by": None if passed is None else passed.message_id,
                    "revisions": revisions,
                    "plans": [dict(plan._mapping) for plan in plans]})  # fmt: skip
        return
    if group is not None:
        _show_group(group)
    if judged is not None:
        _say_judged(*judged)
        say("")
    if found is not None:
        show_letter(found, row)
    if passed is not None:
        say(f"  a newer event of its key was handled {when(passed.handled_at)}: message "
            f"{passed.message_id} at {passed.position}")  # fmt: skip
    for one in revisions:
        by = one["transform"] or one["actor"]
        say(f"revision {one['revision']} by {by}, {when(one['made_at'])}: {one['reason']}")
        say(foreign(one["difference"]))
    for plan in plans:
        # A claim that is over, of an aborted plan, was never sent or never confirmed.
        state = "not confirmed" if plan.state == "claimed" and plan.live is None else plan.state
        say(f"plan {plan.plan_id[-8:]}: {state} {foreign(plan.note or '')}")
    if group is None and found is not None and row is not None:
        say_next(found, row["state"])


def explain(
    name: Name, *, config: Config = None, database: Database, as_json: Json = False
) -> None:
    """Say why messages are in one group."""
    with dead_letters(database) as engine:
        group = _group(engine, name)
        if group is None:
            query = select(message.c.group_id).where(message.c.dlq_id == one_letter(engine, name))
            with reading(engine).connect() as db:
                own = str(db.execute(query).scalar_one())
            group = one_group(engine, own)
        triage, around = _judged(engine, group)
    if as_json:
        print_json(
            {"group_id": group.group_id, "algorithm": group.algorithm,
             "fingerprint": group.fingerprint, **group.hints,
             "looks_like": around.verdict, "why": around.why, "triage": _triage(triage)}
        )  # fmt: skip
        return
    say(f"group {group.group_id}: {group.title}")
    say(f"fingerprint {group.fingerprint} by algorithm {group.algorithm}, from the "
        f"{group.hints.get('by', 'failure')} of the error")  # fmt: skip
    for hint in _hints(group.hints.get("hints")):
        say(f"  {hint}")
    _say_judged(triage, around)
    say("a message is in this group when all of that is the same, and so are the consumer group, "
        "the topic and the handler; line numbers and values do not count")  # fmt: skip


def _correlated(engine: Engine, correlation: str) -> str:
    """Return the one letter of *correlation*, in whatever state."""
    wanted = Selection(correlation=correlation, state=None).where()
    with reading(engine).connect() as db:
        found = db.execute(select(message.c.dlq_id).where(*wanted).limit(2)).scalars().all()
    if not found:
        raise NotFound(f"no dead letter has the correlation id {correlation!r}")
    if len(found) > 1:
        raise ConfigurationError(
            "several letters have it: see  holdfast dlq list --state any --correlation "
            f"{correlation}"
        )
    return str(found[0])


def _group(engine: Engine, name: str) -> Group | None:
    try:
        return one_group(engine, name)
    except NotFound:
        return None


def _sample(engine: Engine, group: Group) -> str:
    """Return the latest pending message of *group*, else the latest there is, else the first."""
    with reading(engine).connect() as db:
        last = newest(db, group.group_id, (PENDING,)) or newest(db, group.group_id)
        query = select(message.c.dlq_id).where(message.c.seq == last)
        return str(db.execute(query).scalar() or group.sample)


def _judged(engine: Engine, group: Group) -> tuple[dict[str, Judged], Around]:
    """Return what triage decided about the pending messages, and what failed around them."""
    with reading(engine).connect() as db:
        return verdicts(db, group.group_id), look_around(db, group.group_id)


def _say_judged(triage: dict[str, Judged], around: Around) -> None:
    few = sum(one.pending for one in triage.values()) < MOST
    of = "triage" if few else f"triage of the latest {MOST:,}"
    for verdict, one in triage.items():
        due = one.next_retry
        told = "" if due is None else f", the next {when(due)} by  holdfast dlq replay --due"
        say(f"  {of}: {_VERDICTS.get(verdict, verdict)}: {one.pending:,}{told}")
    say(f"  looks like: {around.verdict} ({around.why})")


def _triage(judged: dict[str, Judged]) -> dict[str, Any]:
    return {verdict: one._asdict() for verdict, one in judged.items()}


def _hints(hints: Any) -> list[str]:
    if isinstance(hints, dict):
        return [f"{key}: {value}" for key, value in hints.items()]
    return [str(hint) for hint in hints or ()]


def _show_group(group: Group) -> None:
    now = datetime.now(UTC).timestamp()
    say(f"group {group.group_id}  {group.state}  {group.kind}/{group.stage}")
    say(f"  {group.title}")
    say(f"  {group.consumer_group} on {group.topic}, handler {group.handler}")
    say(f"  pending {group.pending:,} of {group.total:,}; confirmed {group.confirmed:,}, "
        f"discarded {group.discarded:,}, parked {group.parked:,}")  # fmt: skip
    say(f"  hits {group.keys_text} keys, {group.tenants_text} tenants; "
        f"versions {', '.join(group.versions) or 'unknown'}")  # fmt: skip
    say(f"  first {when(group.first_seen)}, last {ago(group.last_seen, now)}  "
        f"24 h {sparkline(group.trend)}")  # fmt: skip
    if group.owner:
        say(f"  owner {group.owner}")
    if group.note:
        say(foreign(f"  note: {group.note}"))
    if group.state == "muted":
        say(f"  muted until {when(group.muted_until)}")
    if group.pending:
        name = group.group_id[:8]
        say(f"  next: holdfast dlq simulate {name} --handler MODULE:FUNCTION, then  holdfast dlq "
            f"replay {name} --dry-run")  # fmt: skip
    say("")
