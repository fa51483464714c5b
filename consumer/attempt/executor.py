"""One attempt: made, run, and written down; for the runtime, a loop of the user's own, batches."""

from __future__ import annotations

import contextvars
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.call import Call
from holdfast.consumer.attempt.outcome import (
    COUNTED,
    HandlerOutcome,
    OutcomePolicy,
    outcome_of,
)
from holdfast.consumer.replays import ReplayOrder
from holdfast.consumer.scheduling.eligibility import ProcessKilled, replay_ending
from holdfast.consumer.scheduling.work import HandlerEnding, Work, current_work
from holdfast.errors import DependencyDown
from holdfast.message import begin_handling
from holdfast.tracing import switch
from holdfast.tracing.messaging import MESSAGING

if TYPE_CHECKING:
    from holdfast.consumer.replays import ReplayConfirmations
    from holdfast.consumer.settings import ConsumerContext

log = logging.getLogger("holdfast.consumer")


class AttemptExecutor:
    """Does what an attempt needs before, during and after it. Shared by all threads.

    What is decided is decided by `eligibility` and `OutcomePolicy`; what is done with the message
    then is the caller's, who knows where it came from.
    """

    def __init__(self, context: ConsumerContext, confirmations: ReplayConfirmations) -> None:
        self._store = context.store
        self._clock = context.clock
        self._group, self._system = context.group, context.system
        self._counters, self._metrics = context.counters, context.metrics
        self._confirmations = confirmations
        self._replays = ReplayOrder()
        self._foreign: set[str] = set()
        self.policy = OutcomePolicy(context.settings, has_store=context.store is not None)

    # -- before ------------------------------------------------------------------------

    def refused_replay(self, work: Work, *, ask_again: bool) -> HandlerEnding | None:
        """Return how the replayed *work* ends if it is not to be handled here; None: it may run.

        With *ask_again* its plan is read once more: it was admitted a while ago.
        """
        store, standing = self._store, work.replay.standing
        overtakes = work.replay.meant_for is None and self._replays.holds(work)
        if ask_again and store is not None and work.replay.meant_for is None and not overtakes:
            standing = store.standing(work)
        ending = replay_ending(work.replay.meant_for, standing, overtakes=overtakes)
        match ending:
            case HandlerEnding.SKIPPED:
                self._tell_foreign(work)
            case HandlerEnding.HELD_BACK:
                log.warning("replayed message %s stays a dead letter: an earlier one of its key "
                            "failed again", work.message.id)  # fmt: skip
            case HandlerEnding.DUPLICATE:
                log.info("replayed message %s was handled before", work.message.id)
            case HandlerEnding.WITHDRAWN:
                self._withdraw(work)
        return ending

    def bury(self, work: Work, error: BaseException) -> None:
        """Return once *work*, which no handler may see any more, is a dead letter.

        It is the one that its handler's own layer would have written.
        """
        route, letters = work.route, work.route.letters
        assert letters.home is not None  # noqa: S101 - every route has one
        letter = letters.captured(
            work.message, error, group=route.group, handler=route.name, delivery=work.origin,
            attempts=work.history.attempt + work.history.crashes, clock=self._clock,
            stage="crash" if work.refused is None else "deserialize",
        )  # fmt: skip
        token = current_work.set(work)
        try:
            letters.home.put(letter)
        finally:
            current_work.reset(token)
        log.error("message %s is dead-lettered as %s: %s", work.message.id, letter.dlq_id,
                  work.told(error))  # fmt: skip
        if isinstance(error, ProcessKilled):
            self._counters.add(route.topic, "crashed")

    def prepare(self, work: Work, *, suspends: bool) -> Call:
        """Make the call of a fresh run; what is settled with its effect commits with it.

        A run that *suspends* returns where it would wait for a retry.
        """
        letters, store = work.route.letters, self._store
        run = work.run
        run.letter = None
        run.call = call = Call(
            (), {}, message=work.message, consumer=work.route.consumer, suspends=suspends,
            attempt=work.history.attempt, failing_since=work.history.failing_since,
            scrub=letters.scrub, visible=letters.visible, delivery=work.origin,
        )  # fmt: skip
        if store is not None:
            call.before_commit = (lambda db: store.confirm(db, work, duplicate=call.duplicate),)
        if switch.spans is not None:
            run.span = switch.spans.process(
                work.route.topic, [work.message], group=self._group, system=self._system,
                attempt=work.history.attempt,
            )  # fmt: skip
        return call

    # -- during ------------------------------------------------------------------------

    def run(self, work: Work) -> tuple[Any, BaseException | None]:
        """Run a `def` handler: its first attempt, or the next after a wait."""
        plan, run = work.route.plan, work.run
        call, context = run.call, run.context
        assert call is not None  # noqa: S101
        assert context is not None  # noqa: S101
        try:
            if run.span is not None:
                begin = plan.run if run.later is None else partial(plan.resume, later=run.later)
                return context.run(run.span.run, begin, call), None
            if run.later is None:
                return context.run(plan.run, call), None
            return context.run(plan.resume, call, run.later), None
        except BaseException as error:  # noqa: BLE001 - every end is decided about
            return None, error

    async def run_async(self, work: Work) -> tuple[Any, BaseException | None]:
        """Run an `async def` handler likewise, in the context of the work."""
        plan, run = work.route.plan, work.run
        call = run.call
        assert call is not None  # noqa: S101
        try:
            if run.span is not None:
                again = (
                    plan.run_async
                    if run.later is None
                    else partial(plan.resume_async, later=run.later)
                )
                return await run.span.run_async(again, call), None
            if run.later is None:
                return await plan.run_async(call), None
            return await plan.resume_async(call, run.later), None
        except BaseException as error:  # noqa: BLE001
            return None, error

    # -- after -------------------------------------------------------------------------

    def ended(self, work: Work, error: BaseException | None, *, duplicate: bool) -> HandlerOutcome:
        """Write down how an attempt at *work* ended, and return it; it is not counted yet.

        Where the database does not take the word, nobody is blamed: the message comes again.
        """
        run = work.run
        if run.letter is None and run.call is not None:
            run.letter = run.call.letter  # put into a home of the user's own
            if run.letter is not None and self._store is not None:
                self._store.buried()
        outcome = outcome_of(error, dead=run.letter is not None, duplicate=duplicate)
        if run.span is not None:
            failure = error if run.call is None or error is not None else run.call.failure
            run.span.end(COUNTED[outcome.ending], failure, run.call)
            run.span = None
        if error is None and run.letter is None:
            return outcome
        try:
            match outcome.ending:
                case HandlerEnding.DEAD_LETTERED:
                    self._replays.note(work)
                case HandlerEnding.WITHDRAWN:
                    self._withdraw(work)
                case HandlerEnding.FAILED if error is not None:
                    self.blame(work, error)
        except DependencyDown as outage:
            return HandlerOutcome(HandlerEnding.RELEASED, outage)
        return outcome

    def measure(
        self, work: Work, seconds: float, error: BaseException | None, *, retries: int
    ) -> None:
        """Note a run of the handler of *work* that took *seconds*, and failed if *error* says so.

        *retries* is how many of its attempts came after one that failed.
        """
        topic, span = work.route.topic, work.run.span
        link = None if span is None else span.link
        self._metrics.ran(topic, seconds, link)
        event = work.message.type
        MESSAGING.processed(self._system, self._group, topic, event, seconds, error, link)
        if retries:
            self._metrics.retried(topic, retries)

    def blame(self, work: Work, error: BaseException) -> None:
        """Count a failed attempt, unless the message belongs to somebody else by now."""
        if self._store is not None and not work.is_revoked:
            self._store.failed(work, error)

    def count(self, work: Work, ending: HandlerEnding) -> None:
        """Count what became of *work*."""
        self._counters.add(work.route.topic, COUNTED[ending])

    def count_together(self, topic: str, ending: HandlerEnding, count: int) -> None:
        """Count what became of so many messages of *topic*."""
        if count:
            self._counters.add(topic, COUNTED[ending], count=count)

    def confirm(self, work: Work) -> None:
        """Tell the store of a replay, which is elsewhere, that *work* was handled."""
        work.replayed(confirmation_pending=True)
        self._confirmations.tell(work.message)
        work.replayed(confirmation_pending=False)

    def _withdraw(self, work: Work) -> None:
        """Note in its plan that a replayed copy came too late."""
        if self._store is not None:
            self._store.withdraw(work)

    def _tell_foreign(self, work: Work) -> None:
        """Say once for each topic that replays for another group are passed over."""
        if work.route.topic not in self._foreign:
            self._foreign.add(work.route.topic)
            log.warning("message %s of %s, and others from now on, are replays for group %s alone: "
                        "they are passed over", work.message.id, work.route.topic,
                        work.replay.meant_for)  # fmt: skip


def entered(work: Work) -> contextvars.Context:
    """Return a context of its own in which *work* is the one that is handled."""
    context = contextvars.copy_context()
    context.run(_enter, work)
    return context


def _enter(work: Work) -> None:
    begin_handling(work.message)
    current_work.set(work)
