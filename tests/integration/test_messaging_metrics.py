"""The metrics of the messaging conventions, and those of ours that come of the same events."""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as text_families
from sqlalchemy.orm import Session

from holdfast import Batches, Message, Outbox, dead_letter, idempotent, outbox, retry
from holdfast.backoff import Backoff
from holdfast.brokers import connect
from holdfast.clock import SYSTEM_CLOCK
from holdfast.errors import BrokerDown, MessageTooLarge
from holdfast.ids import Uuid7
from holdfast.metrics import LATENCIES, exposition
from holdfast.outbox import LeaseEngine, Relay
from holdfast.outbox.relay.latency import DUE, MOST_LOOKED_AT, PublishLatency, ready_at
from holdfast.ports import Published
from holdfast.retry import Budget
from holdfast.stored_message import StoredMessage, packed
from holdfast.testing import Fault, ScriptedBroker, VirtualClock
from holdfast.testing.faults import nth
from holdfast.tracing import disable, disable_metrics, enable, enable_metrics
from holdfast.tracing.messaging import MOST_TYPES, MessagingMetrics
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.testing.faults import FaultStep

FAST = Backoff(first=0.001, ceiling=0.002, attempts=3)
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
_topics = iter(range(1000))


@pytest.fixture
def topic() -> str:
    """Return a topic of the test's own: the metrics of a process are shared by all tests."""
    return f"orders{next(_topics)}"


@pytest.fixture
def bench(tmp_path: Path, topic: str) -> Iterator[Bench]:
    """Return a bench on SQLite, with a broker in memory."""
    made = Bench(tmp_path, f"sqlite:///{tmp_path}/shop.db", broker=connect("memory:"))
    made.broker.create_topic(topic)
    outbox.create_tables(made.engine)
    yield made
    made.close()


