"""Storing what a stream reads from dead-letter topics, each message once.

A stream hands its messages out in batches, and the same ones again after a crash. The next offset
of each partition is written in the transaction of the letters: what lies before it is stored, and
let pass. That holds whoever hands out again, also after the stream's own memory was lost.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import and_, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.errors import is_about_data
from holdfast.db.sql import insert_ignoring
from holdfast.db.transactions import committed
from holdfast.dlq.replay.outcomes import confirm, report_in
from holdfast.dlq.store.schema import stream
from holdfast.dlq.topic.collector import letter_in, unreadable
from holdfast.errors import ConfigurationError, PoisonMessage
from holdfast.scrubbing import told

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy.engine import Connection

    from holdfast.dlq.destination import DeadLetterStore
    from holdfast.dlq.letter import DeadLetter
    from holdfast.ports import Delivery, Lane

log = logging.getLogger("holdfast.dlq.stream")
_CHUNK = 500
_NAME = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCounts:
    """What became of the messages of a batch."""

    stored: int = 0
    confirmed: int = 0
    """Reports that a replayed message was handled."""
    passed: int = 0
    """Stored before, by this batch or another."""
    unreadable: int = 0
    """Of the stored: those without a readable envelope."""

    def __add__(self, other: StreamCounts) -> StreamCounts:
        return StreamCounts(
            stored=self.stored + other.stored,
            confirmed=self.confirmed + other.confirmed,
            passed=self.passed + other.passed,
            unreadable=self.unreadable + other.unreadable,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCollector:
    """Stores the batches of one stream; *name* is what the stream is known by, for ever."""

    store: DeadLetterStore
    name: str
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > _NAME:
            raise ConfigurationError(f"the stream's name {self.name!r}: use 1 to {_NAME} letters")

    def collect(self, batch: int, deliveries: Iterable[Delivery]) -> StreamCounts:
        """Store *deliveries* of batch number *batch*, each partition in the order of its offsets.

        All of a partition must come to one caller at a time, lower offsets first.
        """
        total = StreamCounts()
        for lane, some in itertools.groupby(deliveries, key=lambda one: one.lane):
            while chunk := list(itertools.islice(some, _CHUNK)):
                total += self._stored(lane, batch, chunk)
        return total

    def _stored(self, lane: Lane, batch: int, chunk: Sequence[Delivery]) -> StreamCounts:
        def work(db: Connection) -> StreamCounts:
            return self._write(db, lane, batch, chunk)

        return committed(self.store.engine, work, clock=self.clock)

    def _write(
        self, db: Connection, lane: Lane, batch: int, chunk: Sequence[Delivery]
    ) -> StreamCounts:
        own = and_(
            stream.c.name == self.name,
            stream.c.topic == lane.topic,
            stream.c.lane == lane.partition,
        )
        row = {"name": self.name, "topic": lane.topic, "lane": lane.partition, "position": 0,
               "batch": batch}  # fmt: skip
        db.execute(insert_ignoring(db, stream), row)
        # Locked: of two who hand out the same messages the second sees what the first stored.
        known = db.execute(select(stream.c.position).where(own).with_for_update()).scalar_one()
        fresh = [one for one in chunk if int(one.position) >= known]
        found = StreamCounts(passed=len(chunk) - len(fresh))
        for are_reports, group in itertools.groupby(fresh, key=_is_report):
            some = list(group)
            found += self._enter(db, some) if are_reports else self._keep(db, some)
        if fresh:
            values = {"position": int(fresh[-1].position) + 1, "batch": batch}
            db.execute(update(stream).where(own).values(**values))
        return found

    def _enter(self, db: Connection, some: Iterable[Delivery]) -> StreamCounts:
        handled: dict[str, dict[str, str | None]] = {}
        for delivery in some:
            if (report := report_in(delivery.message)) is not None:
                handled.setdefault(report.plan, {})[report.dlq_id] = report.message_id
        closed = sum(
            len(confirm(db, plan_id, letters, clock=self.clock))
            for plan_id, letters in sorted(handled.items())
        )
        return StreamCounts(confirmed=closed)

    def _keep(self, db: Connection, some: Sequence[Delivery]) -> StreamCounts:
        letters = [_letter(one) for one in some]
        bad = sum(is_bad for _, is_bad in letters)
        try:
            with db.begin_nested():
                self.store.put_all([letter for letter, _ in letters], db)
        except Exception as error:
            if not is_about_data(error):
                raise
            log.warning("letters are stored one by one: %s", told(error))
        else:
            return StreamCounts(stored=len(some), unreadable=bad)
        return StreamCounts(stored=len(some), unreadable=sum(self._one(db, one) for one in some))

    def _one(self, db: Connection, delivery: Delivery) -> bool:
        """Store one letter; what no column takes is stored as one that cannot be read."""
        letter, is_bad = _letter(delivery)
        try:
            with db.begin_nested():
                self.store.put(letter, db)
        except Exception as error:
            if not is_about_data(error):
                raise
            self.store.put(unreadable(delivery, error), db)
            return True
        return is_bad


def _is_report(delivery: Delivery) -> bool:
    return report_in(delivery.message) is not None


def _letter(delivery: Delivery) -> tuple[DeadLetter, bool]:
    try:
        return letter_in(delivery), False
    except PoisonMessage as error:
        return unreadable(delivery, error), True
