"""The metrics of OpenTelemetry's messaging conventions: what was sent, received and processed.

For Prometheus dots are underscores, as in `holdfast_message_type`.

Labels are the broker, the operation, the topic, the group, and the type of an event or an error;
never an id. Topics and types beyond the first few hundred are `_OTHER`, as the conventions say.
"""

from __future__ import annotations

import logging
from collections import Counter as Tallied
from operator import attrgetter
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry

from holdfast.clock import SYSTEM_CLOCK
from holdfast.metrics import LATENCIES, BoundedLabel, Instruments, TraceLink, counter, histogram
from holdfast.scrubbing import type_name
from holdfast.stored_message import topics_of
from holdfast.tracing import switch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client import Counter

    from holdfast.message import Message
    from holdfast.metrics import Observed
    from holdfast.ports import Published

log = logging.getLogger("holdfast.tracing")

MOST_TOPICS, MOST_TYPES = 300, 100
"""Topics, and types of events and of errors, that are told by name."""
_error = attrgetter("error")
_SYSTEM, _NAME = "messaging.system", "messaging.operation.name"
_TOPIC, _GROUP = "messaging.destination.name", "messaging.consumer.group.name"
_TYPE, _ERROR = "holdfast.message.type", "error.type"

OPERATION = histogram(
    "messaging_client_operation_duration_seconds",
    "How long the broker took to take, hand out or settle messages of a topic, by batch",
    _SYSTEM, _NAME, "messaging.operation.type", _TOPIC, _GROUP, _ERROR,
    buckets=LATENCIES, otel="messaging.client.operation.duration", unit="s",
)  # fmt: skip
PROCESS = histogram(
    "messaging_process_duration_seconds",
    "How long each run of a handler took, by the type of the event, and of the error if it failed",
    _SYSTEM, _NAME, _TOPIC, _GROUP, _TYPE, _ERROR,
    buckets=LATENCIES, otel="messaging.process.duration", unit="s",
)  # fmt: skip
SENT = counter(
    "messaging_client_sent_messages",
    "Messages that were given to the broker, by the type of the error if it did not take them",
    _SYSTEM, _NAME, _TOPIC, _ERROR,
    otel="messaging.client.sent.messages", unit="{message}",
)  # fmt: skip
CONSUMED = counter(
    "messaging_client_consumed_messages",
    "Messages that the broker handed out, once for each delivery",
    _SYSTEM, _NAME, _TOPIC, _GROUP,
    otel="messaging.client.consumed.messages", unit="{message}",
)  # fmt: skip


