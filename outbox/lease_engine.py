"""The lease engine: reads the table in order, publishes, deletes what was acknowledged."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import DependencyDown
from holdfast.isolation import at_read_committed
from holdfast.outbox.delays import Delays
from holdfast.outbox.deletion import delete_rows
from holdfast.outbox.engine import Step
from holdfast.outbox.foresight import precheck
from holdfast.outbox.leased_sink import LeasedSink
from holdfast.outbox.leases import LeaseLost, Leases, LeaseTerms
from holdfast.outbox.missing import MissingTopics
from holdfast.outbox.outcome import Outcome, sort_out
from holdfast.outbox.parking import Parking
from holdfast.outbox.rows import Row, staged
from holdfast.outbox.table_pass import TablePass
from holdfast.transactions import transact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.message import Message
    from holdfast.outbox.shard_sinks import ShardSinks
    from holdfast.ports import Published, Sink

_FEW = 16  # rows that are published without a thread: waking it would double the delay
_SHORT_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Flight:
    """A batch that the broker is taking."""

    rows: list[Row]
    results: Future[list[Published]]


class LeaseEngine:
    """Works on any database: relays share the shards and delete each row once published.

    A pass reads a snapshot upwards by `seq` while the last batch is being published, and
    every pass starts from the bottom again: what is not deleted is always seen, however
    late it committed. Only rows that were read are deleted, each by its own number.
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
        self._clock = clock
        self._leases = Leases(self._engine, terms, clock=clock)
        self._sink = LeasedSink(sink, self._leases)
        self._missing = MissingTopics(clock=clock)
        self._parking = Parking(self._engine, self._missing, clock=clock)
        self._delays = Delays(self._engine, self._leases, clock=clock)
        self._pass = TablePass(self._engine, self._leases, self._missing, batch=batch)
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="holdfast-relay")
        self._flight: Flight | None = None
        self._deleter = ThreadPoolExecutor(1, thread_name_prefix="holdfast-outbox-delete")
        self._deleting: Future[None] | None = None
        self._going: Sequence[int] = ()
        """What is being deleted."""

    @property
    def shards(self) -> int:
        """How many shards this relay owns now."""
        return len(self._leases.owned)

    def step(self) -> Step:
        """Read one batch while the one before it is being published, then settle that one."""
        try:
            done = Step()
            due = self._leases.due
            if due or self._pass.ended:
                done = self._settle_flight(deleted=due or not self._pass.brief)
                done = done.plus(Step(published=self._begin_pass(due=due)))
            if not self._leases.owned:
                return Step(published=done.published, parked=done.parked, idle=True, standby=True)
            return replace(self._advance(done), missing=self._missing.topics)
        except BaseException as error:
            self._restart()
            if isinstance(error, LeaseLost):
                self._leases.drop()
            raise

    def _begin_pass(self, *, due: bool) -> int:
        """Start from the lowest row; return how many released events were published."""
        if due:
            self._pass.end()
            self._leases.renew()
        if not self._leases.owned:
            self._pass.end()
            return 0
        self._delays.move()
        self._missing.try_again()
        released = self._parking.refresh(self._leases, self._sink)
        self._pass.begin()
        return released

    def _advance(self, done: Step) -> Step:
        brief = self._pass.brief
        # Asked for before: a deletion may end between the moment that is read and this one.
        going = set(self._going) if brief else ()
        rows = self._pass.read()
        if going:
            rows = [row for row in rows if row.seq not in going]
        ready: list[Message] = [staged(row) for row in rows]  # while the batch before is on its way
        outcome = self._landed()
        parked = 0
        if rows:
            rows, behind = self._parking.split(self._free(rows))
            try:
                rows, refused = precheck(rows, self._sink, self._missing)
            except DependencyDown:  # what the broker took before is not to be sent again
                self._delete_meanwhile(outcome.done)
                self._deleted()
                raise
            parked = self._parking.park(self._leases, behind)
            parked += self._parking.refuse(self._leases, refused)
        if rows:
            self._send(rows, ready)
        self._delete_meanwhile(outcome.done)
        done = done.plus(Step(published=len(outcome.done), parked=len(outcome.refused) + parked))
        if self._pass.ended:
            done = done.plus(self._settle_flight(deleted=not brief))
        is_idle = not (rows or done.published or done.parked)
        if is_idle and self._deleting is not None:
            wait([self._deleting], _SHORT_SECONDS)
            return replace(done, rested=True)
        return replace(done, idle=is_idle)

    def _free(self, rows: list[Row]) -> list[Row]:
        """Return *rows* without those whose topic was found missing since they were read."""
        held = self._missing.held
        return [row for row in rows if row.topic not in held] if held else rows

    def _send(self, rows: list[Row], ready: list[Message]) -> None:
        messages = ready if len(rows) == len(ready) else [staged(row) for row in rows]
        if not self._pass.ended or len(rows) > _FEW:
            self._flight = Flight(rows, self._publisher.submit(self._sink.publish, messages))
            return
        results: Future[list[Published]] = Future()  # with nothing to do meanwhile
        try:
            results.set_result(self._sink.publish(messages))
        except Exception as error:  # noqa: BLE001 - raised when it lands, as from the thread
            results.set_exception(error)
        self._flight = Flight(rows, results)

    def _landed(self) -> Outcome:
        """Wait for the batch in flight; what was refused of it is parked when this returns.

        Nothing of a refused key may be sent before that, so it is not put off.
        """
        if self._flight is None:
            return Outcome()
        flight, self._flight = self._flight, None
        outcome = sort_out(flight.rows, flight.results.result())
        self._note_topics(flight.rows, outcome)
        if outcome.outage is not None:
            self._delete_meanwhile(outcome.done)
            self._deleted()
        self._parking.refuse(self._leases, outcome.refused)
        if outcome.outage is not None:
            raise outcome.outage
        return outcome

    def _note_topics(self, rows: list[Row], outcome: Outcome) -> None:
        """Learn from a batch which topics are missing; the rest of the pass leaves them out."""
        self._missing.note(outcome.missing)
        if self._missing.topics and outcome.outage is None:
            self._missing.there({row.topic for row in rows} - outcome.missing.keys())

    def _settle_flight(self, *, deleted: bool = True) -> Step:
        """Wait for the batch in flight and delete what the broker took of it.

        Not *deleted* yet, its rows are left out by a brief pass that still sees them.
        """
        outcome = self._landed()
        self._delete_meanwhile(outcome.done)
        if deleted or (self._deleting is not None and self._deleting.done()):
            self._deleted()
        return Step(published=len(outcome.done), parked=len(outcome.refused))

    def _delete_meanwhile(self, seqs: Sequence[int]) -> None:
        """Delete *seqs* while the next batch is read and published; one deletion at a time.

        A pass does not see what is deleted during it, and what was not deleted when it ends
        is waited for before the next begins, so nothing is read twice. SQLite has one writer
        for all and gains nothing by it.
        """
        if not seqs:
            return
        self._deleted()
        if self._engine.dialect.name == "sqlite":
            self._delete(seqs)
        else:
            self._going = seqs
            self._deleting = self._deleter.submit(self._delete, seqs)

    def _deleted(self) -> None:
        """Return once nothing is being deleted; what went wrong with it is raised here."""
        deleting, self._deleting, self._going = self._deleting, None, ()
        if deleting is not None:
            deleting.result()

    def _delete(self, seqs: Sequence[int]) -> None:
        def delete(db: Connection) -> None:
            if not self._leases.holds(db):
                raise LeaseLost
            delete_rows(db, self._leases, seqs)

        transact(self._engine, delete, clock=self._clock)

    def _restart(self) -> None:
        """Begin the next pass from the bottom: whatever was in flight is read again."""
        flight, self._flight = self._flight, None
        if flight is not None and not flight.results.cancel():
            flight.results.exception()  # nothing may be on its way when the next one begins
        deleting, self._deleting, self._going = self._deleting, None, ()
        if deleting is not None:
            deleting.exception()  # it failed: its rows are read again
        self._pass.end()

    def close(self) -> None:
        """Settle the batch in flight and give the shards back."""
        try:
            self._settle_flight()
        finally:
            self._pass.end()
            self._publisher.shutdown()
            self._deleter.shutdown()
            self._leases.release()
