"""One batch: many messages in one transaction, and what becomes of each of them."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.call import Call
from holdfast.classification import classify
from holdfast.consumer.attempt.executor import entered
from holdfast.consumer.attempt.outcome import ends_process
from holdfast.consumer.attempt.transaction import outage_of
from holdfast.consumer.scheduling.work import Disposition, RetryIn, RunAlone, Work
from holdfast.consumer.store import scope_of
from holdfast.errors import DependencyDown, Remedy
from holdfast.idempotency import BatchOutcome, InboxBatch
from holdfast.idempotency.batch import BatchLeftOpen
from holdfast.message import begin_list
from holdfast.scrubbing import type_name
from holdfast.tracing import switch
from holdfast.tracing.messaging import MESSAGING

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from holdfast.consumer.attempt.settlement import Settlement
    from holdfast.consumer.handlers.route import BatchPlan, Route
    from holdfast.consumer.settings import ConsumerContext
    from holdfast.consumer.store import ConsumerStore
    from holdfast.idempotency.claim import ClaimRequest
    from holdfast.message import Message
    from holdfast.tracing.spans import ProcessSpan

    Await = Callable[[Coroutine[Any, Any, Any]], Any]

log = logging.getLogger("holdfast.consumer")


class BatchExecutor:
    """Runs batches in worker threads. Shared by all threads.

    A message that fails in a batch is left out of it and then runs by its own plan, which
    retries, dead-letters or waits as if there were no batches; only that run is counted.
    """

    def __init__(
        self, context: ConsumerContext, store: ConsumerStore, settlement: Settlement
    ) -> None:
        self._store = store
        self._settlement = settlement
        self._context = context
        self._metrics = context.metrics

    def perform(
        self, route: Route, works: list[Work], wait_for: Await
    ) -> list[tuple[Work, Disposition]]:
        """Run *works* in one transaction; return a step for each, in their order."""
        assert route.batch is not None  # noqa: S101 - asked by the lanes
        run = BatchAttempt(route, route.batch, self._context, wait_for)
        ready = run.prepared(works)
        try:
            outcomes = run.outcomes(ready)
        except Exception as error:  # noqa: BLE001 - nothing was committed
            return self._forfeited(works, outage_of(error))
        except BaseException as error:  # noqa: BLE001
            if route.batch.batches.whole and len(works) > 1:
                # Whose fault it was shows when each runs by itself; nothing was committed.
                return [(work, RunAlone(failed=True)) for work in works]
            if not ends_process(error):
                return [(work, RunAlone(failed=True)) for work in works]
            self._settlement.exited(run.current or works[0], error)
            return [(work, RetryIn(math.inf)) for work in works]
        self._metrics.batch.labels(route.topic).observe(len(ready))
        done = [work for work, outcome in outcomes.items() if outcome.is_done]
        duplicates = {work for work in done if outcomes[work].is_duplicate}
        for budget in route.batch.budgets:
            for _ in done:
                budget.deposit()
        route.outage.passed_all(work.identity for work in done if work not in duplicates)
        steps = dict(zip(done, self._settlement.done_together(done, duplicates), strict=True))
        return [(work, steps.get(work) or self._step(run, work, outcomes)) for work in works]

    def _step(
        self, run: BatchAttempt, work: Work, outcomes: dict[Work, BatchOutcome]
    ) -> Disposition:
        """Return what becomes of *work*, which was not done."""
        outcome = outcomes.get(work)
        if outcome is None:
            return RunAlone(failed=work in run.broken)
        if isinstance(outcome.error, BatchLeftOpen):
            return RunAlone(failed=False)
        why = "" if outcome.error is None else work.told(outcome.error)
        log.info("message %s failed in a batch and runs alone: %s", work.message.id, why)
        return RunAlone(failed=True)

    def _forfeited(self, works: list[Work], error: BaseException) -> list[tuple[Work, Disposition]]:
        """Give up the whole batch: wait for what is down, else find out one by one."""
        if classify(error) is not Remedy.PAUSE:
            # What it quotes may be of any of them: its own run tells why.
            log.warning("a batch of %d was rolled back, its messages run alone: %s",
                        len(works), type_name(error))  # fmt: skip
            return [(work, RunAlone(failed=True)) for work in works]
        steps = [(work, self._settlement.released(work, error)) for work in works]
        longest = max(step.delay for _, step in steps if isinstance(step, RetryIn))
        return [(work, RetryIn(longest)) for work in works]


class BatchAttempt:
    """The run of one batch, however often its transaction is begun."""

    def __init__(
        self, route: Route, plan: BatchPlan, context: ConsumerContext, wait_for: Await
    ) -> None:
        assert context.store is not None  # noqa: S101 - batches have a database
        self._route = route
        self._plan = plan
        self._store = context.store
        self._clock = context.clock
        self._context = context
        self._wait_for = wait_for
        self._works: dict[int, Work] = {}
        self._args: dict[Work, tuple[Any, ...]] = {}
        self._wanted: dict[Work, ClaimRequest] = {}
        self._outage: DependencyDown | None = None
        self.broken: set[Work] = set()
        """Those that cannot even be decoded."""
        self.current: Work | None = None
        """The message whose handler runs, or ran last."""

    def prepared(self, works: list[Work]) -> list[Work]:
        """Decode; return what may run, without those that fail at that and what is behind them."""
        ready: list[Work] = []
        stuck = set()
        subject, decode = self._plan.dedup.subject, self._plan.payload.enter
        assert subject is not None  # noqa: S101 - it was decorated
        call = Call((), {}, consumer=self._route.consumer, visible=self._route.letters.visible)
        for work in works:
            work.run.started = work.run.reported = math.inf  # no handler of its own runs yet
            call.message = work.message  # nobody keeps the call: one does for all
            try:
                if work.lane_key in stuck:
                    continue
                decode(call)
                self._wanted[work] = subject.wanted(call)
            except Exception:  # noqa: BLE001 - its own run tells why
                stuck.add(work.lane_key)
                self.broken.add(work)
            else:
                self._works[id(work.message)] = work
                self._args[work] = call.args
                ready.append(work)
        return ready

    def outcomes(self, works: list[Work]) -> dict[Work, BatchOutcome]:
        """Run *works* and commit; return what became of each."""
        if not works:
            return {}
        batch = InboxBatch(
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
        context = entered(work)
        call = Call(
            self._args[work], {}, message=message, attempt=work.history.attempt,
            identity=self._wanted[work].id,
        )  # fmt: skip
        self._call([work], context, call, session)

    def _handle_all(self, session: Any, messages: list[Message]) -> None:
        works = [self._works[id(message)] for message in messages]
        payloads = [self._args[work][0] for work in works]
        context = contextvars.copy_context()
        context.run(begin_list, messages)
        self._call(works, context, Call((payloads,), {}), session)

    def _call(
        self, works: list[Work], context: contextvars.Context, call: Call, session: Any
    ) -> None:
        if self._outage is not None:
            raise self._outage  # a dependency is down: it is not asked for each message again
        call.consumer, call.session = self._route.consumer, session
        self.current = works[0]
        run = works[0].run
        run.started = run.reported = began = self._clock.monotonic()
        span, failure = self._span(works, call), None
        try:
            self._run(context, call, span)
        except BaseException as error:
            failure = error
            if isinstance(error, DependencyDown):
                self._outage = error
            raise
        finally:
            run.started = run.reported = math.inf
            shared, link = self._context, None if span is None else span.link
            MESSAGING.processed(shared.system, shared.group, self._route.topic, _event(works),
                                self._clock.monotonic() - began, failure, link)  # fmt: skip
            if span is not None:
                span.end("handled" if failure is None else "failed", failure, call)

    def _span(self, works: list[Work], call: Call) -> ProcessSpan | None:
        if switch.spans is None:
            return None
        return switch.spans.process(
            self._route.topic, [work.message for work in works], group=self._context.group,
            system=self._context.system, attempt=call.attempt,
        )  # fmt: skip

    def _run(self, context: contextvars.Context, call: Call, span: ProcessSpan | None) -> None:
        inner = self._plan.inner
        if not inner.is_async:
            context.run(*(inner.run, call) if span is None else (span.run, inner.run, call))
            return
        begin = inner.run_async if span is None else partial(span.run_async, inner.run_async)
        error = self._wait_for(_caught(context, begin, call))
        if error is not None:
            raise error

    def _committing(self, session: Any, batch: InboxBatch, outcomes: list[BatchOutcome]) -> None:
        ended = [
            (self._works[id(message)], outcome.is_duplicate)
            for message, outcome in zip(batch.messages, outcomes, strict=True)
            if outcome.is_done
        ]
        db = session.connection()
        self._store.confirm_all(db, ended)
        # Here, so that no transaction of its own is needed: once this commits they are handled.
        ids = [work.message.identity for work, _ in ended]
        self._store.ledger.finished(self._route.consumer, ids, self._context.owner, connection=db)


def _event(works: list[Work]) -> str:
    """Return the type of the events of *works*, nothing if they are of several."""
    if len(works) == 1:
        return works[0].message.type
    (first, *others) = {work.message.type for work in works}
    return "" if others else first


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
