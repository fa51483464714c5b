"""One message in the hands of this process, from the poll until it is settled."""

from __future__ import annotations

import contextvars
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.dlq.capture import scrubber
from holdfast.dlq.raised import traced
from holdfast.scrubbing import told

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.consumer.held import HeldRow
    from holdfast.consumer.route import Route
    from holdfast.dlq.overtaking import OpenLetter
    from holdfast.dlq.replay.admission import Standing
    from holdfast.layer import Call, Later
    from holdfast.message import Message
    from holdfast.ports import Delivery

LaneKey = tuple[Any, ...]
"""What is handled one after the other: (topic, key), a partition, or one message alone."""


class Work(msgspec.Struct, kw_only=True, eq=False):
    """A message to be handled: delivered by the broker, or held in the database."""

    route: Route
    message: Message
    lane_key: LaneKey
    delivery: Delivery | None = None
    row: HeldRow | None = None
    """The row it comes from, if it was parked; it is then settled on the broker already."""
    admitted: bool = False
    """Whether the database was asked about it."""
    attempt: int = 1
    failing_since: float | None = None
    """When it failed first, by the monotonic clock; None: not yet."""
    unproven: int = 0
    """Attempts that may turn out to be a dependency's outage; they are not in the ledger."""
    known: bool = False
    """Whether the ledger holds a row about it."""
    crashes: int = 0
    suspect: bool = False
    """Whether it may have ended a process: it runs beside nothing but other suspects."""
    prime: bool = False
    """Whether it did so among few: it runs beside nothing at all."""
    outages: int = 0
    """How often in a row it was given up because something was down."""
    refused: Exception | None = None
    """Why no handler may see it: it cannot even be read."""
    waits_for: str | None = None
    """Why it waits: for people."""
    call: Call | None = None
    later: Later | None = None
    context: contextvars.Context | None = None
    letter: Any = None
    """The dead letter that it became."""
    passes: Sequence[OpenLetter] = ()
    """The open dead letters of its key: a replay must know if it goes ahead of them."""
    has_letter: bool = False
    """Whether a dead letter has its id: it may be that of this very message, which came again."""
    burials: int = -1
    """How many dead letters this process had stored when `passes` was looked up."""
    came_by: str = ""
    """The topic that it was delivered by."""
    meant_for: str | None = None
    """The other group that a replay sent it to; None: it is for this one."""
    standing: Standing | None = None
    """What the plan of the replay that sent it says; None: no replay, or nobody was asked."""
    unsaid: bool = False
    """Whether it was handled, and the store of its replay, which is elsewhere, is to hear of it."""
    dropped: bool = False
    """Whether its lane has gone to somebody else: whatever comes of it is not settled."""
    begun: bool = False
    """Whether a thread has taken it."""
    started: float = math.inf
    """When its handler began, by the monotonic clock; never, until it has."""
    reported: float = 0.0
    task: Any = None
    permit: Any = None
    not_before: float = 0.0
    """When a retry that waited in a tier is due, by the monotonic clock."""
    single: bool = False
    """Whether it failed in a batch: it runs by its own plan, which finds out why."""

    @property
    def key(self) -> bytes | None:
        """The key whose order counts; none where the handler says that order does not matter."""
        return self.message.key if self.route.ordered else None

    @property
    def is_apart(self) -> bool:
        """Whether it may not run in a batch."""
        return (
            self.single
            or self.suspect
            or self.dropped
            or self.row is not None
            or self.later is not None
            or self.refused is not None
            or self.message.is_replay
        )

    def told(self, error: BaseException) -> str:
        """Return what *error* says, without what the dead letter of this message would hide."""
        return told(error, scrubber(self.message, self.route.letters.origin))

    def traced(self, error: BaseException) -> str:
        """Return the trace of *error* in the same way."""
        return traced(error, scrubber(self.message, self.route.letters.origin))

    @property
    def identity(self) -> tuple[str, str]:
        """The handler and the message."""
        return self.route.consumer, self.message.identity


@dataclass(frozen=True, slots=True)
class Settled:
    """Verdict: done with; the broker may be told, and the next of its lane may run."""

    holds: bool = False
    """Whether the later messages of its key are to wait in the database."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Verdict: try again after *delay* seconds; the later ones of its lane stay behind it."""

    delay: float


@dataclass(frozen=True, slots=True)
class Released:
    """Verdict: not handled and nobody's fault; it is left to whoever gets it next."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Verdict: its batch ended without it; it keeps its turn."""

    single: bool
    """Whether it is to run by itself: it failed. Else it only stood behind one that did."""


@dataclass(frozen=True, slots=True)
class Delayed:
    """Verdict: the broker is to hand it out again after *delay* seconds, its key behind it."""

    delay: float


Verdict = Settled | Wait | Released | Apart | Delayed

current_work: contextvars.ContextVar[Work | None] = contextvars.ContextVar(
    "holdfast_work", default=None
)