class Told:
    """What OpenTelemetry was told."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider([self._reader])
        enable_metrics(self.provider)

    def points(self, name: str, topic: str) -> list[Any]:
        """Return the data points of *name* about *topic*."""
        data = self._reader.get_metrics_data()
        return [
            point
            for resource in ([] if data is None else data.resource_metrics)
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
            if topic in (point.attributes or {}).values()
        ]

    def figures(self, name: str, topic: str) -> dict[tuple[str, str], float]:
        """Return counts by operation and type of the error."""
        return {
            (point.attributes["messaging.operation.name"], point.attributes.get("error.type", "")):
            getattr(point, "count", getattr(point, "value", 0))
            for point in self.points(name, topic)
        }  # fmt: skip


@pytest.fixture
def told() -> Iterator[Told]:
    """Tell metrics to a provider in memory."""
    yield Told()
    disable_metrics()


def shown(consumer: Any, name: str) -> dict[str, float]:
    """Return the samples of *name* on the page of *consumer*, by the values of their labels."""
    body = exposition([consumer.metrics.registry, REGISTRY]).body.decode()
    return {
        " ".join(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_families(body)
        for sample in family.samples
        if sample.name == name
    }


class OrderPlaced(msgspec.Struct):
    """An event."""

    order: int


def place(bench: Bench, topic: str, *orders: int) -> None:
    """Stage *orders*, and let the relay publish them."""
    with Session(bench.engine) as session, session.begin():
        for number in orders:
            Outbox(source="shop").add(session, OrderPlaced(number), topic=topic, key=str(number))
    Relay(LeaseEngine(bench.engine, bench.broker.sink())).run_once()


def test_what_is_sent_received_processed_and_settled_is_told_by_the_conventions(
    bench: Bench, topic: str, told: Told
) -> None:
    """Names, units, buckets and attributes; no id is among them."""
    place(bench, topic, 1, 2, 3)
    consumer = bench.consumer()

    @consumer.on(topic)
    @idempotent
    def handle(order: OrderPlaced, session: Session) -> None: ...

    with running(consumer):
        until(lambda: consumer.tally.handled == 3, "handled")
        until(lambda: ("ack", "") in told.figures("messaging.client.operation.duration", topic),
              "settled")  # fmt: skip
    assert told.figures("messaging.client.sent.messages", topic) == {("send", ""): 3}
    assert told.figures("messaging.client.consumed.messages", topic) == {("receive", ""): 3}
    assert told.figures("messaging.process.duration", topic) == {("process", ""): 3}
    operations = told.points("messaging.client.operation.duration", topic)
    assert {point.attributes["messaging.operation.name"] for point in operations} == {
        "send", "receive", "ack",
    }  # fmt: skip
    (process,) = told.points("messaging.process.duration", topic)
    assert dict(process.attributes) == {
        "messaging.system": "memory",
        "messaging.operation.name": "process",
        "messaging.destination.name": topic,
        "messaging.consumer.group.name": "g",
        "holdfast.message.type": "OrderPlaced",
    }
    assert tuple(process.explicit_bounds) == LATENCIES
    sent = shown(consumer, "messaging_client_sent_messages_total")
    assert sent[f" {topic} send holdfast"] == 3  # no error; the sink of the embedded brokers
    told_by_group = told.points("holdfast.consumer.messages", topic)
    assert {point.attributes["messaging.consumer.group.name"] for point in told_by_group} == {"g"}


def test_each_delivery_is_consumed_once_and_each_run_is_told_with_its_error(
    bench: Bench, topic: str, told: Told
) -> None:
    """A retry in the process is no delivery; a failed run tells the type of its error."""
    bench.send(Message.new(topic, b'{"order":1}', key="k"))
    consumer, runs = bench.consumer(), []

    @consumer.on(topic)
    @dead_letter()
    @retry(FAST)
    def handle(order: OrderPlaced) -> None:
        runs.append(order)
        if len(runs) < 3:
            raise TimeoutError("later")

    with running(consumer):
        until(lambda: consumer.tally.handled == 1, "handled at its third attempt")
    found = told.figures("messaging.process.duration", topic)
    assert found == {("process", "TimeoutError"): 2, ("process", ""): 1}
    assert told.figures("messaging.client.consumed.messages", topic) == {("receive", ""): 1}
    assert shown(consumer, "holdfast_consumer_retries_total") == {topic: 2}

    again = Bench.consumer(bench)  # another member, which is handed out the next delivery
    bench.send(Message.new(topic, b'{"order":2}', key="k"))

    @again.on(topic)
    def anew(order: OrderPlaced) -> None: ...

    with running(again):
        until(lambda: again.tally.handled == 1, "handled")
    assert told.figures("messaging.client.consumed.messages", topic) == {("receive", ""): 2}


def test_a_dead_letter_is_counted_by_topic_group_and_error(
    bench: Bench, topic: str, told: Told
) -> None:
    """The type of what failed first, and the run that failed with it."""
    bench.send(Message.new(topic, b"not json", key="k"))
    consumer = bench.consumer()

    @consumer.on(topic)
    @dead_letter()
    def handle(order: OrderPlaced) -> None: ...

    with running(consumer):
        until(lambda: consumer.tally.dead_lettered == 1, "dead-lettered")
    (point,) = told.points("holdfast.dlq.errors", topic)
    assert point.value == 1
    assert point.attributes["group"] == "g"
    assert point.attributes["error_type"] == bench.letters[0].error_type


@pytest.mark.parametrize("whole", [False, True])
def test_batches_are_processed_by_call(bench: Bench, topic: str, told: Told, whole: bool) -> None:
    """A handler of lists runs once for all, another one once for each."""
    bench.send(*(Message.new(topic, b'{"order":1}', key=f"k{n}") for n in range(6)))
    consumer = bench.consumer(workers=1)
    handled: list[Any] = []

    if whole:

        @consumer.on(topic, batch=Batches(size=6, wait=5.0, whole=True))
        @idempotent
        def handle_all(orders: list[OrderPlaced]) -> None:
            handled.append(len(orders))
    else:

        @consumer.on(topic, batch=Batches(size=6, wait=5.0))
        @idempotent
        def handle(order: OrderPlaced) -> None:
            handled.append(1)

    with running(consumer):
        until(lambda: consumer.tally.handled == 6, "handled")
    assert sum(handled) == 6
    assert told.figures("messaging.process.duration", topic) == {("process", ""): len(handled)}


def test_a_loop_of_ones_own_is_measured_likewise(bench: Bench, topic: str, told: Told) -> None:
    """One call holds all its attempts."""
    consumer, runs = bench.consumer(), []

    @consumer.on(topic)
    @retry(FAST)
    def handle(order: OrderPlaced) -> None:
        runs.append(order)
        if len(runs) == 1:
            raise TimeoutError("later")

    outcome = consumer.handler(topic).handle(Message.new(topic, b'{"order":1}', key="k"))
    assert outcome.acknowledge
    assert told.figures("messaging.process.duration", topic) == {("process", ""): 1}
    assert shown(consumer, "holdfast_consumer_retries_total") == {topic: 1}


def exemplars(consumer: Any, topic: str) -> set[tuple[str, str]]:
    """Return name and trace of each exemplar about *topic* on the page of *consumer*."""
    body = exposition([consumer.metrics.registry, REGISTRY], OPENMETRICS).body.decode()
    return {
        (family.name, sample.exemplar.labels["trace_id"])
        for family in text_string_to_metric_families(body)
        for sample in family.samples
        if sample.exemplar is not None and topic in sample.labels.values()
    }


@pytest.mark.parametrize("sampled", [True, False])
def test_processing_is_linked_to_its_trace_if_that_is_recorded(
    bench: Bench, topic: str, told: Told, sampled: bool
) -> None:
    """Both for Prometheus and for OpenTelemetry."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider() if sampled else TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    enable(provider)
    try:
        bench.send(Message.new(topic, b'{"order":1}', key="k"))
        consumer = bench.consumer()

        @consumer.on(topic)
        def handle(order: OrderPlaced) -> None: ...

        with running(consumer):
            until(lambda: consumer.tally.handled == 1, "handled")
    finally:
        disable()
    spans = [span for span in exporter.get_finished_spans() if span.name == f"process {topic}"]
    traces = {f"{span.get_span_context().trace_id:032x}" for span in spans}  # type: ignore[union-attr]
    (point,) = told.points("messaging.process.duration", topic)
    assert {f"{one.trace_id:032x}" for one in point.exemplars} == traces
    names = ("holdfast_consumer_handler_seconds", "messaging_process_duration_seconds")
    assert exemplars(consumer, topic) == {(name, trace) for name in names for trace in traces}
    assert len(traces) == sampled


