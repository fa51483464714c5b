"""The workers: threads for `def` handlers, one event loop for `async def` handlers."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from holdfast.consumer.attempt.transaction import AsyncTransaction
from holdfast.consumer.scheduling.batches import BatchReady
from holdfast.consumer.scheduling.work import Disposition, Release, RunAlone, Work
from holdfast.dlq.capture.exceptions import traced

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine

    from holdfast.consumer.attempt.batch import BatchExecutor
    from holdfast.consumer.attempt.executor import AttemptExecutor
    from holdfast.consumer.attempt.settlement import Settlement
    from holdfast.consumer.handlers.route import Route
    from holdfast.consumer.scheduling.scheduler import KeyScheduler
    from holdfast.consumer.settings import ConsumerContext

log = logging.getLogger("holdfast.consumer")
_END = object()


class AsyncResult:
    """An `async def` handler has ended; a thread writes down what came of it."""

    __slots__ = ("error", "result", "work")

    def __init__(self, work: Work, result: Any, error: BaseException | None) -> None:
        self.work, self.result, self.error = work, result, error


class WorkerPool:
    """Takes works from the lanes, has them performed, and reports what becomes of them.

    The threads are daemons: a handler that hangs cannot keep the process from ending.
    """

    def __init__(
        self,
        context: ConsumerContext,
        lanes: KeyScheduler,
        executor: AttemptExecutor,
        settlement: Settlement,
        batch: BatchExecutor | None,
        routes: Collection[Route],
    ) -> None:
        settings = context.settings
        self._lanes = lanes
        self._executor = executor
        self._settlement = settlement
        self._batch = batch
        self._clock = context.clock
        self._routes = routes
        self._threads = [
            threading.Thread(target=self._work, name=f"holdfast-worker-{n}", daemon=True)
            for n in range(settings.workers)
        ]
        has_async = any(route.plan.is_async for route in routes)
        self._loop = asyncio.new_event_loop() if has_async else None
        self._most_tasks = settings.tasks
        self._room = asyncio.Semaphore(settings.tasks)
        if self._loop is not None:
            loop = threading.Thread(target=self._serve, name="holdfast-loop", daemon=True)
            self._threads.append(loop)
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Begin to work."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let idle threads go; those with a handler go when it returns."""
        for _ in self._threads:
            self._lanes.ready.put(_END)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end_loop)
        for thread in self._threads:
            thread.join(timeout=0.5 if self._lanes.running() else 5.0)

    def _work(self) -> None:
        while True:
            item = self._lanes.ready.get()
            if item is _END:
                return
            if isinstance(item, BatchReady):
                self._take_batch(item.route)
                continue
            try:
                self._take(item)
            except BaseException as error:  # noqa: BLE001 - told, and the lane goes on
                # Nothing is settled by this; a thread that died would stop its lanes for good.
                work = item.work if isinstance(item, AsyncResult) else item
                log.critical("the consumer failed in itself: please report this\n%s",
                             work.traced(error))  # fmt: skip
                self._end(work, self._settlement.broken(work))

    def _take(self, item: Work | AsyncResult) -> None:
        if isinstance(item, AsyncResult):
            self._ended(item.work, item.result, item.error)
            return
        work = item
        if not self._lanes.begin(work):
            self._end(work, Release())
            return
        work.run.started = work.run.reported = self._clock.monotonic()
        step = self._settlement.before(work)
        if step is not None:
            self._end(work, step)
            return
        self._settlement.prepare(work)
        if work.route.plan.is_async:
            self._submit(work)
        else:
            self._ended(work, *self._executor.run(work))

    def _take_batch(self, route: Route) -> None:
        works = self._lanes.begin_batch(route)
        if not works or self._batch is None:
            return
        # Each by its own plan: it keeps its turn, and shows whose fault it was.
        steps: list[tuple[Work, Disposition]] = [(work, RunAlone(failed=True)) for work in works]
        try:
            steps = self._batch.perform(route, works, self._wait_for)
        except BaseException as error:  # noqa: BLE001 - told, and each runs alone
            log.critical("the consumer failed in itself: please report this\n%s",
                         traced(error, lambda _: "(withheld)"))  # fmt: skip
        self._lanes.finish_batch(route, steps)  # the marks of what is done went with its commit

    def _wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return what *coroutine* returns on the loop; a thread waits for it."""
        assert self._loop is not None  # noqa: S101
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _ended(self, work: Work, result: Any, error: BaseException | None) -> None:
        seconds = self._clock.monotonic() - work.run.started
        self._end(work, self._settlement.after(work, result, error, seconds=seconds))

    def _end(self, work: Work, step: Disposition) -> None:
        self._settlement.unmark(work, step)
        self._lanes.finish(work, step)

    # -- the loop ----------------------------------------------------------------------

    def _submit(self, work: Work) -> None:
        loop = self._loop
        assert loop is not None  # noqa: S101

        def begin() -> None:
            task = loop.create_task(self._perform(work), context=work.run.context)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            work.run.cancel = lambda: _cancel(loop, task)

        loop.call_soon_threadsafe(begin)

    async def _perform(self, work: Work) -> None:
        try:
            async with self._room:
                work.run.started = work.run.reported = self._clock.monotonic()
                result, error = await self._executor.run_async(work)
        except BaseException as cancelled:  # noqa: BLE001 - it had not begun
            result, error = None, cancelled
        self._lanes.ready.put(AsyncResult(work, result, error))

    def _serve(self) -> None:
        assert self._loop is not None  # noqa: S101
        asyncio.set_event_loop(self._loop)
        # One for each task, or those that wait for a lock could keep its holder from going on.
        self._loop.set_default_executor(DaemonThreads(self._most_tasks, "holdfast-async"))
        self._loop.run_forever()
        for route in self._routes:
            for layer in route.plan.layers:
                if isinstance(layer, AsyncTransaction):
                    self._loop.run_until_complete(layer.dispose())
        if not self._tasks:  # else a thread may still report to it, and must not fail at that
            self._loop.close()

    def _end_loop(self) -> None:
        assert self._loop is not None  # noqa: S101
        for task in self._tasks:
            task.cancel()
        self._loop.call_later(0.2 if self._tasks else 0.0, self._loop.stop)


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    with suppress(RuntimeError):  # the loop has ended, and the task with it
        loop.call_soon_threadsafe(task.cancel)


_Job = tuple["Future[Any]", "Callable[..., Any]", "tuple[Any, ...]", "dict[str, Any]"]


class DaemonThreads(ThreadPoolExecutor):
    """A pool of daemons: the interpreter waits for the threads of an ordinary pool at its exit.

    An event loop takes nothing but a `ThreadPoolExecutor`; of that, only the name is used.
    """

    def __init__(self, most: int, name: str) -> None:
        super().__init__(max_workers=1)
        self._most, self._name = most, name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._guard = threading.Lock()
        self._started = self._busy = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have *fn* run in one of the threads."""
        future: Future[Any] = Future()
        with self._guard:
            self._busy += 1
            if self._busy > self._started and self._started < self._most:
                self._started += 1
                name = f"{self._name}-{self._started}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        self._jobs.put((future, fn, args, kwargs))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads go once they are idle; nobody waits for them."""
        for _ in range(self._started):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function, args, kwargs = job
            if future.set_running_or_notify_cancel():
                try:
                    result = function(*args, **kwargs)
                except BaseException as error:  # noqa: BLE001 - told to who waits
                    future.set_exception(error)
                else:
                    future.set_result(result)
            del job, future, function, args, kwargs
            with self._guard:
                self._busy -= 1
