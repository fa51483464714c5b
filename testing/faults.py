"""Rules of what goes wrong at a scripted broker, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.message import Message
    from holdfast.ports import Delivery

Point = Literal["publish", "poll", "accept", "release", "reject", "extend", "flush", "close"]
POINTS: tuple[Point, ...] = get_args(Point)


class Crash(BaseException):
    """The simulated process is dead. Not an `Exception`, so that nothing swallows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCall:
    """One call about to reach the broker."""

    point: Point
    number: int
    """Counts the calls at this point, from 1."""
    messages: Sequence[Message] = ()
    deliveries: Sequence[Delivery] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultStep:
    """A call in the hands of an effect, which makes it, alters it or never makes it."""

    call: FaultCall
    make: Callable[[FaultCall], Any]
    crash: Callable[[], NoReturn]
    """Kill the process that makes the call."""
    rebalance: Callable[[], list[Delivery]]
    """Poll while the member's lanes go to another member and come back."""

    def go(self) -> Any:
        """Make the call as it is."""
        return self.make(self.call)


def always(call: FaultCall) -> bool:
    """Match every call."""
    return True


def nth(*numbers: int) -> Callable[[FaultCall], bool]:
    """Match the calls of these *numbers*, from 1."""
    if not numbers or min(numbers) < 1:
        raise ValueError(f"nth{numbers}: calls are numbered from 1")
    return lambda call: call.number in numbers


def every(n: int) -> Callable[[FaultCall], bool]:
    """Match every *n*-th call."""
    if n < 1:
        raise ValueError(f"every({n}): use 1 or more")
    return lambda call: call.number % n == 0


def on_key(key: bytes) -> Callable[[FaultCall], bool]:
    """Match the calls that carry a message or a delivery of *key*."""
    return lambda call: (
        any(message.key == key for message in call.messages)
        or any(delivery.key == key for delivery in call.deliveries)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """At *point*, for the calls that match *when*, *effect* decides what becomes of them.

    Of several faults that match one call the first is outermost.
    """

    point: Point
    effect: Callable[[FaultStep], Any]
    when: Callable[[FaultCall], bool] = always

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise ValueError(f"point {self.point!r}: use one of {', '.join(POINTS)}")
