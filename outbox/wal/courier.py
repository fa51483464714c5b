"""Publishing one batch at a time in a thread, while the stream is kept alive."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from holdfast.errors import PoisonMessage
from holdfast.outbox.rows import Row, staged
from holdfast.ports import Published

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.ports import Sink

T = TypeVar("T")
_UNREADABLE = (msgspec.MsgspecError, TypeError, ValueError, KeyError)


class Courier(Generic[T]):
    """The one thread that publishes; *arrived* is called there when a batch is back."""

    def __init__(
        self, publish: Callable[[Sequence[T]], list[Published]], arrived: Callable[[], None]
    ) -> None:
        self._publish = publish
        self._arrived = arrived
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-relay")
        self._flight: Future[list[Published]] | None = None
        self._sent: list[T] = []

    @property
    def busy(self) -> bool:
        """Whether a batch is on its way or back and not yet collected."""
        return self._flight is not None

    @property
    def back(self) -> bool:
        """Whether a batch can be collected without waiting."""
        return self._flight is not None and self._flight.done()

    def send(self, batch: list[T]) -> None:
        """Start to publish *batch*."""
        self._sent = batch
        self._flight = self._thread.submit(self._publish, batch)
        self._flight.add_done_callback(lambda _: self._arrived())

    def collect(self) -> tuple[list[T], list[Published]]:
        """Return what was sent and what became of each; waits for them."""
        flight, self._flight = self._flight, None
        if flight is None:
            return [], []
        return self._sent, flight.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


class RowSink:
    """Publishes outbox rows; one that cannot be read is refused and stops nobody."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def __call__(self, rows: Sequence[Row]) -> list[Published]:
        """Return what became of each of *rows*."""
        try:
            messages = [staged(row) for row in rows]
        except _UNREADABLE:
            return self._publish_sound(rows)
        return self._sink.publish(messages)

    def _publish_sound(self, rows: Sequence[Row]) -> list[Published]:
        results = []
        for row in rows:
            try:
                message = staged(row)
            except _UNREADABLE as error:
                poison = PoisonMessage(f"the row's headers cannot be read: {error}")
                results.append(Published(error=poison))
            else:
                results += self._sink.publish([message])
        return results
