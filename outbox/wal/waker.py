"""A wait that other threads can end."""

from __future__ import annotations

import os
import select
from contextlib import suppress


class Waker:
    """Wakes the one thread that waits; a wake before the wait counts, too."""

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._write, False)
        self._closed = False
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)

    def wake(self) -> None:
        """End the wait. Any thread may call this."""
        if not self._closed:
            with suppress(BlockingIOError):  # full: it wakes anyway
                os.write(self._write, b"!")

    def wait(self, seconds: float) -> None:
        """Return when woken, at the latest after *seconds*."""
        self._poll.poll(seconds * 1000)
        self.clear()

    def clear(self) -> None:
        """Forget the wakes so far."""
        with suppress(BlockingIOError):
            os.read(self.descriptor, 4096)

    def close(self) -> None:
        """Release the pipe; the threads that wake have ended."""
        self._closed = True
        os.close(self._write)
        os.close(self.descriptor)
