"""Decorators on the success path against a bare call and their peers.

The budgets are absolute, so the processor time of this thread is measured, the best of
several short runs: neighbours on the machine would drown a microsecond otherwise.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import pybreaker
import stamina
import tenacity

from figures import Figure, Goal, compare
from holdfast.circuit import Breaker, circuit
from holdfast.plan import Handler
from holdfast.retry import Budget, retry, timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def _figure(
    name: str, function: Callable[..., Any], peer: Callable[[], float], goal: Goal, detail: str
) -> Figure:
    return compare(name, ours=overhead(function), peer=peer, unit="ns", goal=goal, detail=detail)
