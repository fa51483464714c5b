"""The verdict over a run of the chain: a pure function of what was observed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.testing import (
    Violation,
    check_effects_once,
    check_nothing_invented,
    check_nothing_left,
    check_nothing_lost,
    check_order_per_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a run has left behind. An order is (key, id), and one that was rolled back had an id."""

    committed: Sequence[tuple[str, str]]
    """In each key's order of commits."""
    effects: Mapping[str, Sequence[tuple[str, str]]]
    """By stage, in the order in which they happened; those of no committed order included."""
    standing: Mapping[str, int] = field(default_factory=dict)
    """By place: messages that wait, keys that are held, lag, letters that are open."""


def judge(observed: Observed) -> list[str]:
    """Return the promises that were broken, each with its stage and its witnesses."""
    committed = observed.committed
    broken: list[str] = []

    def check(where: str, promise: Callable[[], None]) -> None:
        try:
            promise()
        except Violation as violation:
            broken.append(f"{where}: {violation}")

    for stage, effects in observed.effects.items():
        check(stage, lambda e=effects: check_nothing_lost(committed, e))  # type: ignore[misc]
        check(stage, lambda e=effects: check_effects_once(e))  # type: ignore[misc]
        check(stage, lambda e=effects: check_nothing_invented(committed, e))  # type: ignore[misc]
        check(stage, lambda e=effects: check_order_per_key(committed, e))  # type: ignore[misc]
    check("the chain", lambda: check_nothing_left(observed.standing))
    return broken
