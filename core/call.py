"""One call of a handler: where its layers stand, what they share about it, what they answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.scrubbing import told

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection

    from holdfast.message import Message
    from holdfast.ports import Delivery


class Stage(IntEnum):
    """The one order in which layers wrap a handler, outermost first."""

    HEARTBEAT = 10
    TRACE = 20
    METRICS = 30
    SETTLE = 40
    DURABLE_RETRY = 50
    DECODE = 55
    BUDGET = 60
    RETRY = 70
    ATTEMPT = 80
    BREAKER = 90
    TRANSACTION = 100
    DEDUP = 110
    INJECT = 120
    RETURN = 130
    RESULT = 140


REPEATABLE = frozenset({Stage.ATTEMPT, Stage.BREAKER})
"""Stages that may hold several layers: one breaker per dependency."""

REASONS: dict[tuple[Stage, Stage], str] = {
    (Stage.DEDUP, Stage.RETRY): "a failed attempt would be remembered as done and never retried",
    (Stage.TRANSACTION, Stage.RETRY): "a retry would go on inside a transaction that has failed",
    (Stage.RETRY, Stage.SETTLE): "a message would be dead-lettered and then tried again",
    (Stage.DEDUP, Stage.SETTLE): "a dead-lettered message would be remembered as done",
    (Stage.BREAKER, Stage.RETRY): "the breaker would see one call where many were made",
    (Stage.ATTEMPT, Stage.RETRY): "it would cover all attempts together, and the waits between",
    (Stage.DEDUP, Stage.BREAKER): "the dedup row would be held while the circuit is open",
}
"""Why (outer, inner) is wrong."""


class Call(msgspec.Struct):
    """One run of a plan: what the layers share about it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    message: Message | None = None
    consumer: str = ""
    """Who handles it: the group and the handler, the scope of its dedup memory."""
    identity: str | None = None
    """What dedup knows the effect by: a key of the user's, or the message's id."""
    session: Any = None
    """The database session of this attempt, inside its transaction."""
    duplicate: bool = False
    """Whether the effect was found to be there already."""
    attempt: int = 1
    """Which attempt this is, from 1, over every kind of retry."""
    failing_since: float | None = None
    """When an earlier run of this message failed first, on the monotonic clock."""
    delivery: Delivery | None = None
    """What the message was delivered as, with its coordinates; None outside of a consumer."""
    before_commit: tuple[Callable[[Connection], None], ...] = ()
    """What is done in the transaction of the attempt, after the handler, before its commit."""
    letter: Any = None
    """The dead letter that became of it; None while it is none."""
    failure: BaseException | None = None
    """Why it became a dead letter."""
    notes: dict[object, Any] = {}
    """What a layer keeps for this run, under itself as the key and for itself alone."""
    result: Any = None
    """What the function returned, for the layers that leave."""
    clock: Clock = SYSTEM_CLOCK
    """The clock of the plan that runs this call."""
    error: BaseException | None = None
    """Why the attempt before failed, in a run that suspends."""
    suspends: bool = False
    """Whether the run returns a `Later` where it would otherwise wait."""
    visible: Callable[[bytes | None], bytes | None] | None = None
    """Returns a payload without the fields that are hidden from what is kept of it; None: all of
    it may be seen."""
    scrub: Callable[[Call, str], str] | None = None
    """How a text about this call is rid of what its dead letter would hide."""

    def told(self, error: BaseException | None) -> str:
        """Return what *error* says, as a log or a table may hold it."""
        if error is None:
            return "its result was refused"
        scrub = self.scrub
        return told(error) if scrub is None else told(error, lambda text: scrub(self, text))


@dataclass(frozen=True, slots=True)
class Done:
    """Verdict: the run ends here with *result*."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Again:
    """Verdict: enter the layers inside this one once more, after *delay* seconds."""

    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class Later:
    """A run that waits: `Runner.resume` goes on with it after *delay* seconds."""

    delay: float
    depth: int


class Refusal(Exception):
    """The result of an attempt is refused, so that what the attempt did is taken back."""

    def __init__(self) -> None:
        super().__init__("the result was refused")
