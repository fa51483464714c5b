"""What a fault does to a call: crash, fail, repeat, reorder, rebalance."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from holdfast.errors import HoldfastError
from holdfast.ports import Delivery, Published
from holdfast.testing.faults import Fault, FaultStep, Point, nth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from holdfast.message import Message


def crash_before(step: FaultStep) -> NoReturn:
    """Die with the call unmade."""
    step.crash()


def crash_after(step: FaultStep) -> NoReturn:
    """Die with the call made and its result unseen."""
    step.go()
    step.crash()


def crash_midway(step: FaultStep) -> NoReturn:
    """Die with the call made for the first half of its messages or deliveries."""
    messages, deliveries = step.call.messages, step.call.deliveries
    half = replace(
        step.call,
        messages=messages[: len(messages) // 2],
        deliveries=deliveries[: len(deliveries) // 2],
    )
    if half.messages or half.deliveries:
        step.make(half)
    step.crash()


def fail(error: HoldfastError | Callable[[str], HoldfastError]) -> Callable[[FaultStep], NoReturn]:
    """Raise *error* (or make it, given its class) with the call unmade."""

    def effect(step: FaultStep) -> NoReturn:
        raise _made(error, step)

    return effect


def fail_after(
    error: HoldfastError | Callable[[str], HoldfastError],
) -> Callable[[FaultStep], NoReturn]:
    """Raise *error* although the call was made, as a lost answer does."""

    def effect(step: FaultStep) -> NoReturn:
        step.go()
        raise _made(error, step)

    return effect


def refuse(
    error: HoldfastError, which: Callable[[Message], bool] = lambda _: True
) -> Callable[[FaultStep], list[Published]]:
    """Refuse with *error* the messages of a batch that match *which*, and store the others."""

    def effect(step: FaultStep) -> list[Published]:
        _only_at("publish", step)
        taken = [message for message in step.call.messages if not which(message)]
        results = iter(step.make(replace(step.call, messages=taken)) if taken else ())
        return [
            Published(error=error) if which(message) else next(results)
            for message in step.call.messages
        ]

    return effect


def duplicate(step: FaultStep) -> Any:
    """Hand every delivery out twice; at any other point make the call twice."""
    result = step.go()
    if step.call.point != "poll":
        step.go()
        return result
    return [*result, *(msgspec.structs.replace(delivery) for delivery in result)]


def reorder(seed: int = 0, *, within_keys: bool = False) -> Callable[[FaultStep], list[Delivery]]:
    """Hand deliveries out in another order; each key keeps its own unless *within_keys*."""
    random = Random(seed)  # noqa: S311 - a repeatable run is the point

    def effect(step: FaultStep) -> list[Delivery]:
        _only_at("poll", step)
        deliveries: list[Delivery] = step.go()
        mixed = random.sample(deliveries, len(deliveries))
        if within_keys:
            return mixed
        ordered = {
            key: iter([d for d in deliveries if d.key == key]) for key in {d.key for d in mixed}
        }
        return [d if d.key is None else next(ordered[d.key]) for d in mixed]

    return effect


def rebalance(step: FaultStep) -> list[Delivery]:
    """Take the member's lanes away while it polls, and give them back."""
    _only_at("poll", step)
    return step.rebalance()


def every_crash(calls: Mapping[Point, int]) -> Iterator[Fault]:
    """Yield a crash before and one after each of *calls*, to try one per run.

    *calls* counts the calls by point, as `ScriptedBroker.calls` does after a run without
    faults.
    """
    for point, count in calls.items():
        for number in range(1, count + 1):
            yield Fault(point=point, when=nth(number), effect=crash_before)
            yield Fault(point=point, when=nth(number), effect=crash_after)


def _made(error: HoldfastError | Callable[[str], HoldfastError], step: FaultStep) -> HoldfastError:
    if isinstance(error, HoldfastError):
        return error
    return error(f"scripted failure of {step.call.point} {step.call.number}")


def _only_at(point: Point, step: FaultStep) -> None:
    if step.call.point != point:
        raise ValueError(f"this effect is for {point!r}, not for {step.call.point!r}")
