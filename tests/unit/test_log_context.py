"""Log lines say which message, correlation and trace they belong to."""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from holdfast import Consumer, Message
from holdfast.brokers import connect
from holdfast.tracing import JsonFormatter, LogContext, correlated
from tests.consuming import running, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Add the filter to a handler of the user's own, and read what it wrote."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(LogContext(service="billing"))
    log = logging.getLogger("shop")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    log.removeHandler(handler)


def test_every_line_of_a_handler_says_what_it_handles(
    lines: Callable[[], list[dict[str, Any]]],
) -> None:
    """Also of functions that it calls; the payload is in none of them."""
    broker = connect("memory:")
    broker.create_topic("orders", partitions=1)
    sent = Message.new("orders", b'{"card":"4111"}', key="k", type="OrderPlaced")
    sink = broker.sink()
    sink.publish([sent])
    consumer = Consumer(broker, group="billing")
    log = logging.getLogger("shop.charging")

    @consumer.on("orders")
    def handle(order: dict[str, str]) -> None:
        log.info("charging", extra={"topic": "its own"})

    with running(consumer):
        until(lambda: consumer.tally.handled == 1, "handled")
    broker.close()
    (line,) = lines()
    assert line["message"] == "charging"
    assert line["service"] == "billing"
    assert line["message_id"] == sent.id
    assert line["event_type"] == "OrderPlaced"
    assert line["correlation_id"] == sent.correlation_id
    assert line["topic"] == "its own"  # what the program says itself stays
    assert line["duration_ms"] >= 0
    assert "4111" not in json.dumps(line)


def test_a_line_of_a_request_has_its_correlation_and_one_of_nothing_has_none(
    lines: Callable[[], list[dict[str, Any]]],
) -> None:
    """No field is made up."""
    log = logging.getLogger("shop")
    with correlated("req-1"):
        log.info("inside")
    log.info("outside")
    inside, outside = lines()
    assert inside["correlation_id"] == "req-1"
    assert set(outside) == {"time", "level", "logger", "message", "service"}


def test_a_line_within_a_span_names_it(lines: Callable[[], list[dict[str, Any]]]) -> None:
    """By the ids that a tracing backend shows."""
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("work") as span:
        logging.getLogger("shop").info("inside")
    (line,) = lines()
    context = span.get_span_context()
    assert line["trace_id"] == f"{context.trace_id:032x}"
    assert line["span_id"] == f"{context.span_id:016x}"
