"""What the runtime does with a message: runs it if it may, and then settles, waits or gives back.

The shell around the decisions: `eligibility` before an attempt, `OutcomePolicy` after it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from typing import TYPE_CHECKING, Any

from holdfast.call import Later, Refusal
from holdfast.classification import classify
from holdfast.consumer.attempt.executor import entered
from holdfast.consumer.attempt.outcome import HandlerOutcome, ends_process
from holdfast.consumer.scheduling.circuit_gate import note_outcome
from holdfast.consumer.scheduling.eligibility import RUN, Bury, Park, Run, eligibility
from holdfast.consumer.scheduling.work import (
    ACK,
    Ack,
    Disposition,
    HandlerEnding,
    Release,
    RetryIn,
    RunAlone,
)
from holdfast.errors import CircuitOpen, DependencyDown, HoldfastError, Remedy, StaleDelivery

if TYPE_CHECKING:
    import contextvars
    from collections.abc import Callable, Collection, Sequence

    from holdfast.consumer.attempt.executor import AttemptExecutor
    from holdfast.consumer.intake.retry_topics import RetryTopics
    from holdfast.consumer.scheduling.scheduler import KeyScheduler
    from holdfast.consumer.scheduling.work import Work
    from holdfast.consumer.settings import ConsumerContext

log = logging.getLogger("holdfast.consumer")
_RUNS_AGAIN = (RetryIn, RunAlone)
_DEAD_LETTERED = HandlerEnding.DEAD_LETTERED


class Postponed(StaleDelivery):
    """The run of a message ends here; it goes on from the database when its retry is due."""


class Settlement:
    """Says what becomes of each message in hand, after writing down what must not be forgotten.

    Shared by all threads.
    """

    def __init__(
        self,
        context: ConsumerContext,
        executor: AttemptExecutor,
        lanes: KeyScheduler,
        delays: RetryTopics,
        stop: Callable[[BaseException], None],
    ) -> None:
        self._store = context.store
        self._owner = context.owner
        self._counters = context.counters
        self._crash_limit = context.settings.crash_limit
        self._executor = executor
        self._policy = executor.policy
        self._lanes = lanes
        self._delays = delays
        self._stop = stop
        self._waits = WaitLog()

    # -- before an attempt -------------------------------------------------------------

    def before(self, work: Work) -> Disposition | None:
        """Do what comes before an attempt; a disposition means that there is none."""
        try:
            return self._before(work)
        except (DependencyDown, StaleDelivery) as error:
            return self.released(work, error)

    def _before(self, work: Work) -> Disposition | None:
        if work.replay.confirmation_pending:
            return self._confirm(work)
        if work.run.later is None and work.message.is_replay:
            ending = self._executor.refused_replay(work, ask_again=True)
            if ending is not None:
                self._executor.count(work, ending)
                return ACK
        found = eligibility(
            work,
            key_held=self._store is not None and self._lanes.is_held(work),
            crash_limit=self._crash_limit,
        )
        if found is RUN:
            return None
        if isinstance(found, Park):
            if self._store is not None and self._store.park_behind(work):
                self._counters.add(work.route.topic, "parked")
                return ACK
            self._lanes.unhold(work)
            found = eligibility(work, key_held=False, crash_limit=self._crash_limit)
        match found:
            case Bury(error):
                self._executor.bury(work, error)
                if work.refused is error:
                    return self.done(work, duplicate=False)
                return Ack(holds=self._policy.holds_key(work))
            case Run(alone=True) if self._store is not None:
                self._store.alone(work, self._owner)
        return None

    def prepare(self, work: Work) -> None:
        """Make the call of a fresh run, in a context of its own."""
        if work.run.later is None:
            work.run.context = entered(work)
            self._executor.prepare(work, suspends=True)

    # -- after an attempt --------------------------------------------------------------

    def after(
        self, work: Work, result: Any, error: BaseException | None, *, seconds: float
    ) -> Disposition:
        """Return what becomes of *work*, which ran for *seconds*."""
        call = work.run.call
        failure = error
        if failure is None and call is not None:
            failure = call.error if isinstance(result, Later) else call.failure
        is_retry = work.run.later is not None or work.history.attempt > 1
        self._executor.measure(work, seconds, failure, retries=int(is_retry))
        try:
            if error is not None:
                return self._failed(work, error)
            if isinstance(result, Later):
                return self._suspended(work, result)
            return self.done(work, duplicate=call is not None and call.duplicate)
        except DependencyDown as outage:
            return self.released(work, outage)
        finally:
            if call is not None:
                call.failure = None
                if call.error is not None:
                    # With its frames, or after the run, they would keep each other alive.
                    call.error = None if work.run.later is None else call.error.with_traceback(None)

    def done(self, work: Work, *, duplicate: bool) -> Disposition:
        """Note that the way of *work* has ended: its effect is there, or its dead letter."""
        outcome = self._executor.ended(work, None, duplicate=duplicate)
        is_dead = outcome.ending is _DEAD_LETTERED
        note_outcome(work.route.limit, dead=is_dead)
        self._executor.count(work, outcome.ending)
        step = self._policy.next_step(work, outcome)
        _clean(work)
        self._waits.end(work)
        if not is_dead and self._policy.must_confirm(work):
            return self._confirm(work)
        return step

    def done_together(self, works: Sequence[Work], duplicates: Collection[Work]) -> list[Ack]:
        """Note as `done` does that *works* of one handler have ended, in one transaction.

        What shared a batch is no replay and has no dead letter: it is counted together.
        """
        if not works:
            return []
        route = works[0].route
        self._executor.count_together(route.topic, HandlerEnding.DUPLICATE, len(duplicates))
        self._executor.count_together(
            route.topic, HandlerEnding.HANDLED, len(works) - len(duplicates)
        )
        for work in works:
            note_outcome(route.limit, dead=False)
            _clean(work)
            self._waits.end(work)
        return [ACK] * len(works)

    def _confirm(self, work: Work) -> Disposition:
        """Have a store elsewhere hear that *work* was handled.

        Until it is told, nothing is acknowledged; the handler is not run again for that.
        """
        try:
            self._executor.confirm(work)
        except HoldfastError as error:
            work.note(outages=work.history.outages + 1)
            log.warning("message %s was handled; its replay hears of it later: %s",
                        work.message.id, error)  # fmt: skip
            return self._policy.outage(work.history.outages)
        return ACK

    def _failed(self, work: Work, error: BaseException) -> Disposition:
        if work.run.call is not None:
            work.note(attempt=work.run.call.attempt)
        if ends_process(error):
            self.exited(work, error)
            return RetryIn(math.inf)  # its key waits: the consumer stops
        outcome = self._executor.ended(work, error, duplicate=False)
        if outcome.blame or outcome.error is not error:  # nobody wrote down the latter
            log.log(
                logging.ERROR if classify(error) is Remedy.FIX else logging.WARNING,
                "the handler of message %s failed (attempt %d), it comes again: %s",
                work.message.id, work.history.attempt, work.told(error),
            )  # fmt: skip
        if outcome.ending is HandlerEnding.RELEASED and outcome.error is not None:
            return self.released(work, outcome.error)
        self._executor.count(work, outcome.ending)
        step = self._policy.next_step(work, outcome)
        if outcome.blame:
            work.note(attempt=work.history.attempt + 1)
        _clean(work)
        if isinstance(step, RetryIn):  # after a failure that no layer of the plan took care of
            return self._put_off(work, step.delay, error) or step
        return step

    def released(self, work: Work, error: BaseException) -> Disposition:
        """Wait for what is down, or for whoever has *work* in hand; nobody is blamed.

        Nor is an attempt counted, also not those that led to an outage. A parked message that
        somebody else has handled is simply gone.
        """
        step = self._policy.next_step(work, HandlerOutcome(HandlerEnding.RELEASED, error))
        is_outage = classify(error) is not Remedy.RELEASE
        if is_outage:
            attempt = max(1, work.history.attempt - work.history.unblamed)
            since = None if attempt == 1 else work.history.failing_since
            work.note(attempt=attempt, failing_since=since)
        else:
            log.info("message %s is left to others: %s", work.message.id, work.told(error))
        outages = work.history.outages + 1
        _clean(work)
        if isinstance(step, Release):
            return step
        work.note(outages=outages)
        self._executor.count(work, HandlerEnding.RELEASED)
        if is_outage:
            text = work.told(error)
            work.note(waits_for=text)
            self._waits.begin(work, error, text)
        return step

    def broken(self, work: Work) -> Disposition:
        """Have *work* tried again after a failure of the consumer itself: its key waits."""
        outages = work.history.outages + 1
        _clean(work)
        work.note(outages=outages)
        return self._policy.outage(outages)

    def exited(self, work: Work, error: BaseException) -> None:
        """Stop the consumer, because the handler of *work* raised *error*: that is a crash."""
        log.critical("the handler of message %s raised %s: the consumer stops, nothing is "
                     "acknowledged", work.message.id, work.told(error))  # fmt: skip
        if self._store is not None:
            try:
                self._store.crashed(work)
            except DependencyDown as outage:
                log.error("that crash is not counted: %s", outage)  # noqa: TRY400
        _clean(work)
        self._stop(error)

    def unmark(self, work: Work, step: Disposition) -> None:
        """Have the start mark of *work* removed, unless it runs again soon; a lone one at once."""
        if work.history.crash_suspect and self._store is not None:
            try:
                self._store.finished(work, self._owner)
            except DependencyDown as error:
                log.warning("the mark of message %s stays for now: %s", work.message.id, error)
                if not isinstance(step, _RUNS_AGAIN):
                    self._lanes.unmark(work)
        elif not isinstance(step, _RUNS_AGAIN):
            self._lanes.unmark(work)

    # -- waits -------------------------------------------------------------------------

    def _suspended(self, work: Work, later: Later) -> Disposition:
        """Keep the run for the next attempt, or park the message if that is long to wait."""
        call, topic = work.run.call, work.route.topic
        assert call is not None  # noqa: S101
        error, since = call.error, work.history.failing_since
        work.note(
            attempt=call.attempt,
            failing_since=call.clock.monotonic() if since is None else since,
        )
        outage = work.route.outage
        if error is not None and outage.is_on(work, error):
            self._counters.add(topic, "failed", blamed=False)
            self._abandon(work, later)
            work.note(unblamed=work.history.unblamed + 1)
            return self.released(work, CircuitOpen(outage.detector.breaker.name, None))
        if error is not None and outage.excuses(work, error):
            self._counters.add(topic, "failed", blamed=False)
            work.note(unblamed=work.history.unblamed + 1)  # it may turn out to be an outage
        else:
            self._counters.add(topic, "failed")
            self._executor.blame(work, error or Refusal())
        step = self._put_off(work, later.delay, error)
        if step is None:
            work.run.later = later
            return RetryIn(later.delay)
        self._abandon(work, later)
        _clean(work)
        return step

    def _put_off(self, work: Work, delay: float, error: BaseException | None) -> Disposition | None:
        """Have so long a wait spent in the database or on the broker; None: in memory."""
        if not self._policy.is_long(work, delay):
            return None
        if self._store is None:
            step = self._delays.postpone(work, delay)
            if step is not None:
                self._counters.add(work.route.topic, "delayed")
            return step
        self._store.postpone(work, delay, error)
        self._counters.add(work.route.topic, "parked")
        return Ack(holds=True)

    def _abandon(self, work: Work, later: Later) -> None:
        """End the run of *work* in good order: its layers hear that it was put off."""
        plan, call, context = work.route.plan, work.run.call, work.run.context
        assert call is not None  # noqa: S101
        assert context is not None  # noqa: S101
        if work.run.span is not None:
            work.run.span.end("delayed", call.error, call)
            work.run.span = None
        put_off = Postponed(f"message {work.message.id} is tried again later")
        try:
            if plan.is_async:
                asyncio.run(_in(context, plan.recover_async(call, put_off, later.depth)))
            else:
                context.run(plan.recover, call, put_off, later.depth)
        except Postponed:
            pass
        except Exception as error:  # noqa: BLE001 - told; the message waits in the database
            log.error("a layer failed while message %s was put off\n%s",  # noqa: TRY400
                      work.message.id, work.traced(error))  # fmt: skip


class WaitLog:
    """Tells the first message of a topic that waits for a cause, and how many did when one passes.

    What comes in between is told at DEBUG: an outage gives messages back many times a second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[str, int]] = {}
        """How often messages were given back, by topic and cause."""

    def begin(self, work: Work, error: BaseException, text: str) -> None:
        """Note that *work* waits because of *error*, which may be told as *text*."""
        topic = work.route.topic
        cause = error.name if isinstance(error, CircuitOpen) else type(error).__name__
        with self._lock:
            counts = self._waiting.setdefault(topic, {})
            counts[cause] = counts.get(cause, 0) + 1
            is_first = counts[cause] == 1
        log.log(
            logging.WARNING if is_first else logging.DEBUG,
            "message %s of %s waits, nothing is acknowledged: %s%s",
            work.message.id, topic, text,
            ", so do others from now on, until it is over" if is_first else "",
        )  # fmt: skip

    def end(self, work: Work) -> None:
        """Note that a message of the topic of *work* has passed: what was waited for is there."""
        if not self._waiting:
            return
        with self._lock:
            counts = self._waiting.pop(work.route.topic, None)
        if counts:
            told = ", ".join(f"{count} for {cause}" for cause, count in counts.items())
            log.warning("%s goes on; attempts given back meanwhile: %s", work.route.topic, told)


def _clean(work: Work) -> None:
    """End the run of *work*; the outages that led to it are forgotten."""
    run, history = work.run, work.history
    run.call = run.later = run.context = run.cancel = run.span = None
    if history.unblamed or history.outages:
        work.note(unblamed=0, outages=0)


async def _in(context: contextvars.Context, coroutine: Any) -> Any:
    return await asyncio.get_running_loop().create_task(coroutine, context=context)
