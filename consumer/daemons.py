"""Threads for the blocking parts of `async def` handlers that cannot keep the process alive."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

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
