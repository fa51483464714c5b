"""Where an instance of an older version stands in a newer one, or why it stays where it is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from holdfast.sagas import InvalidSaga, Saga
from holdfast.sagas.states import Direction, SagaPhase, SagaProgress, StepState, StepStatus
from holdfast.sagas.versions import Impossible, moved

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


class State(msgspec.Struct):
    order: str = ""


def newer(*, kind: str = "command", pivot: bool = False) -> Saga[State]:
    """Return version 2 of a saga whose version 1 was reserve, charge, ship: it looks twice."""
    saga = Saga("order", state=State, version=2)

    @saga.command("inventory", compensate="release")
    def reserve(state: State) -> State:
        return state

    @saga.compensation("inventory")
    def release(state: State) -> State:
        return state

    @saga.command("fraud", compensate=None)
    def look_twice(state: State) -> State:
        return state

    if kind == "command":

        @saga.command("payment", **({"pivot": True} if pivot else {"compensate": "refund"}))  # type: ignore[arg-type]
        def charge(state: State) -> State:
            return state
    else:

        @saga.local(compensate="refund")
        def charge(state: State, session: Session) -> State:
            return state

    if not pivot:

        @saga.compensation("payment")
        def refund(state: State) -> State:
            return state

    return saga


def progress(phase: SagaPhase = SagaPhase.FORWARD, **statuses: StepStatus) -> SagaProgress:
    """Return how far an instance of version 1 is."""
    steps = {"reserve": StepStatus.WAITING, "charge": StepStatus.WAITING,
             "ship": StepStatus.WAITING, **statuses}  # fmt: skip
    return SagaProgress(
        steps={name: StepState(status=status, attempt=1) for name, status in steps.items()},
        phase=phase,
    )


def statuses(after: SagaProgress) -> dict[str, str]:
    return {name: step.status.value for name, step in after.steps.items()}


def test_what_has_not_begun_takes_the_new_steps() -> None:
    """A step that is under way keeps its attempt, one that is gone was never begun."""
    after = moved(newer().graph, progress(reserve=StepStatus.RUNNING), local=frozenset())
    assert statuses(after) == {"reserve": "running", "look_twice": "waiting", "charge": "waiting"}
    assert after.steps["reserve"].attempt == 1


def test_a_new_step_that_was_passed_is_skipped_only_if_that_was_said() -> None:
    """Nobody guesses whether it may be left out."""
    before = progress(reserve=StepStatus.DONE, charge=StepStatus.RUNNING)
    with pytest.raises(Impossible, match=r"'look_twice' comes before 'charge'.*name it in skip="):
        moved(newer().graph, before, local=frozenset())
    after = moved(newer().graph, before, skip=frozenset({"look_twice"}), local=frozenset())
    assert statuses(after) == {"reserve": "done", "look_twice": "skipped", "charge": "running"}


def test_what_was_undone_or_failed_needs_no_place() -> None:
    """Nothing of it stands."""
    before = progress(SagaPhase.BACKWARD, reserve=StepStatus.UNDOING, ship=StepStatus.FAILED)
    assert "ship" not in moved(newer().graph, before, local=frozenset()).steps


LOCAL = frozenset({("charge", Direction.DO)})


@pytest.mark.parametrize(
    ("saga", "before", "local", "why"),
    [
        (newer(), progress(ship=StepStatus.DONE), frozenset(), "'ship' is done, and version 2 has"),
        (newer(), progress(ship=StepStatus.RETRYING), frozenset(), "'ship' is retrying"),
        (newer(kind="local"), progress(charge=StepStatus.RUNNING), frozenset(), "of another kind"),
        (newer(), progress(charge=StepStatus.RUNNING), LOCAL, "of another kind"),
        (newer(pivot=True), progress(SagaPhase.BACKWARD, charge=StepStatus.DONE), frozenset(),
         "'charge' is to be undone, and has no compensation"),
        (newer(pivot=True), progress(SagaPhase.BACKWARD, charge=StepStatus.UNDO_PARKED),
         frozenset(), "is being undone, and has no compensation"),
    ],
)  # fmt: skip
def test_what_could_not_go_on_is_refused(
    saga: Saga[Any], before: SagaProgress, local: Any, why: str
) -> None:
    """With the step and the reason."""
    with pytest.raises(Impossible, match=re.escape(why)):
        moved(saga.graph, before, skip=frozenset({"look_twice"}), local=local)


@pytest.mark.parametrize("version", [0, 2, 3, "1"])
def test_a_migration_comes_from_a_version_before(version: Any) -> None:
    """And is there once."""
    with pytest.raises(InvalidSaga, match="name a version before 2"):
        newer().migrate(from_version=version)
    saga = newer()
    saga.migrate(from_version=1)(lambda state: State(state["order"]))
    with pytest.raises(InvalidSaga, match="two migrations from version 1"):
        saga.migrate(from_version=1)
