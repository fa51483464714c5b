"""The whole trace context of an event survives its way: `tracestate` beside `traceparent`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from holdfast import Message, Transient
from holdfast.consumer import Attempt  # noqa: TC001 - asked for by its type
from holdfast.dlq import dead_letter
from holdfast.outbox import Outbox
from holdfast.outbox import create_tables as create_outbox
from holdfast.retry import Backoff, retry
from tests.consuming import Bench, running
from tests.shell import shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STATE = "vendor=00f067aa0ba902b7,other=1"
PARENT = f"00-{0xABC:032x}-{0xDEF:016x}-01"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a database with an outbox."""
    made = Bench(tmp_path, f"sqlite:///{tmp_path}/app.db")
    create_outbox(made.engine)
    yield made
    made.close()


def stage(bench: Bench, *, delay: float | None) -> None:
    """Add an event within a span of a traced request."""
    state = TraceState.from_header([STATE])
    context = SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(1),
                          trace_state=state)  # fmt: skip
    with trace.use_span(NonRecordingSpan(context)), bench.engine.begin() as db:
        Outbox(source="shop").add(db, "order", topic="orders", key="k", delay=delay)


def holdfast(bench: Bench, *args: str) -> None:
    """Run a command on the database and the broker."""
    url = bench.engine.url.render_as_string(hide_password=False)
    ended = shell(*args, "--database", url, "--broker", f"sqlite:///{bench.broker_file}")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("delay", [None, 0.01], ids=["at once", "delayed"])
def test_tracestate_goes_the_whole_way_with_its_event(bench: Bench, delay: float | None) -> None:
    """Through outbox, delay, broker, retry, dead letter and replay; what follows inherits it."""
    stage(bench, delay=delay)
    holdfast(bench, "relay", "--once")
    seen: list[tuple[str, str | None, str | None]] = []
    is_fixed = False
    consumer = bench.consumer()

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.01, attempts=3))
    def handle(order: str, message: Message, attempt: Attempt) -> None:
        follow = Message.new("bills", b"{}")
        assert (follow.traceparent, follow.tracestate) == (message.traceparent, message.tracestate)
        way = "replay" if message.is_replay else f"attempt {attempt.number}"
        seen.append((way, message.traceparent, message.tracestate))
        if attempt.number == 1 and not is_fixed:
            raise Transient("not yet")
        if not is_fixed:
            raise ValueError("a bug")

    consumer.run(until_idle=True)
    is_fixed = True
    with running(consumer):
        holdfast(bench, "dlq", "replay", "--group", "g", "--yes", "--reason", "fixed")
    assert seen == [
        (way, PARENT, STATE) for way in ("attempt 1", "attempt 2", "attempt 3", "replay")
    ]
