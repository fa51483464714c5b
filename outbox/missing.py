"""Topics that do not exist: a wrong setting, no fault of the events, which wait in the outbox."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.errors import UnknownTopic

log = logging.getLogger("holdfast.outbox")

LOOK_SECONDS, _SELDOM_SECONDS, _SUMMARY_SECONDS = 1.0, 5.0, 60.0


class MissingTopics:
    """What a relay found missing; whole topics wait, so that the order of each key holds.

    Each topic is told once when it is found missing and once when it is there; while any is
    missing, one line a minute sums up.
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._found: set[str] = set()
        self._tried: set[str] = set()
        """Those that are looked for again by trying to publish to them."""
        self._looked = self._told = float("-inf")
        self._pause = LOOK_SECONDS

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that are missing, as far as is known."""
        return tuple(sorted(self._found))

    @property
    def held(self) -> set[str]:
        """The topics to which nothing is to be published now."""
        return self._found - self._tried

    def try_again(self) -> bool:
        """Hold nothing back for one try, if it is time; what is noted then is held again.

        What a try before this one has not met has no events any more, and is forgotten.
        """
        self._found -= self._tried
        self._tried.clear()
        if not self.due:
            return False
        self._tried = set(self._found)
        return True

    @property
    def due(self) -> bool:
        """Whether it is time to look for them again."""
        return bool(self._found) and self._clock.monotonic() - self._looked >= self._pause

    def note(self, errors: Mapping[str, UnknownTopic]) -> None:
        """Remember that the topics of *errors* are missing."""
        if not errors:
            return
        self._looked = now = self._clock.monotonic()
        self._pause = min(2 * self._pause, _SELDOM_SECONDS)
        for topic in errors.keys() - self._found:
            self._told, self._pause = now, LOOK_SECONDS
            log.error(
                "events to %s wait in the outbox, and nothing is parked: %s",
                topic, mask(str(errors[topic])), extra={"topic": topic},
            )  # fmt: skip
        self._found |= errors.keys()
        self._tried -= errors.keys()
        if now - self._told >= _SUMMARY_SECONDS:
            self._told = now
            log.error("events to %s still wait: no such topic", ", ".join(self.topics))

    def there(self, topics: Iterable[str]) -> None:
        """Note that *topics* were published to."""
        for topic in self._found & set(topics):
            self._tried.discard(topic)
            self._found.discard(topic)
            log.warning("topic %s is there: its events go out", topic, extra={"topic": topic})
