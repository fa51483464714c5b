"""From rows to the broker: one batch at a time, each row done, parked or tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import DependencyDown, HoldfastError, Transient
from holdfast.outbox.engine import Step
from holdfast.outbox.foresight import precheck
from holdfast.outbox.leases import LeaseLost
from holdfast.outbox.outcome import sort_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.message import Message
    from holdfast.outbox.leased_sink import LeasedSink
    from holdfast.outbox.leases import Leases
    from holdfast.outbox.missing import MissingTopics
    from holdfast.outbox.outcome import Refused
    from holdfast.outbox.rows import Row
    from holdfast.outbox.wal.cleaner import Cleaner
    from holdfast.outbox.wal.courier import Courier
    from holdfast.outbox.wal.intake import Batch
    from holdfast.outbox.wal.parking import WalParking


class Dispatch:
    """Holds at most one batch; the next one waits until all of it is published or parked.

    An outage keeps the rows that it hit, in their order, and sends them again first. As many
    rows of the batch are sent at a time as may be repeated should this relay be killed.
    """

    def __init__(
        self,
        sink: LeasedSink,
        courier: Courier,
        leases: Leases,
        parking: WalParking,
        cleaner: Cleaner,
        missing: MissingTopics,
    ) -> None:
        self.finished = 0
        """How far the batches finished so far reach."""
        self.outage: HoldfastError | None = None
        """Why the batch has to be sent again."""
        self._sink = sink
        self._courier = courier
        self._leases = leases
        self._parking = parking
        self._cleaner = cleaner
        self._missing = missing
        self._batch: Batch | None = None
        self._rows: list[Row] = []
        self._sent: list[Row] = []

    @property
    def busy(self) -> bool:
        """Whether a batch is in hand."""
        return self._batch is not None or self._courier.busy

    @property
    def in_flight(self) -> bool:
        """Whether something is on its way, or back and not yet settled."""
        return self._courier.busy

    @property
    def ready(self) -> bool:
        """Whether `advance` would do something now."""
        if self._batch is None or self._courier.busy:
            return self._courier.back
        return not self._rows or self._cleaner.room(len(self._rows)) > 0

    def start(self, batch: Batch) -> Step:
        """Take *batch* in hand; only when not busy."""
        self._batch, self._rows = batch, batch.rows
        return self._send()

    def advance(self) -> Step:
        """Settle what came back, or send again what an outage hit."""
        if self._courier.back:
            return self._settle()
        if self._batch is not None and not self._courier.busy:
            return self._send()
        return Step()

    def _send(self) -> Step:
        room = self._cleaner.room(len(self._rows))
        if self._rows and not room:
            return Step()
        rest = self._rows[room:]
        asked, behind = self._parking.split(self._without_missing(self._rows[:room]))
        try:
            rows, refused = precheck(asked, self._sink, self._missing)
        except DependencyDown as error:
            self.outage = error
            return Step()
        if len(rows) + len(refused) < len(asked) and self._must_wait(asked):
            return Step()
        parked = self._park([*((row, None) for row in behind), *refused])
        self._sent, self._rows = rows, rows + rest
        if rows:
            self._courier.send(self._messages(rows))
        else:
            self._reach(rest)
        return Step(parked=parked)

    def _without_missing(self, rows: list[Row]) -> list[Row]:
        """Return *rows* without those that are left in the table, for their topic is missing."""
        held = self._missing.held
        return [row for row in rows if row.seq < 0 or row.topic not in held] if held else rows

    def _must_wait(self, rows: Sequence[Row]) -> bool:
        """Whether *rows* hold one of a missing topic that no table keeps: everything waits then."""
        held = self._missing.held
        topic = next((row.topic for row in rows if row.seq < 0 and row.topic in held), None)
        if topic is not None:
            self.outage = DependencyDown(f"an event without a row waits: no topic {topic!r}")
        return topic is not None

    def _messages(self, rows: list[Row]) -> list[Message]:
        batch = self._batch
        assert batch is not None  # noqa: S101 - only a batch is sent
        if len(rows) == len(batch.rows):
            return batch.messages
        sent = {row.seq for row in rows}
        pairs = zip(batch.rows, batch.messages, strict=True)
        return [message for row, message in pairs if row.seq in sent]

    def _settle(self) -> Step:
        rows = self._sent
        try:
            results = self._courier.collect()
        except LeaseLost:
            raise
        except (DependencyDown, Transient) as error:
            self._hit(error)
            return Step()
        outcome = sort_out(rows, results)
        if isinstance(outcome.outage, LeaseLost):
            raise outcome.outage
        self._missing.note(outcome.missing)
        if self._missing.topics and outcome.outage is None:
            self._missing.there({row.topic for row in rows} - outcome.missing.keys())
        if self._batch is None:  # the stream it came from is gone
            self._cleaner.add(outcome.done, ())
            return Step(published=len(outcome.done))
        self._cleaner.add(outcome.done, self._batch.xids)
        parked = self._park(outcome.refused)
        rest = self._rows[len(rows) :]
        if outcome.outage is None and not (outcome.missing and self._must_wait(rows)):
            self._reach(rest)
        else:
            settled = {*outcome.done, *(row.seq for row, _ in outcome.refused)}
            self._rows = [row for row in rows if row.seq not in settled] + rest
            if outcome.outage is not None:
                self._hit(outcome.outage)
        return Step(published=len(outcome.done), parked=parked)

    def _park(self, rows: Sequence[Refused]) -> int:
        if not rows:
            return 0
        if self._batch is not None:
            self._parking.await_visible(self._batch.xids)
        return self._parking.refuse(self._leases, rows)

    def _hit(self, outage: HoldfastError) -> None:
        self.outage = outage
        self._cleaner.narrow()

    def _reach(self, rest: list[Row]) -> None:
        """Note that of the batch only *rest* is left."""
        self._rows = rest
        if self._batch is not None and self._batch.upto:
            self.finished = self._batch.upto - len(rest)
        if not rest:
            self._batch = None

    def detach(self) -> None:
        """Forget the batch: its stream is gone. What is on its way is still waited for."""
        self._batch, self._rows = None, []
        self.finished, self.outage = 0, None
