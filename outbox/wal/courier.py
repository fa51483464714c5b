"""Publishing one batch at a time in a thread, while the stream is kept alive."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import PoisonMessage
from holdfast.outbox.rows import Row, staged
from holdfast.ports import Published

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.ports import Sink


class Courier:
    """The one thread that uses the sink; *arrived* is called there when a batch is back."""

    def __init__(self, sink: Sink, arrived: Callable[[], None]) -> None:
        self._sink = sink
        self._arrived = arrived
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-relay")
        self._flight: Future[list[Published]] | None = None
        self._rows: list[Row] = []

    @property
    def busy(self) -> bool:
        """Whether a batch is on its way or back and not yet collected."""
        return self._flight is not None

    @property
    def back(self) -> bool:
        """Whether a batch can be collected without waiting."""
        return self._flight is not None and self._flight.done()

    def send(self, rows: list[Row]) -> None:
        """Start to publish *rows*."""
        self._rows = rows
        self._flight = self._thread.submit(self._publish, rows)
        self._flight.add_done_callback(lambda _: self._arrived())

    def _publish(self, rows: Sequence[Row]) -> list[Published]:
        try:
            messages = [staged(row) for row in rows]
        except (msgspec.MsgspecError, TypeError, ValueError, KeyError):
            return self._publish_sound(rows)
        return self._sink.publish(messages)

    def _publish_sound(self, rows: Sequence[Row]) -> list[Published]:
        """Publish one by one: a row with broken headers must not stop the others."""
        results = []
        for row in rows:
            try:
                message = staged(row)
            except (msgspec.MsgspecError, TypeError, ValueError, KeyError) as error:
                poison = PoisonMessage(f"the row's headers cannot be read: {error}")
                results.append(Published(error=poison))
            else:
                results += self._sink.publish([message])
        return results

    def collect(self) -> tuple[list[Row], list[Published]]:
        """Return the rows sent and what became of each; waits for them."""
        flight, self._flight = self._flight, None
        if flight is None:
            return [], []
        return self._rows, flight.result()

    @property
    def sent(self) -> list[Row]:
        """The rows sent last."""
        return self._rows

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
