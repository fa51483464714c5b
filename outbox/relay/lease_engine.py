"""The lease engine: reads the table in order, publishes, deletes what was acknowledged."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.engine import at_one_moment, at_read_committed
from holdfast.db.sql import spelled, statements
from holdfast.db.transactions import transact
from holdfast.errors import DependencyDown
from holdfast.outbox.relay.delayed import DelayedEvents
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
    from collections.abc import Iterable, Mapping, Sequence

    from sqlalchemy import TextClause
    from sqlalchemy.engine import Connection, Engine

    from holdfast.outbox.relay.publishing import ShardSinks
    from holdfast.outbox.rows import Cells
    from holdfast.ports import Sink

_FAST_SECONDS, _SLOW_SECONDS = 0.001, 0.006  # between two looks while events come one by one
_LOOKS = 3  # for each event, at the rate of those before
_TOGETHER_SECONDS, _TOGETHER_ROWS, _TOGETHER_BYTES = 0.1, 64, 1 << 16
_IDLE, _RESTED = RelayStep(idle=True), RelayStep(rested=True)
_BATCHES = 32  # after so many a scan ends, so that its snapshot holds up no vacuum for long
_LONG = 32  # rows; a statement for a shorter run costs more than to find its rows one by one


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
            due = self._leases.due
            if not due and self._is_quiet():
                return _RESTED if self._deleter.rest(self._pause) else _IDLE
            if due or self._scan.ended:
                done = self._begin_scan(due=due)
            if not self._leases.owned:
                return replace(done, idle=True, standby=True)
            return replace(self._advance(done), missing=self._missing.topics)
        except BaseException as error:
            self._start_over()
            if isinstance(error, ShardLeaseLost):
                self._leases.drop()
            raise

    def _is_quiet(self) -> bool:
        """Whether a step would surely find nothing to do; costs a tenth of the step."""
        scan = self._scan
        if not scan.glances or self._missing.topics:
            return False
        try:
            if self._delays.is_due and self._delays.is_told(scan.glance("next_due")):
                return False
            parking, leases = self._parking, self._leases
            if parking.is_due(leases) and parking.is_told(leases, scan.glance("any_parked")):
                return False
            return not scan.sees_more(self._deleter.going)
        except Exception:  # noqa: BLE001 - a step meets it too, and says what it means
            return False

    def _begin_scan(self, *, due: bool) -> RelayStep:
        """Settle what is under way, renew the leases if *due*, start from the lowest row.

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

    def _advance(self, done: RelayStep) -> RelayStep:
        """Read batch n+1 while n is being published; send it; delete n while it is on its way."""
        is_brief = self._scan.brief
        rows = self._read()
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