def test_the_budget_that_is_left_is_shown_by_its_name(bench: Bench, topic: str) -> None:
    """Or by the topic of the handler that has it alone."""
    bench.broker.create_topic("bills")
    consumer, clock = bench.consumer(), VirtualClock()
    shared = Budget(name="payments", ratio=0, per_second=1.0, window=10.0, clock=clock)

    @consumer.on(topic)
    @retry(FAST, budget=shared)
    def handle(order: OrderPlaced) -> None: ...

    @consumer.on("bills")
    @retry(FAST, budget=Budget(ratio=0, per_second=3.0, window=10.0, clock=clock))
    def bill(order: OrderPlaced) -> None: ...

    with running(consumer):
        until(lambda: consumer.running is not None, "runs")
        assert shared.withdraw()
        assert shown(consumer, "holdfast_retry_budget_left") == {
            "payments": 9, "bills": 30,
        }  # fmt: skip


def test_what_the_broker_does_not_take_is_counted_by_error(told: Told, topic: str) -> None:
    """Each message by its own result, or all of them by what was raised."""
    from prometheus_client import CollectorRegistry

    metrics = MessagingMetrics(CollectorRegistry())
    messages = [Message.new(topic, b"", key=str(n)) for n in range(4)]
    results = [Published(), Published(error=MessageTooLarge(9, 5)), Published(), Published()]
    metrics.sent("memory", messages, results, 0.1)
    metrics.sent("memory", messages, [], 0.1, BrokerDown("no answer"))
    too_large, down = "holdfast.errors.MessageTooLarge", "holdfast.errors.BrokerDown"
    assert told.figures("messaging.client.sent.messages", topic) == {
        ("send", ""): 3, ("send", too_large): 1, ("send", down): 4,
    }  # fmt: skip
    assert told.figures("messaging.client.operation.duration", topic) == {
        ("send", too_large): 1, ("send", down): 1,
    }  # fmt: skip
    del metrics
    gc.collect()


