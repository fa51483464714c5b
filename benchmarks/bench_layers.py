"""Decorators on the success path against a bare call and their peers.

FastStream has no retry and no breaker of its own; what it offers is a chain of middlewares.
So layers that do nothing are measured beside middlewares that do nothing.

The budgets are absolute, so the processor time of this thread is measured, the best of
several short runs: neighbours on the machine would drown a microsecond otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pybreaker
import pydantic
import stamina
import tenacity
from faststream import BaseMiddleware
from faststream.nats import NatsBroker, TestNatsBroker
from faststream.nats.testing import build_message

from figures import Figure, Goal, compare
from holdfast.call import Call, Stage
from holdfast.circuit import Breaker, CircuitPolicy, LastCalls, circuit
from holdfast.cloudevents import from_wire, to_wire
from holdfast.consumer import Attempt, Consumer
from holdfast.dlq import dead_letter
from holdfast.layer import Layer
from holdfast.message import Message
from holdfast.pipeline import Handler
from holdfast.retry import Budget, retry, timeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

_NUMBER, _RUNS = 5_000, 15


def work(value: int) -> int:
    return value


def cost(function: Callable[..., Any]) -> float:
    """Return the nanoseconds of processor time of one call."""
    return min(_one_run(function) for _ in range(_RUNS))


def overhead(function: Callable[..., Any]) -> Callable[[], float]:
    """Return a measurement of what *function* costs beyond the bare call."""
    for _ in range(200):  # the window fills, the interpreter specialises
        function(1)
    return lambda: cost(function) - cost(work)


def _one_run(function: Callable[..., Any]) -> float:
    start = time.thread_time_ns()
    for _ in range(_NUMBER):
        function(1)
    return (time.thread_time_ns() - start) / _NUMBER


def microsecond() -> float:
    return 1_000.0


def figures() -> Iterator[Figure]:
    """Measure each decorator alone, then a whole stack."""
    logging.getLogger("stamina").setLevel(logging.ERROR)
    ours = {
        "empty plan": Handler((), work),
        "retry": retry()(work),
        "breaker": circuit("bench", breaker=Breaker("bench"))(work),
    }
    stack = retry(deadline=10, budget=Budget())(
        timeout(5)(circuit("bench", breaker=Breaker("bench"))(work))
    )
    for name, function in ours.items():
        yield _figure(
            f"{name}: overhead against 1 µs",
            function,
            microsecond,
            Goal(at_most=1.0),
            "success path beyond a bare call",
        )
    yield _figure(
        "retry with deadline and budget, timeout, breaker: overhead against 5 µs",
        stack,
        lambda: 5_000.0,
        Goal(at_most=1.0),
        "success path of four layers beyond a bare call",
    )
    yield from compiled_plans()
    yield _figure(
        "breaker with one failure in its window: overhead against 1 µs",
        _unsteady(),
        microsecond,
        Goal(),
        "success path beyond a bare call, while the window has to be written",
    )
    peers: dict[str, tuple[str, Callable[..., Any]]] = {
        "tenacity": ("retry", tenacity.retry(stop=tenacity.stop_after_attempt(5))(work)),
        "stamina": ("retry", stamina.retry(on=ValueError, attempts=5)(work)),
        "pybreaker": ("breaker", pybreaker.CircuitBreaker()(work)),
    }
    for peer, (name, theirs) in peers.items():
        yield _figure(
            f"{name} against {peer}",
            ours[name],
            overhead(theirs),
            Goal(at_most=0.5),
            f"success path beyond a bare call; the peer is {peer}",
        )

    yield from beside_faststream()


def _unsteady() -> Callable[..., Any]:
    """Return a guarded function whose window always holds a failure."""
    breaker = Breaker("unsteady", CircuitPolicy(window=LastCalls(100), minimum_calls=100))
    guarded_work, calls = circuit("unsteady", breaker=breaker)(work), itertools.count()

    def call(value: int) -> int:
        if next(calls) % 90 == 0:
            breaker.failed(breaker.admit())
        result: int = guarded_work(value)
        return result

    return call


def compiled_plans() -> Iterator[Figure]:
    """Measure what a consumer makes of a handler, message by message, against the bare call."""

    def plain(order: Order) -> None: ...

    def asking(order: Order, message: Message, attempt: Attempt) -> None: ...

    for name, handler in (("a payload", plain), ("payload, message and attempt", asking)):
        consumer = Consumer("memory:", group="bench")
        consumer.on("orders")(dead_letter()(guarded(handler)))
        plan = consumer._routes["orders"].plan
        message = Message.new("orders", b'{"number":1}', key="k")

        def run(_value: int, plan: Any = plan, message: Message = message) -> Any:
            return plan.run(Call((), {}, message=message, consumer="bench/handle"))

        yield _figure(
            f"compiled plan of a handler that asks for {name}: overhead against 5 µs",
            run,
            lambda: 5_000.0,
            Goal(at_most=1.0) if handler is plain else Goal(),
            "JSON decoded to a typed payload, dead letters, retry with deadline and budget, "
            "timeout, breaker, injection; no database, tracing off; beyond a bare call",
        )


class Passing(BaseMiddleware):
    """A middleware of FastStream that does nothing."""

    async def consume_scope(self, call_next: Any, msg: Any) -> Any:
        return await call_next(msg)


class Idle(Layer):
    """A layer that is told of everything and does nothing."""

    label: ClassVar[str] = "idle"

    def enter(self, call: Call) -> None: ...
    def leave(self, call: Call) -> None: ...


class Order(msgspec.Struct):
    number: int


class Body(pydantic.BaseModel):
    number: int


async def work_async(value: int) -> int:
    return value


async def handle(order: Order) -> None:
    """Stand for a handler of a typed payload."""


def guarded(function: Callable[..., Any]) -> Any:
    """Return *function* with the four layers that are measured."""
    breaker = Breaker("bench")
    return retry(deadline=10, budget=Budget())(
        timeout(5)(circuit("bench", breaker=breaker)(function))
    )


def beside_faststream() -> Iterator[Figure]:
    """Measure four layers as such, then a message's whole way from its bytes to the handler."""
    chain = [type(f"Passing{n}", (Passing,), {}) for n in range(4)]
    stages = (Stage.TRACE, Stage.METRICS, Stage.SETTLE, Stage.ATTEMPT)
    kinds = [type(f"Idle{n}", (Idle,), {"stage": stage}) for n, stage in enumerate(stages)]
    ours = Handler([kind() for kind in kinds], work_async)

    async def theirs(value: int) -> Any:
        call: Any = work_async  # put together for each message, as FastStream does
        for middleware in chain:
            call = partial(middleware(value, context=None).consume_scope, call)
        return await call(value)

    yield compare(
        "async: four layers that do nothing, against FastStream",
        ours=lambda: cost_async(lambda: ours(1)) - cost_async(lambda: work_async(1)),
        peer=lambda: cost_async(lambda: theirs(1)) - cost_async(lambda: work_async(1)),
        unit="ns",
        goal=Goal(at_most=1.0),
        detail="beyond a bare await; ours are told before and after the call, the peer is four "
        "middlewares of FastStream that only call the next, without its parsing and injection",
    )
    yield compare(
        "async: a message from its bytes to the handler, against FastStream",
        ours=_our_way,
        peer=_their_way,
        unit="ns",
        goal=Goal(at_most=0.5),
        detail="no broker, no database: headers and JSON read, typed payload, four layers, the "
        "handler; ours: from_wire and Consumer.handler(), the peer: process_message of a NATS "
        "subscriber in FastStream's own test broker, a pydantic model, four middlewares that only "
        "call the next",
    )


