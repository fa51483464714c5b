"""The lease engine: reads the table in order, publishes, deletes what was acknowledged."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.engine import at_one_moment, at_read_committed
from holdfast.db.sql import spelled, statements
from holdfast.errors import DependencyDown
from holdfast.outbox.relay.delayed import DelayedEvents
from holdfast.outbox.relay.deleting import Deleter
from holdfast.outbox.relay.leases import Leases, LeaseTerms, ShardLeaseLost
from holdfast.outbox.relay.parking import Parking
from holdfast.outbox.relay.publishing import (
    MissingTopics,
    PublishOutcome,
    RelaySink,
    classify_results,
)
from holdfast.outbox.relay.relay import RelayStep
from holdfast.outbox.rows import StagedRows, read_rows, size_of
from holdfast.outbox.schema import SHARDS
from holdfast.publishing import BatchPublisher, BatchSizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import TextClause
    from sqlalchemy.engine import Connection, Engine

    from holdfast.outbox.relay.publishing import ShardSinks
    from holdfast.outbox.rows import Cells
    from holdfast.ports import Sink

_FAST_SECONDS, _SLOW_SECONDS = 0.001, 0.006  # between two looks while events come one by one
_LOOKS = 3  # for each event, at the rate of those before
_LOOKS_A_STEP = 8
_IDLE, _RESTED = RelayStep(idle=True), RelayStep(rested=True)
_PREPARED = "holdfast_glances"
_DONE, _ROWS = 1, 2  # what libpq says of a statement that went well, without rows and with
_BATCHES = 32  # after so many a scan ends, so that its snapshot holds up no vacuum for long


class LeaseEngine:
    """Works on any database: relays share the shards and delete each row once published.

    Three batches are under way at a time: one is read while the one before it is being
    published and the one before that is being deleted. A scan reads a snapshot upwards by
    `seq`, and every scan starts from the bottom again: what is not deleted is always seen,
    however late it committed. Only rows that were read are deleted, each by its own number.
    """

    name = "lease"

    def __init__(
        self,
        engine: Engine,
        sink: Sink | ShardSinks,
        *,
        terms: LeaseTerms | None = None,
        batch: int = 2000,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._engine = at_read_committed(engine)
        self._leases = Leases(self._engine, terms, clock=clock)
        self._sink = RelaySink(sink, self._leases)
        self._missing = MissingTopics(clock=clock)
        self._parking = Parking(self._engine, self._missing, clock=clock)
        self._delays = DelayedEvents(self._engine, self._leases, clock=clock)
        self._scan = TableScan(self._engine, self._leases, self._missing, batch=batch)
        self._publisher = BatchPublisher(self._sink.publish, clock=clock)
        self._sent: list[Cells] = []
        """The rows in flight."""
        self._deleter = Deleter(self._engine, self._leases, clock=clock)
        self._clock = clock
        self._found = float("-inf")
        self._pause = _FAST_SECONDS
        """Seconds between two looks while events come: a part of what lies between two events."""

    @property
    def shards(self) -> int:
        """How many shards this relay owns now."""
        return len(self._leases.owned)

    def step(self) -> RelayStep:
        """Read one batch while the one before it is being published, then settle that one."""
        try:
            done = RelayStep()
            due = self._leases.due and not self._leases.extend()
            rows = None
            if not due:
                rows = self._look()
                if rows is not None and not rows:
                    return _RESTED if self._deleter.rest(self._pause) else _IDLE
            if due or (rows is None and self._scan.ended):
                done = self._begin_scan(due=due)
            if not self._leases.owned:
                return replace(done, idle=True, standby=True)
            return replace(self._advance(done, rows), missing=self._missing.topics)
        except BaseException as error:
            self._start_over()
            if isinstance(error, ShardLeaseLost):
                self._leases.drop()
            raise

    def _look(self) -> list[Cells] | None:
        """Return what a brief scan reads; None where more is to be done than that.

        While events come one by one this is all that most steps do, and costs a fraction of one:
        it looks several times, unless something comes.
        """
        scan, deleter = self._scan, self._deleter
        for _ in range(_LOOKS_A_STEP):
            if not scan.looks or self._missing.topics:
                return None
            try:
                if self._is_more_due():
                    return None
                # Asked for before: a deletion may end between the moment that is read and this one.
                rows = scan.look(deleter.going)
            except Exception:  # noqa: BLE001 - a step meets it too, and says what it means
                return None
            if rows or self._leases.due or not deleter.rest(self._pause):
                return rows
        return []

    def _is_more_due(self) -> bool:
        """Whether delayed events or parked keys are to be seen to."""
        scan, leases = self._scan, self._leases
        if self._delays.is_due:
            due = scan.glance("next_due")
            if self._delays.is_told(None if due is None else float(due)):
                return True
        parking = self._parking
        return parking.is_due(leases) and parking.is_told(leases, scan.glance("any_parked"))

    def _begin_scan(self, *, due: bool) -> RelayStep:
        """Settle what is under way, renew the leases if *due*, start from the lowest row.

        They are *due* if they could not be extended: shards are shared anew then.

        A brief scan waits for no deletion: it leaves the rows out that are being deleted.
        """
        done = self._settle(wait=due or not self._scan.brief)
        if due:
            self._scan.end()
            self._leases.renew()
        if not self._leases.owned:
            self._scan.end()
            return done
        self._delays.move()
        self._missing.try_again()
        released = self._parking.refresh(self._leases, self._sink)
        self._scan.begin()
        return done.plus(RelayStep(published=released))

    def _advance(self, done: RelayStep, rows: list[Cells] | None) -> RelayStep:
        """Read batch n+1 while n is being published; send it; delete n while it is on its way.

        Unless a look has read these *rows* already.
        """
        is_brief = self._scan.brief or rows is not None
        rows = self._read() if rows is None else rows
        landed = self._collect()
        try:
            rows, parked = self._sift(rows)
        except DependencyDown:  # what the broker took before is not to be sent again
            self._deleter.start(landed.done)
            self._deleter.finish()
            raise
        if rows:
            self._keep_pace()
            self._sent = rows
            self._publisher.send(StagedRows(rows), here=self._scan.ended)
        self._deleter.start(landed.done)
        done = done.plus(RelayStep(published=len(landed.done), parked=len(landed.refused) + parked))
        if self._scan.ended:
            done = done.plus(self._settle(wait=not is_brief))
        is_idle = not (rows or done.published or done.parked)
        if is_idle and self._deleter.rest(self._pause):
            return replace(done, rested=True)
        return replace(done, idle=is_idle)

    def _keep_pace(self) -> None:
        """Look as often as events come: they wait a few milliseconds, however few they are."""
        last, self._found = self._found, self._clock.monotonic()
        self._pause = min(max((self._found - last) / _LOOKS, _FAST_SECONDS), _SLOW_SECONDS)

    def _read(self) -> list[Cells]:
        # Asked for before: a deletion may end between the moment that is read and this one.
        going = set(self._deleter.going) if self._scan.brief else ()
        rows = self._scan.read()
        return [row for row in rows if row[0] not in going] if going else rows

    def _collect(self) -> PublishOutcome:
        """Wait for the batch in flight; what was refused of it is parked when this returns.

        Nothing of a refused key may be sent before that, so it is not put off.
        """
        if not self._publisher.in_flight:
            return PublishOutcome()
        outcome = classify_results(self._sent, self._publisher.collect())
        self._missing.learn(self._sent, outcome)
        if outcome.outage is not None:
            self._deleter.start(outcome.done)
            self._deleter.finish()
        self._parking.refuse(self._leases, outcome.refused)
        if outcome.outage is not None:
            raise outcome.outage
        return outcome

    def _sift(self, rows: list[Cells]) -> tuple[list[Cells], int]:
        """Return which of *rows* may be sent, and how many of them are parked instead."""
        if not rows:
            return rows, 0
        held = self._missing.held  # also since they were read
        rows = [row for row in rows if row[2] not in held] if held else rows
        rows, behind = self._parking.split(rows)
        rows, refused = self._sink.precheck(rows, self._missing)
        parked = self._parking.park(self._leases, behind)
        return rows, parked + self._parking.refuse(self._leases, refused)

    def _settle(self, *, wait: bool) -> RelayStep:
        """Wait for the batch in flight, and see to it that what the broker took is deleted.

        With *wait* it is deleted when this returns.
        """
        size = size_of(self._sent) if self._publisher.in_flight else 0
        outcome = self._collect()
        if wait:
            self._deleter.start(outcome.done)
            self._deleter.finish()
        else:
            self._deleter.put_off(outcome.done, size)
        return RelayStep(published=len(outcome.done), parked=len(outcome.refused))

    def _start_over(self) -> None:
        """Begin the next scan from the bottom: whatever was under way is read again.

        Nothing is on its way or being deleted any more when this returns.
        """
        self._publisher.drop()
        self._deleter.drop()
        self._scan.end()

    def close(self) -> None:
        """Settle the batch in flight and give the shards back."""
        try:
            self._settle(wait=True)
        finally:
            self._scan.end()
            self._publisher.close()
            self._deleter.close()
            self._leases.release()


class QueryFailed(Exception):
    """A look could not be taken; the usual way finds out why."""


class PreparedQueries:
    """Asks small questions on a connection that is kept, past SQLAlchemy and psycopg's cursors.

    What they do around so small a statement costs several times as much, and these are asked
    many times a second by a relay with little to do.
    """

    def __init__(self, db: Connection) -> None:
        raw: Any = db.connection.driver_connection
        self._cursor = raw.cursor()
        self._raw = raw.pgconn
        self._encoding: str = raw.info.encoding
        self._known: dict[str, bytes] = db.info.setdefault(_PREPARED, {})
        """The statements that this connection was told of, by what it calls them."""
        self.works = True

    def rows(self, sql: str, where: Mapping[str, int | str]) -> list[Any]:
        """Return the rows that *sql* finds, in binary form."""
        return list(self._cursor.execute(sql, where, binary=True).fetchall())

    def value(self, sql: str) -> bytes | None:
        """Return the first value that *sql* finds, as text; None without any."""
        found = self._found(sql, {}, 0)
        value: bytes | None = found.get_value(0, 0) if found.ntuples else None
        return value

    def cells(self, sql: str, where: Mapping[str, str]) -> list[Cells]:
        """Return the rows of the outbox that *sql* finds."""
        found, encoding = self._found(sql, where, 1), self._encoding
        get, rows = found.get_value, []
        for row in range(found.ntuples):
            seq, shard, topic, key, payload, headers, own, kind = [get(row, n) for n in range(8)]
            rows.append((
                int.from_bytes(seq, "big", signed=True), int.from_bytes(shard, "big", signed=True),
                topic.decode(encoding), None if key is None else key.decode(encoding), payload,
                headers.decode(encoding), own.decode(encoding), kind.decode(encoding),
            ))  # fmt: skip
        return rows

    def _found(self, sql: str, where: Mapping[str, str], form: int) -> Any:
        if (name := self._known.get(sql)) is None:
            name = b"holdfast_%d" % len(self._known)
            numbered = sql
            for number, place in enumerate(where, 1):
                numbered = numbered.replace(f"%({place})s", f"${number}")
            self._checked(self._raw.prepare(name, numbered.encode()), _DONE)
            self._known[sql] = name
        values = [text.encode() for text in where.values()]
        return self._checked(self._raw.exec_prepared(name, values, None, form), _ROWS)

    def _checked(self, result: Any, status: int) -> Any:
        if result.status != status:
            self.works = False  # a pooler in between, say, which forgets what it was told
            raise QueryFailed
        return result


class TableScan:
    """Reads the rows of our shards upwards by `seq`, as they were when the scan began.

    One snapshot serves the whole scan. Without it a row that commits late, below what was
    read already, would be passed by, and the next event of its key, committed after it,
    would be read first. What commits during a scan waits for the next, which starts from
    the bottom again.

    While there is little to read a scan is *brief*: one statement, which sees one moment by
    itself; on PostgreSQL on a connection that is kept, which takes a third of the time.
    """

    def __init__(
        self, engine: Engine, leases: Leases, missing: MissingTopics, *, batch: int
    ) -> None:
        self._missing = missing
        # SQLite numbers and commits one writer after the other: nothing commits late there,
        # and an open snapshot would be a writer in the way.
        self._frozen = engine.dialect.name != "sqlite"
        self._engine = engine
        self._leases = leases
        self._sql = statements("holdfast.outbox", engine.dialect.name)
        self._sizer = BatchSizer(batch)
        self._db: Connection | None = None
        self._glance: PreparedQueries | None = None
        """On the connection that is kept."""
        self._after = 0
        self._batches = 0
        self.ended = True
        self.brief = False
        """Whether the next scan is one, or this one."""

    def begin(self) -> None:
        """Start from the lowest row, with a new snapshot."""
        if not self.brief:
            self.end()
        self._after, self._batches, self.ended = 0, 0, False
        if self._frozen and self._db is None:
            self._db = self._kept() if self.brief else at_one_moment(self._engine)
            if self.brief and self._db is not None and self._engine.dialect.driver == "psycopg":
                self._glance = PreparedQueries(self._db)

    def read(self) -> list[Cells]:
        """Return the next rows; a short batch, or many of them, end the scan."""
        everything = len(self._leases.owned) == SHARDS
        most = self._sizer.rows
        where: dict[str, int | str] = {"after": self._after, "most": most}
        if not everything:
            where["shards"] = self._leases.listed(self._leases.owned)
        command = self._sql["read_all" if everything else "read"]
        if held := self._missing.held:  # else many events of theirs would be read in vain
            where["held"] = msgspec.json.encode(sorted(held)).decode()
            command = self._sql["read_all_but" if everything else "read_but"]
        rows = self._read_by_driver(command, where) if self.brief else None
        if rows is None:
            with self._connection() as db:
                rows = read_rows(db, command, where)
        self._sizer.came(len(rows), size_of(rows))
        self._batches += 1
        is_short = len(rows) < most
        if self.brief and is_short:
            self.ended = True
        elif self.brief or is_short or self._batches >= _BATCHES:
            self.end()
            self.brief = is_short and self._frozen
        else:
            self._after = rows[-1][0]
        return rows

    def _read_by_driver(
        self, command: TextClause, where: Mapping[str, int | str]
    ) -> list[Cells] | None:
        """Return the rows as `read_rows` does, at half the cost; None where that fails.

        It is then to be read in the usual way, which says what the error means.
        """
        if self._glance is None:
            return None
        try:
            return self._glance.rows(spelled(command, self._engine.dialect), where)
        except Exception:  # noqa: BLE001 - of the driver's own; the usual way meets it, too
            return None

    @property
    def looks(self) -> bool:
        """Whether `glance` and `look` can be used: between brief scans, on their connection."""
        return self.brief and self.ended and self._glance is not None and self._glance.works

    def glance(self, name: str) -> bytes | None:
        """Return the one value that the statement *name* finds, as text; None without any."""
        if self._glance is None:
            raise QueryFailed
        return self._glance.value(spelled(self._sql[name], self._engine.dialect))

    def look(self, but: Sequence[int]) -> list[Cells]:
        """Return what a brief scan reads, without the rows *but*; it has ended then."""
        if self._glance is None:
            raise QueryFailed
        most = self._sizer.rows
        where = {"but": self._leases.listed(but), "most": str(most)}
        everything = len(self._leases.owned) == SHARDS
        if not everything:
            where["shards"] = self._leases.listed(self._leases.owned)
        command = self._sql["look_all" if everything else "look"]
        rows = self._glance.cells(spelled(command, self._engine.dialect), where)
        if rows:
            self._sizer.came(len(rows), size_of(rows))
            if len(rows) == most:
                self.end()
        return rows

    def end(self) -> None:
        """Let the snapshot go; the next `begin` takes a new one."""
        self.ended, self.brief, self._glance = True, False, None
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def _kept(self) -> Connection | None:
        if self._engine.dialect.name != "postgresql":
            return None  # MySQL's drivers ask the server for this, where nobody expects it to fail
        return self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def _connection(self) -> AbstractContextManager[Connection]:
        return self._engine.connect() if self._db is None else nullcontext(self._db)
