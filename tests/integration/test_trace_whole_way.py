"""One story by links: HTTP → outbox → Kafka → consumer → outbox → RabbitMQ → consumer.

The spans are kept in memory; `tests/acceptance/test_tracing_story.py` tells the same by processes
and a real OTLP endpoint.
"""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from sqlalchemy.orm import Session

from holdfast import (
    Backoff,
    Consumer,
    Message,
    Outbox,
    PoisonMessage,
    consumer,
    dead_letter,
    idempotent,
    new_id,
    outbox,
    retry,
)
from holdfast.brokers import connect
from holdfast.db import open_database
from holdfast.headers import replay_topic
from holdfast.outbox import LeaseEngine, Relay
from holdfast.testing import wait_until
from holdfast.tracing import WsgiCorrelationMiddleware, disable, enable
from tests.consuming import running
from tests.shell import shell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.servers import Kafka, RabbitMQ

STATE = "shop=t61rcWkgMzE"


class _Silent(WSGIRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


def parent(number: int) -> str:
    """Return the span of whoever sends order *number*."""
    return f"00-{0xABC0 + number:032x}-{0xDEF0 + number:016x}-01"


def context_of(span: ReadableSpan) -> tuple[int, int]:
    """Return which span it is."""
    found = span.get_span_context()
    assert found is not None
    return found.trace_id, found.span_id


def links(span: ReadableSpan) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the spans that *span* links to, with what the link says."""
    return {
        (one.context.trace_id, one.context.span_id): dict(one.attributes or {})
        for one in span.links
    }


class Spans:
    """The spans that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        """Return those of this name, oldest first."""
        return [one for one in self._exporter.get_finished_spans() if one.name == name]

    def about(self, name: str, creation: ReadableSpan) -> list[ReadableSpan]:
        """Return those of this name that link to the span *creation*."""
        return [one for one in self.named(name) if context_of(creation) in links(one)]

    @property
    def names(self) -> set[str]:
        """The names of all of them."""
        return {one.name for one in self._exporter.get_finished_spans()}


class Way:
    """A shop, its billing and its mail, with databases of their own and two brokers."""

    def __init__(self, folder: Path, kafka: str, rabbitmq: str) -> None:
        self.spans = Spans()
        name = new_id()[-12:]
        self.orders, self.payments = f"orders-{name}", f"payments-{name}"
        self.urls = {one: f"sqlite:///{folder}/{one}.db" for one in ("shop", "billing", "mail")}
        self.kafka, self.kafka_url = connect(kafka), kafka
        self.rabbitmq = connect(rabbitmq)
        self.kafka.create_topic(self.orders, partitions=1)
        self.kafka.create_group(self.orders, "billing")
        self.rabbitmq.create_topic(self.payments, partitions=1)
        self.rabbitmq.create_group(self.payments, "mail")
        self.engines = {one: open_database(url) for one, url in self.urls.items()}
        for engine in self.engines.values():
            for package in (consumer, outbox):
                package.create_tables(engine)
        self.is_fixed = False
        self.failed: set[int] = set()
        self.mailed: list[tuple[int, Message]] = []
        self.billing = Consumer(self.kafka, group="billing", database=self.engines["billing"])
        self.mail = Consumer(self.rabbitmq, group="mail", database=self.engines["mail"])
        self._handlers()
        self.server = make_server("127.0.0.1", 0, WsgiCorrelationMiddleware(self._served),
                                  handler_class=_Silent)  # fmt: skip
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _served(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        number = int(environ["PATH_INFO"].strip("/"))
        with Session(self.engines["shop"]) as session, session.begin():
            Outbox(source="shop").add(session, {"order": number}, topic=self.orders,
                                      key=str(number), type="OrderPlaced")  # fmt: skip
        start_response("202 Accepted", [])
        return [b""]

    def _handlers(self) -> None:
        box = Outbox(source="billing")

        @self.billing.on(self.orders)
        @dead_letter()
        @retry(Backoff(first=0.01, ceiling=0.02, attempts=3))
        @idempotent
        def bill(order: dict[str, int], session: Session) -> None:
            number = order["order"]
            if number == 1 and number not in self.failed:
                self.failed.add(number)
                raise TimeoutError("the bank is slow")
            if number == 2 and not self.is_fixed:
                raise PoisonMessage("no card")
            box.add(session, {"paid": number}, topic=self.payments, key=str(number),
                    type="PaymentProcessed")  # fmt: skip

        @self.mail.on(self.payments)
        @idempotent
        def send(payment: dict[str, int], message: Message) -> None:
            self.mailed.append((payment["paid"], message))

    def order(self, number: int) -> None:
        """Send an order by HTTP, as a caller that traces."""
        headers = {"X-Correlation-ID": f"corr-{number}", "traceparent": parent(number),
                   "tracestate": STATE}  # fmt: skip
        address = f"http://127.0.0.1:{self.server.server_port}/{number}"
        with urlopen(Request(address, headers=headers), timeout=90) as answer:
            assert answer.headers["X-Correlation-ID"] == f"corr-{number}"

    def relay(self, service: str) -> None:
        """Publish what is in the outbox of a service."""
        broker = {"shop": self.kafka, "billing": self.rabbitmq}[service]
        with closing(broker.sink()) as sink:
            Relay(LeaseEngine(self.engines[service], sink)).run_once()

    def replay(self) -> None:
        """Let an operator send the dead letter again."""
        done = shell("dlq", "replay", "--group", "billing", "--reason", "card added", "--yes",
                     "--database", self.urls["billing"], "--broker", self.kafka_url)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def mails(self) -> list[int]:
        """Return the orders whose customers got a mail."""
        return sorted(number for number, _ in self.mailed)

    def close(self) -> None:
        """Let go of everything."""
        self.server.shutdown()
        self.server.server_close()
        for broker in (self.kafka, self.rabbitmq):
            broker.close()
        for engine in self.engines.values():
            engine.dispose()


@pytest.fixture
def way(tmp_path: Path, kafka: Kafka, rabbitmq: RabbitMQ) -> Iterator[Way]:
    """Make everything ready, and trace into memory."""
    made = Way(tmp_path, kafka.url, rabbitmq.url)
    enable(made.spans.provider)
    yield made
    disable()
    made.close()


def until(condition: Any, what: str) -> None:
    """Wait for *condition*; two brokers on a busy machine take their time."""
    wait_until(condition, deadline=120, what=what)


def test_an_order_is_one_story_over_two_brokers(way: Way) -> None:
    """With a retry, and a dead letter and its replay, each span where it belongs."""
    for number in (1, 2):
        way.order(number)
    way.relay("shop")
    spans, tally = way.spans, way.billing.tally
    with running(way.billing), running(way.mail):
        until(lambda: (tally.handled, tally.dead_lettered) == (1, 1), "one is handled, one dead")
        way.relay("billing")
        until(lambda: way.mails() == [1], "the first customer is told")
        way.is_fixed = True
        way.replay()
        way.relay("billing")
        until(lambda: way.mails() == [1, 2], "the second customer is told")
        acknowledged = (f"ack {way.orders}", f"ack {way.payments}")
        until(
            lambda: all(
                len({link for one in spans.named(name) for link in links(one)}) == 2
                for name in acknowledged
            ),
            "all is acknowledged",
        )
    first = tell(way, 1, ["handled"], attempts=[True, False])
    second = tell(way, 2, ["dead_lettered", "handled"], attempts=[True, False])
    assert first is not second
    letters = [event.name for one in spans.about(f"process {way.orders}", second)
               for event in one.events]  # fmt: skip
    assert letters.count("dead letter") == 1
    (again,) = spans.about(f"send {replay_topic(way.orders, 'billing')}", second)
    assert again.kind is SpanKind.CLIENT
    assert context_of(first) not in links(again)
    topics = {way.orders, way.payments, replay_topic(way.orders, "billing")}
    known = {f"{what} {topic}" for topic in topics
             for what in ("create", "send", "receive", "process", "ack")}  # fmt: skip
    assert spans.names <= known | {"attempt"}


def tell(way: Way, number: int, outcomes: list[str], *, attempts: list[bool]) -> ReadableSpan:
    """Follow an order from span to span; return the one that created it.

    *outcomes* are those of billing's handlings, *attempts* tells which of its attempts failed.
    """
    spans = way.spans
    (create,) = [
        one for one in spans.named(f"create {way.orders}")
        if context_of(one)[0] == 0xABC0 + number
    ]  # fmt: skip
    assert create.parent is not None
    assert (create.parent.span_id, create.kind) == (0xDEF0 + number, SpanKind.PRODUCER)
    processed = hop(way, create, way.orders, "kafka", "billing", number, len(outcomes))
    assert [(one.attributes or {})["holdfast.outcome"] for one in processed] == outcomes
    inside = {context_of(one)[1] for one in processed}
    tried = [
        one for one in spans.named("attempt")
        if one.parent is not None and one.parent.span_id in inside
    ]  # fmt: skip
    failed = [one.status.status_code is StatusCode.ERROR for one in tried]
    assert failed == attempts
    (paid,) = [
        one for one in spans.named(f"create {way.payments}")
        if one.parent is not None and one.parent.span_id == context_of(tried[-1])[1]
    ]  # fmt: skip
    assert context_of(paid)[0] == context_of(tried[-1])[0]
    hop(way, paid, way.payments, "rabbitmq", "mail", number, 1)
    (mailed,) = [message for own, message in way.mailed if own == number]
    assert mailed.correlation_id == f"corr-{number}"
    assert f"{context_of(paid)[1]:016x}" in str(mailed.traceparent)
    return create


def hop(
    way: Way, create: ReadableSpan, topic: str, system: str, group: str, number: int, handled: int
) -> list[ReadableSpan]:
    """Check the spans from the relay to the acknowledgement; return those of the handling."""
    for what, kind in (("send", SpanKind.CLIENT), ("receive", SpanKind.CLIENT),
                       ("process", SpanKind.CONSUMER), ("ack", SpanKind.CLIENT)):  # fmt: skip
        found = way.spans.about(f"{what} {topic}", create)
        assert found, what
        for span in found:
            told = dict(span.attributes or {})
            operation = "settle" if what == "ack" else what
            assert (span.kind, span.parent) == (kind, None), what
            assert told["messaging.system"] == system
            assert told["messaging.operation.name"] == what
            assert told["messaging.operation.type"] == operation
            assert told["messaging.destination.name"] == topic
            if what != "send":
                assert told["messaging.consumer.group.name"] == group
            about = told if "messaging.message.id" in told else links(span)[context_of(create)]
            assert about["messaging.message.id"]
            assert about["messaging.message.conversation_id"] == f"corr-{number}"
            assert ("messaging.batch.message_count" in told) is (len(span.links) > 1)
    processed = way.spans.about(f"process {topic}", create)
    assert len(processed) == handled
    return processed
