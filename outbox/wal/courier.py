"""Publishing one batch at a time in a thread, while the stream is kept alive."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.message import Message
    from holdfast.ports import Published, Sink


class Courier:
    """The one thread that publishes; *arrived* is called there when a batch is back."""

    def __init__(self, sink: Sink, arrived: Callable[[], None]) -> None:
        self._sink = sink
        self._arrived = arrived
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-relay")
        self._flight: Future[list[Published]] | None = None

    @property
    def busy(self) -> bool:
        """Whether a batch is on its way or back and not yet collected."""
        return self._flight is not None

    @property
    def back(self) -> bool:
        """Whether a batch can be collected without waiting."""
        return self._flight is not None and self._flight.done()

    def send(self, messages: Sequence[Message]) -> None:
        """Start to publish *messages*."""
        self._flight = self._thread.submit(self._sink.publish, messages)
        self._flight.add_done_callback(lambda _: self._arrived())

    def collect(self) -> list[Published]:
        """Return what became of each message that was sent; waits for them."""
        flight, self._flight = self._flight, None
        return [] if flight is None else flight.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
