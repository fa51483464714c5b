"""One batch: many messages in one transaction, and what becomes of each of them."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from typing import TYPE_CHECKING, Any

from holdfast.classification import classify
from holdfast.consumer.performer import enter_context
from holdfast.consumer.scopes import scope_of
from holdfast.consumer.transaction import outage_of
from holdfast.consumer.work import Apart, Verdict, Wait, Work
from holdfast.errors import DependencyDown, Remedy
from holdfast.idempotency import Batch, Outcome
from holdfast.idempotency.batch_work import LeftBehind
from holdfast.layer import Call
from holdfast.scrubbing import type_name

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from holdfast.clock import Clock
    from holdfast.consumer.batch_plan import BatchPlan
    from holdfast.consumer.books import Books
    from holdfast.consumer.judge import Judge
    from holdfast.consumer.metrics import ConsumerMetrics
    from holdfast.consumer.route import Route
    from holdfast.idempotency.claim import Wanted
    from holdfast.message import Message

    Await = Callable[[Coroutine[Any, Any, Any]], Any]

log = logging.getLogger("holdfast.consumer")


class BatchPerformer:
    """Runs batches in worker threads. Shared by all threads.

    A message that fails in a batch is left out of it and then runs by its own plan, which
    retries, dead-letters or waits as if there were no batches; only that run is counted.
    """

    def __init__(
        self, books: Books, judge: Judge, *, clock: Clock, metrics: ConsumerMetrics
    ) -> None:
        self._books = books
        self._judge = judge
        self._clock = clock
        self._metrics = metrics

    def perform(
        self, route: Route, works: list[Work], wait_for: Await
    ) -> list[tuple[Work, Verdict]]:
        """Run *works* in one transaction; return a verdict for each, in their order."""
        assert route.batch is not None  # noqa: S101 - asked by the lanes
        run = BatchRun(route, route.batch, self._books, self._clock, wait_for)
        ready = run.prepared(works)
        try:
            outcomes = run.outcomes(ready)
        except Exception as error:  # noqa: BLE001 - nothing was committed
            return self._forfeited(works, outage_of(error))
        except BaseException as error:  # noqa: BLE001
            if route.batch.batches.whole and len(works) > 1:
                # Whose fault it was shows when each runs by itself; nothing was committed.
                return [(work, Apart(single=True)) for work in works]
            ends = self._judge.ends_process(run.current or works[0], error)
            return [(work, Wait(math.inf) if ends else Apart(single=True)) for work in works]
        self._metrics.batch.labels(route.topic).observe(len(ready))
        return [
            (work, self._verdict(route.batch, work, outcomes[work]))
            if work in outcomes
            else (work, Apart(single=work in run.broken))
            for work in works
        ]

    def _verdict(self, plan: BatchPlan, work: Work, outcome: Outcome) -> Verdict:
        if outcome.is_done:
            for budget in plan.budgets:
                budget.deposit()
            if not outcome.is_duplicate:
                work.route.outage.passed(*work.identity)
            return self._judge.done(work, duplicate=outcome.is_duplicate)
        if isinstance(outcome.error, LeftBehind):
            return Apart(single=False)
        why = "" if outcome.error is None else work.told(outcome.error)
        log.info("message %s failed in a batch and runs alone: %s", work.message.id, why)
        return Apart(single=True)

    def _forfeited(self, works: list[Work], error: BaseException) -> list[tuple[Work, Verdict]]:
        """Give up the whole batch: wait for what is down, else find out one by one."""
        if classify(error) is not Remedy.PAUSE:
            # What it quotes may be of any of them: its own run tells why.
            log.warning("a batch of %d was rolled back, its messages run alone: %s",
                        len(works), type_name(error))  # fmt: skip
            return [(work, Apart(single=True)) for work in works]
        verdicts = [(work, self._judge.down(work, error)) for work in works]
        longest = max(verdict.delay for _, verdict in verdicts if isinstance(verdict, Wait))
        return [(work, Wait(longest)) for work in works]


class BatchRun:
    """The run of one batch, however often its transaction is begun."""

    def __init__(
        self, route: Route, plan: BatchPlan, books: Books, clock: Clock, wait_for: Await
    ) -> None:
        self._route = route
        self._plan = plan
        self._books = books
        self._clock = clock
        self._wait_for = wait_for
        self._works: dict[int, Work] = {}
        self._calls: dict[Work, Call] = {}
        self._wanted: dict[Work, Wanted] = {}
        self._outage: DependencyDown | None = None
        self.broken: set[Work] = set()
        """Those that cannot even be decoded."""
        self.current: Work | None = None
        """The message whose handler runs, or ran last."""

    def prepared(self, works: list[Work]) -> list[Work]:
        """Decode; return what may run, without those that fail at that and what is behind them."""
        ready: list[Work] = []
        stuck = set()
        for work in works:
            work.started = work.reported = math.inf  # no handler of its own runs yet
            call = Call(
                (), {}, message=work.message, consumer=self._route.consumer,
                visible=self._route.letters.visible,
            )  # fmt: skip
            subject = self._plan.dedup.subject
            assert subject is not None  # noqa: S101 - it was decorated
            try:
                if work.lane_key in stuck:
                    continue
                self._plan.payload.enter(call)
                self._wanted[work] = subject.wanted(call)
            except Exception:  # noqa: BLE001 - its own run tells why
                stuck.add(work.lane_key)
                self.broken.add(work)
            else:
                self._works[id(work.message)] = work
                self._calls[work] = call
                ready.append(work)
        return ready

    def outcomes(self, works: list[Work]) -> dict[Work, Outcome]:
        """Run *works* and commit; return what became of each."""
        if not works:
            return {}
        batch = Batch(
            consumer=scope_of(self._plan.dedup, self._route.consumer),
            messages=[work.message for work in works],
            wanted=[self._wanted[work] for work in works],
            lanes=[work.lane_key for work in works],
            committing=self._committing,
        )
        runner = self._plan.runner
        found = (
            runner.run_whole(batch, self._handle_all)
            if self._plan.batches.whole
            else runner.run(batch, self._handle)
        )
        return dict(zip(works, found, strict=True))

    def _handle(self, session: Any, message: Message) -> None:
        work = self._works[id(message)]
        context = contextvars.copy_context()
        context.run(enter_context, work)
        call = Call(
            self._calls[work].args, {}, message=message, attempt=work.attempt,
            identity=self._wanted[work].id,
        )  # fmt: skip
        self._call([work], context, call, session)

    def _handle_all(self, session: Any, messages: list[Message]) -> None:
        works = [self._works[id(message)] for message in messages]
        payloads = [self._calls[work].args[0] for work in works]
        self._call(works, contextvars.copy_context(), Call((payloads,), {}), session)

    def _call(
        self, works: list[Work], context: contextvars.Context, call: Call, session: Any
    ) -> None:
        if self._outage is not None:
            raise self._outage  # a dependency is down: it is not asked for each message again
        call.consumer, call.session = self._route.consumer, session
        self.current = works[0]
        works[0].started = works[0].reported = self._clock.monotonic()
        try:
            self._run(context, call)
        except DependencyDown as error:
            self._outage = error
            raise
        finally:
            works[0].started = works[0].reported = math.inf

    def _run(self, context: contextvars.Context, call: Call) -> None:
        inner = self._plan.inner
        if not inner.is_async:
            context.run(inner.run, call)
            return
        error = self._wait_for(_caught(context, inner.run_async, call))
        if error is not None:
            raise error

    def _committing(self, session: Any, batch: Batch, outcomes: list[Outcome]) -> None:
        connection = session.connection()
        for message, outcome in zip(batch.messages, outcomes, strict=True):
            if outcome.is_done:
                work = self._works[id(message)]
                self._books.confirm(connection, work, duplicate=outcome.is_duplicate)


async def _caught(
    context: contextvars.Context, run: Callable[[Call], Any], call: Call
) -> BaseException | None:
    """Return what *run* raises: an exit raised in a task would end the loop of all handlers."""

    async def caught() -> BaseException | None:
        try:
            await run(call)
        except BaseException as error:  # noqa: BLE001 - told to the thread that waits
            return error
        return None

    return await asyncio.get_running_loop().create_task(caught(), context=context)
