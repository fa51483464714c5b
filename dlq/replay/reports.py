"""The outcome of a replay as a message, from a consumer that does not write to the store.

It travels on the dead-letter topic of the group: behind the letters of its key, to the
collector that stores those. A consumer whose own database holds the plan needs none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.letter import dlq_topic
from holdfast.dlq.replay.marks import Marks
from holdfast.dlq.replay.outcomes import confirm
from holdfast.dlq.transactions import committed
from holdfast.message import Message

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.engine import Connection, Engine

OUTCOME: Final = "x-dlq-outcome"
_CONFIRMED = "confirmed"
_MOST = 1_000  # bytes; ours has less than 200


class Report(msgspec.Struct, frozen=True):
    """Which letter of which plan was handled."""

    plan: str
    dlq_id: str


def report_of(message: Message) -> Message | None:
    """Return what to publish once the replayed *message* was handled; None for other messages."""
    marks = Marks.of(message.headers)
    if marks is None:
        return None
    return Message.new(
        dlq_topic(marks.topic, marks.group),
        msgspec.json.encode(Report(plan=marks.plan, dlq_id=marks.dlq_id)),
        key=message.key,
        type="holdfast.replay.confirmed",
        headers={OUTCOME: _CONFIRMED},
        content_type="application/json",
    )


def report_in(message: Message) -> Report | None:
    """Return the report that *message* of a dead-letter topic is; None if it is none."""
    payload = message.payload or b""
    if message.headers.text(OUTCOME) != _CONFIRMED or len(payload) > _MOST:
        return None
    try:
        return msgspec.json.decode(payload, type=Report)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def enter(engine: Engine, reports: Iterable[Report], *, clock: Clock = SYSTEM_CLOCK) -> None:
    """Enter *reports* in the store; one that was entered before changes nothing."""
    by_plan: dict[str, list[str]] = {}
    for report in reports:
        by_plan.setdefault(report.plan, []).append(report.dlq_id)

    def write(db: Connection) -> None:
        for plan_id, dlq_ids in sorted(by_plan.items()):
            confirm(db, plan_id, dlq_ids, clock=clock)

    committed(engine, write, clock=clock)
