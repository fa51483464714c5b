"""What a participant does with a command, given what it knows of the step.

A command may come twice, late, or after the one that undoes it. One mark per step, written in
the participant's own transaction, is enough to answer each of them rightly:

- an undo that comes first does nothing, and leaves a mark by which the late do is refused;
- what was done is not done again, its reply is repeated;
- an attempt that failed keeps the attempts before it from being done later.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from holdfast.sagas.states import Answer, Direction


class MarkStatus(StrEnum):
    """What became of a step where it is carried out."""

    FAILED = "failed"
    DONE = "done"
    UNDONE = "undone"


class Mark(msgspec.Struct, frozen=True):
    """What a participant remembers of one step of one saga."""

    status: MarkStatus
    attempt: int = 0
    """The attempt that failed last."""
    answer: Answer = Answer.DONE
    """How that attempt failed."""


class BarrierVerdict(StrEnum):
    """What to do with a command."""

    EXECUTE = "execute"
    REPEAT = "repeat"
    """It was carried out before: give the same reply again."""
    NOTHING = "nothing"
    """There is nothing to undo: reply that it is undone."""
    REFUSE = "refuse"
    """It was undone before it came: reply that it has failed for good."""


def verdict(mark: Mark | None, direction: Direction, attempt: int) -> BarrierVerdict:
    """Return what to do with a command that comes when the step has *mark*."""
    match (direction, mark):
        case (Direction.DO, None):
            return BarrierVerdict.EXECUTE
        case (Direction.DO, Mark(status=MarkStatus.FAILED, attempt=failed)):
            return BarrierVerdict.EXECUTE if attempt > failed else BarrierVerdict.REPEAT
        case (Direction.DO, Mark(status=MarkStatus.DONE)):
            return BarrierVerdict.REPEAT
        case (Direction.DO, _):
            return BarrierVerdict.REFUSE
        case (_, Mark(status=MarkStatus.DONE)):
            return BarrierVerdict.EXECUTE
        case (_, Mark(status=MarkStatus.UNDONE)):
            return BarrierVerdict.REPEAT
        case _:
            return BarrierVerdict.NOTHING


def marked(mark: Mark | None, direction: Direction, attempt: int, answer: Answer) -> Mark | None:
    """Return the mark to leave after *answer* came of executing, or of doing nothing."""
    match (direction, answer):
        case (Direction.DO, Answer.DONE):
            return Mark(status=MarkStatus.DONE)
        case (Direction.DO, _):
            return Mark(status=MarkStatus.FAILED, attempt=attempt, answer=answer)
        case (_, Answer.DONE):
            return Mark(status=MarkStatus.UNDONE)
        case _:
            return mark  # an undoing that failed has changed nothing
