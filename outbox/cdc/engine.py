"""Change data capture: the rows of plain tables, then every change of them.

Events are sent one batch at a time and only while the slot is ours; what an outage hit is sent
again first, and whoever finds the slot taken stands by.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.engine import open_database
from holdfast.db.sql import statements
from holdfast.errors import ConfigurationError, DependencyDown, HoldfastError, Remedy, Transient
from holdfast.ids import new_id
from holdfast.outbox.cdc.envelope import SETTINGS, ChangeEnvelope
from holdfast.outbox.cdc.feed import Feed, TableSnapshot
from holdfast.outbox.cdc.tables import Kinds, Tables
from holdfast.outbox.relay.relay import RelayStep
from holdfast.outbox.wal.errors import ReplicationDown, SlotBusy, SlotLost
from holdfast.outbox.wal.protocol import Waker, position
from holdfast.outbox.wal.reading import StreamReader
from holdfast.outbox.wal.slot import ReplicationSlot, SlotNames
from holdfast.ports import SinkPowers
from holdfast.publishing import BatchPublisher
from holdfast.tracing.messaging import send
from holdfast.tracing.switch import system_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.engine import Engine

    from holdfast.message import Message
    from holdfast.ports import Published, Sink


class OwnedSink:
    """A sink that sends nothing once the slot may be another's: *left* tells the seconds.

    A capture that was frozen would send old states of rows after its successor's newer
    ones. What is under way when the time ends is given up by a sink that keeps deadlines.
    """

    def __init__(self, sink: Sink, left: Callable[[], float]) -> None:
        self._publish = SinkPowers.of(sink).publish_within
        self._system = system_of(sink)
        self._left = left

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Publish *messages*, or raise `DatabaseDown` when it is too late for that."""
        left = self._left()
        if left <= 0:
            raise ReplicationDown("publishing: the slot may be another's by now")
        return send(self._system, messages, lambda: self._publish(messages, left))


log = logging.getLogger("holdfast.outbox.cdc")


class Shipment:
    """Holds at most one batch; what an outage hit is kept, in its order, and sent again first."""

    def __init__(self, publisher: BatchPublisher) -> None:
        self.finished = 0
        """How many events of this stream are stored."""
        self._publisher = publisher
        self._messages: list[Message] = []
        self._outage: HoldfastError | None = None

    @property
    def under_way(self) -> bool:
        """Whether a batch is on its way or not yet collected, be it of a life before."""
        return self._publisher.in_flight

    @property
    def unsettled(self) -> bool:
        """Whether events are in hand, under way or to be sent again."""
        return bool(self._messages)

    def send(self, messages: list[Message] | None = None) -> None:
        """Send *messages*, or again what is left; only when nothing is under way."""
        if messages is not None:
            self._messages = messages
        if self._messages:
            self._publisher.send(self._messages)

    def collect(self) -> int:
        """Settle what came back; return how many events are stored."""
        if not self._publisher.has_landed:
            return 0
        try:
            results = self._publisher.collect()
        except (DependencyDown, Transient) as error:
            self._outage = error
            return 0
        done = _prefix(self._messages, results)
        self.finished += done
        self._messages = self._messages[done:]
        if self._messages:
            self._outage = results[done].error
        return done

    def take_outage(self) -> HoldfastError | None:
        """Return why events have to be sent again, once."""
        outage, self._outage = self._outage, None
        return outage

    @property
    def is_hit(self) -> bool:
        """Whether an outage is to be told."""
        return self._outage is not None

    def let_go(self) -> None:
        """Forget the events: their stream is gone, and tells them again."""
        self._messages, self._outage, self.finished = [], None, 0

    def drop(self) -> None:
        """Take back what a stream before had sent, if it is back."""
        if self._publisher.has_landed:
            try:
                self._publisher.collect()
            except HoldfastError as error:
                log.debug("given up: %s", error)

    def close(self) -> None:
        """Return once nothing is under way."""
        self._publisher.close()


def _prefix(messages: Sequence[Message], results: Sequence[Published]) -> int:
    """Return how many from the start were stored; raise what the broker refuses for good."""
    for number, (message, result) in enumerate(zip(messages, results, strict=True)):
        if result.error is not None:
            if result.error.remedy in (Remedy.FIX, Remedy.DEAD_LETTER):
                raise ConfigurationError(
                    f"the change of {message.topic} with key {message.key_text} is refused: "
                    f"{result.error}"
                ) from result.error
            return number
    return len(messages)


