"""The outcome of a replay as a message, from a consumer that does not write to the store.

It travels on the dead-letter topic of the group: behind the letters of its key, to the
collector that stores those. A consumer whose own database holds the plan needs none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.letter import dlq_topic
from holdfast.dlq.replay.marks import Marks, is_id
from holdfast.dlq.replay.outcomes import confirm
from holdfast.dlq.transactions import committed
from holdfast.message import Message

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.engine import Connection, Engine

OUTCOME: Final = "x-dlq-outcome"
_CONFIRMED = "confirmed"
_MOST = 10_000  # bytes; a message id may be long


class Report(msgspec.Struct, frozen=True):
    """Which letter of which plan was handled, and as what message."""

    plan: str
    dlq_id: str
    message_id: str | None = None


def report_of(message: Message) -> Message | None:
    """Return what to publish once the replayed *message* was handled; None for other messages."""
    marks = Marks.of(message.headers)
    if marks is None:
        return None
    return Message.new(
        dlq_topic(marks.topic, marks.group),
        msgspec.json.encode(Report(marks.plan, marks.dlq_id, message.id)),
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
        report = msgspec.json.decode(payload, type=Report)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return report if is_id(report.plan) and is_id(report.dlq_id) else None


def enter(
    engine: Engine, reports: Iterable[Report], *, clock: Clock = SYSTEM_CLOCK
) -> list[Report]:
    """Enter *reports* in the store; one that was entered before changes nothing.

    Return those about a plan or a letter of it that the store does not have: they close
    nothing.
    """
    by_plan: dict[str, list[Report]] = {}
    for report in reports:
        by_plan.setdefault(report.plan, []).append(report)

    def write(db: Connection) -> list[Report]:
        unknown = []
        for plan_id, some in sorted(by_plan.items()):
            handled = {report.dlq_id: report.message_id for report in some}
            known = confirm(db, plan_id, handled, clock=clock)
            unknown += [report for report in some if report.dlq_id not in known]
        return unknown

    return committed(engine, write, clock=clock)
