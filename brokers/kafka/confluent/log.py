"""What librdkafka says, in our log: an outage is one line when it begins and one when it ends."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.clock import Clock

_log = logging.getLogger("holdfast.brokers.kafka.client")
_OUTAGE = frozenset({"FAIL", "ERROR", "REQTMOUT", "BROKERFAIL", "CONNFAIL"})
_EXPECTED = "enable.gapless.guarantee is exp"
_AGAIN_SECONDS = 300.0


class ClientLog:
    """The logger of all clients of one broker object; they call it from threads of their own.

    Every connection of every client reports each failed try, many times a second. The first
    report of an outage is passed on, the others are left out, to be had at level DEBUG. Where
    nobody notices the end, as of one server among several, it is said again now and then.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since: float | None = None
        self._left_out = 0
        self._is_down = False

    def log(self, level: int, text: str, *facts: Any) -> None:
        """Take what librdkafka says: a facility, the client's name and a sentence."""
        if _EXPECTED in str(facts):
            return
        if facts and facts[0] in _OUTAGE and not self._is_news():
            level = logging.DEBUG
        _log.log(level, text, *facts)

    def _is_news(self) -> bool:
        now = self._clock.monotonic()
        with self._lock:
            if self._since is not None and now - self._since < _AGAIN_SECONDS:
                self._left_out += 1
                return False
            self._since = now
            return True

    def fell(self) -> None:
        """Note that no server answers: failed tries alone may be about one of several."""
        self._is_down = True

    def answered(self) -> None:
        """Note that Kafka answers; after an outage, say so."""
        if not self._is_down:
            return
        with self._lock:
            self._is_down = False
            left_out, self._left_out = self._left_out, 0
            since, self._since = self._since, None
        if since is not None:
            _log.warning("Kafka answers again; %d reports of failed tries were left out", left_out)


def log_in(configs: Mapping[str, Any], clock: Clock) -> ClientLog:
    """Return the log that a client with *configs* writes to; another where that is not ours."""
    found = configs.get("logger")
    return found if isinstance(found, ClientLog) else ClientLog(clock)
