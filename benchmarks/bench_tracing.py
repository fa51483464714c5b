"""What tracing and metrics cost: nothing while they are off, and little more than the SDK's own.

Processor time of this thread is measured, the best of several short runs: neighbours on the
machine would drown a microsecond otherwise. "Without" is the same code with every look at the
switches taken out of it, so that the price of the looks themselves is told.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import Link, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from figures import Figure, Goal, against, compare
from holdfast.call import Call
from holdfast.circuit import Breaker, circuit
from holdfast.consumer import Consumer
from holdfast.consumer.attempt.executor import AttemptExecutor
from holdfast.consumer.own_loop import MessageHandler
from holdfast.dlq import dead_letter
from holdfast.message import Message
from holdfast.metrics import Observed
from holdfast.ports import Published
from holdfast.retry import Budget, retry, timeout
from holdfast.tracing import disable, disable_metrics, enable, enable_metrics
from holdfast.tracing.messaging import MESSAGING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NUMBER, _RUNS, _WARM_UP = 1_000, 15, 50
_BATCH = 2_000
_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LOOKS = (
    (AttemptExecutor, "prepare"), (AttemptExecutor, "run"), (AttemptExecutor, "ended"),
    (AttemptExecutor, "measure"), (MessageHandler, "handle"), (Observed, "observe"),
)  # fmt: skip
"""Where a message on its way asks whether somebody traces it or hears of its metrics."""


class Order(msgspec.Struct):
    number: int


def cost(function: Callable[[], Any]) -> float:
    """Return the nanoseconds of processor time of one call."""
    return min(_one_run(function) for _ in range(_RUNS))


def _one_run(function: Callable[[], Any]) -> float:
    start = time.thread_time_ns()
    for _ in range(_NUMBER):
        function()
    return (time.thread_time_ns() - start) / _NUMBER


def figures() -> Iterator[Figure]:
    """Measure off, then on."""
    disable()
    disable_metrics()
    consumer = Consumer("memory:", group="bench")

    @consumer.on("orders")
    @dead_letter()
    @retry(deadline=10, budget=Budget())
    @timeout(5)
    @circuit("bench", breaker=Breaker("bench"))
    def handle(order: Order) -> None: ...

    message = Message.new("orders", b'{"number":1}', key="k").with_(traceparent=_TRACE)
    plan, handler = consumer._routes["orders"].plan, consumer.handler("orders")

    def run() -> Any:
        return plan.run(Call((), {}, message=message, consumer="bench/handle"))

    def one() -> Any:
        return handler.handle(message)

    for _ in range(200):  # the window fills, the interpreter specialises
        run()
        one()
    yield compare(
        "compiled plan, tracing and metrics off: overhead against 5 µs",
        ours=lambda: cost(run) - cost(_nothing),
        peer=lambda: 5_000.0,
        unit="ns",
        goal=Goal(at_most=1.0),
        detail="JSON decoded to a typed payload, dead letters, retry with deadline and budget, "
        "timeout, breaker; no database; beyond a bare call",
    )
    with_looks, without = _in_turns(one)
    yield against(
        "a message with tracing and metrics off, against the same code without the switches",
        with_looks,
        without,
        unit="ns",
        goal=Goal(at_most=1.02),
        detail="Consumer.handler(), the same layers, Prometheus counts; the peer has every look at "
        "the switches of spans and meters compiled out",
    )
    yield from _spans_on(one, message)
    yield from _metrics_on(one)


def _nothing() -> None: ...


def _spans_on(one: Callable[[], Any], message: Message) -> Iterator[Figure]:
    provider = TracerProvider()
    provider.add_span_processor(SpanProcessor())
    tracer = provider.get_tracer("by hand")

    def traced() -> float:
        off = cost(one)
        enable(provider)
        try:
            return cost(one) - off
        finally:
            disable()

    def by_hand() -> float:
        # Around the same message: alone, in warm caches, the SDK looks a quarter cheaper.
        off = cost(one)
        return cost(lambda: _by_hand(tracer, message, one)) - off

    yield compare(
        "spans on, against the same spans made by hand",
        ours=traced,
        peer=by_hand,
        unit="ns",
        goal=Goal(at_most=1.3),
        detail="two spans for a message, process and attempt, with attributes and a link to the "
        "span that created it; beyond the same message with tracing off, the peer is the "
        "plain SDK; a processor that keeps nothing on both sides",
    )


def _by_hand(tracer: trace.Tracer, message: Message, handle: Callable[[], Any]) -> None:
    """Handle *message* within spans, as one who knows the conventions writes them by hand."""
    about = {
        "messaging.message.id": message.id,
        "holdfast.message.type": message.type,
        "messaging.message.conversation_id": message.correlation_id or "",
    }
    carrier = {"traceparent": message.traceparent}
    origin = trace.get_current_span(_propagator.extract(carrier, Context())).get_span_context()
    attributes = {
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": message.topic,
        "messaging.system": "memory",
        "messaging.consumer.group.name": "bench",
        **about,
    }
    span = tracer.start_span(
        f"process {message.topic}", Context(), SpanKind.CONSUMER, attributes, [Link(origin, about)]
    )
    with tracer.start_as_current_span(
        "attempt", trace.set_span_in_context(span), attributes={"holdfast.attempt": 1}
    ):
        handle()
    span.set_attribute("holdfast.outcome", "handled")
    span.end()


_propagator = TraceContextTextMapPropagator()


def _metrics_on(one: Callable[[], Any]) -> Iterator[Figure]:
    provider = MeterProvider([InMemoryMetricReader()])

    def told() -> float:
        enable_metrics(provider)
        try:
            return cost(one)
        finally:
            disable_metrics()

    yield compare(
        "a message whose metrics OpenTelemetry hears, against off",
        ours=told,
        peer=lambda: cost(one),
        unit="ns",
        goal=Goal(),
        detail="two histograms are told each value, everything else is read when it is collected",
    )
    messages = [Message.new("orders", b"", key="k") for _ in range(_BATCH)]
    results = [Published()] * _BATCH

    def counted() -> float:
        start = time.thread_time_ns()
        for _ in range(20):
            MESSAGING.sent("kafka", messages, results, 0.01)
        return (time.thread_time_ns() - start) / 20 / _BATCH

    yield compare(
        "counting what is sent, per message, against 1 µs",
        ours=counted,
        peer=lambda: 1_000.0,
        unit="ns",
        goal=Goal(at_most=0.2),
        detail=f"batches of {_BATCH} messages of one topic, as a relay publishes them",
    )


def _in_turns(function: Callable[[], Any]) -> tuple[list[float], list[float]]:
    """Return what *function* costs with and without looks, measured in turns: 2 % is not much."""
    seeing, blind = [], []
    for _ in range(9):
        best = {True: float("inf"), False: float("inf")}
        for turn in range(_RUNS):
            for look in (True, False) if turn % 2 else (False, True):
                with _compiled_anew(look=look):
                    for _ in range(_WARM_UP):
                        function()
                    best[look] = min(best[look], _one_run(function))
        seeing.append(best[True])
        blind.append(best[False])
    return seeing, blind


@contextmanager
def _compiled_anew(*, look: bool) -> Iterator[None]:
    """Replace what looks at the switches, by the same or by the same without a *look*.

    By the same as well: the interpreter specialises code that is new sooner than code whose class
    has just been changed.
    """
    kept = [(owner, name, getattr(owner, name)) for owner, name in LOOKS]
    for owner, name, method in kept:
        setattr(owner, name, _compiled(method, look=look))
    try:
        yield
    finally:
        for owner, name, method in kept:
            setattr(owner, name, method)


def _compiled(method: Any, *, look: bool) -> Any:
    tree = ast.parse(
        "from __future__ import annotations\n" + textwrap.dedent(inspect.getsource(method))
    )
    if not look:
        found = _Off()
        tree = ast.fix_missing_locations(found.visit(tree))
        assert found.removed, f"{method.__qualname__} looks at no switch"
    made: dict[str, Any] = {}
    exec(compile(tree, method.__code__.co_filename, "exec"), method.__globals__, made)  # noqa: S102
    return made[method.__name__]


class _Off(ast.NodeTransformer):
    """Takes out each look at a switch, as if it had found it off."""

    removed = 0

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if (off := _when_off(node.test)) is None:
            return node
        self.removed += 1
        return (node.body if off else node.orelse) or None

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        self.generic_visit(node)
        if (off := _when_off(node.test)) is None:
            return node
        self.removed += 1
        return node.body if off else node.orelse


def _when_off(test: ast.expr) -> bool | None:
    """Return what *test* of a switch says while it is off; None if it is none of a switch."""
    text = ast.unparse(test)
    if text in ("span is None", "switch.spans is None"):
        return True
    on = ("run.span is not None", "switch.spans is not None", "link is not None or recorders")
    return False if text in on else None
