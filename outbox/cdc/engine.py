"""Change data capture: the rows of plain tables, then every change of them."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.database import open_database
from holdfast.errors import ConfigurationError, DependencyDown, HoldfastError, Remedy, Transient
from holdfast.ids import new_id
from holdfast.outbox.cdc.envelope import Envelope
from holdfast.outbox.cdc.feed import Feed
from holdfast.outbox.cdc.snapshot import TableSnapshot
from holdfast.outbox.cdc.values import SETTINGS
from holdfast.outbox.engine import Step
from holdfast.outbox.wal.courier import Courier
from holdfast.outbox.wal.faults import SlotBusy, SlotLost
from holdfast.outbox.wal.frames import position
from holdfast.outbox.wal.reading import Reading
from holdfast.outbox.wal.slot import Slot, SlotNames
from holdfast.outbox.wal.waker import Waker
from holdfast.sql import statements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Engine

    from holdfast.message import Message
    from holdfast.ports import Published, Sink

log = logging.getLogger("holdfast.outbox.cdc")

_IDLE_SECONDS = 0.05
_SERVER = re.compile(r"[A-Za-z0-9._-]+")


class Cdc:
    """Publishes the rows of *tables* and then every change of them; run it with `Relay`.

    An event goes to the topic `server.schema.table` with the primary key as JSON for its
    key, in the order of the commits, at least once. The snapshot and the stream meet
    without a gap; the slot is kept only when the whole snapshot is published, so a crash
    before that starts it again. Later starts go on where the slot was confirmed.

    A message that the broker refuses ends the capture with its error: to leave a change
    out would be a silent loss.
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
        plain = re.sub(r"[^a-z0-9_]", "_", server.lower())
        self._slot = Slot(
            self._engine,
            SlotNames(
                slot=f"holdfast_cdc_{plain}" if slot is None else slot,
                publication=f"holdfast_cdc_{plain}" if publication is None else publication,
                tables=tuple(tables),
                publish="insert, update, delete",
            ),
            reader=f"holdfast-{new_id()}",
            clock=clock,
            settings=SETTINGS,
        )
        self._sql = statements("holdfast.outbox.cdc", "postgresql")
        self._envelope = Envelope(server, self._engine.url.database or "")
        self._waker = Waker()
        self._courier = Courier(sink, self._waker.wake)
        self._snapshot: TableSnapshot | None = None
        self._reading: Reading[list[Message]] | None = None
        self._sending: list[Message] = []
        self._finished = 0
        self._idle = False
        self._outage: HoldfastError | None = None

    @property
    def progress(self) -> int | None:
        """Rows of the snapshot read so far; None while streaming."""
        return None if self._snapshot is None else self._snapshot.rows

    def topics(self) -> list[str]:
        """Return the topics that the tables' changes go to."""
        return [self._envelope.topic(schema, table) for schema, table in self._tables()]

    def step(self) -> Step:
        """Publish what is there, keep the stream alive; bounded like every engine's step."""
        try:
            step = self._advance()
        except SlotBusy as error:
            log.info("standing by: %s", error)
            self._let_go()
            self._waker.wait(_IDLE_SECONDS)
            return Step(idle=True, standby=True)
        except SlotLost as error:
            self._let_go()
            raise ConfigurationError(
                f"{error}; changes were lost with the slot: drop it and start again, which takes "
                f"a new snapshot:  SELECT pg_drop_replication_slot('{self._slot.names.slot}')"
            ) from error
        except BaseException:
            self._let_go()
            raise
        outage, self._outage = self._outage, None
        if outage is not None:
            raise outage
        return step

    def _advance(self) -> Step:
        if self._reading is not None:
            return self._follow(self._reading)
        if self._snapshot is not None:
            return self._take_snapshot(self._snapshot)
        if self._courier.busy:  # of a life before
            if self._courier.back:
                self._drop_flight()
            self._waker.wait(_IDLE_SECONDS)
            return Step()
        self._open()
        return Step()

    def _open(self) -> None:
        self._slot.prepare()
        export = self._slot.begin()
        if export is None:
            self._reading = self._begin()
            return
        try:
            self._snapshot = TableSnapshot(
                self._engine.url, export, self._tables(), self._envelope, self._key,
                now=self._clock.now(), batch=self._batch,
            )  # fmt: skip
        except BaseException:
            export.close()
            raise

    def _begin(self) -> Reading[list[Message]]:
        with self._engine.connect() as db:
            target = position(db.execute(self._sql["log_end"]).scalar_one())
        feed = Feed(self._envelope, self._key, most=self._batch)
        stream = self._slot.stream(self._waker, messages=False, binary=False)
        self._finished = 0
        return Reading(stream, feed, target=target, waker=self._waker, clock=self._clock)

    def _tables(self) -> list[tuple[str, str]]:
        with self._engine.connect() as db:
            names = ({"table": name} for name in self._slot.names.tables)
            found = [db.execute(self._sql["table"], name).first() for name in names]
        if None in found:
            missing = self._slot.names.tables[found.index(None)]
            raise ConfigurationError(f"table {missing} does not exist: name it as schema.table")
        return [(row.nspname, row.relname) for row in found if row is not None]

    def _key(self, schema: str, table: str) -> list[str]:
        with self._engine.connect() as db:
            quoted = f'"{schema}"."{table}"'
            return list(db.execute(self._sql["key"], {"table": quoted}).scalars())

    def _take_snapshot(self, snapshot: TableSnapshot) -> Step:
        """Publish the next rows; after the last one keep the slot and begin to stream."""
        published = self._collect()
        if self._courier.busy:
            self._waker.wait(_IDLE_SECONDS)
        elif self._sending:
            self._courier.send(self._sending)
        elif messages := snapshot.read():
            self._sending = messages
            self._courier.send(messages)
        else:
            self._slot.keep(snapshot.export)
            snapshot.close()
            self._snapshot = None
        return Step(published=published)

    def _follow(self, reading: Reading[list[Message]]) -> Step:
        published = self._collect()
        received = reading.receive()
        if not (received or published or (reading.waiting and not self._sending)):
            reading.wait(_IDLE_SECONDS)
            received = reading.receive()
            published += self._collect()
        if not self._courier.busy:
            if not self._sending and reading.waiting:
                self._sending = reading.take()
            if self._sending:
                self._courier.send(self._sending)
        reading.confirm(self._finished)
        busy = received or published or self._sending
        was_idle, self._idle = self._idle, not busy and reading.caught_up
        # Said once: this step waits by itself, and a longer wait would delay the next event.
        return Step(published=published, idle=self._idle and not was_idle)

    def _collect(self) -> int:
        """Settle what came back; return how many events were published."""
        if not self._courier.back:
            return 0
        try:
            results = self._courier.collect()
        except (DependencyDown, Transient) as error:
            self._outage = error
            return 0
        done = _prefix(self._sending, results)
        self._finished += done
        self._sending = self._sending[done:]
        if self._sending:
            self._outage = results[done].error
        return done

    def _drop_flight(self) -> None:
        try:
            self._courier.collect()
        except HoldfastError as error:
            log.debug("given up: %s", error)

    def _let_go(self) -> None:
        for part in (self._snapshot, self._reading):
            if part is not None:
                part.close()
        self._snapshot = self._reading = None
        self._sending, self._outage = [], None

    def close(self) -> None:
        """Finish the batch in flight and confirm it."""
        try:
            while self._courier.busy and self._reading is not None and self._outage is None:
                self._collect()
                self._waker.wait(_IDLE_SECONDS if self._courier.busy else 0)
            if self._reading is not None:
                self._reading.confirm(self._finished, now=True)
        finally:
            self._courier.close()
            self._let_go()
            self._waker.close()
            if self._owned:
                self._engine.dispose()


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
