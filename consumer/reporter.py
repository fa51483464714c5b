"""Tells a store that is elsewhere what became of a replayed message."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from holdfast.dlq.replay.reports import report_of
from holdfast.dlq.topic import ready

if TYPE_CHECKING:
    from holdfast.message import Message
    from holdfast.ports import Broker, Sink


class Reporter:
    """Publishes confirmations to the dead-letter topic of the group, for its collector.

    For a consumer without a database, or whose letters are kept in another one. Threads
    take turns: they do not share a sink.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._sink: Sink | None = None
        self._ready: set[str] = set()
        self._lock = threading.Lock()

    def tell(self, message: Message) -> None:
        """Return once the broker has the news that *message* was handled."""
        report = report_of(message)
        if report is None:
            return
        with self._lock:
            if report.topic not in self._ready:
                ready(self._broker, report.topic, like=message.topic)
                self._ready.add(report.topic)
            if self._sink is None:
                self._sink = self._broker.sink()
            (result,) = self._sink.publish([report])
        if result.error is not None:
            raise result.error