_LINGER_SECONDS, _SHORT = 0.5, 0.05
_PAUSE_SECONDS = 0.5


class Standby:
    """Says once that another reads the slot, and paces the looks at it.

    A reader that has just ended is still there for a moment; that is no standby.
    """

    def __init__(self, waker: Waker, *, clock: Clock) -> None:
        self._waker = waker
        self._clock = clock
        self._since: float | None = None
        self._is_said = False

    def wait(self, error: SlotBusy) -> RelayStep:
        """Return after a pause, with what to tell of it."""
        now = self._clock.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since < _LINGER_SECONDS:
            self._waker.wait(_SHORT)
            return RelayStep()
        if not self._is_said:
            log.info("standing by: %s", error)
            self._is_said = True
        self._waker.wait(_PAUSE_SECONDS)
        return RelayStep(idle=True, standby=True)

    def end(self) -> None:
        """Note that the slot is ours."""
        self._since, self._is_said = None, False


PENDING = "holdfast cdc: the first snapshot is not complete"
"""Said of a publication made here until its changes are streamed."""

_IDLE_SECONDS = 0.05
_OURS = 0.9  # of the silence after which the server ends a stream
_UNFIT = re.compile(r"[^a-z0-9_]")
_SERVER = re.compile(r"[A-Za-z0-9._-]+")


