"""Spans by OpenTelemetry's conventions: names, kinds, links; nothing secret, nothing twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from sqlalchemy.orm import Session

from holdfast import Batches, Message, Outbox, dead_letter, idempotent, outbox, retry
from holdfast.backoff import Backoff
from holdfast.brokers import connect
from holdfast.outbox import LeaseEngine, Relay
from holdfast.tracing import WsgiCorrelationMiddleware, disable, enable, switch
from tests.consuming import Bench, running, until
from tests.orchestrating import OrderState, Shop, order_saga

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FAST = Backoff(first=0.001, ceiling=0.002, attempts=2)


class Recorded:
    """The spans that have ended so far."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    def named(self, name: str) -> list[ReadableSpan]:
        """Return those with this name, oldest first."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """Return the only one with this name, once it has ended."""
        until(lambda: bool(self.named(name)), f"the span {name!r}")
        (found,) = self.named(name)
        return found

    @property
    def names(self) -> set[str]:
        """The names of all of them."""
        return {span.name for span in self._exporter.get_finished_spans()}


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    """Trace into memory, with a provider of the program's own."""
    found = Recorded()
    enable(found.provider)
    yield found
    disable()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Return a bench on SQLite, with a broker in memory."""
    made = Bench(tmp_path, f"sqlite:///{tmp_path}/shop.db", broker=connect("memory:"))
    outbox.create_tables(made.engine)
    yield made
    made.close()


class OrderPlaced(msgspec.Struct):
    """An event."""

    order: int


def place(bench: Bench, recorded: Recorded, *orders: int) -> Any:
    """Stage *orders* within a request's span, and let the relay publish them; return the span."""
    box = Outbox(source="shop")
    with (
        recorded.tracer.start_as_current_span("POST /orders") as request,
        Session(bench.engine) as session,
        session.begin(),
    ):
        for number in orders:
            box.add(session, OrderPlaced(number), topic="orders", key=str(number))
    relay = Relay(LeaseEngine(bench.engine, bench.broker.sink()))
    relay.run_once()
    return request


def attributes(span: ReadableSpan, *names: str) -> list[Any]:
    """Return the values of some attributes."""
    return [(span.attributes or {}).get(name) for name in names]


def context_of(span: ReadableSpan) -> tuple[int, int]:
    """Return which span it is."""
    found = span.get_span_context()
    assert found is not None
    return found.trace_id, found.span_id


def linked(span: ReadableSpan) -> set[tuple[int, int]]:
    """Return the spans that *span* links to."""
    return {(link.context.trace_id, link.context.span_id) for link in span.links}


def test_an_event_is_one_story_from_the_request_to_the_acknowledgement(
    bench: Bench, recorded: Recorded
) -> None:
    """Each span has the name, the kind and the attributes of the conventions."""
    request = place(bench, recorded, 7)
    consumer = bench.consumer()
    seen: list[Message] = []
    current: list[Any] = []

    @consumer.on("orders")
    @idempotent
    def handle(order: OrderPlaced, message: Message, session: Session) -> None:
        seen.append(message)
        current.append(trace.get_current_span().get_span_context())
        Outbox(source="billing").add(session, {"paid": order.order}, topic="payments")

    with running(consumer):
        until(lambda: consumer.tally.handled == 1, "handled")
        recorded.one("ack orders")
    create, send = recorded.one("create orders"), recorded.one("send orders")
    receive, process = recorded.one("receive orders"), recorded.one("process orders")
    attempt, after = recorded.one("attempt"), recorded.one("create payments")

    assert create.parent is not None
    assert create.parent.span_id == request.get_span_context().span_id
    assert create.kind is SpanKind.PRODUCER
    assert seen[0].traceparent is not None
    assert f"{context_of(create)[1]:016x}" in seen[0].traceparent  # never overwritten
    for span, kind in [
        (send, SpanKind.CLIENT), (receive, SpanKind.CLIENT), (process, SpanKind.CONSUMER),
        (recorded.one("ack orders"), SpanKind.CLIENT),
    ]:  # fmt: skip
        assert span.kind is kind, span.name
        assert linked(span) == {context_of(create)}, span.name
        assert span.parent is None, span.name
        name, operation = span.name.split()[0], "settle" if "ack" in span.name else None
        assert attributes(
            span, "messaging.operation.name", "messaging.operation.type",
            "messaging.destination.name", "messaging.message.id",
        ) == [name, operation or name, "orders", seen[0].id]  # fmt: skip
        assert attributes(span, "messaging.system")[0]
        assert span.status.status_code is StatusCode.UNSET
    assert attributes(process, "messaging.consumer.group.name", "holdfast.outcome") == [
        "g", "handled",
    ]  # fmt: skip
    assert attributes(process, "messaging.message.conversation_id") == [seen[0].correlation_id]
    assert attempt.parent is not None
    assert attempt.parent.span_id == context_of(process)[1]
    assert (current[0].trace_id, current[0].span_id) == context_of(attempt)
    assert after.parent is not None
    assert after.parent.span_id == context_of(attempt)[1]


