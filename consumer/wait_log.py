"""What is logged about messages that wait for something that is down: once, then summed up."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from holdfast.errors import CircuitOpen

if TYPE_CHECKING:
    from holdfast.consumer.work import Work

log = logging.getLogger("holdfast.consumer")


class WaitLog:
    """Tells the first message of a topic that waits for a cause, and how many did when one passes.

    What comes in between is told at DEBUG: an outage gives messages back many times a second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[str, int]] = {}
        """How often messages were given back, by topic and cause."""

    def begin(self, work: Work, error: BaseException, text: str) -> None:
        """Note that *work* waits because of *error*, which may be told as *text*."""
        topic = work.route.topic
        cause = error.name if isinstance(error, CircuitOpen) else type(error).__name__
        with self._lock:
            counts = self._waiting.setdefault(topic, {})
            counts[cause] = counts.get(cause, 0) + 1
            is_first = counts[cause] == 1
        log.log(
            logging.WARNING if is_first else logging.DEBUG,
            "message %s of %s waits, nothing is acknowledged: %s%s",
            work.message.id, topic, text,
            ", so do others from now on, until it is over" if is_first else "",
        )  # fmt: skip

    def end(self, work: Work) -> None:
        """Note that a message of the topic of *work* has passed: what was waited for is there."""
        if not self._waiting:
            return
        with self._lock:
            counts = self._waiting.pop(work.route.topic, None)
        if counts:
            told = ", ".join(f"{count} for {cause}" for cause, count in counts.items())
            log.warning("%s goes on; attempts given back meanwhile: %s", work.route.topic, told)
