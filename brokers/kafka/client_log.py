"""What Kafka's clients say, in our log: an outage is one line when it begins, one when it ends."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.clock import Clock

_log = logging.getLogger("holdfast.brokers.kafka.client")
_AGAIN_SECONDS = 300.0


class ClientLog:
    """What all clients of one broker object say; they do so from threads of their own.

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

    def is_news(self) -> bool:
        """Whether a report of a failed try says what nobody has said yet; else it is counted."""
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


# -- librdkafka, which takes a logger ------------------------------------------------------

_FACILITIES = frozenset({"FAIL", "ERROR", "REQTMOUT", "BROKERFAIL", "CONNFAIL"})
_EXPECTED = "enable.gapless.guarantee is exp"


class LibrdkafkaLog(ClientLog):
    """The logger of librdkafka's clients."""

    def log(self, level: int, text: str, *facts: Any) -> None:
        """Take what librdkafka says: a facility, the client's name and a sentence."""
        if _EXPECTED in str(facts):
            return
        if facts and facts[0] in _FACILITIES and not self.is_news():
            level = logging.DEBUG
        _log.log(level, text, *facts)


def log_in(configs: Mapping[str, Any], clock: Clock) -> ClientLog:
    """Return the log that a client with *configs* writes to; another where that is not ours."""
    found = configs.get("logger")
    return found if isinstance(found, ClientLog) else ClientLog(clock)


# -- kafka-python, which has loggers of its own --------------------------------------------

_LOGGERS = (
    "kafka.cluster", "kafka.consumer.fetcher", "kafka.coordinator", "kafka.coordinator.consumer",
    "kafka.coordinator.heartbeat", "kafka.net.connection", "kafka.net.inet", "kafka.net.manager",
    "kafka.net.transport", "kafka.producer.sender", "kafka.producer.transaction_manager",
)  # fmt: skip
_FAILED_TRIES = (
    "KafkaConnectionError", "No node available", "socket disconnected", "Request timed out",
    "Error receiving network data", "Error sending request data", "Bootstrap connection to",
)  # fmt: skip
_thread = threading.local()


class _FailedTries(logging.Filter):
    """Lets through what kafka-python says, but for failed tries that are no news.

    Only what the IO threads of our clients say is looked at: other clients of the program speak
    as they like.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether *record* is written; a report that is left out is one at level DEBUG."""
        heard: ClientLog | None = getattr(_thread, "log", None)
        if heard is None or record.levelno < logging.WARNING:
            return True
        text = record.getMessage()
        if not any(words in text for words in _FAILED_TRIES) or heard.is_news():
            return True
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


_FILTER = _FailedTries()


@contextmanager
def spoken_to(log: ClientLog) -> Iterator[None]:
    """Let *log* decide which failed tries are written that kafka-python reports in this thread."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_FILTER)  # once, however often it is added
    _thread.log = log
    try:
        yield
    finally:
        _thread.log = None
