"""The WAL engine: publishes what the replication slot tells, confirms only what is published."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.engine import looking, open_database
from holdfast.db.sql import spelled, statements
from holdfast.errors import ConfigurationError
from holdfast.outbox.relay.delayed import DelayedEvents
from holdfast.outbox.relay.leases import Leases, LeaseTerms, ShardLeaseLost
from holdfast.outbox.relay.monitoring import default_slot
from holdfast.outbox.relay.publishing import MissingTopics, RelaySink
from holdfast.outbox.relay.relay import RelayStep
from holdfast.outbox.schema import outbox
from holdfast.outbox.wal.catchup import MissedRows, SlotSetup
from holdfast.outbox.wal.cleanup import Cleaner
from holdfast.outbox.wal.errors import SlotBusy, SlotLost
from holdfast.outbox.wal.protocol import Waker
from holdfast.outbox.wal.publishing import Dispatch, WalParking
from holdfast.outbox.wal.reading import Covered, StreamBatch, StreamIntake, StreamReader
from holdfast.outbox.wal.slot import ReplicationSlot, SlotConflict, SlotNames
from holdfast.publishing import BatchPublisher

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection, Engine

    from holdfast.outbox.relay.publishing import ShardSinks
    from holdfast.outbox.wal.catchup import Reconcile
    from holdfast.ports import Sink

log = logging.getLogger("holdfast.outbox.wal")

_IDLE_SECONDS, _LAZY_SECONDS = 0.05, 0.25
_BUSY_SECONDS = 0.5  # between two looks at a slot that somebody else reads
_FLUSH_SECONDS = 1.0


class WalEngine:
    """PostgreSQL only: one relay reads the slot, others wait to take over.

    A step is bounded: when nothing happens it returns after 250 ms. At its start, and
    whenever the slot was lost, it publishes what the table holds and then goes on with the
    stream, without a gap and in the order of each key. Slots belong to
    the whole server, so the slot is named after the database unless *slot* says otherwise.
    """

    name = "wal"

    def __init__(
        self,
        database: Engine | str,
        sink: Sink | ShardSinks,
        *,
        slot: str | None = None,
        publication: str = "holdfast_outbox",
        terms: LeaseTerms | None = None,
        batch: int = 2000,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if batch < 1:
            raise ConfigurationError(f"batch={batch}: use 1 or more rows")
        self._owned = isinstance(database, str)
        self._engine = _postgres(database)
        self._clock = clock
        self._batch = batch
        terms = replace(LeaseTerms() if terms is None else terms, engine="wal", exclusive=True)
        self._leases = Leases(self._engine, terms, clock=clock)
        self._sink = RelaySink(sink, self._leases)
        names = SlotNames(
            slot=default_slot(self._engine) if slot is None else slot,
            publication=publication,
            tables=(outbox.name,),
            when_lost="is made anew and the table is read instead",
        )
        self._slot = ReplicationSlot(
            self._engine, names, reader=f"holdfast-{self._leases.me}", clock=clock
        )
        self._waker = Waker()
        self._missing = MissingTopics(clock=clock)
        self._parking = WalParking(self._engine, self._missing, clock=clock)
        self._delays = DelayedEvents(self._engine, self._leases, clock=clock)
        self._cleaner = Cleaner(
            self._engine, self._leases, self._waker.wake, clock=clock, most=2 * batch
        )
        self._leftovers = MissedRows(self._engine, self._cleaner, clock=clock)
        self._publisher = BatchPublisher(self._sink.publish, landed=self._waker.wake, clock=clock)
        self._dispatch = Dispatch(
            self._sink, self._publisher, self._leases, self._parking, self._cleaner, self._missing
        )
        self._opening = SlotSetup(self._engine, self._slot, self._waker, batch=batch, clock=clock)
        self._reconcile: Reconcile | None = None
        self._ahead: StreamBatch | None = None
        """The next rows of the table, read while those before them are being published."""
        self._reading: StreamReader[StreamBatch] | None = None
        self._stranger = SlotConflict(clock=clock)
        self._glance = Glance(self._engine)

    @property
    def shards(self) -> int:
        """How many shards this relay owns now: all or none."""
        return len(self._leases.owned)

    def step(self) -> RelayStep:
        """Publish what has arrived; keep lease, stream and housekeeping going meanwhile."""
        step = self._guarded()
        # The stream outlives an outage of the broker; what was hit is sent again first.
        outage, self._dispatch.outage = self._dispatch.outage, None
        if outage is not None:
            raise outage
        missing = self._missing.topics
        if self._stranger.named is not None or missing:
            return replace(step, hindered=self._stranger.named, missing=missing)
        return step

    def _guarded(self) -> RelayStep:
        try:
            if self._leases.due:
                self._renew()
            if self._leases.owned:
                return self._advance()
        except ShardLeaseLost:
            self._leases.drop()
            self._lose()
            raise
        except SlotBusy as error:
            self._let_go()
            self._stranger.seen(error)
            self._opening.not_before(self._clock.monotonic() + _BUSY_SECONDS)
            return RelayStep(standby=True)
        except SlotLost as error:
            self._let_go()
            self._slot.discard(str(error))
            return RelayStep()
        except BaseException:
            self._let_go()
            raise
        self._waker.wait(_IDLE_SECONDS)
        return RelayStep(idle=True, standby=True)

    def _renew(self) -> None:
        # Our own deletion locks the shards' rows, which would look like another relay.
        self._cleaner.settle()
        had = self._leases.owned
        self._leases.renew()
        if had and self._leases.owned != had:  # also when it is back already
            log.warning("another relay took over; this one stands by")
            self._lose()

    def _lose(self) -> None:
        """Stop at once: somebody else may publish now."""
        self._stranger.gone()
        self._let_go()
        self._cleaner.forget()

    def _let_go(self) -> None:
        """Give up the stream; whatever was not confirmed comes again."""
        self._opening.abandon()
        if self._reconcile is not None:
            self._reconcile.close()
        if self._reading is not None:
            self._reading.close()
        self._reconcile = self._reading = self._ahead = None
        self._dispatch.detach()

    def _advance(self) -> RelayStep:
        if self._reading is not None:
            return self._follow(self._reading)
        if self._reconcile is not None:
            return self._catch_up(self._reconcile)
        return self._open()

    def _open(self) -> RelayStep:
        """Get the slot and a snapshot; first settle what an earlier stream left behind."""
        step = self._dispatch.advance()
        if self._dispatch.busy:
            self._waker.wait(_IDLE_SECONDS)
        elif not self._opening.begun:
            self._cleaner.flush(_FLUSH_SECONDS)
            self._opening.begin()
        else:
            self._waker.wait(_IDLE_SECONDS)
            self._reconcile = self._opening.result()
        return step

    def _catch_up(self, reconcile: Reconcile) -> RelayStep:
        """Publish the next rows of the table; after the last of them, begin to stream."""
        step = self._dispatch.advance().plus(self._housekeep())
        if self._ahead is None and not reconcile.ended:
            rows = reconcile.read(self._cleaner.unfinished)
            self._ahead = StreamBatch(rows) if rows else None
        if self._dispatch.busy:
            if not self._dispatch.ready:
                self._waker.wait(_IDLE_SECONDS)
        elif self._ahead is not None:
            step = step.plus(self._dispatch.start(self._ahead))
            self._ahead = None
        elif reconcile.ended:
            self._cleaner.flush(0)
            reconcile.close()
            self._reconcile = None
            self._reading = self._begin(reconcile.covered)
        return step

    def _begin(self, covered: Covered) -> StreamReader[StreamBatch]:
        intake = StreamIntake(self._batch, covered)
        # With messages: an event that a former version left there must not be confirmed away.
        stream = self._slot.stream(self._waker, messages=True, binary=True)
        self._stranger.gone()
        return StreamReader(
            stream, intake, target=covered.until, waker=self._waker, clock=self._clock
        )

    def _follow(self, reading: StreamReader[StreamBatch]) -> RelayStep:
        """Collect, receive, send, confirm; wait only where none of it is possible."""
        step = self._dispatch.advance().plus(self._housekeep())
        received = reading.receive()
        moved = received or step.published or step.parked
        if not (moved or self._sendable(reading) or self._dispatch.ready):
            is_settled = self._cleaner.is_done and reading.caught_up and not self._missing.topics
            reading.wait(_LAZY_SECONDS if is_settled else _IDLE_SECONDS)
            received = reading.receive()
            step = self._dispatch.advance()  # nothing was moved before
        if self._sendable(reading):
            step = step.plus(self._dispatch.start(reading.take()))
        reading.confirm(self._dispatch.finished)
        if self._leftovers.found(reading.confirmed, self._missing) or self._may_be_there():
            self._let_go()  # what waits in the table is read from there
            return step
        busy = received or step.published or step.parked or self._dispatch.busy
        return replace(step, idle=not busy and reading.caught_up, rested=True)

    def _may_be_there(self) -> bool:
        """Whether to read the table again for topics that were missing and may be there now."""
        if not self._missing.topics or self._dispatch.busy or not self._missing.try_again():
            return False
        still = self._sink.absent(self._missing.topics)
        self._missing.note(still)
        return len(still) < len(self._missing.topics)

    def _sendable(self, reading: StreamReader[StreamBatch]) -> bool:
        return reading.waiting and not self._dispatch.busy

    def _housekeep(self) -> RelayStep:
        self._cleaner.work()
        delays, parking, leases = self._delays, self._parking, self._leases
        if delays.is_due and self._glance.tells("next_due", delays.is_told):
            delays.move()
        if self._dispatch.busy:  # the sink is not ours to use
            return RelayStep()
        is_told = partial(parking.is_told, leases)
        if parking.is_due(leases) and self._glance.tells("any_parked", is_told):
            return RelayStep(published=parking.refresh(leases, self._sink))
        return RelayStep()

    def close(self) -> None:
        """Settle the batch in flight, delete what was published, give up slot and leases."""
        try:
            self._opening.close()
            while self._dispatch.in_flight:
                if self._dispatch.ready:
                    self._dispatch.advance()
                else:
                    self._waker.wait(_IDLE_SECONDS)
            self._cleaner.flush(_FLUSH_SECONDS)
            if self._reading is not None:
                self._reading.confirm(self._dispatch.finished, now=True)
        finally:
            self._publisher.close()
            self._glance.close()
            self._cleaner.forget()
            self._cleaner.close()
            self._let_go()
            self._waker.close()
            try:
                self._leases.release()
            finally:
                if self._owned:
                    self._engine.dispose()


class Glance:
    """Asks whether there is anything to do, by the driver itself and on a connection that is kept.

    What SQLAlchemy does around so small a statement costs several times as much, and these
    are asked several times a second by a relay that has nothing to do.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = looking(engine)
        self._sql = statements("holdfast.outbox", "postgresql")
        self._db: Connection | None = None
        self._cursor: Any = None

    def tells(self, name: str, is_told: Callable[[Any], bool]) -> bool:
        """Return what *is_told* makes of the one value that the statement *name* finds.

        True where that cannot be asked: whoever looks then meets it, too, and says what it means.
        """
        try:
            if self._db is None:
                self._db = self._engine.connect()
                driver: Any = self._db.connection.driver_connection
                self._cursor = driver.cursor()
            self._cursor.execute(spelled(self._sql[name], self._engine.dialect))
            row = self._cursor.fetchone()
        except Exception:  # noqa: BLE001 - the driver's own
            if self._db is not None:
                self._db.invalidate()
            self.close()
            return True
        return is_told(None if row is None else row[0])

    def close(self) -> None:
        """Give the connection back; the next question takes another."""
        db, self._db, self._cursor = self._db, None, None
        if db is not None:
            db.close()


def _postgres(database: Engine | str) -> Engine:
    engine = open_database(database)
    if engine.dialect.name != "postgresql":
        raise ConfigurationError(
            f"the WAL engine reads PostgreSQL only, not {engine.dialect.name}: use LeaseEngine"
        )
    # Locks and leases must see what others committed meanwhile.
    return engine.execution_options(isolation_level="READ COMMITTED")