class Cdc:
    """Publishes the rows of *tables* and then every change of them; run it with `Relay`.

    An event goes to the topic `server.schema.table` with the primary key as JSON for its
    key, in the order of the commits, at least once. The snapshot and the stream meet
    without a gap; the slot is kept only when the whole snapshot is published, so a crash
    before that starts it again. Later starts go on where the slot was confirmed.

    A message that the broker refuses ends the capture with its error: to leave a change
    out would be a silent loss. So does a slot that is gone, for what was deleted since would
    never show; with *snapshot* a new start reads the tables anew then.
    """

    name = "cdc"

    def __init__(
        self,
        database: Engine | str,
        sink: Sink,
        *,
        tables: Sequence[str],
        server: str,
        slot: str | None = None,
        publication: str | None = None,
        snapshot: bool = False,
        batch: int = 2000,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not tables or isinstance(tables, str):
            raise ConfigurationError(f"tables={tables!r}: name the tables to capture in a list")
        if not _SERVER.fullmatch(server):
            raise ConfigurationError(
                f"server={server!r}: it begins the topics' names, use letters, digits, . _ -"
            )
        if batch < 1:
            raise ConfigurationError(f"batch={batch}: use 1 or more rows")
        self._owned = isinstance(database, str)
        self._engine = open_database(database)
        if self._engine.dialect.name != "postgresql":
            raise ConfigurationError(f"changes of {self._engine.dialect.name} cannot be captured")
        self._clock = clock
        self._batch = batch
        plain = _UNFIT.sub("_", server.lower())
        self._slot = ReplicationSlot(
            self._engine,
            SlotNames(
                slot=f"holdfast_cdc_{plain}" if slot is None else slot,
                publication=f"holdfast_cdc_{plain}" if publication is None else publication,
                tables=tuple(tables),
                publish="insert, update, delete, truncate",
                remark=PENDING,
                when_lost="ends the capture: see docs/cdc.md",
            ),
            reader=f"holdfast-{new_id()}",
            clock=clock,
            settings=SETTINGS,
        )
        self._sql = statements("holdfast.outbox.cdc", "postgresql")
        self._envelope = ChangeEnvelope(server, self._engine.url.database or "")
        self._waker = Waker()
        self._tables = Tables(self._engine, tables)
        self._kinds = Kinds(self._engine)
        self._standby = Standby(self._waker, clock=clock)
        owned = OwnedSink(sink, self._seconds_left)
        self._shipment = Shipment(BatchPublisher(owned.publish, landed=self._waker.wake))
        self._left: Callable[[], float] = _always
        """For how many seconds the slot is surely ours; outlives its stream."""
        self._anew = snapshot
        self._has_streamed = False
        self._snapshot: TableSnapshot | None = None
        self._reading: StreamReader[list[Message]] | None = None

    @property
    def progress(self) -> int | None:
        """Rows of the snapshot read so far; None while streaming."""
        return None if self._snapshot is None else self._snapshot.rows

    def topics(self) -> list[str]:
        """Return the topics that the tables' changes go to."""
        return [self._envelope.topic(table.schema, table.name) for table in self._tables.found()]

    def step(self) -> RelayStep:
        """Publish what is there, keep the stream alive; bounded like every engine's step."""
        try:
            step = self._advance()
        except SlotBusy as error:
            self._let_go()
            return self._standby.wait(error)
        except SlotLost as error:
            self._let_go()
            slot = self._slot.names.slot
            raise ConfigurationError(
                f"{error}, and the changes since went with it: start with --snapshot to read the "
                "tables anew (rows that were deleted meanwhile never show as such); if the slot is "
                f"still there, first run  SELECT pg_drop_replication_slot('{slot}')"
            ) from error
        except BaseException:
            self._let_go()
            raise
        if (outage := self._shipment.take_outage()) is not None:
            raise outage
        return step

    def _advance(self) -> RelayStep:
        if self._reading is not None:
            return self._follow(self._reading)
        if self._snapshot is not None:
            return self._take_snapshot(self._snapshot)
        if self._shipment.under_way:  # of a life before
            self._shipment.drop()
            self._waker.wait(_IDLE_SECONDS)
            return RelayStep()
        self._open()
        return RelayStep()

    def _open(self) -> None:
        self._tables.check()
        self._slot.prepare()
        first = self._anew or self._slot.publication.marked
        export = self._slot.begin(anew=first and not self._has_streamed)
        if export is None:
            self._reading = self._begin()
        else:
            self._left = _always
            try:
                self._snapshot = TableSnapshot(
                    self._engine.url, export, self._tables.readable(), self._envelope,
                    self._tables.key, self._kinds, now=self._clock.now(), batch=self._batch,
                )  # fmt: skip
            except BaseException:
                export.close()
                raise
        self._standby.end()

    def _begin(self) -> StreamReader[list[Message]]:
        self._slot.publication.unmark()
        with self._engine.connect() as db:
            place = db.execute(self._sql["place"]).one()
        feed = Feed(self._envelope, self._tables.key, self._kinds, most=self._batch)
        stream = self._slot.stream(
            self._waker, messages=False, binary=False,
            patience=_OURS * place.patience if place.patience else float("inf"),
        )  # fmt: skip
        self._left = lambda: stream.left
        self._has_streamed = True
        self._shipment.let_go()  # what the snapshot published is not of the stream
        target = position(place.log_end)
        return StreamReader(stream, feed, target=target, waker=self._waker, clock=self._clock)

    def _seconds_left(self) -> float:
        return self._left()

    def _take_snapshot(self, snapshot: TableSnapshot) -> RelayStep:
        """Publish the next rows; after the last one keep the slot and begin to stream."""
        published = self._shipment.collect()
        if self._shipment.under_way:
            self._waker.wait(_IDLE_SECONDS)
        elif self._shipment.unsettled:
            self._shipment.send()
        elif messages := snapshot.read():
            self._shipment.send(messages)
        else:
            self._slot.keep(snapshot.export)
            snapshot.close()
            self._snapshot = None
        return RelayStep(published=published)

    def _follow(self, reading: StreamReader[list[Message]]) -> RelayStep:
        shipment = self._shipment
        published = shipment.collect()
        received = reading.receive()
        if not (received or published or (reading.waiting and not shipment.unsettled)):
            reading.wait(_IDLE_SECONDS)
            received = reading.receive()
            published += shipment.collect()
        if not shipment.under_way:
            fresh = reading.waiting and not shipment.unsettled
            shipment.send(reading.take() if fresh else None)
        reading.confirm(shipment.finished)
        busy = received or published or shipment.unsettled
        return RelayStep(published=published, idle=not busy and reading.caught_up, rested=True)

    def _let_go(self) -> None:
        for part in (self._snapshot, self._reading):
            if part is not None:
                part.close()
        self._snapshot = self._reading = None
        self._shipment.let_go()

    def close(self) -> None:
        """Finish the batch in flight and confirm it."""
        shipment = self._shipment
        try:
            while shipment.under_way and self._reading is not None and not shipment.is_hit:
                shipment.collect()
                self._waker.wait(_IDLE_SECONDS if shipment.under_way else 0)
            if self._reading is not None:
                self._reading.confirm(shipment.finished, now=True)
        finally:
            shipment.close()
            self._let_go()
            self._waker.close()
            if self._owned:
                self._engine.dispose()


def _always() -> float:
    """Return how long the slot of a snapshot is ours: it goes with its connection."""
    return float("inf")