def test_an_event_of_a_request_is_in_its_callers_trace(bench: Bench, recorded: Recorded) -> None:
    """Although nobody instruments the web server; a span of the program's own counts more."""

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        with Session(bench.engine) as session, session.begin():
            Outbox(source="shop").add(session, OrderPlaced(1), topic=environ["PATH_INFO"])
        return []

    served = WsgiCorrelationMiddleware(app)
    headers = {
        "HTTP_TRACEPARENT": f"00-{0xABC:032x}-{0xDEF:016x}-01", "HTTP_TRACESTATE": "shop=1",
    }  # fmt: skip
    served({**headers, "PATH_INFO": "orders"}, print)
    with recorded.tracer.start_as_current_span("GET /") as own:
        served({**headers, "PATH_INFO": "refunds"}, print)
    create, inner = recorded.one("create orders"), recorded.one("create refunds")
    assert create.parent is not None
    assert (create.parent.trace_id, create.parent.span_id) == (0xABC, 0xDEF)
    assert create.context.trace_state.get("shop") == "1"
    assert inner.parent is not None
    assert inner.parent.span_id == own.get_span_context().span_id


def test_failed_attempts_and_the_dead_letter_are_told_without_secrets(
    bench: Bench, recorded: Recorded
) -> None:
    """Each attempt has its error; the creation context is in the letter."""
    place(bench, recorded, 7)
    consumer = bench.consumer()

    @consumer.on("orders")
    @dead_letter()
    @retry(FAST)
    def handle(order: OrderPlaced) -> None:
        raise ValueError("no way to postgresql://shop:hunter2@db/shop")

    with running(consumer):
        until(lambda: consumer.tally.dead_lettered == 1, "dead-lettered")
        process = recorded.one("process orders")
    attempts = recorded.named("attempt")
    assert [attributes(one, "holdfast.attempt", "error.type") for one in attempts] == [
        [1, "ValueError"], [2, "ValueError"],
    ]  # fmt: skip
    assert attributes(process, "holdfast.outcome", "error.type") == ["dead_lettered", "ValueError"]
    assert process.status.status_code is StatusCode.ERROR
    told = {event.name: dict(event.attributes or {}) for event in process.events}
    (letter,) = bench.letters
    assert told["dead letter"] == {"holdfast.dead_letter.id": letter.dlq_id}
    assert "no way to" in str(told["exception"]["exception.message"])
    everything = "".join(span.to_json() for span in [process, *attempts])
    assert "hunter2" not in everything
    assert f"{context_of(recorded.one('create orders'))[1]:016x}" in letter.traceparent


@pytest.mark.parametrize("whole", [True, False])
def test_a_batch_links_to_all_that_created_its_messages(
    bench: Bench, recorded: Recorded, *, whole: bool
) -> None:
    """A list is one span for all; single calls are a span each."""
    place(bench, recorded, *range(5))
    consumer = bench.consumer()

    def one(order: OrderPlaced, session: Session) -> None:
        bench.note(session, str(order.order))

    def many(orders: list[OrderPlaced], session: Session) -> None:
        for order in orders:
            one(order, session)

    consumer.on("orders", batch=Batches(size=50, whole=whole))(idempotent(many if whole else one))
    with running(consumer):
        until(lambda: consumer.tally.handled == 5, "handled")
        until(lambda: sum(len(s.links) for s in recorded.named("ack orders")) == 5, "settled")
    created = {context_of(span) for span in recorded.named("create orders")}
    assert len(created) == 5
    for name in ("send orders", "receive orders", "process orders", "ack orders"):
        spans = recorded.named(name)
        assert set().union(*(linked(span) for span in spans)) == created, name
        for span in spans:
            count = attributes(span, "messaging.batch.message_count")[0]
            assert count == (len(span.links) if len(span.links) > 1 else None), name
    if not whole:
        assert len(recorded.named("process orders")) == 5


