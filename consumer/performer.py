"""One attempt: what is done before it, how it runs, and what becomes of the message after it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import TYPE_CHECKING, Any

from holdfast.classification import classify
from holdfast.consumer.gates import note_outcome
from holdfast.consumer.transaction import before_commit
from holdfast.consumer.work import Released, Settled, Verdict, Wait, Work, current_work
from holdfast.dlq import dead_lettered
from holdfast.errors import CircuitOpen, DependencyDown, Remedy, StaleDelivery
from holdfast.layer import Call, Later
from holdfast.message import begin_handling

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection

    from holdfast.consumer.books import Books
    from holdfast.consumer.lanes import Lanes
    from holdfast.consumer.metrics import ConsumerMetrics
    from holdfast.consumer.settings import Settings
    from holdfast.consumer.tally import Tally

log = logging.getLogger("holdfast.consumer")


class Postponed(StaleDelivery):
    """The run of a message ends here; it goes on from the database when its retry is due."""


class ProcessKilled(Exception):
    """A message was alone in hand each time that its process died."""

    __holdfast_remedy__ = Remedy.DEAD_LETTER

    def __init__(self, crashes: int) -> None:
        super().__init__(
            f"the process died {crashes} times while it handled this message and nothing else: "
            "out of memory, a crash in native code, or a kill"
        )


class Performer:
    """Runs works in worker threads and judges how they ended. Shared by all threads."""

    def __init__(
        self,
        lanes: Lanes,
        books: Books | None,
        *,
        owner: str,
        settings: Settings,
        tally: Tally,
        metrics: ConsumerMetrics,
        bury: Callable[[Work, BaseException], None],
        stop: Callable[[BaseException], None],
    ) -> None:
        self._lanes = lanes
        self._books = books
        self._owner = owner
        self._settings = settings
        self._tally = tally
        self._metrics = metrics
        self._bury = bury
        self._stop = stop

    def before(self, work: Work) -> Verdict | None:
        """Do what comes before an attempt; a verdict means that there is none."""
        try:
            return self._before(work)
        except DependencyDown as error:
            return self._down(work, error)

    def _before(self, work: Work) -> Verdict | None:
        books = self._books
        if books is None or work.later is not None:
            return None
        if work.message.is_replay and books.is_held_back(work):
            log.warning("replayed message %s stays a dead letter: an earlier one of its key failed "
                        "again", work.message.id)  # fmt: skip
            self._tally.add("held_back")
            return Settled()
        if work.row is None and not work.message.is_replay and self._lanes.is_held(work):
            if books.park_behind(work):
                self._tally.add("parked")
                return Settled()
            self._lanes.unhold(work)
        if work.crashes >= self._settings.crash_limit:
            self._bury(work, ProcessKilled(work.crashes))
            self._tally.add("crashed")
            self._metrics.count(work.route.topic, "crashed")
            return Settled(holds=work.message.key is not None and self._settings.parks)
        if work.suspect:
            books.alone(work, self._owner)
        return None

    def after(self, work: Work, verdict: Verdict) -> bool:
        """Whether the start mark of *work* may go soon; a lone mark goes at once."""
        if work.suspect and self._books is not None:
            try:
                self._books.finished(work, self._owner)
            except DependencyDown as error:
                log.warning("the mark of message %s stays for now: %s", work.message.id, error)
            return False
        return not isinstance(verdict, Wait)

    def prepare(self, work: Work) -> None:
        """Make the call of a fresh run, in a context of its own."""
        if work.later is not None:
            return
        work.letter = None
        work.context = contextvars.copy_context()
        work.context.run(_enter, work)
        work.call = call = Call(
            (), {}, message=work.message, consumer=work.route.consumer, attempt=work.attempt,
            suspends=True,
        )  # fmt: skip
        call.notes["delivery"] = work.delivery if work.row is None else work.row.origin
        if self._books is not None:
            before_commit(call, lambda db: self._settle(db, work))

    def run(self, work: Work) -> tuple[Any, BaseException | None]:
        """Run a `def` handler: its first attempt, or the next after a wait."""
        plan, call, context = work.route.plan, work.call, work.context
        assert call is not None  # noqa: S101
        assert context is not None  # noqa: S101
        try:
            if work.later is None:
                return context.run(plan.run, call), None
            return context.run(plan.resume, call, work.later), None
        except BaseException as error:  # noqa: BLE001 - the judge decides about every end
            return None, error

    async def run_async(self, work: Work) -> tuple[Any, BaseException | None]:
        """Run an `async def` handler likewise."""
        plan, call = work.route.plan, work.call
        assert call is not None  # noqa: S101
        try:
            if work.later is None:
                return await plan.run_async(call), None
            return await plan.resume_async(call, work.later), None
        except BaseException as error:  # noqa: BLE001
            return None, error

    def judge(self, work: Work, result: Any, error: BaseException | None) -> Verdict:
        """Return what becomes of *work*, after writing down what must not be forgotten."""
        try:
            if error is not None:
                return self._failed(work, error)
            if isinstance(result, Later):
                return self._later(work, result)
            return self._done(work)
        except DependencyDown as outage:
            return self._down(work, outage)
        finally:
            if work.call is not None:
                work.call.error = None  # or they would keep each other alive

    def _settle(self, db: Connection, work: Work) -> None:
        if self._books is not None:
            self._books.confirm(db, work)

    def _done(self, work: Work) -> Verdict:
        duplicate = work.call is not None and work.call.duplicate
        if work.letter is None and work.call is not None:
            work.letter = dead_lettered(work.call)  # put into a home of the user's own
            if work.letter is not None and self._books is not None:
                self._books.buried()
        dead = work.letter is not None
        note_outcome(work.route.limit, dead=dead)
        outcome = "dead_lettered" if dead else "duplicates" if duplicate else "handled"
        self._tally.add(outcome)
        self._metrics.count(work.route.topic, outcome)
        self._clean(work)
        holds = dead and self._settings.quarantine and work.message.key is not None
        return Settled(holds=holds and self._books is not None and self._settings.parks)

    def _later(self, work: Work, later: Later) -> Verdict:
        """Keep the run for the next attempt, or park the message if that is long to wait."""
        call = work.call
        assert call is not None  # noqa: S101
        error, work.attempt = call.error, call.attempt
        self._metrics.count(work.route.topic, "failed")
        if error is not None and work.route.outage.blamed(error) is not None:
            work.unproven += 1  # it may turn out to be an outage
        else:
            self._tally.add("failed")
            if self._books is not None:
                self._books.failed(work, error or RuntimeError("the result was refused"))
        if not self._parks(work, later.delay) or self._books is None:
            work.later = later
            return Wait(later.delay)
        self._books.postpone(work, later.delay, error)
        self._abandon(work, later)
        return self._parked(work)

    def _failed(self, work: Work, error: BaseException) -> Verdict:
        if work.call is not None:
            work.attempt = work.call.attempt
        if not isinstance(error, Exception) and not isinstance(error, asyncio.CancelledError):
            log.critical("the handler of message %s raised %r: the consumer stops, nothing is "
                         "acknowledged", work.message.id, error)  # fmt: skip
            self._clean(work)
            self._stop(error)
            return Released()
        remedy = classify(error)
        if remedy is Remedy.PAUSE:
            return self._down(work, error)
        if remedy is Remedy.RELEASE:
            return self._left(work, error)
        return self._again(work, error)

    def _again(self, work: Work, error: BaseException) -> Verdict:
        """Try again after a failure that no layer of the plan took care of."""
        log.log(
            logging.ERROR if classify(error) is Remedy.FIX else logging.WARNING,
            "the handler of message %s failed (attempt %d), it comes again: %r",
            work.message.id, work.attempt, error,
        )  # fmt: skip
        self._tally.add("failed")
        self._metrics.count(work.route.topic, "failed")
        work.attempt += 1
        if self._books is not None:
            self._books.failed(work, error)
        self._clean(work)
        delay = self._settings.backoff.delay(work.attempt - 1) or self._settings.backoff.ceiling
        if not self._parks(work, delay) or self._books is None:
            return Wait(delay)
        self._books.postpone(work, delay, error)
        return self._parked(work)

    def _down(self, work: Work, error: BaseException) -> Verdict:
        """Wait for what is down; no attempt is counted, also not those that led to this."""
        work.attempt = max(1, work.attempt - work.unproven)
        outages = work.outages + 1
        self._clean(work)
        work.outages = outages
        self._tally.add("released")
        self._metrics.count(work.route.topic, "released")
        delay = self._settings.backoff.delay(min(work.outages, 8)) or 1.0
        if isinstance(error, CircuitOpen) and error.retry_after is not None:
            delay = 0.0  # the gate of its lane knows when to open
        level = logging.INFO if isinstance(error, CircuitOpen) else logging.WARNING
        log.log(level, "message %s waits, nothing is acknowledged: %s", work.message.id, error)
        work.waits_for = str(error)
        return Wait(min(delay, self._settings.patience))

    def _left(self, work: Work, error: BaseException) -> Verdict:
        """Wait for whoever has *work* in hand; it keeps its turn, and nobody is blamed.

        A parked message that somebody else has handled is simply gone.
        """
        log.info("message %s is left to others: %r", work.message.id, error)
        outages = work.outages + 1
        self._clean(work)
        if work.row is not None or work.dropped:
            return Released()
        work.outages = outages
        self._tally.add("released")
        self._metrics.count(work.route.topic, "released")
        asked = getattr(error, "retry_after", None)
        delay = self._settings.backoff.delay(min(outages, 8)) or 1.0 if asked is None else asked
        return Wait(min(delay, self._settings.patience))

    def _parked(self, work: Work) -> Verdict:
        self._tally.add("parked")
        self._clean(work)
        return Settled(holds=True)

    def _parks(self, work: Work, delay: float) -> bool:
        """Whether so long a wait is spent in the database."""
        if self._books is None or not self._settings.parks:
            return False
        # A parked replay would queue behind newer messages of its key, and be overtaken by the
        # replays that follow it.
        if work.message.is_replay:
            return False
        return delay > self._settings.patience and not work.dropped

    def _abandon(self, work: Work, later: Later) -> None:
        """End the run of *work* in good order: its layers hear that it was put off."""
        plan, call, context = work.route.plan, work.call, work.context
        assert call is not None  # noqa: S101
        assert context is not None  # noqa: S101
        put_off = Postponed(f"message {work.message.id} is tried again later")
        try:
            if plan.is_async:
                asyncio.run(_in(context, plan.recover_async(call, put_off, later.depth)))
            else:
                context.run(plan.recover, call, put_off, later.depth)
        except Postponed:
            pass
        except Exception:
            log.exception("a layer failed while message %s was put off", work.message.id)

    @staticmethod
    def _clean(work: Work) -> None:
        work.call = work.later = work.context = work.task = None
        work.unproven = 0
        work.outages = 0


def _enter(work: Work) -> None:
    begin_handling(work.message)
    current_work.set(work)


async def _in(context: contextvars.Context, coroutine: Any) -> Any:
    return await asyncio.get_running_loop().create_task(coroutine, context=context)