class Deleter:
    """Deletes rows that were published, in a thread; one deletion at a time.

    A scan does not see what is deleted during it, and what was not deleted when it ends is
    waited for, or left out, before the next begins: so nothing is read twice. A relay whose
    leases ran out deletes nothing. SQLite has one writer for all and gains nothing by a thread.

    Rows that come one by one are put off, and share a transaction: which costs more than to
    read and publish them. That is for 100 ms, 64 rows or 64 kB at most.
    """

    def __init__(self, engine: Engine, leases: Leases, *, clock: Clock) -> None:
        self._engine = engine
        self._leases = leases
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-outbox-delete")
        self._running: Future[None] | None = None
        self._started: Sequence[int] = ()
        self._later: list[int] = []
        self._size, self._since = 0, 0.0
        """Of what was put off: its bytes, and since when."""

    @property
    def going(self) -> list[int]:
        """The rows that are being deleted, or soon will be."""
        return [*self._started, *self._later]

    def start(self, seqs: Sequence[int]) -> None:
        """Begin to delete *seqs* and what was put off, after the deletion before."""
        if seqs:
            self._start(seqs)

    def _start(self, seqs: Sequence[int] = ()) -> None:
        self._await()
        later, self._later, self._size = self._later, [], 0
        seqs = [*later, *seqs] if later else seqs
        if self._engine.dialect.name == "sqlite":
            self._delete(seqs)
        else:
            self._started = seqs
            self._running = self._thread.submit(self._delete, seqs)

    def put_off(self, seqs: Sequence[int], size: int) -> None:
        """Delete *seqs*, rows of *size* bytes, together with those that come next."""
        if self._running is not None and self._running.done():
            self._await()
        if seqs and not self._later:
            self._since = self._clock.monotonic()
        self._later += seqs
        self._size += size
        if len(self._later) >= _TOGETHER_ROWS or self._size >= _TOGETHER_BYTES or self._left <= 0:
            self._start()

    @property
    def _left(self) -> float:
        """Seconds for which the rows that were put off may wait; without any, for ever."""
        if not self._later:
            return float("inf")
        return self._since + _TOGETHER_SECONDS - self._clock.monotonic()

    def finish(self) -> None:
        """Return once nothing is left to delete; what went wrong with it is raised here."""
        if self._later:
            self._start()
        self._await()

    def _await(self) -> None:
        running, self._running, self._started = self._running, None, ()
        if running is not None:
            running.result()

    def rest(self, seconds: float) -> bool:
        """Return whether something is to be deleted, after *seconds* or when that has changed.

        What was put off for long enough is begun with.
        """
        if self._running is not None:
            wait([self._running], seconds)
            if self._running.done():
                self._await()
            return True
        if not self._later:
            return False
        left = self._left
        if left > 0:
            self._clock.sleep(min(left, seconds))
        else:
            self._start()
        return True

    def drop(self) -> None:
        """Return once nothing is being deleted; if it failed, its rows are read again."""
        running, self._running, self._started = self._running, None, ()
        if running is not None:
            running.exception()
        later, self._later, self._size = self._later, [], 0
        if later:  # the broker has them: whatever else went wrong, they need not go again
            self._thread.submit(self._delete, later).exception()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _delete(self, seqs: Sequence[int]) -> None:
        def delete(db: Connection) -> None:
            if not self._leases.holds(db):
                raise ShardLeaseLost
            delete_rows(db, self._leases, seqs)

        transact(self._engine, delete, clock=self._clock)


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
        self._glance: Any = None
        """A cursor of psycopg's on the connection that is kept."""
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
                raw: Any = self._db.connection.driver_connection
                self._glance = raw.cursor()

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
            found = self._glance.execute(
                spelled(command, self._engine.dialect), where, binary=True
            ).fetchall()
        except Exception:  # noqa: BLE001 - of the driver's own; the usual way meets it, too
            return None
        return list(found)

    @property
    def glances(self) -> bool:
        """Whether `glance` can be used: between brief scans, on their connection."""
        return self.brief and self.ended and self._glance is not None

    def glance(self, name: str, where: Mapping[str, str] | None = None) -> Any:
        """Return the one value that the statement *name* finds; None without any.

        By the driver itself: what SQLAlchemy does around so small a statement costs several
        times as much, and this is asked many times a second. Errors are the driver's own.
        """
        self._glance.execute(spelled(self._sql[name], self._engine.dialect), where)
        row = self._glance.fetchone()
        return None if row is None else row[0]

    def sees_more(self, but: Sequence[int]) -> bool:
        """Whether a scan would find a row that is not in *but*."""
        where = {"but": self._leases.listed(but)}
        if len(self._leases.owned) == SHARDS:
            return self.glance("glance_all", where) is not None
        where["shards"] = self._leases.listed(self._leases.owned)
        return self.glance("glance", where) is not None

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


def delete_rows(db: Connection, leases: Leases, seqs: Sequence[int]) -> None:
    """Delete the rows with the numbers *seqs*; the caller guards it by the *leases*.

    A row that commits late, in between, is left alone: its number is missing in *seqs*, and
    no range is deleted that holds a number more than they do.
    """
    sql = statements("holdfast.outbox", db.dialect.name)
    found = runs(seqs) if "delete_run" in sql else []
    if found and len(found) * _LONG <= len(seqs):
        db.execute(sql["delete_run"], [{"first": first, "last": last} for first, last in found])
    else:
        db.execute(sql["delete"], {"seqs": leases.listed(seqs)})


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the fewest ranges, each from first to last, that hold *numbers* and nothing else."""
    ordered = sorted(set(numbers))
    if not ordered:
        return []
    first, last = ordered[0], ordered[-1]
    if last - first == len(ordered) - 1:
        return [(first, last)]
    gaps = [(below, above) for below, above in pairwise(ordered) if above - below > 1]
    ends, starts = zip(*gaps, strict=True)
    return list(zip((first, *starts), (*ends, last), strict=True))