def test_a_batch_larger_than_a_spans_links_has_several_spans(
    bench: Bench, recorded: Recorded
) -> None:
    """No link gets lost."""
    place(bench, recorded, *range(300))
    created = {context_of(span) for span in recorded.named("create orders")}
    assert len(created) == 300
    spans = recorded.named("send orders")
    assert set().union(*(linked(span) for span in spans)) == created
    assert max(len(span.links) for span in spans) <= 128


def test_with_parent_the_handling_is_in_the_trace_of_the_creation(
    bench: Bench, recorded: Recorded
) -> None:
    """As asked for; a link besides would say it twice."""
    enable(recorded.provider, parent=True)
    place(bench, recorded, 7)
    consumer = bench.consumer()

    @consumer.on("orders")
    def handle(order: OrderPlaced) -> None:
        pass

    with running(consumer):
        until(lambda: consumer.tally.handled == 1, "handled")
    create, process = recorded.one("create orders"), recorded.one("process orders")
    assert process.parent is not None
    assert (process.parent.trace_id, process.parent.span_id) == context_of(create)
    assert not process.links


def test_a_loop_of_the_users_own_is_traced_as_well(bench: Bench, recorded: Recorded) -> None:
    """Sync and async."""
    consumer = bench.consumer()

    @consumer.on("orders")
    def handle(order: OrderPlaced) -> None:
        pass

    @consumer.on("refunds")
    async def refund(order: OrderPlaced) -> None:
        pass

    import asyncio

    consumer.handler("orders").handle(Message.new("orders", b'{"order":1}'))
    asyncio.run(consumer.handler("refunds").handle_async(Message.new("refunds", b'{"order":1}')))
    for name in ("process orders", "process refunds"):
        assert attributes(recorded.one(name), "holdfast.outcome") == ["handled"]
    assert len(recorded.named("attempt")) == 2


def test_client_instrumentation_makes_no_spans_beside_ours(
    bench: Bench, recorded: Recorded
) -> None:
    """What a client library's instrumentation begins inside of our calls is not kept."""
    seen: list[bool] = []
    sink = bench.broker.sink()
    publish = sink.publish

    def instrumented(messages: Any) -> Any:
        with recorded.tracer.start_as_current_span("orders send", kind=SpanKind.PRODUCER) as span:
            seen.append(span.is_recording())
            return publish(messages)

    sink.publish = instrumented  # type: ignore[method-assign]
    with (
        recorded.tracer.start_as_current_span("request"),
        Session(bench.engine) as session,
        session.begin(),
    ):
        Outbox(source="shop").add(session, OrderPlaced(1), topic="orders")
    Relay(LeaseEngine(bench.engine, sink)).run_once()
    assert seen == [False]
    assert "orders send" not in recorded.names
    assert "send orders" in recorded.names


def test_the_steps_of_a_saga_are_told_and_its_commands_belong_to_them(
    tmp_path: Path, recorded: Recorded
) -> None:
    """Each transition is a span; the command that it sends is created inside of it."""
    saga = order_saga()
    shop = Shop(f"sqlite:///{tmp_path}/saga.db", saga)
    shop.start(saga, OrderState("o1"), "o1")
    shop.settle()
    assert shop.result("o1").status == "completed"
    shop.close()
    steps = {context_of(span): span for span in recorded.named("saga order")}
    told = [attributes(span, "saga.event", "saga.step", "saga.key") for span in steps.values()]
    assert ["Started", "", "o1"] in told
    assert ["Answered", "ship", "o1"] in told
    for topic in ("inventory", "payment", "shipping"):
        create = recorded.one(f"create {topic}")
        assert create.parent is not None
        assert (create.parent.trace_id, create.parent.span_id) in steps


def test_while_tracing_is_off_nothing_is_recorded(bench: Bench, recorded: Recorded) -> None:
    """The message still carries the span that the program made it in."""
    disable()
    assert switch.spans is None
    request = place(bench, recorded, 7)
    consumer = bench.consumer()
    seen: list[Message] = []

    @consumer.on("orders")
    def handle(order: OrderPlaced, message: Message) -> None:
        seen.append(message)

    with running(consumer):
        until(lambda: consumer.tally.handled == 1, "handled")
    assert recorded.names == {"POST /orders"}
    assert f"{request.get_span_context().span_id:016x}" in (seen[0].traceparent or "")
