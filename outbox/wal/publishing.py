"""From rows to the broker: one batch at a time, each row done, parked or tried again.

The stream may be ahead of the table: rows to park may not be visible yet, or be gone already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.db.sql import statements
from holdfast.errors import DependencyDown, HoldfastError, Transient
from holdfast.outbox.relay.leases import ShardLeaseLost
from holdfast.outbox.relay.parking import Parking
from holdfast.outbox.relay.publishing import classify_results
from holdfast.outbox.relay.relay import RelayStep
from holdfast.outbox.rows import StagedRows
from holdfast.outbox.wal.catchup import Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection

    from holdfast.outbox.relay.leases import Leases
    from holdfast.outbox.relay.publishing import MissingTopics, Refused, RelaySink
    from holdfast.outbox.rows import Cells, Row
    from holdfast.outbox.wal.cleanup import Cleaner
    from holdfast.outbox.wal.reading import StreamBatch
    from holdfast.publishing import BatchPublisher


class Dispatch:
    """Holds at most one batch; the next one waits until all of it is published or parked.

    An outage keeps the rows that it hit, in their order, and sends them again first. As many
    rows of the batch are sent at a time as may be repeated should this relay be killed.
    """

    def __init__(
        self,
        sink: RelaySink,
        publisher: BatchPublisher,
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
        self._publisher = publisher
        self._leases = leases
        self._parking = parking
        self._cleaner = cleaner
        self._missing = missing
        self._batch: StreamBatch | None = None
        self._rows: list[Cells] = []
        self._sent: list[Cells] = []

    @property
    def busy(self) -> bool:
        """Whether a batch is in hand."""
        return self._batch is not None or self._publisher.in_flight

    @property
    def in_flight(self) -> bool:
        """Whether something is on its way, or back and not yet settled."""
        return self._publisher.in_flight

    @property
    def ready(self) -> bool:
        """Whether `advance` would do something now."""
        if self._batch is None or self._publisher.in_flight:
            return self._publisher.has_landed
        return not self._rows or self._cleaner.room(len(self._rows)) > 0

    def start(self, batch: StreamBatch) -> RelayStep:
        """Take *batch* in hand; only when not busy."""
        self._batch, self._rows = batch, batch.rows
        return self._send()

    def advance(self) -> RelayStep:
        """Settle what came back, or send again what an outage hit."""
        if self._publisher.has_landed:
            return self._settle()
        if self._batch is not None and not self._publisher.in_flight:
            return self._send()
        return RelayStep()

    def _send(self) -> RelayStep:
        batch = self._batch
        assert batch is not None  # noqa: S101 - only a batch is sent
        room = self._cleaner.room(len(self._rows))
        if self._rows and not room:
            return RelayStep()
        rest = self._rows[room:]
        asked, behind = self._parking.split(self._without_missing(self._rows[:room]))
        try:
            rows, refused = self._sink.precheck(asked, self._missing)
        except DependencyDown as error:
            self.outage = error
            return RelayStep()
        parked = self._park([*((row, None) for row in behind), *refused])
        self._sent, self._rows = rows, rows + rest
        if rows:
            quick = self._sink.keeps_deadlines and self._publisher.was_quick
            self._publisher.send(StagedRows(rows), here=quick)
        else:
            self._reach(rest)
        return RelayStep(parked=parked)

    def _without_missing(self, rows: list[Cells]) -> list[Cells]:
        """Return *rows* without those that are left in the table, for their topic is missing."""
        held = self._missing.held
        return [row for row in rows if row[2] not in held] if held else rows

    def _settle(self) -> RelayStep:
        rows = self._sent
        try:
            results = self._publisher.collect()
        except ShardLeaseLost:
            raise
        except (DependencyDown, Transient) as error:
            self._hit(error)
            return RelayStep()
        outcome = classify_results(rows, results)
        if isinstance(outcome.outage, ShardLeaseLost):
            raise outcome.outage
        self._missing.learn(rows, outcome)
        if self._batch is None:  # the stream it came from is gone
            self._cleaner.add(outcome.done, ())
            return RelayStep(published=len(outcome.done))
        self._cleaner.add(outcome.done, self._batch.xids)
        parked = self._park(outcome.refused)
        rest = self._rows[len(rows) :]
        if outcome.outage is None:
            self._reach(rest)
        else:
            settled = {*outcome.done, *(row.seq for row, _ in outcome.refused)}
            self._rows = [row for row in rows if row[0] not in settled] + rest
            self._hit(outcome.outage)
        return RelayStep(published=len(outcome.done), parked=parked)

    def _park(self, rows: Sequence[Refused]) -> int:
        if not rows:
            return 0
        if self._batch is not None:
            self._parking.await_visible(self._batch.xids)
        return self._parking.refuse(self._leases, rows)

    def _hit(self, outage: HoldfastError) -> None:
        self.outage = outage
        self._cleaner.narrow()

    def _reach(self, rest: list[Cells]) -> None:
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


_PATIENCE_SECONDS, _POLL_SECONDS = 10.0, 0.005


class WalParking(Parking):
    """Parks rows like the lease engine, also those that somebody deleted meanwhile."""

    def await_visible(self, xids: Sequence[int]) -> None:
        """Return once the rows of the transactions *xids* can be moved.

        A commit is in the log a moment before its rows can be seen; longer where it waits
        for a synchronous standby.
        """
        snapshot = statements("holdfast.outbox.wal", "postgresql")["snapshot"]
        until = self._clock.monotonic() + _PATIENCE_SECONDS
        while True:
            with self._engine.connect() as db:
                seen = Snapshot.parse(db.execute(snapshot).scalar_one())
            if seen.sees_all(xids):
                return
            if self._clock.monotonic() >= until:
                raise Transient("rows to park cannot be seen yet: their commit still waits")
            self._clock.sleep(_POLL_SECONDS)

    def _keep(self, db: Connection, row: Row, why: str | None, how: str) -> bool:
        # The log alone says what exists: a row may be deleted as soon as it was inserted.
        command = statements("holdfast.outbox.wal", "postgresql")["park_gone"]
        values = {**row._asdict(), "error": why, "state": how, "now": self._clock.now()}
        db.execute(command, values)
        return True
