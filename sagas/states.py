"""The values of a saga's transitions: how far it is, what happens, what is to be done.

Those of which each transition makes several hold texts and numbers alone, so that no cycle can
go through them: the garbage collector need not look at them (`gc=False`).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Direction(StrEnum):
    """Whether a step is being done or undone."""

    DO = "do"
    UNDO = "undo"


class SagaPhase(StrEnum):
    """Where a saga is going."""

    FORWARD = "forward"
    QUIESCING = "quiescing"
    """It will be compensated once what is in flight has an outcome; nothing new begins."""
    BACKWARD = "backward"
    COMPLETED = "completed"
    COMPENSATED = "compensated"

    @property
    def is_final(self) -> bool:
        """Whether nothing will happen any more."""
        return self in _FINAL


_FINAL = frozenset({SagaPhase.COMPLETED, SagaPhase.COMPENSATED})


class StepStatus(StrEnum):
    """How far one step is; `FAILED` has had no effect, `UNKNOWN` may have had one."""

    WAITING = "waiting"
    RUNNING = "running"
    RETRYING = "retrying"
    PARKED = "parked"
    """It can neither be given up nor done without a human."""
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"
    UNDOING = "undoing"
    UNDO_RETRYING = "undo-retrying"
    UNDO_PARKED = "undo-parked"
    UNDONE = "undone"


PARKED = frozenset({StepStatus.PARKED, StepStatus.UNDO_PARKED})
"""What waits for a human."""
IN_FLIGHT = frozenset({StepStatus.RUNNING, StepStatus.RETRYING, StepStatus.PARKED})
"""What may still be done."""
OWING = frozenset({StepStatus.DONE, StepStatus.UNKNOWN})
"""What has to be undone on the way back."""
ENDED = frozenset({StepStatus.DONE, StepStatus.SKIPPED})
"""What the steps behind it need not wait for any more."""
UNDOING = frozenset({StepStatus.UNDOING, StepStatus.UNDO_RETRYING, StepStatus.UNDO_PARKED})


class StepState(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One step of one saga; attempts count from 1, 0 is none yet."""

    status: StepStatus = StepStatus.WAITING
    attempt: int = 0
    undo_attempt: int = 0
    doubt: bool = False
    """Whether the latest attempt went without an answer: it may have had its effect."""
    case: str | None = None
    """What a choice has chosen."""


class SagaProgress(msgspec.Struct, frozen=True):
    """How far one saga is, without its data."""

    steps: dict[str, StepState]
    phase: SagaPhase = SagaPhase.FORWARD
    signals: tuple[str, ...] = ()
    """Signals that came before they were waited for."""
    reason: str = ""
    """Why it is being compensated."""

    @property
    def parked(self) -> tuple[str, ...]:
        """The steps that wait for a human."""
        if self.phase.is_final:
            return ()
        return tuple([name for name, step in self.steps.items() if step.status in PARKED])


class TimerKind(StrEnum):
    """What a timer is for; only the first two mean that something went wrong."""

    TIMEOUT = "timeout"
    DEADLINE = "deadline"
    RETRY = "retry"
    SLEEP = "sleep"


class Answer(StrEnum):
    """What came of an attempt; no answer at all is the third outcome, which a timer tells."""

    DONE = "done"
    FAILED = "failed"
    """It had no effect and will not have one."""
    FAILED_FOR_NOW = "failed-for-now"
    """It had no effect, and another attempt may succeed."""


# What happens.


class Started(msgspec.Struct, frozen=True, tag=True):
    """The saga begins."""


class Answered(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A reply has come, or a local step has run."""

    step: str
    direction: Direction
    attempt: int
    answer: Answer
    error: str = ""


class TimerFired(msgspec.Struct, frozen=True, tag=True):
    """A timer is due; the one without a step is the deadline of the saga."""

    step: str
    direction: Direction
    attempt: int
    kind: TimerKind


class Decided(msgspec.Struct, frozen=True, tag=True):
    """A choice was made."""

    step: str
    case: str


class Signalled(msgspec.Struct, frozen=True, tag=True):
    """Somebody has sent a signal."""

    name: str


class CancelRequested(msgspec.Struct, frozen=True, tag=True):
    """Somebody wants the saga undone."""

    reason: str


class RetryRequested(msgspec.Struct, frozen=True, tag=True):
    """A human has mended what kept a parked step from passing."""

    step: str


class SkipRequested(msgspec.Struct, frozen=True, tag=True):
    """A human says that a parked step need not be done, or undone."""

    step: str


class MarkedDone(msgspec.Struct, frozen=True, tag=True):
    """A human has done by hand what a parked step was to do, or undo."""

    step: str


class Migrated(msgspec.Struct, frozen=True, tag=True):
    """The saga goes on with another version; told in its history, no transition takes it."""

    from_version: int
    to_version: int


SagaEvent = (
    Started | Answered | TimerFired | Decided | Signalled
    | CancelRequested | RetryRequested | SkipRequested | MarkedDone
)  # fmt: skip


# What is to be done about it, in the same transaction.


class SendCommand(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Send the command of a step."""

    step: str
    direction: Direction
    attempt: int


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """Run a local step, in a transaction of its own."""

    step: str
    direction: Direction
    attempt: int


class Decide(msgspec.Struct, frozen=True, tag=True):
    """Ask a choice, and tell what it `Decided`."""

    step: str
    attempt: int = 1


class Accept(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Take up into the state what came with the event, or with a signal that was kept."""

    step: str
    direction: Direction = Direction.DO


class SetTimer(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Let a timer fire; how late follows from the definition."""

    step: str
    direction: Direction
    attempt: int
    kind: TimerKind


class ClearTimers(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Remove the timers of a step, those of the whole saga where none is named."""

    step: str
    keep_deadline: bool = False


class ParkStep(msgspec.Struct, frozen=True, tag=True):
    """Tell a human that a step cannot go on without one."""

    step: str
    direction: Direction
    reason: str


class Ignore(msgspec.Struct, frozen=True, tag=True):
    """Nothing changes: the event came late, or twice. It is told, never dropped silently."""

    reason: str


class FinishSaga(msgspec.Struct, frozen=True, tag=True):
    """The saga has ended."""

    phase: SagaPhase


SagaEffect = (
    SendCommand
    | RunStep
    | Decide
    | Accept
    | SetTimer
    | ClearTimers
    | ParkStep
    | Ignore
    | FinishSaga
)
