"""The judge: what becomes of a message after an attempt, and what is written down about it."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Any

from holdfast.classification import classify
from holdfast.consumer.failed_replays import FailedReplays
from holdfast.consumer.gates import note_outcome
from holdfast.consumer.held import HandledElsewhere
from holdfast.consumer.wait_log import WaitLog
from holdfast.consumer.work import Released, Settled, Verdict, Wait, Work
from holdfast.dlq import dead_lettered
from holdfast.dlq.layer import FAILURE
from holdfast.dlq.replay.admission import Withdrawn
from holdfast.errors import CircuitOpen, DependencyDown, HoldfastError, Remedy, StaleDelivery
from holdfast.layer import Later, Refusal

if TYPE_CHECKING:
    import contextvars
    from collections.abc import Callable

    from holdfast.consumer.books import Books
    from holdfast.consumer.delays import Delays
    from holdfast.consumer.metrics import ConsumerMetrics
    from holdfast.consumer.reporter import Reporter
    from holdfast.consumer.settings import Settings
    from holdfast.consumer.tally import Tally

log = logging.getLogger("holdfast.consumer")


class Postponed(StaleDelivery):
    """The run of a message ends here; it goes on from the database when its retry is due."""


class Judge:
    """Decides between settled, waiting and released. Shared by all threads."""

    def __init__(
        self,
        books: Books | None,
        delays: Delays,
        *,
        settings: Settings,
        tally: Tally,
        metrics: ConsumerMetrics,
        stop: Callable[[BaseException], None],
        reporter: Reporter,
    ) -> None:
        self._books = books
        self._delays = delays
        self._settings = settings
        self._tally = tally
        self._metrics = metrics
        self._stop = stop
        self._reporter = reporter
        self.replays = FailedReplays()
        self._foreign: set[str] = set()
        self._waits = WaitLog()

    def ran(self, work: Work, seconds: float) -> None:
        """Note how long the handler took."""
        self._metrics.seconds.labels(work.route.topic).observe(seconds)

    def judge(self, work: Work, result: Any, error: BaseException | None) -> Verdict:
        """Return what becomes of *work*, after writing down what must not be forgotten."""
        try:
            if error is not None:
                return self._failed(work, error)
            if isinstance(result, Later):
                return self._later(work, result)
            duplicate = work.call is not None and work.call.duplicate
            return self.done(work, duplicate=duplicate)
        except DependencyDown as outage:
            return self.down(work, outage)
        finally:
            call = work.call
            if call is not None:
                call.notes.pop(FAILURE, None)
            if call is not None and call.error is not None:
                # With its frames, or after the run, they would keep each other alive.
                call.error = None if work.later is None else call.error.with_traceback(None)

    def done(self, work: Work, *, duplicate: bool) -> Verdict:
        """Note that the way of *work* has ended: its effect is there, or its dead letter."""
        if work.letter is None and work.call is not None:
            work.letter = dead_lettered(work.call)  # put into a home of the user's own
            if work.letter is not None and self._books is not None:
                self._books.buried()
        dead = work.letter is not None
        if dead:
            self.replays.note(work)
        note_outcome(work.route.limit, dead=dead)
        outcome = "dead_lettered" if dead else "duplicates" if duplicate else "handled"
        self._tally.add(outcome)
        self._metrics.count(work.route.topic, outcome)
        self._clean(work)
        self._waits.end(work)
        if not dead and (work.unsaid or (self._books is None and work.message.is_replay)):
            return self.report(work)
        holds = dead and self._settings.quarantine and work.key is not None
        return Settled(holds=holds and self._books is not None and self._settings.parks)

    def report(self, work: Work) -> Verdict:
        """Tell the store of a replay, which is elsewhere, that *work* was handled.

        Until it is told, nothing is acknowledged; the handler is not run again for that.
        """
        work.unsaid = True
        try:
            self._reporter.tell(work.message)
        except HoldfastError as error:
            work.outages += 1
            delay = self._settings.backoff.delay(min(work.outages, 8)) or 1.0
            log.warning("message %s was handled; its replay hears of it later: %s",
                        work.message.id, error)  # fmt: skip
            return Wait(min(delay, self._settings.patience))
        work.unsaid = False
        return Settled()

    def count(self, work: Work, outcome: str) -> None:
        """Count what became of *work*."""
        self._tally.add(outcome)
        self._metrics.count(work.route.topic, outcome)

    def skipped(self, work: Work) -> None:
        """Count a replay for another group, which the plan in the database keeps; say so once."""
        self.count(work, "skipped")
        if work.route.topic not in self._foreign:
            self._foreign.add(work.route.topic)
            log.warning("message %s of %s, and others from now on, are replays for group %s alone: "
                        "they are passed over", work.message.id, work.route.topic,
                        work.meant_for)  # fmt: skip

    def withdrawn(self, work: Work) -> Verdict:
        """Leave a replayed copy that came too late; its plan keeps that it came."""
        if self._books is not None:
            self._books.withdraw(work)
        self.count(work, "withdrawn")
        self._clean(work)
        return Settled()

    def _later(self, work: Work, later: Later) -> Verdict:
        """Keep the run for the next attempt, or park the message if that is long to wait."""
        call = work.call
        assert call is not None  # noqa: S101
        error, work.attempt = call.error, call.attempt
        if work.failing_since is None:
            work.failing_since = call.clock.monotonic()
        self._metrics.count(work.route.topic, "failed")
        if error is not None and work.route.outage.is_on(work, error):
            self._abandon(work, later)
            work.unproven += 1
            return self.down(work, CircuitOpen(work.route.outage.detector.breaker.name, None))
        if error is not None and work.route.outage.excuses(work, error):
            work.unproven += 1  # it may turn out to be an outage
        else:
            self._tally.add("failed")
            self._blame(work, error or Refusal())
        verdict = self._put_off(work, later.delay, error)
        if verdict is None:
            work.later = later
            return Wait(later.delay)
        self._abandon(work, later)
        self._clean(work)
        return verdict

    def ends_process(self, work: Work, error: BaseException) -> bool:
        """Whether *error*, raised while *work* ran, is to stop the consumer; it is told so.

        Signals reach the main thread, never a handler: this is the handler's own doing, and it
        would do so after each restart. So it counts as a crash, and enough of them are poison.
        """
        if isinstance(error, Exception | asyncio.CancelledError):
            return False
        log.critical("the handler of message %s raised %s: the consumer stops, nothing is "
                     "acknowledged", work.message.id, work.told(error))  # fmt: skip
        if self._books is not None:
            try:
                self._books.crashed(work)
            except DependencyDown as outage:
                log.error("that crash is not counted: %s", outage)  # noqa: TRY400
        self._clean(work)
        self._stop(error)
        return True

    def _failed(self, work: Work, error: BaseException) -> Verdict:
        if work.call is not None:
            work.attempt = work.call.attempt
        if self.ends_process(work, error):
            return Wait(math.inf)  # its key waits: the consumer stops
        remedy = classify(error)
        if remedy is Remedy.PAUSE:
            return self.down(work, error)
        if remedy is Remedy.RELEASE:
            return self.left(work, error)
        return self._again(work, error)

    def _again(self, work: Work, error: BaseException) -> Verdict:
        """Try again after a failure that no layer of the plan took care of."""
        log.log(
            logging.ERROR if classify(error) is Remedy.FIX else logging.WARNING,
            "the handler of message %s failed (attempt %d), it comes again: %s",
            work.message.id, work.attempt, work.told(error),
        )  # fmt: skip
        self._tally.add("failed")
        self._metrics.count(work.route.topic, "failed")
        work.attempt += 1
        self._blame(work, error)
        self._clean(work)
        delay = self._settings.backoff.delay(work.attempt - 1) or self._settings.backoff.ceiling
        return self._put_off(work, delay, error) or Wait(delay)

    def _blame(self, work: Work, error: BaseException) -> None:
        """Count a failed attempt, unless the message belongs to somebody else by now."""
        if self._books is not None and not work.dropped:
            self._books.failed(work, error)

    def down(self, work: Work, error: BaseException) -> Verdict:
        """Wait for what is down; no attempt is counted, also not those that led to this."""
        work.attempt = max(1, work.attempt - work.unproven)
        if work.attempt == 1:
            work.failing_since = None
        outages = work.outages + 1
        self._clean(work)
        work.outages = outages
        self._tally.add("released")
        self._metrics.count(work.route.topic, "released")
        delay = self._settings.backoff.delay(min(work.outages, 8)) or 1.0
        if isinstance(error, CircuitOpen) and work.route.is_gated:
            delay = 0.0  # the gate of its lane knows when to open
        work.waits_for = text = work.told(error)
        self._waits.begin(work, error, text)
        return Wait(min(delay, self._settings.patience))

    def left(self, work: Work, error: BaseException) -> Verdict:
        """Wait for whoever has *work* in hand; it keeps its turn, and nobody is blamed.

        A parked message that somebody else has handled is simply gone.
        """
        if isinstance(error, Withdrawn):
            return self.withdrawn(work)
        log.info("message %s is left to others: %s", work.message.id, work.told(error))
        outages = work.outages + 1
        self._clean(work)
        if work.dropped or isinstance(error, HandledElsewhere):
            return Released()
        work.outages = outages
        self._tally.add("released")
        self._metrics.count(work.route.topic, "released")
        asked = getattr(error, "retry_after", None)
        delay = self._settings.backoff.delay(min(outages, 8)) or 1.0 if asked is None else asked
        return Wait(min(delay, self._settings.patience))

    def broken(self, work: Work) -> Verdict:
        """Have *work* tried again after a failure of the consumer itself: its key waits."""
        outages = work.outages + 1
        self._clean(work)
        work.outages = outages
        delay = self._settings.backoff.delay(min(outages, 8)) or 1.0
        return Wait(min(delay, self._settings.patience))

    def _put_off(self, work: Work, delay: float, error: BaseException | None) -> Verdict | None:
        """Have so long a wait spent in the database or on the broker; None: in memory."""
        if not self._parks(work, delay):
            return None
        if self._books is None:
            verdict = self._delays.postpone(work, delay)
            if verdict is not None:
                self._tally.add("delayed")
            return verdict
        self._books.postpone(work, delay, error)
        self._tally.add("parked")
        return Settled(holds=True)

    def _parks(self, work: Work, delay: float) -> bool:
        """Whether a wait is too long for memory."""
        # A parked replay would queue behind newer messages of its key, and be overtaken by the
        # replays that follow it.
        if work.message.is_replay or work.dropped:
            return False
        return self._settings.parks and delay > self._settings.patience

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
        except Exception as error:  # noqa: BLE001 - told; the message waits in the database
            log.error("a layer failed while message %s was put off\n%s",  # noqa: TRY400
                      work.message.id, work.traced(error))  # fmt: skip

    @staticmethod
    def _clean(work: Work) -> None:
        work.call = work.later = work.context = work.task = None
        work.unproven = 0
        work.outages = 0


async def _in(context: contextvars.Context, coroutine: Any) -> Any:
    return await asyncio.get_running_loop().create_task(coroutine, context=context)
