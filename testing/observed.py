"""Checks over what was really observed: what was sent, what took effect, and what still stands."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.testing.waiting import WaitTimeout, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

T = TypeVar("T", bound="Hashable")

_MOST_SHOWN = 10


class Violation(AssertionError):
    """A guarantee did not hold; names the promise and the messages that break it."""

    def __init__(self, promise: str, witnesses: Sequence[object]) -> None:
        shown = ", ".join(repr(witness) for witness in witnesses[:_MOST_SHOWN])
        more = f" and {len(witnesses) - _MOST_SHOWN} more" if witnesses[_MOST_SHOWN:] else ""
        super().__init__(f"{promise}, but: {shown}{more}")
        self.promise = promise
        self.witnesses = witnesses


def check_nothing_lost(sent: Iterable[Hashable], seen: Iterable[Hashable]) -> None:
    """Raise `Violation` unless everything *sent* was *seen* at least once."""
    known = set(seen)
    lost = [item for item in dict.fromkeys(sent) if item not in known]
    if lost:
        raise Violation("nothing is lost", lost)


def check_nothing_invented(sent: Iterable[Hashable], seen: Iterable[Hashable]) -> None:
    """Raise `Violation` if anything was *seen* that was never *sent*, as from a rollback."""
    known = set(sent)
    invented = [item for item in dict.fromkeys(seen) if item not in known]
    if invented:
        raise Violation("nothing comes of what was never committed", invented)


def check_effects_once(effects: Iterable[Hashable]) -> None:
    """Raise `Violation` if any of *effects* happened more than once."""
    twice = [item for item, count in Counter(iter(effects)).items() if count > 1]
    if twice:
        raise Violation("each effect happens once", twice)


def check_order_per_key(
    sent: Iterable[tuple[T, Hashable]], seen: Iterable[tuple[T, Hashable]]
) -> None:
    """Raise `Violation` unless each key's items were first *seen* in the order *sent*.

    Items come as (key, id). What was seen again later is a duplicate, not a disorder; an
    item that has not been seen yet is missing, not out of order, unless a later one of
    its key has. The key None has no order.
    """
    order = {item: place for place, item in enumerate(dict.fromkeys(sent))}
    by_key: dict[T, list[Hashable]] = {}
    for key, item in order:
        by_key.setdefault(key, []).append(item)
    first_seen = list(dict.fromkeys(pair for pair in seen if pair in order))
    wrong: list[object] = []
    for key, items in by_key.items():
        if key is None:
            continue
        got = [item for own, item in first_seen if own == key]
        if got != items[: len(got)]:
            wrong.append((key, got))
    if wrong:
        raise Violation("each key's messages come in order", wrong)


def check_nothing_left(standing: Mapping[str, int]) -> None:
    """Raise `Violation` if anything still stands: *standing* counts it by place.

    Places are whatever can hold a message back: lag, an outbox, held keys, open dead letters.
    """
    left = [f"{place}: {count}" for place, count in standing.items() if count]
    if left:
        raise Violation("nothing is left standing", left)


def settled(
    standing: Callable[[], Mapping[str, int]],
    *,
    within: float,
    every: float = 0.2,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Return once nothing stands any more; raise `Violation` if that takes longer than *within*.

    This is liveness: call it when the last fault is over. A run in which nothing is wrong so
    far, and nothing moves either, is not a good one. *standing* is asked again and again; an
    exception of it counts as "not yet".
    """

    def is_empty() -> bool:
        check_nothing_left(standing())
        return True

    try:
        wait_until(is_empty, deadline=within, what="it settled", every=every, clock=clock)
    except WaitTimeout as error:
        said = error.last
        seen = said.witnesses if isinstance(said, Violation) else [said]
        raise Violation(f"nothing stands {within:g} s after the last fault", seen) from error
