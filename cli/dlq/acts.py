"""What operators say and decide about groups and letters; each act is audited."""

from dataclasses import replace
from typing import Annotated, Any

import typer
from sqlalchemy import func, select
from sqlalchemy.engine import Connection, Engine

from holdfast.cli.display import answer, err, print_json, say
from holdfast.cli.dlq.confirming import confirm
from holdfast.cli.dlq.opened import dead_letters, one_group, one_letter, warrant
from holdfast.cli.dlq.options import Database, Letters, Names, seconds
from holdfast.cli.dlq.progress import shown_work
from holdfast.cli.options import Actor, Config, Json, Reason, Yes
from holdfast.dlq.audit import Audit, Warrant
from holdfast.dlq.closing import close
from holdfast.dlq.closing import reopen as reopened
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.rows import DISCARDED, PARKED, PENDING
from holdfast.dlq.schema import message
from holdfast.dlq.transactions import committed
from holdfast.errors import ConfigurationError, NotFound

_CHUNK = 500
_MOST_IDS = 1000  # in one audit entry


def discard(
    names: Names = None,
    *,
    config: Config = None,
    database: Database,
    letter: Letters = None,
    reason: Reason,
    actor: Actor = None,
    park: Annotated[
        bool, typer.Option("--park", help="Put aside for good instead: may be reopened.")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Close dead letters for good without replaying them."""
    if not names and not letter:
        raise ConfigurationError("what? name groups, or single letters with --id")
    state = PARKED if park else DISCARDED
    with dead_letters(database) as engine:
        selection = _selected(engine, names, letter)
        ids = _free(engine, selection)
        if not ids:
            raise _nothing_open(engine, selection)
        what = "Park" if park else "Discard for good"
        confirm(len(ids), f"{what} {len(ids):,} messages", yes=yes)
        closed = _close(engine, ids, state, warrant(actor, reason), selection)
        claimed = _count_claimed(engine, selection)
    if as_json:
        left = {"left": len(ids) - closed, "claimed": claimed}
        print_json({"state": state, "count": closed, **left})
        return
    say(f"{closed:,} messages are {state}")
    if closed < len(ids):
        say(f"{len(ids) - closed:,} were closed or claimed by a plan meanwhile, and left alone")
    if claimed:
        say(
            f"{claimed:,} belong to a plan and were left alone: see  holdfast dlq plans list --open"
        )


def reopen(
    names: Names = None,
    *,
    config: Config = None,
    database: Database,
    letter: Letters = None,
    reason: Reason,
    actor: Actor = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Make parked or discarded letters pending again, with all their replays."""
    if not names and not letter:
        raise ConfigurationError("what? name groups, or single letters with --id")
    with dead_letters(database) as engine:
        chosen = _selected(engine, names, letter)
        # Of a group those that are parked; what was discarded is named one by one.
        states = (PARKED, DISCARDED) if letter and not names else (PARKED,)
        query = select(message.c.dlq_id).where(
            *replace(chosen, state=None).where(), message.c.state.in_(states)
        )
        with engine.connect() as db:
            ids = list(db.execute(query.order_by(message.c.seq)).scalars())
        if not ids:
            raise NotFound(
                "nothing of this is parked: see  holdfast dlq list --state parked ; a discarded "
                "letter is reopened by its --id"
            )
        confirm(len(ids), f"Reopen {len(ids):,} messages", yes=yes)
        who = warrant(actor, reason)

        def work(db: Connection) -> int:
            moved = reopened(db, ids)
            _record(db, who, "reopen", moved, chosen)
            return len(moved)

        count = committed(engine, work)
    facts = {"state": PENDING, "count": count}
    answer(f"{count:,} messages are pending again", facts, as_json=as_json)


def _selected(engine: Engine, names: list[str] | None, letters: list[str] | None) -> Selection:
    return Selection(
        groups=tuple(one_group(engine, name).group_id for name in names or ()),
        dlq_ids=tuple(one_letter(engine, name) for name in letters or ()),
    )


def _free(engine: Engine, selection: Selection) -> list[str]:
    """Return the pending letters that no live plan has claimed."""
    claimed = select(item.c.live).where(item.c.live == message.c.dlq_id).exists()
    query = select(message.c.dlq_id).where(*selection.where(), ~claimed)
    with engine.connect() as db:
        return list(db.execute(query.order_by(message.c.seq)).scalars())


def _count_claimed(engine: Engine, selection: Selection) -> int:
    claimed = select(item.c.live).where(item.c.live == message.c.dlq_id).exists()
    with engine.connect() as db:
        query = select(func.count()).select_from(message).where(*selection.where(), claimed)
        return int(db.execute(query).scalar_one())


def _nothing_open(engine: Engine, selection: Selection) -> NotFound:
    """Return why nothing can be closed: claimed, parked, closed before, or gone."""
    anything = replace(selection, state=None).where()
    with engine.connect() as db:
        states = select(message.c.state, func.count()).where(*anything).group_by(message.c.state)
        counts = {state: count for state, count in db.execute(states)}  # noqa: C416 - Rows
    if counts.get(PENDING):
        return NotFound(
            f"{counts[PENDING]:,} are pending, but a plan has claimed them: see  holdfast dlq "
            "plans list --open , and abort it first"
        )
    if counts.get(PARKED):
        return NotFound(
            f"nothing of this is pending, {counts[PARKED]:,} are parked: make them pending with  "
            "holdfast dlq reopen"
        )
    told = ", ".join(f"{count:,} {state}" for state, count in sorted(counts.items()))
    return NotFound(f"nothing of this is pending: {told or 'nothing is left of it'}")


def _close(engine: Engine, ids: list[str], state: str, who: Warrant, selection: Selection) -> int:
    def work(db: Connection) -> int:
        closed = close(db, _unclaimed(db, ids), state, actor=who.actor, reason=who.reason)
        _record(db, who, "park" if state == PARKED else "discard", closed, selection)
        return len(closed)

    return committed(engine, work)


def _record(
    db: Connection, who: Warrant, action: str, ids: list[str], selection: Selection
) -> None:
    """Write down every id, in as many entries as it takes: after a prune nothing else tells."""
    subject = ", ".join(selection.groups) or f"{len(ids)} letters"
    parts = [ids[start : start + _MOST_IDS] for start in range(0, len(ids), _MOST_IDS)] or [[]]
    for number, part in enumerate(parts, 1):
        detail: dict[str, Any] = {"count": len(ids), "ids": part}
        if len(parts) > 1:
            detail["part"] = f"{number} of {len(parts)}"
        Audit().append(db, who, action, subject, detail | {"selection": selection.described()})


def _unclaimed(db: Connection, ids: list[str]) -> list[str]:
    """Lock *ids* and return those that no plan has claimed while the operator was asked."""
    free: list[str] = []
    ordered = sorted(ids)
    for start in range(0, len(ordered), _CHUNK):
        chunk = ordered[start : start + _CHUNK]
        rows = select(message.c.dlq_id).where(message.c.dlq_id.in_(chunk))
        db.execute(rows.order_by(message.c.dlq_id).with_for_update()).all()
        taken = set(db.execute(select(item.c.live).where(item.c.live.in_(chunk))).scalars())
        free += [dlq_id for dlq_id in chunk if dlq_id not in taken]
    return free


def prune(
    *,
    config: Config = None,
    database: Database,
    older_than: Annotated[str, typer.Option(help="Closed so long ago, e.g. 30d.")] = "30d",
    actor: Actor = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many.")] = False,
    as_json: Json = False,
) -> None:
    """Delete closed dead letters that are old enough; open ones are never deleted."""
    from holdfast.dlq.replay.retention import prune_plans
    from holdfast.dlq.retention import prunable
    from holdfast.dlq.retention import prune as pruned

    length = seconds(older_than, "--older-than")
    with dead_letters(database) as engine:
        if dry_run:
            found = prunable(engine, older_than=length)
            text = f"{found:,} closed dead letters would be deleted"
            answer(text, {"would_delete": found}, as_json=as_json)
            return
        who = warrant(actor, f"older than {older_than}")
        total = prunable(engine, older_than=length) if err.is_terminal else None
        with shown_work("deleted", total) as observe:
            count = pruned(engine, older_than=length, warrant=who, observe=observe)
        with engine.connect() as db:
            left = db.execute(select(func.count()).select_from(message)).scalar_one()
        plans = prune_plans(engine, older_than=length, warrant=who)
    text = f"deleted {count:,} closed dead letters and {plans:,} plans; {left:,} letters are left"
    answer(text, {"deleted": count, "plans": plans, "left": left}, as_json=as_json)


def forget(
    subject: Annotated[str, typer.Argument(help="The data subject, as captured.")],
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    actor: Actor = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Destroy the key of a data subject: its encrypted fields are gone for good."""
    from holdfast.dlq.vault import forget as destroyed

    confirm(1, f"Destroy the key of {subject} for good", yes=yes)
    with dead_letters(database) as engine:
        found = destroyed(engine, subject, warrant(actor, reason))
    if not found:
        raise NotFound(f"{subject} has no key: it was forgotten before, or nothing was encrypted")
    text = f"the key of {subject} is destroyed: its encrypted fields are gone for good"
    answer(text, {"subject": subject, "forgotten": True}, as_json=as_json)
