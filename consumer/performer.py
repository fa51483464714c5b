"""One attempt: what is done before it, how it runs, and that its mark goes after it."""

from __future__ import annotations

import contextvars
import logging
from typing import TYPE_CHECKING, Any

from holdfast.consumer.transaction import before_commit
from holdfast.consumer.work import Apart, Settled, Verdict, Wait, Work, current_work
from holdfast.dlq.replay.admission import Standing
from holdfast.errors import DependencyDown, Remedy, StaleDelivery
from holdfast.layer import Call
from holdfast.message import begin_handling

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection

    from holdfast.consumer.books import Books
    from holdfast.consumer.judge import Judge
    from holdfast.consumer.lanes import Lanes
    from holdfast.consumer.metrics import ConsumerMetrics
    from holdfast.consumer.settings import Settings
    from holdfast.consumer.tally import Tally

log = logging.getLogger("holdfast.consumer")


class ProcessKilled(Exception):
    """A message was alone in hand each time that its process died, or its handler ended it."""

    __holdfast_remedy__ = Remedy.DEAD_LETTER

    def __init__(self, crashes: int) -> None:
        super().__init__(
            f"the process died {crashes} times while it handled this message and nothing else: "
            "out of memory, a crash in native code, a kill, or a handler that raises SystemExit"
        )


class Performer:
    """Runs works in worker threads. Shared by all threads."""

    def __init__(
        self,
        lanes: Lanes,
        books: Books | None,
        judge: Judge,
        *,
        owner: str,
        settings: Settings,
        tally: Tally,
        metrics: ConsumerMetrics,
        bury: Callable[[Work, BaseException], None],
    ) -> None:
        self._lanes = lanes
        self._books = books
        self._judge = judge
        self._owner = owner
        self._settings = settings
        self._tally = tally
        self._metrics = metrics
        self._bury = bury

    def before(self, work: Work) -> Verdict | None:
        """Do what comes before an attempt; a verdict means that there is none."""
        try:
            return self._before(work)
        except DependencyDown as error:
            return self._judge.down(work, error)
        except StaleDelivery as error:
            return self._judge.left(work, error)

    def _before(self, work: Work) -> Verdict | None:
        if work.unsaid:
            return self._judge.report(work)
        if work.later is None and work.message.is_replay and self._stays(work):
            return Settled()
        books = self._books
        if books is None:
            return None if work.refused is None else self._refuse(work, work.refused)
        if work.later is not None:
            if work.suspect:  # its mark went when it began to wait
                books.alone(work, self._owner)
            return None
        passes = work.standing is Standing.LIVE  # the quarantine of its key
        if work.row is None and not passes and self._lanes.is_held(work):
            if books.park_behind(work):
                self._tally.add("parked")
                return Settled()
            self._lanes.unhold(work)
        if work.crashes >= self._settings.crash_limit:
            self._bury(work, ProcessKilled(work.crashes))
            self._tally.add("crashed")
            self._metrics.count(work.route.topic, "crashed")
            return Settled(holds=work.key is not None and self._settings.parks)
        if work.refused is not None:
            return self._refuse(work, work.refused)
        if work.suspect:
            books.alone(work, self._owner)
        return None

    def _stays(self, work: Work) -> bool:
        """Whether a replayed message is not to be handled here; it is counted and told."""
        if work.meant_for is not None:
            self._judge.skipped(work)
            return True
        standing = Standing.HELD if self._judge.replays.holds(work) else None
        if standing is None and self._books is not None:
            standing = self._books.standing(work)
        match standing:
            case Standing.HELD:
                log.warning("replayed message %s stays a dead letter: an earlier one of its key "
                            "failed again", work.message.id)  # fmt: skip
                self._judge.count(work, "held_back")
            case Standing.DONE:
                log.info("replayed message %s was handled before", work.message.id)
                self._judge.count(work, "duplicates")
            case Standing.OVER:
                self._judge.withdrawn(work)
            case _:
                return False
        return True

    def _refuse(self, work: Work, error: Exception) -> Verdict:
        """Dead-letter what cannot be read."""
        self._bury(work, error)
        return self._judge.done(work, duplicate=False)

    def after(self, work: Work, verdict: Verdict) -> bool:
        """Whether the start mark of *work* may go soon; a lone mark goes at once."""
        if work.suspect and self._books is not None:
            try:
                self._books.finished(work, self._owner)
            except DependencyDown as error:
                log.warning("the mark of message %s stays for now: %s", work.message.id, error)
            return False
        return not isinstance(verdict, Wait | Apart)

    def prepare(self, work: Work) -> None:
        """Make the call of a fresh run, in a context of its own."""
        if work.later is not None:
            return
        work.letter = None
        work.context = contextvars.copy_context()
        work.context.run(enter_context, work)
        work.call = call = Call(
            (), {}, message=work.message, consumer=work.route.consumer, attempt=work.attempt,
            suspends=True, failing_since=work.failing_since, scrub=work.route.letters.scrub,
            visible=work.route.letters.visible,
        )  # fmt: skip
        call.notes["delivery"] = work.delivery if work.row is None else work.row.origin
        if self._books is not None:
            before_commit(call, lambda db: self._settle(db, work, call))

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

    def _settle(self, db: Connection, work: Work, call: Call) -> None:
        if self._books is not None:
            self._books.confirm(db, work, duplicate=call.duplicate)


def enter_context(work: Work) -> None:
    """Make *work* the one that is handled in this context."""
    begin_handling(work.message)
    current_work.set(work)
