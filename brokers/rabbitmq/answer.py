"""What the broker will have said to one request."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from holdfast.errors import BrokerDown, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.clock import Clock


class Answer:
    """Given in the connection's thread, awaited or looked at in the caller's."""

    __slots__ = ("_event", "_notify", "error", "value")

    def __init__(self, notify: Callable[[], None] | None = None) -> None:
        self._event = threading.Event()
        self._notify = notify
        self.value: Any = None
        self.error: HoldfastError | None = None

    @property
    def done(self) -> bool:
        """Whether it was given or has failed."""
        return self._event.is_set()

    def give(self, value: Any = None) -> None:
        """Answer with *value*; only the first answer counts."""
        if not self.done:
            self.value = value
            self._finish()

    def fail(self, error: HoldfastError) -> None:
        """Say that no answer will come."""
        if not self.done:
            self.error = error
            self._finish()

    def _finish(self) -> None:
        self._event.set()
        if self._notify is not None:
            self._notify()

    def get(self, clock: Clock, patience: float, what: str) -> Any:
        """Return the value, or raise what failed; `BrokerDown` after *patience* seconds."""
        if not clock.wait(self._event, patience):
            raise BrokerDown(f"RabbitMQ has not answered for {patience:g} s: {what}")
        if self.error is not None:
            raise self.error
        return self.value