def _our_way() -> float:
    consumer = Consumer("memory:", group="bench")
    consumer.on("orders")(guarded(handle))
    handler = consumer.handler("orders")
    headers = to_wire(Message.new("orders", b'{"number":1}', key="k"))
    read = partial(from_wire, topic="orders", key=b"k", body=b'{"number":1}', headers=headers,
                   fallback_id=lambda: "", fallback_time=lambda: None)  # fmt: skip
    return cost_async(lambda: handler.handle_async(read()))


def _their_way() -> float:
    broker = NatsBroker(
        logger=None, middlewares=[type(f"Passing{n}", (Passing,), {}) for n in range(4)]
    )

    @broker.subscriber("orders")
    async def handle(order: Body) -> None: ...

    async def measured() -> float:
        async with TestNatsBroker(broker):
            (subscriber,) = broker.subscribers
            message = await build_message({"number": 1}, "orders")
            return await _cost_async(lambda: subscriber.process_message(message), 300)

    return asyncio.run(measured())


def cost_async(call: Callable[[], Awaitable[Any]]) -> float:
    """Return the nanoseconds of processor time of one awaited call."""
    return asyncio.run(_cost_async(call, _NUMBER // 5))


async def _cost_async(call: Callable[[], Awaitable[Any]], number: int) -> float:
    best = float("inf")
    for _ in range(_RUNS + 1):  # the first warms up
        start = time.process_time_ns()  # what a side does in other threads counts as well
        for _ in range(number):
            await call()
        best = min(best, (time.process_time_ns() - start) / number)
    return best


def _figure(
    name: str, function: Callable[..., Any], peer: Callable[[], float], goal: Goal, detail: str
) -> Figure:
    return compare(name, ours=overhead(function), peer=peer, unit="ns", goal=goal, detail=detail)
