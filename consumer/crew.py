"""The crew: threads for `def` handlers, one event loop for `async def` handlers."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from holdfast.consumer.daemons import DaemonThreads
from holdfast.consumer.pools import Turn
from holdfast.consumer.work import Apart, Released, Verdict, Work
from holdfast.dlq.raised import traced

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from holdfast.clock import Clock
    from holdfast.consumer.batch_performer import BatchPerformer
    from holdfast.consumer.judge import Judge
    from holdfast.consumer.lanes import Lanes
    from holdfast.consumer.performer import Performer
    from holdfast.consumer.route import Route

log = logging.getLogger("holdfast.consumer")
_END = object()


class Judgement:
    """An `async def` handler has ended; a thread judges it, since that may write."""

    __slots__ = ("error", "result", "work")

    def __init__(self, work: Work, result: Any, error: BaseException | None) -> None:
        self.work, self.result, self.error = work, result, error


class Crew:
    """Takes works from the lanes, has them performed, and reports the verdicts.

    The threads are daemons: a handler that hangs cannot keep the process from ending.
    """

    def __init__(
        self,
        lanes: Lanes,
        performer: Performer,
        judge: Judge,
        batch: BatchPerformer | None,
        *,
        workers: int,
        tasks: int,
        has_async: bool,
        clock: Clock,
        finished: Callable[[Work], None],
        farewells: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        self._lanes = lanes
        self._performer = performer
        self._judge = judge
        self._batch = batch
        self._clock = clock
        self._finished = finished
        self._farewells = farewells
        self._threads = [
            threading.Thread(target=self._work, name=f"holdfast-worker-{n}", daemon=True)
            for n in range(workers)
        ]
        self._loop = asyncio.new_event_loop() if has_async else None
        self._most_tasks = tasks
        self._room = asyncio.Semaphore(tasks)
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
            if isinstance(item, Turn):
                self._take_batch(item.route)
                continue
            try:
                self._take(item)
            except BaseException as error:  # noqa: BLE001 - told, and the lane goes on
                # Nothing is settled by this; a thread that died would stop its lanes for good.
                work = item.work if isinstance(item, Judgement) else item
                log.critical("the consumer failed in itself: please report this\n%s",
                             work.traced(error))  # fmt: skip
                self._end(work, self._judge.broken(work))

    def _take(self, item: Work | Judgement) -> None:
        if isinstance(item, Judgement):
            self._judged(item.work, item.result, item.error)
            return
        work = item
        if not self._lanes.begin(work):
            self._end(work, Released())
            return
        work.started = work.reported = self._clock.monotonic()
        verdict = self._performer.before(work)
        if verdict is not None:
            self._end(work, verdict)
            return
        self._performer.prepare(work)
        if work.route.plan.is_async:
            self._submit(work)
        else:
            self._judged(work, *self._performer.run(work))

    def _take_batch(self, route: Route) -> None:
        works = self._lanes.begin_batch(route)
        if not works or self._batch is None:
            return
        # Each by its own plan: it keeps its turn, and shows whose fault it was.
        verdicts: list[tuple[Work, Verdict]] = [(work, Apart(single=True)) for work in works]
        try:
            verdicts = self._batch.perform(route, works, self._wait_for)
        except BaseException as error:  # noqa: BLE001 - told, and each runs alone
            log.critical("the consumer failed in itself: please report this\n%s",
                         traced(error, lambda _: "(withheld)"))  # fmt: skip
        for work, verdict in verdicts:
            if self._performer.after(work, verdict):
                self._finished(work)
        self._lanes.finish_batch(route, verdicts)

    def _wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return what *coroutine* returns on the loop; a thread waits for it."""
        assert self._loop is not None  # noqa: S101
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _judged(self, work: Work, result: Any, error: BaseException | None) -> None:
        self._judge.ran(work, self._clock.monotonic() - work.started)
        self._end(work, self._judge.judge(work, result, error))

    def _end(self, work: Work, verdict: Verdict) -> None:
        if self._performer.after(work, verdict):
            self._finished(work)
        self._lanes.finish(work, verdict)

    # -- the loop ----------------------------------------------------------------------

    def _submit(self, work: Work) -> None:
        loop = self._loop
        assert loop is not None  # noqa: S101

        def begin() -> None:
            task = loop.create_task(self._perform(work), context=work.context)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            work.task = lambda: _cancel(loop, task)

        loop.call_soon_threadsafe(begin)

    async def _perform(self, work: Work) -> None:
        try:
            async with self._room:
                work.started = work.reported = self._clock.monotonic()
                result, error = await self._performer.run_async(work)
        except BaseException as cancelled:  # noqa: BLE001 - it had not begun
            result, error = None, cancelled
        self._lanes.ready.put(Judgement(work, result, error))

    def _serve(self) -> None:
        assert self._loop is not None  # noqa: S101
        asyncio.set_event_loop(self._loop)
        # One for each task, or those that wait for a lock could keep its holder from going on.
        self._loop.set_default_executor(DaemonThreads(self._most_tasks, "holdfast-async"))
        self._loop.run_forever()
        for farewell in self._farewells:
            self._loop.run_until_complete(farewell())
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
