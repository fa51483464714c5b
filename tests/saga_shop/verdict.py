"""The verdict over a run of the shop: a pure function of what was observed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

STANDS = {"stock": 1, "money": 10, "parcel": 1}
"""What stands of an order that was completed."""
STEPS = {"reserve": "stock", "charge": "money", "ship": "parcel"}
"""Which step each of them comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a saga ended, as its table says."""

    status: str
    reason: str = ""
    parked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a run has left behind."""

    started: Collection[str]
    """The orders whose start was committed."""
    sagas: Mapping[str, Ending]
    ledger: Sequence[tuple[str, str, int]]
    """What was done (above 0) and undone (below), for which order, in that order."""
    missing_stock: int = 0
    """How much less is on the shelves than there was at first."""
    missing_money: int = 0
    standing: Mapping[str, int] = field(default_factory=dict)
    """By place: what still runs, waits, or is locked."""


def judge(observed: Observed) -> list[str]:
    """Return the promises that were broken, each with its witnesses."""
    return [*_ends(observed), *_books(observed), *_conserved(observed), *_left(observed)]


def _ends(observed: Observed) -> Iterator[str]:
    for order in sorted(observed.started):
        match observed.sagas.get(order):
            case None:
                yield f"{order} was started, and there is no saga of it"
            case Ending(status="completed"):
                pass
            case Ending(status="compensated" | "parked" as status, reason=""):
                yield f"{order} is {status} without a reason"
            case Ending(status="parked", parked=()):
                yield f"{order} is parked, and no step of it is"
            case Ending(status="compensated" | "parked"):
                pass
            case Ending(status=status):
                yield f"{order} has not ended: it is {status}"
    for order in sorted(observed.sagas.keys() - set(observed.started)):
        yield f"there is a saga of {order}, which was never started"


def _books(observed: Observed) -> Iterator[str]:
    """Each step was done once and, if at all, undone once; what stands is what the saga says."""
    done: Counter[tuple[str, str]] = Counter()
    undone: Counter[tuple[str, str]] = Counter()
    net: Counter[tuple[str, str]] = Counter()
    for what, order, amount in observed.ledger:
        (done if amount > 0 else undone)[order, what] += 1
        net[order, what] += amount
    for (order, what), times in sorted(done.items()):
        if times > 1:
            yield f"{what} of {order} was done {times} times"
    for (order, what), times in sorted(undone.items()):
        if times > 1:
            yield f"{what} of {order} was undone {times} times"
    for order, saga in sorted(observed.sagas.items()):
        stands = {what: net[order, what] for what in STANDS if net[order, what]}
        if stands != (expected := _expected(saga)) and saga.status not in _OPEN:
            yield f"{order} is {saga.status}, but of it stands {stands}, not {expected}"
    for order in sorted({order for order, _ in net} - observed.sagas.keys()):
        yield f"something was done for {order}, which is no saga"


_OPEN = ("running", "compensating")


def _expected(saga: Ending) -> dict[str, int]:
    if saga.status == "completed":
        return STANDS
    return {STEPS[step]: STANDS[STEPS[step]] for step in saga.parked if step in STEPS}


def _conserved(observed: Observed) -> Iterator[str]:
    total: Counter[str] = Counter()
    for what, _, amount in observed.ledger:
        total[what] += amount
    if observed.missing_stock != total["stock"]:
        yield f"{observed.missing_stock} left the shelves, and the ledger has {total['stock']}"
    if observed.missing_money != total["money"]:
        yield f"{observed.missing_money} left the accounts, and the ledger has {total['money']}"


def _left(observed: Observed) -> Iterator[str]:
    for place, count in observed.standing.items():
        if count:
            yield f"{place}: {count} left"
