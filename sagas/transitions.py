"""What becomes of a saga when something happens: (graph, progress, event) → (progress, effects).

Pure: no clock, no database, no functions of the user. The engine calls it inside of one
transaction; the model checker calls it with every order of events that there can be.

The three rules that everything else follows from:
- An attempt without an answer is in doubt, and doubt is compensated like success.
- Only the answer to the latest attempt can say "failed"; any attempt can say "done".
- Nothing is undone while something that came after it may still be done or is not undone yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from msgspec.structs import replace

from holdfast.sagas.graph import NodeKind
from holdfast.sagas.states import (
    ENDED,
    IN_FLIGHT,
    OWING,
    UNDOING,
    Accept,
    Answer,
    Answered,
    CancelRequested,
    ClearTimers,
    Decide,
    Decided,
    Direction,
    FinishSaga,
    Ignore,
    MarkedDone,
    ParkStep,
    RetryRequested,
    RunStep,
    SagaEffect,
    SagaEvent,
    SagaPhase,
    SagaProgress,
    SendCommand,
    SetTimer,
    Signalled,
    SkipRequested,
    Started,
    StepState,
    StepStatus,
    TimerFired,
    TimerKind,
)

if TYPE_CHECKING:
    from holdfast.sagas.graph import Graph, Node

_DO, _UNDO = Direction.DO, Direction.UNDO
_WAITING = StepStatus.WAITING  # bound once: Python looks a member up in its class slowly


def begin(graph: Graph) -> SagaProgress:
    """Return the progress of a saga to which nothing has happened yet."""
    return SagaProgress(steps={node.name: StepState() for node in graph})


def transition(
    graph: Graph, progress: SagaProgress, event: SagaEvent
) -> tuple[SagaProgress, tuple[SagaEffect, ...]]:
    """Return what *event* makes of *progress*, and what is to be done in the same transaction."""
    work = _Transition(graph, progress)
    if progress.phase.is_final:
        work.ignore(f"the saga is {progress.phase} already")
    else:
        work.take(event)
        work.advance()
    return work.result(), tuple(work.effects)


class _Transition:
    """One event on its way through the graph; `steps` and `phase` change, nothing else does."""

    def __init__(self, graph: Graph, progress: SagaProgress) -> None:
        self.graph = graph
        self.before = progress
        self.steps = dict(progress.steps)
        self.phase = progress.phase
        self.signals = progress.signals
        self.reason = progress.reason
        self.effects: list[SagaEffect] = []

    def result(self) -> SagaProgress:
        return SagaProgress(
            steps=self.steps, phase=self.phase, signals=self.signals, reason=self.reason
        )

    def ignore(self, reason: str) -> None:
        self.effects.append(Ignore(reason))

    # Taking the event in.

    def take(self, event: SagaEvent) -> None:
        match event:
            case Started():
                if self.graph.deadline is not None:
                    self.effects.append(SetTimer("", _DO, 0, TimerKind.DEADLINE))
            case Answered(direction=Direction.DO):
                self._answered(self.graph[event.step], event)
            case Answered():
                self._undo_answered(self.graph[event.step], event)
            case TimerFired(step=""):
                self._turn_back("the deadline of the saga has passed")
            case TimerFired():
                self._fired(self.graph[event.step], event)
            case Decided(step=name, case=case):
                self._decided(self.graph[name], case)
            case Signalled(name=name):
                self._signalled(name)
            case CancelRequested(reason=reason):
                self._turn_back(reason)
            case RetryRequested() | SkipRequested() | MarkedDone():
                self._operated(self.graph[event.step], event)
            case _:
                assert_never(event)

    def _operated(self, node: Node, event: RetryRequested | SkipRequested | MarkedDone) -> None:
        match event:
            case RetryRequested():
                self._retry_requested(node)
            case SkipRequested():
                self._skip_requested(node)
            case MarkedDone():
                self._marked_done(node)

    def _answered(self, node: Node, event: Answered) -> None:
        step = self.steps[node.name]
        is_latest = event.attempt == step.attempt
        match (step.status, event.answer):
            case (StepStatus.RUNNING | StepStatus.RETRYING | StepStatus.PARKED, Answer.DONE):
                self._done(node)
            case (StepStatus.UNKNOWN | StepStatus.FAILED, Answer.DONE):
                # Late: it had its effect after all, so its undoing is owed.
                self._done(node)
            case (_, Answer.DONE):
                self.ignore(f"step {node.name!r} is {step.status} already")
            case (_, _) if not is_latest:
                # An attempt that was superseded may fail: the latest one decides.
                self.ignore(f"attempt {event.attempt} of {node.name!r} was superseded")
            case (StepStatus.RUNNING, Answer.FAILED_FOR_NOW) if self._may_retry(node):
                self._retry_later(node, doubt=False)
            case (StepStatus.RUNNING | StepStatus.RETRYING, Answer.FAILED):
                self._give_up(node, doubt=False, why=event.error or "it has failed")
            case (StepStatus.RUNNING, Answer.FAILED_FOR_NOW):
                self._give_up(node, doubt=False, why=event.error or "it fails again and again")
            case (StepStatus.RETRYING, Answer.FAILED_FOR_NOW):
                self._put(node, doubt=False)  # late, and the next attempt is on its way
            case (StepStatus.UNKNOWN, _):
                self._put(node, status=StepStatus.FAILED, doubt=False)  # nothing to undo
            case (StepStatus.PARKED, _) if step.doubt and not self.graph.is_behind_pivot(node.name):
                self._give_up(node, doubt=False, why=event.error or "it has failed")
            case _:
                self.ignore(f"step {node.name!r} is {step.status} already")

    def _undo_answered(self, node: Node, event: Answered) -> None:
        step = self.steps[node.name]
        match (step.status, event.answer):
            case (
                StepStatus.UNDOING | StepStatus.UNDO_RETRYING | StepStatus.UNDO_PARKED,
                Answer.DONE,
            ):
                self._undone(node, accept=True)
            case (StepStatus.UNDOING, Answer.FAILED | Answer.FAILED_FOR_NOW) if (
                event.attempt == step.undo_attempt
            ):
                is_final = event.answer is Answer.FAILED
                self._undo_failed(node, event.error or "its undoing has failed", final=is_final)
            case _:
                self.ignore(f"step {node.name!r} is {step.status}: undo {event.attempt} is late")

    def _fired(self, node: Node, event: TimerFired) -> None:
        step = self.steps[node.name]
        current = step.attempt if event.direction is _DO else step.undo_attempt
        is_current = event.kind is TimerKind.DEADLINE or event.attempt == current
        match (event.direction, event.kind, step.status):
            case _ if not is_current:
                self.ignore(f"a timer of attempt {event.attempt} of {node.name!r} is late")
            case (Direction.DO, TimerKind.TIMEOUT, StepStatus.RUNNING):
                self._timed_out(node)
            case (Direction.DO, TimerKind.DEADLINE, StepStatus.RUNNING):
                doubt = node.kind is NodeKind.COMMAND
                self._give_up(node, doubt=doubt, why="its deadline has passed")
            case (Direction.DO, TimerKind.DEADLINE, StepStatus.RETRYING):
                self._give_up(node, doubt=step.doubt, why="its deadline has passed")
            case (Direction.DO, TimerKind.RETRY, StepStatus.RETRYING):
                self._dispatch(node)
            case (Direction.DO, TimerKind.SLEEP, StepStatus.RUNNING):
                self._put(node, status=StepStatus.DONE)
            case (Direction.UNDO, TimerKind.TIMEOUT, StepStatus.UNDOING):
                self._undo_failed(node, "its undoing was not answered in time", final=False)
            case (Direction.UNDO, TimerKind.RETRY, StepStatus.UNDO_RETRYING):
                self._dispatch_undo(node)
            case _:
                self.ignore(f"a timer of {node.name!r} is late: it is {step.status}")

    def _timed_out(self, node: Node) -> None:
        if node.kind is NodeKind.SIGNAL:
            self._give_up(node, doubt=False, why="the signal has not come in time")
        elif self._may_retry(node):
            self._retry_later(node, doubt=True)
        else:
            self._give_up(node, doubt=True, why="it was not answered in time")

    def _decided(self, node: Node, case: str) -> None:
        if self.steps[node.name].status is StepStatus.RUNNING:
            self._put(node, status=StepStatus.DONE, case=case)
        else:
            self.ignore(f"{node.name!r} has been decided already")

    def _signalled(self, name: str) -> None:
        node = self.graph.nodes.get(name)
        if node is None or node.kind is not NodeKind.SIGNAL:
            self.ignore(f"nothing waits for a signal {name!r}")
        elif self.steps[name].status in (StepStatus.RUNNING, StepStatus.PARKED):
            self._done(node)
        elif self.steps[name].status is StepStatus.WAITING and name not in self.signals:
            self.signals = (*self.signals, name)
        else:
            self.ignore(f"signal {name!r} has come already, or too late")

    def _turn_back(self, reason: str) -> None:
        if self.phase is not SagaPhase.FORWARD:
            self.ignore("it is being compensated already")
        elif self._is_past_pivot():
            self.ignore("the pivot is passed: it can only go forward")
        else:
            self.phase, self.reason = SagaPhase.QUIESCING, reason

    def _retry_requested(self, node: Node) -> None:
        match self.steps[node.name].status:
            case StepStatus.PARKED:
                self._dispatch(node)
            case StepStatus.UNDO_PARKED:
                self._dispatch_undo(node)
            case status:
                self.ignore(f"step {node.name!r} is {status}, not parked")

    def _skip_requested(self, node: Node) -> None:
        match self.steps[node.name].status:
            case StepStatus.PARKED if self.graph.is_behind_pivot(node.name):
                self._settle(node, StepStatus.SKIPPED)
            case StepStatus.PARKED:
                self._fail(node, doubt=False, why="a human says that it was not done")
            case StepStatus.UNDO_PARKED:
                self._undone(node, accept=False)
            case status:
                self.ignore(f"step {node.name!r} is {status}, not parked")

    def _marked_done(self, node: Node) -> None:
        match self.steps[node.name].status:
            case StepStatus.PARKED:
                self._settle(node, StepStatus.DONE)
            case StepStatus.UNDO_PARKED:
                self._undone(node, accept=False)
            case status:
                self.ignore(f"step {node.name!r} is {status}, not parked")

    # What a step becomes.

    def _put(
        self,
        node: Node,
        *,
        status: StepStatus | None = None,
        doubt: bool | None = None,
        case: str | None = None,
    ) -> None:
        step = self.steps[node.name]
        self.steps[node.name] = replace(
            step,
            status=step.status if status is None else status,
            doubt=step.doubt if doubt is None else doubt,
            case=step.case if case is None else case,
        )

    def _settle(self, node: Node, status: StepStatus, *, doubt: bool = False) -> None:
        self._put(node, status=status, doubt=doubt)
        self.effects.append(ClearTimers(node.name))

    def _done(self, node: Node) -> None:
        self._settle(node, StepStatus.DONE)
        self.effects.append(Accept(node.name))

    def _undone(self, node: Node, *, accept: bool) -> None:
        self._settle(node, StepStatus.UNDONE)
        if accept:
            self.effects.append(Accept(node.name, _UNDO))

    def _may_retry(self, node: Node) -> bool:
        """Whether another attempt is left; on the way back only a pivot is tried to the end."""
        if self.phase is not SagaPhase.FORWARD and not self._is_irrevocable(node):
            return False
        most = node.retry.attempts
        return most is None or self.steps[node.name].attempt < most

    def _retry_later(self, node: Node, *, doubt: bool) -> None:
        self._put(node, status=StepStatus.RETRYING, doubt=doubt)
        attempt = self.steps[node.name].attempt
        self.effects.append(ClearTimers(node.name, keep_deadline=True))
        self.effects.append(SetTimer(node.name, _DO, attempt, TimerKind.RETRY))

    def _give_up(self, node: Node, *, doubt: bool, why: str) -> None:
        """End the attempts at a step: it has failed or is unknown, or only a human can tell."""
        behind = self.graph.is_behind_pivot(node.name)
        if behind or (doubt and self._is_irrevocable(node)):
            self._settle(node, StepStatus.PARKED, doubt=doubt)
            self.effects.append(ParkStep(node.name, _DO, why))
        else:
            self._fail(node, doubt=doubt, why=why)

    def _fail(self, node: Node, *, doubt: bool, why: str) -> None:
        self._settle(node, StepStatus.UNKNOWN if doubt else StepStatus.FAILED, doubt=doubt)
        if self.phase is SagaPhase.FORWARD:
            self.phase, self.reason = SagaPhase.QUIESCING, f"{node.name}: {why}"

    def _undo_failed(self, node: Node, why: str, *, final: bool) -> None:
        assert node.undo is not None  # noqa: S101 - nothing else is ever undone
        attempt, most = self.steps[node.name].undo_attempt, node.undo.retry.attempts
        if not final and (most is None or attempt < most):
            self._settle(node, StepStatus.UNDO_RETRYING)
            self.effects.append(SetTimer(node.name, _UNDO, attempt, TimerKind.RETRY))
        else:
            self._settle(node, StepStatus.UNDO_PARKED)
            self.effects.append(ParkStep(node.name, _UNDO, why))

    def _is_irrevocable(self, node: Node) -> bool:
        """Whether only its own outcome can say whether there is a way back."""
        return node.pivot and node.undo is None

    def _is_past_pivot(self) -> bool:
        pivot = self.graph.pivot
        return pivot is not None and self.steps[pivot].status is StepStatus.DONE

    # Going on from there.

    def advance(self) -> None:
        """Begin what can begin now, in whichever direction the saga is going."""
        if self.phase is SagaPhase.FORWARD:
            self._forward()
        if self.phase is SagaPhase.QUIESCING:
            self._quiesce()
        if self.phase is SagaPhase.BACKWARD:
            self._backward()

    def _forward(self) -> None:
        for node in self.graph:  # in topological order: one pass reaches everything
            if self.steps[node.name].status is _WAITING and self._is_reached(node):
                if self._is_chosen(node):
                    self._dispatch(node)
                else:
                    self._put(node, status=StepStatus.SKIPPED)
        for step in self.steps.values():
            if step.status not in ENDED:
                return
        self._finish(SagaPhase.COMPLETED)

    def _is_reached(self, node: Node) -> bool:
        for earlier in node.after:  # noqa: SIM110 - for every step of every transition
            if self.steps[earlier].status not in ENDED:
                return False
        return True

    def _is_chosen(self, node: Node) -> bool:
        return all(self.steps[choice].case == case for choice, case in node.when)

    def _dispatch(self, node: Node) -> None:
        attempt = self.steps[node.name].attempt + 1
        self.steps[node.name] = replace(
            self.steps[node.name], status=StepStatus.RUNNING, attempt=attempt
        )
        if node.deadline is not None and attempt == 1:
            self.effects.append(SetTimer(node.name, _DO, 0, TimerKind.DEADLINE))
        match node.kind:
            case NodeKind.LOCAL:
                self.effects.append(RunStep(node.name, _DO, attempt))
            case NodeKind.COMMAND:
                self.effects.append(SendCommand(node.name, _DO, attempt))
            case NodeKind.CHOICE:
                self.effects.append(Decide(node.name, attempt))
            case NodeKind.TIMER:
                self.effects.append(SetTimer(node.name, _DO, attempt, TimerKind.SLEEP))
            case NodeKind.SIGNAL if node.name in self.signals:
                self.signals = tuple(name for name in self.signals if name != node.name)
                self._done(node)
                return
            case NodeKind.SIGNAL:
                pass
            case _:
                assert_never(node.kind)
        if node.timeout is not None:
            self.effects.append(SetTimer(node.name, _DO, attempt, TimerKind.TIMEOUT))

    def _quiesce(self) -> None:
        """Give up what has had no effect, wait for what may have one, then turn back."""
        for node in self.graph:
            step = self.steps[node.name]
            if step.status is StepStatus.RUNNING and node.kind is not NodeKind.COMMAND:
                self._settle(node, StepStatus.CANCELLED)
            elif step.status is StepStatus.RETRYING and not (
                step.doubt and self._is_irrevocable(node)
            ):
                self._settle(
                    node, StepStatus.UNKNOWN if step.doubt else StepStatus.FAILED, doubt=step.doubt
                )
        if any(step.status in IN_FLIGHT for step in self.steps.values()):
            return
        if self._is_past_pivot():
            self.phase, self.reason = SagaPhase.FORWARD, ""
            self._forward()
        else:
            self.phase = SagaPhase.BACKWARD

    def _backward(self) -> None:
        for node in reversed(list(self.graph)):
            if self.steps[node.name].status not in OWING:
                continue
            if any(self._is_in_the_way(later) for later in self.graph.descendants[node.name]):
                continue
            if node.undo is None:
                self._put(node, status=StepStatus.UNDONE)  # said to have nothing to undo
            else:
                self._dispatch_undo(node)
        if not any(self._is_in_the_way(name) for name in self.steps):
            self._finish(SagaPhase.COMPENSATED)

    def _is_in_the_way(self, name: str) -> bool:
        status = self.steps[name].status
        return status in OWING or status in UNDOING

    def _dispatch_undo(self, node: Node) -> None:
        assert node.undo is not None  # noqa: S101 - nothing else is ever undone
        attempt = self.steps[node.name].undo_attempt + 1
        self.steps[node.name] = replace(
            self.steps[node.name], status=StepStatus.UNDOING, undo_attempt=attempt
        )
        if node.undo.kind is NodeKind.LOCAL:
            self.effects.append(RunStep(node.name, _UNDO, attempt))
        else:
            self.effects.append(SendCommand(node.name, _UNDO, attempt))
        if node.undo.timeout is not None:
            self.effects.append(SetTimer(node.name, _UNDO, attempt, TimerKind.TIMEOUT))

    def _finish(self, phase: SagaPhase) -> None:
        self.phase = phase
        self.effects.append(ClearTimers(""))
        self.effects.append(FinishSaga(phase))
