"""Publishing in batches: one at a time in a thread, of a size that memory can take."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from holdfast.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from holdfast.message import Message
    from holdfast.ports import Published

MOST_BYTES = 16 << 20
"""Of payloads in a batch, as far as they are known beforehand."""
_FEW, _QUICK_SECONDS = 16, 0.05


class BatchPublisher:
    """Has one batch in flight at a time, in a thread of its own; *landed* is called there.

    Meanwhile its owner reads the next batch, or deletes the one before. Nothing is sent
    before the batch in flight is collected, so nothing of a key is on its way behind a
    message that may yet be refused.
    """

    def __init__(
        self,
        publish: Callable[[Sequence[Message]], list[Published]],
        *,
        landed: Callable[[], None] | None = None,
        name: str = "holdfast-relay",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.was_quick = False
        """Whether the last batch was published within 50 ms."""
        self._publish = publish
        self._landed = landed
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._flight: Future[list[Published]] | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a batch is on its way, or has landed and is not yet collected."""
        return self._flight is not None

    @property
    def has_landed(self) -> bool:
        """Whether a batch can be collected without waiting."""
        return self._flight is not None and self._flight.done()

    def send(self, messages: Sequence[Message], *, here: bool = False) -> None:
        """Begin to publish *messages*; with *here*, a few of them in the calling thread.

        That is for a caller with nothing to do meanwhile: to wake the thread would double
        the delay.
        """
        if not here or len(messages) > _FEW:
            self._flight = self._thread.submit(self._timed, messages)
            if self._landed is not None:
                self._flight.add_done_callback(self._tell)
            return
        self._flight = Future()
        try:
            self._flight.set_result(self._timed(messages))
        except Exception as error:  # noqa: BLE001 - raised by `collect`, as from the thread
            self._flight.set_exception(error)

    def _timed(self, messages: Sequence[Message]) -> list[Published]:
        self.was_quick, began = False, self._clock.monotonic()
        results = self._publish(messages)
        self.was_quick = self._clock.monotonic() - began < _QUICK_SECONDS
        return results

    def _tell(self, _flight: Future[list[Published]]) -> None:
        if self._landed is not None:
            self._landed()

    def wait(self, seconds: float) -> bool:
        """Return whether the batch lands within *seconds*; True if none is in flight."""
        return self._flight is None or bool(wait([self._flight], seconds).done)

    def collect(self) -> list[Published]:
        """Return what became of each message that was sent; waits for them."""
        flight, self._flight = self._flight, None
        return [] if flight is None else flight.result()

    def drop(self) -> None:
        """Forget the batch; return once nothing of it is on its way."""
        flight, self._flight = self._flight, None
        if flight is not None and not flight.cancel():
            flight.exception()

    def close(self) -> None:
        """End the thread, after the batch in flight."""
        self._thread.shutdown()


class BatchSizer:
    """Says how many rows to ask for, at most *most*, so that some *most_bytes* come.

    It begins with few and asks for more as it learns their size: a process that was killed
    for its memory would otherwise read the same rows at once after every restart.
    """

    def __init__(
        self, most: int, *, first: int = 16, growth: int = 4, most_bytes: int = MOST_BYTES
    ) -> None:
        self.rows = min(most, first)
        """How many to ask for now."""
        self._most = most
        self._growth = growth
        self._most_bytes = most_bytes

    def came(self, rows: int, size: int) -> None:
        """Note that *rows* came, of *size* bytes together."""
        if rows:
            fitting = rows * self._most_bytes // max(size, 1)
            self.rows = max(1, min(self._most, fitting, self.rows * self._growth))


def fitting(sizes: Iterable[tuple[int, int | None]]) -> list[int]:
    """Return the first of the numbered *sizes* that make 16 MB together; always one."""
    chosen: list[int] = []
    total = 0
    for number, size in sizes:
        total += size or 0
        if chosen and total > MOST_BYTES:
            break
        chosen.append(number)
    return chosen
