"""A measured figure beside its peer, and how the two are taken in one run."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from profiles import explained

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the results: ours against a peer or a raw floor, and the goal for the ratio."""

    name: str
    ours: float
    peer: float
    unit: str
    ratio: float
    goal: str
    met: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A bound on the ratio ours / peer, e.g. Goal(at_least=0.8); None: only recorded."""

    at_least: float | None = None
    at_most: float | None = None

    def met(self, ratio: float) -> bool:
        """Whether *ratio* keeps the goal."""
        return (self.at_least is None or ratio >= self.at_least) and (
            self.at_most is None or ratio <= self.at_most
        )

    def __str__(self) -> str:
        bounds = [
            f"≥ {self.at_least:g}" if self.at_least is not None else "",
            f"≤ {self.at_most:g}" if self.at_most is not None else "",
        ]
        return " and ".join(b for b in bounds if b) or "recorded"


def compare(
    name: str,
    *,
    ours: Callable[[], float],
    peer: Callable[[], float],
    unit: str,
    goal: Goal,
    detail: str,
    rounds: int = 5,
) -> Figure:
    """Measure *ours* and *peer* alternately; the ratio is the median of per-round ratios.

    Each callable runs once and returns its figure (a rate, or a time). Neighbours' load
    on the machine hits both sides of a round alike, so only the ratio means anything. A
    missed goal carries a profile of *ours*.
    """
    found = contest({"ours": ours, "peer": peer}, rounds)
    figure = against(name, found["ours"], found["peer"], unit=unit, goal=goal, detail=detail)
    return explained(figure, ours)


def contest(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Measure all *sides* in turn, the other way round every second time."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for round_ in range(rounds):
        order = list(sides) if round_ % 2 == 0 else list(reversed(sides))
        for name in order:
            found[name].append(sides[name]())
    return found


def against(
    name: str,
    ours: Sequence[float],
    peer: Sequence[float],
    *,
    unit: str,
    goal: Goal,
    detail: str,
) -> Figure:
    """Return the figure of two sides of a `contest`."""
    ratio = statistics.median(a / b for a, b in zip(ours, peer, strict=True))
    return Figure(
        name=name,
        ours=statistics.median(ours),
        peer=statistics.median(peer),
        unit=unit,
        ratio=round(ratio, 3),
        goal=str(goal),
        met=goal.met(ratio),
        detail=detail,
    )


def rate(work: Callable[[], object], count: int) -> float:
    """Return how many of *count* things per second *work* does."""
    start = time.perf_counter()
    work()
    return count / (time.perf_counter() - start)


def nanoseconds(work: Callable[[], object], *, number: int = 20_000) -> float:
    """Return the nanoseconds of one call of *work*."""
    start = time.perf_counter_ns()
    for _ in range(number):
        work()
    return (time.perf_counter_ns() - start) / number
