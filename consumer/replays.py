"""Replays: the keys that failed again, and the news of what was handled for a store elsewhere."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from holdfast.dlq.replay.outcomes import report_of
from holdfast.dlq.topic.topic import ready
from holdfast.headers import ReplayHeaders
from holdfast.tracing.messaging import counted
from holdfast.tracing.switch import system_of

if TYPE_CHECKING:
    from holdfast.consumer.scheduling.work import Work
    from holdfast.message import Message
    from holdfast.ports import Broker, Sink

_MOST = 10_000


class ReplayOrder:
    """Knows which messages of a replay must not overtake one of their key that failed in it.

    Where the consumer's database holds the plan, that tells too. Where it does not, only
    this process knows, until the letter has been collected: a restart, or a rebalance of
    the key to another member, forgets. Bounded; the oldest is forgotten first.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._failed: dict[tuple[str, str, bytes], str] = {}
        self._lock = threading.Lock()

    def note(self, work: Work) -> None:
        """Remember that *work* became a dead letter, if it was replayed and order counts."""
        marks = ReplayHeaders.of(work.message.headers) if work.message.is_replay else None
        if marks is None or work.key is None or marks.commutative:
            return
        if work.run.letter is not None and work.run.letter.culprit.commutative:
            return
        with self._lock:
            self._failed.setdefault((marks.plan, marks.topic, work.key), marks.dlq_id)
            if len(self._failed) > self._most:
                del self._failed[next(iter(self._failed))]

    def holds(self, work: Work) -> bool:
        """Whether another message of the key of *work* failed again in the same replay."""
        if not self._failed or work.key is None:
            return False
        marks = ReplayHeaders.of(work.message.headers)
        if marks is None:
            return False
        first = self._failed.get((marks.plan, marks.topic, work.key))
        return first is not None and first != marks.dlq_id


class ReplayConfirmations:
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
            sink = self._sink
            (result,) = counted(system_of(sink), [report], lambda: sink.publish([report]))
        if result.error is not None:
            raise result.error