class MessagingMetrics:
    """Counts and times what goes to a broker and comes from it; any thread may use it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        made = Instruments(registry)
        self._operation = made.histogram(OPERATION)
        self._process = made.histogram(PROCESS)
        self._sent = made.counter(SENT)
        self._consumed = made.counter(CONSUMED)
        self._topic = BoundedLabel(MOST_TOPICS, other="_OTHER")
        self._event = BoundedLabel(MOST_TYPES, other="_OTHER")
        self._error = BoundedLabel(MOST_TYPES, other="_OTHER")
        self._given: dict[tuple[str, ...], Counter] = {}
        self._received: dict[tuple[str, ...], Counter] = {}
        self._plain: dict[tuple[str, ...], Observed] = {}
        """What is told of runs without an error: known by name, so that there are few."""

    def sent(
        self,
        system: str,
        messages: Sequence[Message],
        results: Sequence[Published],
        seconds: float,
        failure: BaseException | None = None,
    ) -> None:
        """Count *messages*, which were published within *seconds*, by topic and error.

        A *failure* is of all of them; otherwise each has a result.
        """
        ends = Tallied(topics_of(messages))
        if failure is None and not any(map(_error, results)):
            for topic, count in ends.items():
                self._add_sent(system, topic, "", count)
                self._took("send", "send", system, topic, "", "", seconds)
            return
        told: Tallied[tuple[str, str]] = Tallied()
        if failure is not None:
            told.update({(topic, self._type(failure)): n for topic, n in ends.items()})
        else:
            told.update(
                (message.topic, self._type(result.error))
                for message, result in zip(messages, results, strict=True)
            )
        for (topic, error), count in told.items():
            self._add_sent(system, topic, error, count)
        for topic in ends:
            errors = sorted(error for where, error in told if where == topic and error)
            self._took("send", "send", system, topic, "", errors[0] if errors else "", seconds)

    def received(self, system: str, group: str, topics: Iterable[str], seconds: float) -> None:
        """Count what one poll brought: of *topics*, one for each delivery."""
        for topic, count in Tallied(topics).items():
            labels = system, "receive", self._topic(topic), group
            found = self._received.get(labels)
            if found is None:  # `labels` of Prometheus is slow
                found = self._received[labels] = self._consumed.labels(*labels)
            found.inc(count)
            self._took("receive", "receive", system, topic, group, "", seconds)

    def settled(
        self,
        name: str,
        system: str,
        group: str,
        topics: Iterable[str],
        seconds: float,
        error: BaseException | None = None,
    ) -> None:
        """Note how long the broker took to hear that deliveries are done with."""
        for topic in set(topics):
            self._took(name, "settle", system, topic, group, self._type(error), seconds)

    def processed(
        self,
        system: str,
        group: str,
        topic: str,
        event: str,
        seconds: float,
        error: BaseException | None = None,
        link: Callable[[], TraceLink | None] | None = None,
    ) -> None:
        """Note a run of a handler for *event*s of this type, and with it the span of *link*."""
        found = self._plain.get((system, group, topic, event)) if error is None else None
        if found is None:
            found = self._ran(system, group, topic, event, error)
        found.observe(seconds, link)

    def _ran(
        self, system: str, group: str, topic: str, event: str, error: BaseException | None
    ) -> Observed:
        where, what = self._topic(topic), self._event(event)
        found = self._process.labels(system, "process", where, group, what, self._type(error))
        if error is None and (where, what) == (topic, event):
            self._plain[system, group, topic, event] = found
        return found

    def _took(
        self, name: str, kind: str, system: str, topic: str, group: str, error: str, seconds: float
    ) -> None:
        labels = system, name, kind, self._topic(topic), group, error
        self._operation.labels(*labels).observe(seconds)

    def _add_sent(self, system: str, topic: str, error: str, count: int) -> None:
        labels = system, "send", self._topic(topic), error
        found = self._given.get(labels)
        if found is None:
            found = self._given[labels] = self._sent.labels(*labels)
        found.inc(count)

    def _type(self, error: BaseException | None) -> str:
        return "" if error is None else self._error(type_name(error))


def _registered() -> MessagingMetrics:
    try:
        return MessagingMetrics(REGISTRY)
    except ValueError:  # the application has metrics of these names
        log.warning("the application exports messaging_* metrics itself: Holdfast's are not shown")
        return MessagingMetrics(CollectorRegistry())


MESSAGING = _registered()


def send(
    system: str, messages: Sequence[Message], publish: Callable[[], list[Published]]
) -> list[Published]:
    """Return what *publish* returns for *messages*: counted, timed and, while on, in spans."""
    spans = switch.spans
    if spans is None:
        return counted(system, messages, publish)
    return counted(system, messages, lambda: spans.send(system, messages, publish))


def counted(
    system: str, messages: Sequence[Message], publish: Callable[[], list[Published]]
) -> list[Published]:
    """Return what *publish* returns for *messages*: counted and timed, without a span."""
    began = SYSTEM_CLOCK.monotonic()
    try:
        results = publish()
    except BaseException as error:
        MESSAGING.sent(system, messages, [], SYSTEM_CLOCK.monotonic() - began, error)
        raise
    MESSAGING.sent(system, messages, results, SYSTEM_CLOCK.monotonic() - began)
    return results
