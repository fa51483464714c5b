"""One message in the hands of this process, from the poll until it is settled."""

from __future__ import annotations

import contextvars
import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.dlq.capture.capture import scrubber
from holdfast.dlq.capture.exceptions import traced
from holdfast.scrubbing import told

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.call import Call, Later
    from holdfast.consumer.handlers.route import Route
    from holdfast.consumer.parking.store import ParkedRow
    from holdfast.dlq.replay.admission import ReplayStanding
    from holdfast.dlq.store.overtaking import OpenLetter
    from holdfast.idempotency.attempts import AttemptHistory as Known
    from holdfast.message import Message
    from holdfast.ports import Delivery
    from holdfast.tracing.spans import ProcessSpan

LaneKey = tuple[Any, ...]
"""What is handled one after the other: (topic, key), a partition, or one message alone."""


class WorkState(Enum):
    """Where a message in hand stands; it changes under the lock of the scheduler."""

    POLLED = "polled"
    """The database has not been asked about it."""
    ADMITTED = "admitted"
    """It may run when its turn comes, or waits for its next attempt."""
    RUNNING = "running"
    """A thread has taken it."""
    REVOKED = "revoked"
    """It has gone to somebody else: whatever comes of it is not settled."""
    REVOKED_RUNNING = "revoked, running"
    """So it has, and its handler still runs here."""


# Bound once: Python looks a member up in its class slowly, and each message asks often.
_POLLED = WorkState.POLLED
_ADMITTED = WorkState.ADMITTED
_RUNNING = WorkState.RUNNING
_REVOKED = WorkState.REVOKED
_REVOKED_RUNNING = WorkState.REVOKED_RUNNING


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What earlier attempts left behind."""

    attempt: int = 1
    failing_since: float | None = None
    """When it failed first, by the monotonic clock; None: not yet."""
    unblamed: int = 0
    """Attempts that may turn out to be a dependency's outage; they are not in the ledger."""
    recorded: bool = False
    """Whether the ledger holds a row about it."""
    crashes: int = 0
    crash_suspect: bool = False
    """Whether it may have ended a process: it runs beside nothing but other suspects."""
    run_alone: bool = False
    """Whether it did so among few: it runs beside nothing at all."""
    outages: int = 0
    """How often in a row it was given up because something was down."""
    waits_for: str | None = None
    """Why it waits: for people."""
    failed_in_batch: bool = False
    """Whether it runs by its own plan now, which finds out why."""


class Execution(msgspec.Struct, kw_only=True):
    """The run under way, over the waits between its attempts."""

    call: Call | None = None
    later: Later | None = None
    """Where it goes on after its wait; None: it begins."""
    context: contextvars.Context | None = None
    span: ProcessSpan | None = None
    """The span of the run; None while tracing is off."""
    letter: Any = None
    """The dead letter that it became."""
    started: float = math.inf
    """When its handler began, by the monotonic clock; never, until it has."""
    reported: float = 0.0
    """When it was last told that its handler hangs."""
    cancel: Callable[[], None] | None = None
    """Ends the task of an `async def` handler."""


class ReplayFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What replays and dead letters have to do with it."""

    meant_for: str | None = None
    """The other group that a replay sent it to; None: it is for this one."""
    standing: ReplayStanding | None = None
    """What the plan of the replay that sent it says; None: no replay, or nobody was asked."""
    confirmation_pending: bool = False
    """Whether it was handled, and the store of its replay, which is elsewhere, is to hear of it."""
    overtakes: Sequence[OpenLetter] = ()
    """The open dead letters of its key: a replay must know if it goes ahead of them."""
    has_letter: bool = False
    """Whether a dead letter has its id: it may be that of this very message, which came again."""
    letters_seen: int = -1
    """How many dead letters this process had stored when that was looked up."""


NEW, NO_REPLAY = History(), ReplayFacts()


class Work(msgspec.Struct, kw_only=True, eq=False):
    """A message to be handled: delivered by the broker, or held in the database."""

    route: Route
    message: Message
    lane_key: LaneKey
    delivery: Delivery | None = None
    row: ParkedRow | None = None
    """The row it comes from, if it was parked; it is then settled on the broker already."""
    came_by: str = ""
    """The topic that it was delivered by."""
    refused: Exception | None = None
    """Why no handler may see it: it cannot even be read."""
    not_before: float = 0.0
    """When a retry that waited in a tier is due, by the monotonic clock."""
    state: WorkState = _POLLED
    history: History = NEW
    run: Execution = msgspec.field(default_factory=Execution)
    replay: ReplayFacts = NO_REPLAY

    def admit(self) -> None:
        """Let it run when its turn comes."""
        if self.state is _POLLED:
            self.state = _ADMITTED

    def begin(self) -> bool:
        """Whether the thread that took it may run it; not once it has gone to somebody else."""
        if self.is_revoked:
            return False
        self.state = _RUNNING
        return True

    def end(self) -> None:
        """Note that it does not run any more."""
        if self.state is _RUNNING:
            self.state = _ADMITTED
        elif self.state is _REVOKED_RUNNING:
            self.state = _REVOKED

    def revoke(self) -> None:
        """Note that it has gone to somebody else, for good."""
        match self.state:
            case WorkState.RUNNING:
                self.state = WorkState.REVOKED_RUNNING
            case WorkState.POLLED | WorkState.ADMITTED:
                self.state = WorkState.REVOKED

    @property
    def is_admitted(self) -> bool:
        """Whether the database was asked about it."""
        return self.state is not _POLLED

    @property
    def is_running(self) -> bool:
        """Whether a thread has taken it, whoever owns it by now."""
        return self.state is _RUNNING or self.state is _REVOKED_RUNNING

    @property
    def is_revoked(self) -> bool:
        """Whether it has gone to somebody else: whatever comes of it is not settled."""
        return self.state is _REVOKED or self.state is _REVOKED_RUNNING

    def note(self, **facts: Any) -> None:
        """Change what is known of earlier attempts."""
        self.history = msgspec.structs.replace(self.history, **facts)

    def replayed(self, **facts: Any) -> None:
        """Change what is known of its replay."""
        self.replay = msgspec.structs.replace(self.replay, **facts)

    @property
    def key(self) -> bytes | None:
        """The key whose order counts; none where the handler says that order does not matter."""
        return self.message.key if self.route.ordered else None

    @property
    def origin(self) -> Delivery | None:
        """The delivery that it came with, at first."""
        return self.delivery if self.row is None else self.row.origin

    def learn(self, known: Known, now: float) -> None:
        """Take over what the ledger knows of it; a parked one knows its attempt by itself."""
        history = self.history
        self.history = History(
            attempt=known.failed + 1 if self.row is None else history.attempt,
            failing_since=(
                history.failing_since if known.failing_for is None else now - known.failing_for
            ),
            recorded=True,
            crashes=known.crashed,
            crash_suspect=known.is_suspect,
            run_alone=known.is_prime_suspect,
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


class HandlerEnding(Enum):
    """How the handling of a message ended."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"
    DEAD_LETTERED = "dead-lettered"
    HELD_BACK = "held-back"
    """A replayed message that stays a dead letter: an earlier one of its key failed again."""
    SKIPPED = "skipped"
    """A replay for another group: nothing of it is handled here."""
    WITHDRAWN = "withdrawn"
    """A replayed copy that came too late: its plan was aborted, or its letter closed or edited."""
    FAILED = "failed"
    RELEASED = "released"

    __hash__ = object.__hash__  # by identity: each message is counted


@dataclass(frozen=True, slots=True)
class Ack:
    """Done with: the broker may be told, and the next of its key may run."""

    holds: bool = False
    """Whether the later messages of its key are to wait in the database."""


@dataclass(frozen=True, slots=True)
class RetryIn:
    """Try again after *delay* seconds; the later ones of its key stay behind it."""

    delay: float


@dataclass(frozen=True, slots=True)
class Release:
    """Not handled and nobody's fault; it is left to whoever gets it next."""


@dataclass(frozen=True, slots=True)
class RunAlone:
    """Its batch ended without it; it keeps its turn."""

    failed: bool
    """Whether it is to run by itself: it failed. Else it only stood behind one that did."""


@dataclass(frozen=True, slots=True)
class Redeliver:
    """The broker is to hand it out again after *delay* seconds, its key behind it."""

    delay: float


Disposition = Ack | RetryIn | Release | RunAlone | Redeliver

ACK = Ack()

current_work: contextvars.ContextVar[Work | None] = contextvars.ContextVar(
    "holdfast_work", default=None
)
