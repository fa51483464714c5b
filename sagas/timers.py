"""What is due: timeouts, retries, sleeps, deadlines, and local steps to run.

A worker leases what is due, by the database's clock, and works each off in a transaction of its
own. One that was asleep while another took over changes nothing: the timer has another epoch and
the saga another revision by then.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from sqlalchemy import update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from holdfast.backoff import Backoff
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.clock import database_now
from holdfast.db.errors import outage
from holdfast.db.transactions import transact
from holdfast.errors import ConfigurationError, InvalidMessage, PoisonMessage
from holdfast.sagas import store
from holdfast.sagas.coroutines import completed, over
from holdfast.sagas.leases import (
    DueTimer,
    LeaseHeartbeat,
    claim,
    finish,
    give_back,
    still_held,
)
from holdfast.sagas.operations import asked
from holdfast.sagas.orchestrator import (
    Came,
    Transitions,
    advance,
    checked,
    described,
    locked,
    write_down,
)
from holdfast.sagas.participant import StepFailed
from holdfast.sagas.schema import timer, timer_lease
from holdfast.sagas.states import (
    Answer,
    Answered,
    Direction,
    SagaEvent,
    StepStatus,
    TimerFired,
    TimerKind,
)
from holdfast.sagas.wire import CommandHeaders, running
from holdfast.scrubbing import text_of

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

    from holdfast.outbox import Outbox
    from holdfast.sagas.alerts import SagaAlerts
    from holdfast.sagas.store import StoredSaga
    from holdfast.sagas.versions import Definitions

log = logging.getLogger("holdfast.sagas")

_AGAIN = Backoff(first=1.0, ceiling=300.0)
"""How long a timer waits that could not be worked off; the others do not wait for it."""

_CONFLICTS = Backoff(first=0.01, ceiling=0.5)
_CONFLICTED = 6
"""How often a saga is read again at once after another worker was quicker with it."""
_TOGETHER_SECONDS = 0.25
"""How long steps that share a transaction may take."""
_SLOW_SECONDS = 0.05
"""From when on a step has transactions of its own: others would wait for their commit with it."""
_ALERT_SECONDS = 5.0
_Joining = Literal["create_savepoint", "rollback_only"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTerms:
    """How much shares a transaction at most, how long timers are leased, how often it is looked."""

    batch: int = 100
    lease_seconds: float = 60.0
    idle_seconds: float = 0.5

    def __post_init__(self) -> None:
        if self.batch < 1 or not 0 < self.lease_seconds < float("inf"):
            raise ConfigurationError(f"{self}: use a batch of 1 or more and finite seconds above 0")


class TimerWorker:
    """Works off what is due for the sagas that it knows; several share the work."""

    def __init__(
        self,
        engine: Engine,
        definitions: Definitions,
        *,
        outbox: Outbox,
        owner: str,
        terms: WorkerTerms | None = None,
        alerts: SagaAlerts | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._engine = engine
        self._alerts = alerts
        self._next_alert = 0.0
        self._definitions = definitions
        self._outbox = outbox
        self._owner = owner
        self._terms = WorkerTerms() if terms is None else terms
        self._clock = clock
        self._stopped = threading.Event()
        self._heartbeat = LeaseHeartbeat(engine, seconds=self._terms.lease_seconds, clock=clock)
        self._slow: set[tuple[str, str, Direction]] = set()
        self.has_died = False
        """Whether `run` was ended by something that nobody could catch."""
        self.database_down: str | None = None

    def run(self) -> None:
        """Work off what is due until `stop`; an outage is waited for and blames nobody."""
        try:
            self._run()
        except BaseException:
            self.has_died = True
            raise

    def _run(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                done = self.step()
                self.alert()
            except Exception as error:  # noqa: BLE001 - sagas must not stand still for it
                failures += 1
                if isinstance(error, DBAPIError):
                    self.database_down = described(error)
                what = "the database fails" if isinstance(error, DBAPIError) else "a worker failed"
                log.warning("sagas: %s: %s", what, described(error))
                self._clock.wait(self._stopped, _AGAIN.longest(min(failures, 6)))
                continue
            failures, self.database_down = 0, None
            if not done:
                self._clock.wait(self._stopped, self._terms.idle_seconds)

    def stop(self) -> None:
        """End `run` after what is in hand."""
        self._stopped.set()

    def alert(self) -> None:
        """Tell the hooks about what needs a human, every few seconds."""
        if self._alerts is None or self._clock.monotonic() < self._next_alert:
            return
        self._alerts.run_once()
        self._next_alert = self._clock.monotonic() + _ALERT_SECONDS

    def step(self) -> int:
        """Work off one batch of what is due; return how many there were."""
        due = transact(self._engine, self._claim, clock=self._clock)
        left = self._together(due) if len(due) > 1 else due
        for number, one in enumerate(left):
            if self._stopped.is_set():  # what is not begun is for others
                rest = partial(give_back, due=left[number:])
                transact(self._engine, rest, clock=self._clock)
                break
            self._work_off(one)
        return len(due)

    def _claim(self, db: Connection) -> list[DueTimer]:
        """Lease what is due, of sagas of versions that are known here."""
        return claim(
            db, self._definitions.workable, owner=self._owner,
            seconds=self._terms.lease_seconds, limit=self._terms.batch,
        )  # fmt: skip

    def _together(self, due: list[DueTimer]) -> list[DueTimer]:
        """Work off what can be in one transaction; return what is left, to be done one by one.

        Where one fails, nothing of it counts, and each runs again by itself.
        """
        known = self._definitions.known
        apart = [
            one
            for one in due
            if one.kind == store.REPLY
            or (one.type, one.version) not in known
            or (one.kind == store.RUN and (one.type, one.step, one.direction) in self._slow)
        ]
        left = [one for one in due if one not in apart]
        while len(left) > 1 and not self._stopped.is_set():
            try:
                with self._heartbeat.keep(*left):
                    done = transact(self._engine, partial(self._work_off_all, due=left))
            except DBAPIError as error:
                if outage(error).passes:
                    raise
                break
            except Exception as error:  # noqa: BLE001 - whose fault it is shows when each runs alone
                log.info("%d timers are worked off one by one: %s", len(left), described(error))
                break
            left = [one for one in left if one not in done]
        return left + apart

    def _work_off_all(self, db: Connection, due: list[DueTimer]) -> set[DueTimer]:
        """Work off *due* in the transaction of *db*, as long as it is short; return which."""
        until = self._clock.monotonic() + _TOGETHER_SECONDS
        held = still_held(db, due)
        done = {one for one in due if one not in held}  # others have them
        rows = store.read_all(db, {one.saga_id for one in held})
        transitions = Transitions(db, self._outbox)
        worked: list[DueTimer] = []
        for one in due:
            if one not in held:
                continue
            if worked and self._clock.monotonic() >= until:
                break
            row = transitions.current(rows[one.saga_id])
            self._follow(db, transitions, row, one)
            worked.append(one)
        # The saga rows first, as everybody locks them.
        for saga_id, revision in store.lock_all(db, {one.saga_id for one in worked}).items():
            if revision != rows[saga_id].revision:
                raise store.SagaConflict(saga_id, rows[saga_id].revision)
        if not finish(db, worked):
            raise store.SagaConflict(worked[0].saga_id, rows[worked[0].saga_id].revision)
        transitions.write()
        return done.union(worked)

    def _follow(
        self, db: Connection, transitions: Transitions, row: StoredSaga, due: DueTimer
    ) -> None:
        saga = self._definitions.of(row)
        if due.kind != store.RUN:
            transitions.add(saga, row, _event(due), Came(payload=due.payload))
        elif _is_awaited(row, due):
            answer, error, came = self._called(db, row, due, mode="rollback_only")
            if answer is not Answer.DONE:
                raise StepFailed(error)  # what it wrote is to be rolled back, and that alone
            event = Answered(due.step, due.direction, due.attempt, answer, error)
            transitions.add(saga, row, event, came)

    def _work_off(self, due: DueTimer) -> None:
        try:
            self._until_it_fits(due)
        except store.SagaConflict as error:
            log.info("%s: %s", due, error)  # nobody is to blame; it is read again when it is due
            self._again(due, delay=_CONFLICTS.longest(_CONFLICTED), counts=False)
        except DBAPIError as error:
            if outage(error).passes:
                raise
            self._failed(due, error)
        except Exception as error:  # noqa: BLE001 - one that fails must not keep the others waiting
            self._failed(due, error)

    def _until_it_fits(self, due: DueTimer) -> None:
        """Work *due* off; where another worker was quicker with its saga, read that again."""
        for attempt in range(1, _CONFLICTED + 1):
            try:
                return self._worked_off(due)
            except store.SagaConflict:
                if attempt == _CONFLICTED:
                    raise
                self._clock.sleep(_CONFLICTS.delay(attempt) or 0.0)
        return None

    def _worked_off(self, due: DueTimer) -> None:
        if (due.type, due.version) not in self._definitions.known:
            self._move(due)
        if due.kind == store.RUN:
            with self._heartbeat.keep(due):
                self._run_local(due)
        elif due.kind == store.REPLY:
            self._take_kept(due)
        else:
            self._fire(due)

    def _move(self, due: DueTimer) -> None:
        """Move the saga of *due* to the version that has a migration for it."""

        def work(db: Connection) -> None:
            row = locked(db, due.saga_id)
            if not row.progress.phase.is_final:
                self._definitions.current(db, row)

        transact(self._engine, work, clock=self._clock)

    def _take_kept(self, due: DueTimer) -> None:
        """Take up a reply that came to a program without the version; poison is written down."""
        kept = store.kept_reply(due.payload or b"")
        event = Answered(due.step, due.direction, due.attempt, kept.answer, kept.error)

        def take(db: Connection, poison: Exception | None = None) -> None:
            row = locked(db, due.saga_id)
            if not self._is_mine(db, due):
                return
            if poison is not None:
                write_down(db, row, event, f"the reply was refused: {described(poison)}")
            elif row.progress.phase.is_final:
                write_down(db, row, event, f"the saga is {row.status} already")
            else:
                self._advance(db, row, event, Came(payload=kept.payload))

        try:
            transact(self._engine, take, clock=self._clock)
        except (PoisonMessage, InvalidMessage) as error:
            poison = error
            log.error("%s is refused: %s", due, described(poison))  # noqa: TRY400 - its text tells
            transact(self._engine, lambda db: take(db, poison), clock=self._clock)

    def _fire(self, due: DueTimer) -> None:
        def work(db: Connection) -> None:
            row = locked(db, due.saga_id)
            if not self._is_mine(db, due):
                return
            self._advance(db, row, _event(due), Came(payload=due.payload))

        transact(self._engine, work, clock=self._clock)

    def _run_local(self, due: DueTimer) -> None:
        """Run a local step; its effect commits with the word that it is done.

        Nothing is locked while it runs, but its lease is renewed. A worker that was frozen in it
        for longer than that is overtaken, and rolls back when it wakes up: the epoch is the fence.
        """
        failure: Exception | None = None

        def work(db: Connection) -> None:
            row = store.read(db, due.saga_id) if still_held(db, [due]) else None
            if row is None or not _is_awaited(row, due):
                self._is_mine(db, due)
                return
            answer, error, came = self._called(db, row, due)
            # The saga row first, as everybody locks them.
            if locked(db, row.id).revision != row.revision or not self._is_mine(db, due):
                raise store.SagaConflict(row.id, row.revision)
            event = Answered(due.step, due.direction, due.attempt, answer, error)
            self._advance(db, row, event, came)

        try:
            transact(self._engine, work, clock=self._clock)
        except (DBAPIError, store.SagaConflict):
            raise
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises
            failure = error
        if failure is not None:
            log.warning("%s: %s", due, described(failure))
            self._tell_failure(due, failure)

    def _called(
        self, db: Connection, row: StoredSaga, due: DueTimer, mode: _Joining = "create_savepoint"
    ) -> tuple[Answer, str, Came]:
        saga = self._definitions.of(row)
        node = saga.graph[due.step]
        is_undo = due.direction is Direction.UNDO and node.undo is not None
        name = node.undo.name if is_undo and node.undo is not None else node.name
        state = saga.decode(row.data)
        session = Session(bind=db, join_transaction_mode=mode)
        context = CommandHeaders(
            saga_id=row.id, saga_type=row.type, step=due.step, direction=due.direction,
            attempt=due.attempt, reply_to="",
        )  # fmt: skip
        began = self._clock.monotonic()
        try:
            with running(context):
                step = saga.steps[name]
                after = completed(step.run(state, over(session) if step.is_awaited else session))
            if session.in_transaction():  # it was used
                session.commit()  # of the savepoint, if any: the transaction is ours
        except StepFailed as failed:
            session.rollback()
            return failed.answer, text_of(failed), Came()
        finally:
            session.close()
            is_slow = self._clock.monotonic() - began > _SLOW_SECONDS
            (self._slow.add if is_slow else self._slow.discard)((due.type, due.step, due.direction))
        return Answer.DONE, "", Came(state=checked(saga, name, after), is_local=True)

    def _tell_failure(self, due: DueTimer, failure: Exception) -> None:
        def work(db: Connection) -> None:
            row = locked(db, due.saga_id)
            if not self._is_mine(db, due) or not _is_awaited(row, due):
                return
            event = Answered(
                due.step, due.direction, due.attempt, Answer.FAILED_FOR_NOW, described(failure)
            )
            self._advance(db, row, event)

        transact(self._engine, work, clock=self._clock)

    def _advance(
        self, db: Connection, row: StoredSaga, event: SagaEvent, came: Came | None = None
    ) -> None:
        saga = self._definitions.of(row)
        advance(db, saga, row, event, outbox=self._outbox, came=came or Came())

    def _is_mine(self, db: Connection, due: DueTimer) -> bool:
        """Whether the timer was still there, and this worker's; it is removed with the work."""
        return finish(db, [due])

    def _failed(self, due: DueTimer, error: Exception) -> None:
        log.error("%s could not be worked off: %s", due, described(error))
        self._again(due, delay=_AGAIN.longest(min(due.tries + 1, 20)), counts=True)

    def _again(self, due: DueTimer, *, delay: float, counts: bool) -> None:
        later = {
            **timer_lease.released(),
            timer.c.due: database_now() + delay,
            timer.c.tries: timer.c.tries + int(counts),
        }
        transact(
            self._engine,
            lambda db: db.execute(update(timer).where(due.where).values(later)),
            clock=self._clock,
        )


def _event(due: DueTimer) -> SagaEvent:
    """Return what a timer stands for that is no step to run."""
    return asked(due.kind, due.step, due.payload) or TimerFired(
        due.step, due.direction, due.attempt, TimerKind(due.kind)
    )


def _is_awaited(row: StoredSaga, due: DueTimer) -> bool:
    """Whether the saga still waits for just this attempt: if not, its effect must not happen."""
    step = row.progress.steps[due.step]
    if due.direction is Direction.DO:
        return step.status is StepStatus.RUNNING and step.attempt == due.attempt
    return step.status is StepStatus.UNDOING and step.undo_attempt == due.attempt