def test_types_beyond_the_bound_are_one_series_and_take_no_memory() -> None:
    """Senders name them: each would stay for as long as the process lives."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    metrics = MessagingMetrics(registry)
    for number in range(3 * MOST_TYPES):
        metrics.processed("memory", "billing", "orders", f"type-{number}", 0.1)
    (family,) = [one for one in registry.collect() if one.name.startswith("messaging_process")]
    counts = {
        one.labels["holdfast_message_type"]: one.value
        for one in family.samples
        if one.name.endswith("_count")
    }
    assert (len(counts), counts["_OTHER"]) == (MOST_TYPES + 1, 2 * MOST_TYPES)
    assert len(metrics._plain) == MOST_TYPES
    del metrics, registry
    gc.collect()


def test_a_broker_that_does_not_hear_of_settled_messages_shows(
    bench: Bench, topic: str, told: Told
) -> None:
    """The operation failed, and the messages are settled when it answers again."""
    bench.send(Message.new(topic, b'{"order":1}', key="k"))

    def away(step: FaultStep) -> None:
        raise BrokerDown("no answer")

    bench.broker = ScriptedBroker(
        Fault(point="accept", effect=away, when=nth(1)), broker=bench.broker
    )
    consumer = bench.consumer()

    @consumer.on(topic)
    def handle(order: OrderPlaced) -> None: ...

    with running(consumer):
        until(lambda: ("ack", "") in told.figures("messaging.client.operation.duration", topic),
              "settled after all")  # fmt: skip
    found = told.figures("messaging.client.operation.duration", topic)
    assert found["ack", "holdfast.errors.BrokerDown"] == 1


def test_the_relay_notes_how_long_events_waited(bench: Bench, topic: str) -> None:
    """From when they were staged, to when the broker had them."""

    def seen() -> tuple[float, float]:
        name = "holdfast_outbox_publish_seconds"
        counts = (REGISTRY.get_sample_value(f"{name}_{end}") for end in ("count", "sum"))
        count, total = (value or 0.0 for value in counts)
        return count, total

    before = seen()
    place(bench, topic, 1, 2, 3)
    count, total = (after - first for after, first in zip(seen(), before, strict=True))
    assert count == 3
    assert 0 <= total < 3 * 600


def stored(made: str, headers: tuple[tuple[str, bytes], ...] = ()) -> StoredMessage:
    """Return an event of the outbox with this id."""
    return StoredMessage(
        id=made, topic="orders", payload=b"", key=None, type="t", time=SYSTEM_CLOCK.now(),
        packed=json.dumps(packed(headers)), shard=0,
    )  # fmt: skip


def test_an_event_waits_since_it_was_made_or_due() -> None:
    """By its UUIDv7, or by the header of a delayed one; other ids tell nothing."""
    clock = VirtualClock()
    made, now = Uuid7(clock)(), clock.now().timestamp()
    assert ready_at(stored(made)) == pytest.approx(now, abs=0.002)
    assert ready_at(stored("ab" * 18)) is None
    assert ready_at(stored("order-1-7-of-somebody")) is None
    due = b"2026-03-01T12:00:00+00:00"
    assert ready_at(stored(made, ((DUE, due),))) == 1772366400.0
    assert ready_at(stored(made, ((DUE, b"soon"),))) is None


def test_of_a_large_batch_some_events_are_looked_at() -> None:
    """Spread over it, and never what the broker did not take."""
    from prometheus_client import CollectorRegistry

    registry, clock = CollectorRegistry(), VirtualClock()
    latency, ids = PublishLatency(registry, clock=clock), Uuid7(clock)
    events = [stored(ids()) for _ in range(10 * MOST_LOOKED_AT)]
    clock.advance(20)
    latency.note(events, [Published()] * len(events))
    latency.note(events[:2], [Published(error=BrokerDown("no")), Published()])
    name = "holdfast_outbox_publish_seconds"
    assert registry.get_sample_value(f"{name}_count") == MOST_LOOKED_AT + 1
    assert registry.get_sample_value(f"{name}_bucket", {"le": "10.0"}) == 0
    assert registry.get_sample_value(f"{name}_bucket", {"le": "30.0"}) == MOST_LOOKED_AT + 1
