"""Publishing one batch at a time, in a thread where it may take long."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from holdfast.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.message import Message
    from holdfast.ports import Published, Sink

_FEW, _QUICK_SECONDS = 16, 0.05


class Courier:
    """Publishes in a thread, so that the stream is kept alive; *arrived* is called there.

    With *at_once*, a few messages to a broker that answered quickly the last time are
    published without the thread: waking it would double the delay. That is for sinks whose
    publish never takes longer than the stream can wait.
    """

    def __init__(
        self,
        sink: Sink,
        arrived: Callable[[], None],
        *,
        at_once: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._sink = sink
        self._arrived = arrived
        self._at_once = at_once
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-relay")
        self._flight: Future[list[Published]] | None = None
        self._is_quick = False

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
        if self._is_quick and len(messages) <= _FEW:
            self._flight = Future()
            try:
                self._flight.set_result(self._publish(messages))
            except Exception as error:  # noqa: BLE001 - raised by `collect`, as from the thread
                self._flight.set_exception(error)
            return
        self._flight = self._thread.submit(self._publish, messages)
        self._flight.add_done_callback(lambda _: self._arrived())

    def _publish(self, messages: Sequence[Message]) -> list[Published]:
        self._is_quick, began = False, self._clock.monotonic()
        results = self._sink.publish(messages)
        quick = self._clock.monotonic() - began < _QUICK_SECONDS
        self._is_quick = quick and self._at_once
        return results

    def collect(self) -> list[Published]:
        """Return what became of each message that was sent; waits for them."""
        flight, self._flight = self._flight, None
        return [] if flight is None else flight.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
