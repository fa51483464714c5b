"""Which replayed messages a consumer may handle: asked of the plan, never of headers alone.

A copy that a replay sent may arrive late: after its plan was aborted, its letter discarded or
edited, or another copy of it handled. And marks are headers, which anybody may write or copy.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import TYPE_CHECKING, Any

from sqlalchemy import select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.text import cut
from holdfast.dlq.metrics import METRICS
from holdfast.dlq.replay.item_state import WAITING, ItemState
from holdfast.dlq.replay.schema import item, plan
from holdfast.dlq.store.rows import PENDING, is_of
from holdfast.dlq.store.schema import message as stored
from holdfast.errors import StaleDelivery
from holdfast.headers import ReplayHeaders, replay_topic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.engine import Connection

    from holdfast.message import Message

log = logging.getLogger("holdfast.dlq.replay")
_LETTER = ("state", "message_id", "exact", "consumer_group", "topic")


class ReplayStanding(Enum):
    """What this database knows about a message with the marks of a replay."""

    LIVE = "live"
    """Its plan has claimed it, and its letter is pending: it is to be handled."""
    HELD = "held"
    """An earlier message of its key failed again in the same replay: it stays a dead letter."""
    DONE = "done"
    """Another copy of it was handled, and confirmed with its effects."""
    OVER = "over"
    """Its claim has ended: the plan was aborted, the letter closed, or it failed again."""
    ELSEWHERE = "elsewhere"
    """Neither plan nor letter are known here: they may be in the store of another database."""
    FORGED = "forged"
    """The plan here has no such message, or it came by another way: it is an ordinary one."""


class Withdrawn(StaleDelivery):
    """A replayed copy came too late: its plan or its letter has ended. Nothing was committed."""


def standing(db: Connection, message: Message, came_by: str | None = None) -> ReplayStanding:
    """Return what this database knows about *message*, which *came by* that topic."""
    return standings(db, [(message, message.topic if came_by is None else came_by)])[0]


def standings(db: Connection, came: Iterable[tuple[Message, str]]) -> list[ReplayStanding]:
    """Return the standing of each message, which came by the topic beside it, in their order."""
    every = [(ReplayHeaders.of(message.headers), message, topic) for message, topic in came]
    by_plan: dict[str, set[str]] = {}
    for marks, _, _ in every:
        if marks is not None:
            by_plan.setdefault(marks.plan, set()).add(marks.dlq_id)
    known: dict[tuple[str, str], Any] = {}
    for plan_id, dlq_ids in sorted(by_plan.items()):
        rows = db.execute(_items(plan_id, sorted(dlq_ids))).mappings()
        known |= {(plan_id, row["dlq_id"]): row for row in rows}
    missing = [m for m, _, _ in every if m is not None and (m.plan, m.dlq_id) not in known]
    here = _here(db, missing)
    found = []
    for marks, message, topic in every:
        if marks is None:
            found.append(ReplayStanding.FORGED)
        elif (row := known.get((marks.plan, marks.dlq_id))) is not None:
            found.append(_judged(marks, message, topic, row))
        else:
            is_here = marks.plan in here or marks.dlq_id in here
            found.append(ReplayStanding.FORGED if is_here else ReplayStanding.ELSEWHERE)
    return found


def require_live(db: Connection, message: Message) -> None:
    """Raise `Withdrawn` unless *message* may take effect now; nobody ends its claim meanwhile.

    Call it in the transaction of the effect: its letter and its item stay locked until then.
    """
    marks = ReplayHeaders.of(message.headers)
    if marks is None:
        return
    state = select(stored.c.state).where(stored.c.dlq_id == marks.dlq_id).with_for_update()
    letter = db.execute(state).scalar()
    own = (item.c.plan_id == marks.plan) & (item.c.dlq_id == marks.dlq_id)
    row = db.execute(select(item.c.live, item.c.state).where(own).with_for_update()).first()
    if row is not None and (row.live is None or letter != PENDING or row.state == ItemState.HELD):
        raise Withdrawn(
            f"message {message.id} of plan {marks.plan} has no claim any more: its letter "
            f"{marks.dlq_id} is {letter or 'gone'}"
        )


def withdrawn(db: Connection, message: Message, *, clock: Clock = SYSTEM_CLOCK) -> None:
    """Note in its plan that the copy *message* came, and was not handled."""
    marks = ReplayHeaders.of(message.headers)
    if marks is None:
        return
    log.warning("replayed message %s is not handled: the claim of plan %s on letter %s has ended",
                message.id, marks.plan, marks.dlq_id)  # fmt: skip
    METRICS.replayed.labels("withdrawn").inc()
    note = "a copy came after its claim had ended, and was not handled"
    db.execute(
        update(item)
        .where(
            item.c.plan_id == marks.plan,
            item.c.dlq_id == marks.dlq_id,
            item.c.state.in_(WAITING),
        )
        .values(state=ItemState.SKIPPED, live=None, note=note, settled_at=clock.now().timestamp())
    )


def _items(plan_id: str, dlq_ids: list[str]) -> Any:
    return (
        select(
            item.c.dlq_id,
            item.c.live,
            item.c.state.label("item_state"),
            plan.c.target,
            *(stored.c[name] for name in _LETTER),
        )
        .join(plan, plan.c.id == item.c.plan_id)
        .outerjoin(stored, stored.c.dlq_id == item.c.dlq_id)
        .where(item.c.plan_id == plan_id, item.c.dlq_id.in_(dlq_ids))
    )


def _here(db: Connection, missing: list[ReplayHeaders]) -> set[str]:
    """Return which plans and letters of *missing* this database has."""
    if not missing:
        return set()
    plans = select(plan.c.id).where(plan.c.id.in_(sorted({marks.plan for marks in missing})))
    ids = sorted({marks.dlq_id for marks in missing})
    letters = select(stored.c.dlq_id).where(stored.c.dlq_id.in_(ids))
    return {*db.execute(plans).scalars(), *db.execute(letters).scalars()}


def _judged(marks: ReplayHeaders, message: Message, topic: str, row: Any) -> ReplayStanding:
    ways = (marks.topic, replay_topic(marks.topic, marks.group), row["target"])
    if topic not in ways:
        return ReplayStanding.FORGED
    if row["state"] is not None and not (
        is_of(row, message.id)
        and row["consumer_group"] == cut(marks.group)
        and row["topic"] == cut(marks.topic)
    ):
        return ReplayStanding.FORGED
    if row["item_state"] == ItemState.HELD:
        return ReplayStanding.HELD
    if row["item_state"] == ItemState.CONFIRMED:
        return ReplayStanding.DONE
    return ReplayStanding.LIVE if row["live"] and row["state"] == PENDING else ReplayStanding.OVER
