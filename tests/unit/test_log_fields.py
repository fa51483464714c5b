"""Every line within a handler has its fields, however the handler is run."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from holdfast import Batches, Consumer, Message, idempotent
from holdfast.brokers import connect
from holdfast.tracing import JsonFormatter, LogContext, disable, enable
from holdfast.tracing.logs import MOST_LISTED
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

log = logging.getLogger("shop.charging")
FIELDS = {"service", "message_id", "event_type", "topic", "correlation_id", "duration_ms"}


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Add the filter to a handler of the user's own, and read what it wrote."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(LogContext(service="billing"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    log.removeHandler(handler)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Return a bench on SQLite, with a broker in memory."""
    made = Bench(tmp_path, f"sqlite:///{tmp_path}/shop.db", broker=connect("memory:"))
    yield made
    made.close()


def orders(count: int = 1) -> list[Message]:
    """Return messages whose payload nobody may read in a log."""
    body = b'{"card": "4111-1111"}'
    return [Message.new("orders", body, key="k", type="OrderPlaced") for _ in range(count)]


def charge(order: dict[str, str]) -> None:
    """Handle one order."""
    log.info("charging")


async def charge_async(order: dict[str, str]) -> None:
    """Handle one order on a loop."""
    await asyncio.sleep(0)
    log.info("charging")


def run(consumer: Consumer, count: int) -> None:
    """Run *consumer* until it has handled so many."""
    with running(consumer):
        until(lambda: consumer.tally.handled == count, "handled")


def checked(line: dict[str, Any], sent: Message) -> None:
    """Check that *line* says what it belongs to."""
    assert set(line) >= FIELDS
    assert line["service"] == "billing"
    assert (line["message_id"], line["event_type"]) == (sent.id, "OrderPlaced")
    assert (line["topic"], line["correlation_id"]) == ("orders", sent.correlation_id)
    assert line["duration_ms"] >= 0
    assert "4111" not in json.dumps(line)


@pytest.mark.parametrize("handler", [charge, charge_async])
def test_a_handler_of_the_consumer(bench: Bench, lines: Any, handler: Any) -> None:
    """In a thread, or on the loop."""
    consumer = bench.consumer()
    consumer.on("orders")(handler)
    (sent,) = orders()
    bench.send(sent)
    run(consumer, 1)
    (line,) = lines()
    checked(line, sent)


@pytest.mark.parametrize("handler", [charge, charge_async])
def test_a_loop_of_the_users_own(bench: Bench, lines: Any, handler: Any) -> None:
    """Whoever polls, the handler's lines are the same."""
    consumer = bench.consumer()
    consumer.on("orders")(handler)
    (sent,) = orders()
    own = consumer.handler("orders")
    if handler is charge:
        own.handle(sent)
    else:
        asyncio.run(own.handle_async(sent))
    (line,) = lines()
    checked(line, sent)


def test_a_batch_of_single_calls(bench: Bench, lines: Any) -> None:
    """Each line is of its own message."""
    consumer = bench.consumer()
    consumer.on("orders", batch=Batches(size=10))(idempotent(charge))
    sent = orders(3)
    bench.send(*sent)
    run(consumer, 3)
    for line, one in zip(lines(), sent, strict=True):
        checked(line, one)


def test_a_list_names_its_messages_in_bounds(bench: Bench, lines: Any) -> None:
    """Nobody's line is longer for a longer list."""
    consumer = bench.consumer()

    @consumer.on("orders", batch=Batches(size=500, whole=True))
    @idempotent
    def charge_all(found: list[dict[str, str]]) -> None:
        log.info("charging %d", len(found))

    sent = orders(25)
    bench.send(*sent)
    run(consumer, 25)
    found = lines()
    assert sum(line["messages"] for line in found) == 25
    names = [one.id for one in sent]
    for line in found:
        assert line["topic"] == "orders"
        assert line["event_types"] == ["OrderPlaced"]
        assert line["duration_ms"] >= 0
        assert len(line["message_ids"]) == min(line["messages"], MOST_LISTED)
        assert set(line["message_ids"]) <= set(names)
        assert len(line["correlation_ids"]) == len(line["message_ids"])
        assert "4111" not in json.dumps(line)


def test_a_line_of_a_traced_handler_is_within_its_attempt(bench: Bench, lines: Any) -> None:
    """A backend finds the line by the span, and the span by the line."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    enable(provider)
    try:
        consumer = bench.consumer()
        consumer.on("orders")(charge)
        bench.send(*orders())
        run(consumer, 1)
    finally:
        disable()
    (line,) = lines()
    spans = {f"{one.context.span_id:016x}": one for one in exporter.get_finished_spans()}
    attempt = spans[line["span_id"]]
    assert attempt.name == "attempt"
    assert line["trace_id"] == f"{attempt.context.trace_id:032x}"
