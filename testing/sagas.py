"""A model checker for sagas: every order of events, every fault, every crash, up to a bound.

The saga's own transitions run against participants with the real barrier, in a world of messages
that may come late, twice and in any order, of timers that may fire at any moment, and of workers
that may die or be overtaken between reading and committing. Every world that can be reached with
so many faults is looked at. The first one that breaks a promise is told as a story, the shortest
there is, which `replay` repeats as a test.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from operator import itemgetter
from random import Random
from typing import TYPE_CHECKING, Any

from holdfast.sagas import barrier
from holdfast.sagas.graph import Graph, Node, NodeKind
from holdfast.sagas.states import (
    Answer,
    Answered,
    CancelRequested,
    ClearTimers,
    Decide,
    Decided,
    Direction,
    RetryRequested,
    RunStep,
    SagaEffect,
    SagaEvent,
    SagaPhase,
    SagaProgress,
    SendCommand,
    SetTimer,
    Signalled,
    Started,
    StepStatus,
    TimerFired,
    TimerKind,
)
from holdfast.sagas.transitions import begin, transition

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.sagas.barrier import Mark
    from holdfast.sagas.definition import Saga

_NET = {
    StepStatus.WAITING: (0,), StepStatus.DONE: (1,), StepStatus.FAILED: (0,),
    StepStatus.SKIPPED: (0,), StepStatus.CANCELLED: (0,), StepStatus.UNDONE: (0,),
}  # fmt: skip
"""How often a step's effect must stand in the world, when nothing is under way any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much may go wrong in one run, and how often a step is tried at most.

    Each failure, timeout, duplicate, kill, cancellation, operator's retry and overtaken worker
    is one of the *faults*. Few *attempts* are enough: what goes wrong with five goes wrong with
    two.
    """

    faults: int = 3
    attempts: int = 2
    worlds: int = 500_000
    """How many worlds are looked at before the check gives up as too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SagaRules:
    """The mechanisms that the promise rests on; switch one off to see what it is good for."""

    barrier: bool = True
    version_guard: bool = True


class SagaViolation(AssertionError):
    """A saga broke its promise; `story` tells how, step by step, and can be replayed."""

    def __init__(self, saga: str, promise: str, story: Sequence[str]) -> None:
        told = "\n".join(f"  {number}. {line}" for number, line in enumerate(story, 1))
        super().__init__(f"saga {saga!r}: {promise}\n{told}")
        self.promise = promise
        self.story = tuple(story)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was looked at, and how the runs ended."""

    worlds: int
    endings: dict[str, int]


def check_saga(
    saga: Saga[Any] | Graph, *, bounds: Bounds | None = None, rules: SagaRules | None = None
) -> Checked:
    """Look at every run of *saga* within *bounds*, or raise `SagaViolation` with the shortest.

    Every run must end completed, compensated or parked, and every step's effect must stand in
    the world exactly as often as the saga believes: once, or not at all.
    """
    model = _Model(saga, bounds or Bounds(), rules or SagaRules())
    first = model.first()
    came_from: dict[World, tuple[World, str] | None] = {first: None}
    queue = deque([first])
    endings: dict[str, int] = {}
    while queue:
        world = queue.popleft()
        if broken := model.broken(world):
            raise SagaViolation(model.graph.saga, broken, _story(came_from, world))
        is_end = True
        for label, after, is_fault in model.actions(world):
            is_end = is_end and is_fault
            if after not in came_from:
                came_from[after] = (world, label)
                queue.append(after)
        if len(came_from) > model.bounds.worlds:
            raise ValueError(
                f"saga {model.graph.saga!r} has more than {model.bounds.worlds} worlds: check it "
                "with fewer faults, or raise Bounds(worlds=…)"
            )
        if is_end:
            if wrong := model.wrong_end(world):
                raise SagaViolation(model.graph.saga, wrong, _story(came_from, world))
            ending = "parked" if world.parked else world.phase.value
            endings[ending] = endings.get(ending, 0) + 1
    return Checked(worlds=len(came_from), endings=endings)


def replay(
    saga: Saga[Any] | Graph,
    story: Sequence[str],
    *,
    bounds: Bounds | None = None,
    rules: SagaRules | None = None,
) -> None:
    """Do again what *story* tells; raise `SagaViolation` if it breaks a promise still."""
    model = _Model(saga, bounds or Bounds(), rules or SagaRules())
    world = model.first()
    for number, line in enumerate(story):
        moves = {label: after for label, after, _ in model.actions(world)}
        if line not in moves:
            raise ValueError(f"{line!r} cannot happen any more; this can: {', '.join(moves)}")
        world = moves[line]
        if broken := model.broken(world):
            raise SagaViolation(model.graph.saga, broken, story[: number + 1])
    if all(is_fault for _, _, is_fault in model.actions(world)) and (
        wrong := model.wrong_end(world)
    ):
        raise SagaViolation(model.graph.saga, wrong, story)


def sample_saga(
    saga: Saga[Any] | Graph,
    *,
    runs: int = 1000,
    randomness: Random | None = None,
    bounds: Bounds | None = None,
    rules: SagaRules | None = None,
) -> Checked:
    """Look at *runs* random runs of a saga that is too large to look at all; promises as there."""
    model = _Model(saga, bounds or Bounds(faults=8, attempts=3), rules or SagaRules())
    pick = Random(0) if randomness is None else randomness  # noqa: S311 - no secrets here
    endings: dict[str, int] = {}
    seen = 0
    for _ in range(runs):
        world, story = model.first(), list[str]()
        while moves := sorted(model.actions(world), key=itemgetter(0)):
            label, world, _is_fault = pick.choice(moves)
            story.append(label)
            seen += 1
            if broken := model.broken(world):
                raise SagaViolation(model.graph.saga, broken, story)
        if wrong := model.wrong_end(world):
            raise SagaViolation(model.graph.saga, wrong, story)
        ending = "parked" if world.parked else world.phase.value
        endings[ending] = endings.get(ending, 0) + 1
    return Checked(worlds=seen, endings=endings)


@dataclass(frozen=True, slots=True)
class CommandInFlight:
    """A command on its way to a participant."""

    step: str
    direction: Direction
    attempt: int


@dataclass(frozen=True, slots=True)
class Slow:
    """A worker that has read the saga, and has not committed yet."""

    event: SagaEvent
    key: tuple[object, ...]
    read: SagaProgress = field(compare=False)


@dataclass(frozen=True, slots=True)
class World:
    """Everything there is at one moment; equal worlds have equal futures."""

    phase: SagaPhase
    steps: tuple[tuple[str, object], ...]
    signals: tuple[str, ...]
    commands: frozenset[CommandInFlight] = frozenset()
    replies: frozenset[Answered] = frozenset()
    runs: frozenset[RunStep] = frozenset()
    choices: frozenset[str] = frozenset()
    timers: frozenset[TimerFired] = frozenset()
    marks: tuple[tuple[str, Mark], ...] = ()
    done: tuple[tuple[str, int, int], ...] = ()
    """How often each step was really done and undone."""
    slow: Slow | None = None
    faults: int = 0
    progress: SagaProgress = field(compare=False, kw_only=True)

    @property
    def parked(self) -> tuple[str, ...]:
        """The steps that wait for a human."""
        return self.progress.parked


Action = tuple[str, World, bool]


class _Model:
    """The moves that a saga, its participants and its enemies have in a world."""

    def __init__(self, saga: Saga[Any] | Graph, bounds: Bounds, rules: SagaRules) -> None:
        graph = saga if isinstance(saga, Graph) else saga.graph
        self.bounds, self.rules = bounds, rules
        nodes = {name: _bounded(node, bounds.attempts) for name, node in graph.nodes.items()}
        self.graph = replace(graph, nodes=nodes)

    def first(self) -> World:
        progress = begin(self.graph)
        return self._commit(_world(progress, self.bounds.faults), Started())

    # What must hold.

    def broken(self, world: World) -> str:
        """Return the promise that *world* breaks at once, "" if none."""
        for step, done, undone in world.done:
            if done > 1:
                return f"step {step!r} was done twice"
            if undone > done:
                return f"step {step!r} was undone more often than done"
        return ""

    def wrong_end(self, world: World) -> str:
        """Return what is wrong with *world* as the end of a run, "" if nothing is."""
        if not world.phase.is_final and not world.parked:
            return f"the run stands still while the saga is {world.phase}"
        counts = {step: done - undone for step, done, undone in world.done}
        for name, step in world.progress.steps.items():
            node = self.graph[name]
            expected = _NET.get(step.status)
            if expected is None and world.phase.is_final:
                return f"it ended {world.phase} with step {name!r} {step.status}"
            if not node.has_effect or expected is None or node.is_harmless:
                continue
            if counts.get(name, 0) not in expected:
                stands = "stands" if counts.get(name, 0) else "does not stand"
                return (
                    f"it ended {world.phase} with step {name!r} {step.status}, "
                    f"but its effect {stands}"
                )
        return ""

    # What can happen.

    def actions(self, world: World) -> Iterator[Action]:
        """Yield each thing that can happen next: how it is told, what comes of it, its fault."""
        yield from self._deliveries(world)
        yield from self._participants(world)
        yield from self._locals(world)
        yield from self._choices(world)
        yield from self._timers(world)
        yield from self._people(world)
        if world.slow is not None:
            label = f"the slow worker commits {_told(world.slow.event)}"
            yield label, self._commit_slow(world, world.slow), False

    def _deliveries(self, world: World) -> Iterator[Action]:
        for reply in world.replies:
            told = _told(reply)
            rest = replace(world, replies=world.replies - {reply})
            yield told, self._commit(rest, reply), False
            if world.faults:
                # Killed between commit and ack: the broker delivers it once more.
                again = self._commit(_spend(world), reply)
                yield f"{told}; the worker is killed before it acks", again, True
                if world.slow is None:
                    slow = replace(_spend(rest), slow=_slow(reply, world))
                    yield f"a slow worker reads {told}", slow, True

    def _participants(self, world: World) -> Iterator[Action]:
        for command in world.commands:
            rest = replace(world, commands=world.commands - {command})
            for answer in (Answer.DONE, Answer.FAILED, Answer.FAILED_FOR_NOW):
                if answer is not Answer.DONE and not world.faults:
                    continue
                after, real = self._handled(rest, command, answer)
                if real is not answer and answer is not Answer.DONE:
                    continue  # it was not executed, so it could not fail
                if real is not Answer.DONE and real is answer:
                    after = _spend(after)
                told = f"the participant of {_named(command)} answers {real}"
                yield told, after, real is not Answer.DONE
                if world.faults and answer is Answer.DONE:
                    twice = replace(_spend(after), commands=world.commands)
                    yield f"{told}, and is killed before it acks", twice, True

    def _handled(
        self, world: World, command: CommandInFlight, wanted: Answer
    ) -> tuple[World, Answer]:
        marks = dict(world.marks)
        # Without the barrier there is still an inbox, which knows the message and nothing else.
        key = command.step if self.rules.barrier else _named(command)
        mark = marks.get(key)
        found = barrier.verdict(mark, command.direction, command.attempt)
        if not self.rules.barrier:
            found = (
                barrier.BarrierVerdict.EXECUTE if mark is None else barrier.BarrierVerdict.REPEAT
            )
        match found:
            case barrier.BarrierVerdict.EXECUTE:
                answer = wanted
                if answer is Answer.DONE:
                    world = _counted(world, command.step, command.direction)
            case barrier.BarrierVerdict.REPEAT:
                is_do = command.direction is Direction.DO
                answer = mark.answer if mark is not None and is_do else Answer.DONE
            case barrier.BarrierVerdict.NOTHING:
                answer = Answer.DONE
            case _:
                answer = Answer.FAILED
        if found in (barrier.BarrierVerdict.EXECUTE, barrier.BarrierVerdict.NOTHING):
            left = barrier.marked(mark, command.direction, command.attempt, answer)
            if left is not None:
                marks[key] = left
        reply = Answered(command.step, command.direction, command.attempt, answer)
        world = replace(world, marks=tuple(sorted(marks.items())), replies=world.replies | {reply})
        return world, answer

    def _locals(self, world: World) -> Iterator[Action]:
        for run in world.runs:
            rest = replace(world, runs=world.runs - {run})
            done = Answered(run.step, run.direction, run.attempt, Answer.DONE)
            yield f"local {_named(run)} runs", self._run(rest, done), False
            if world.faults:
                for answer in (Answer.FAILED, Answer.FAILED_FOR_NOW):
                    failed = Answered(run.step, run.direction, run.attempt, answer)
                    told = f"local {_named(run)} is {answer}"
                    yield told, self._commit(_spend(rest), failed), True
                if world.slow is None:
                    slow = replace(_spend(world), slow=_slow(done, world))
                    yield f"a slow worker begins local {_named(run)}", slow, True

    def _run(self, world: World, event: Answered) -> World:
        """Run a local step: its effect and the transition are one transaction."""
        after = self._commit(world, event)
        if not _is_awaited(world.progress, event):
            return after  # the engine looks before it runs
        return _counted(after, event.step, event.direction)

    def _timers(self, world: World) -> Iterator[Action]:
        for timer in world.timers:
            is_fault = timer.kind in (TimerKind.TIMEOUT, TimerKind.DEADLINE)
            if is_fault and not world.faults:
                continue
            fired = replace(world, timers=world.timers - {timer})
            label = _told(timer)
            yield label, self._commit(_spend(fired) if is_fault else fired, timer), is_fault
            if world.faults and world.slow is None:
                slow = replace(_spend(world), slow=_slow(timer, world))
                yield f"a slow worker sees that {label}", slow, True

    def _choices(self, world: World) -> Iterator[Action]:
        for name in world.choices:
            rest = replace(world, choices=world.choices - {name})
            for case in self.graph[name].cases:
                yield f"{name} chooses {case}", self._commit(rest, Decided(name, case)), False

    def _people(self, world: World) -> Iterator[Action]:
        if world.phase.is_final:
            return
        for node in self.graph:
            if node.kind is NodeKind.SIGNAL and _may_be_signalled(world, node):
                event = Signalled(node.name)
                yield f"signal {node.name} comes", self._commit(world, event), False
        if not world.faults:
            return
        if world.phase is SagaPhase.FORWARD:
            event_ = CancelRequested("cancelled")
            yield "somebody cancels the saga", self._commit(_spend(world), event_), True
        for name in world.parked:
            retried = self._commit(_spend(world), RetryRequested(name))
            yield f"an operator retries {name}", retried, True

    # How it is committed.

    def _commit(self, world: World, event: SagaEvent) -> World:
        """Apply *event* to the saga as it is now, and do what follows from it."""
        progress, effects = transition(self.graph, world.progress, event)
        return self._carry_out(_seen(world, progress), effects)

    def _commit_slow(self, world: World, slow: Slow) -> World:
        """Commit what a worker made of what it had read, if nobody was quicker."""
        world = replace(world, slow=None)
        is_stale = world.progress != slow.read
        event = slow.event
        if isinstance(event, TimerFired) and event in world.timers:
            world = replace(world, timers=world.timers - {event})
        is_local = isinstance(event, Answered) and _is_local(self.graph, event)
        if isinstance(event, Answered) and is_local:
            run = RunStep(event.step, event.direction, event.attempt)
            if is_stale and self.rules.version_guard:
                return world  # rolled back with its effect; whoever is due runs it
            world = replace(world, runs=world.runs - {run})
            world = _counted(world, event.step, event.direction)
        if is_stale and self.rules.version_guard:
            return self._commit(world, event)  # read again, and decided again
        progress, effects = transition(self.graph, slow.read, event)
        return self._carry_out(_seen(world, progress), effects)

    def _carry_out(self, world: World, effects: Sequence[SagaEffect]) -> World:
        commands, runs, timers = set(world.commands), set(world.runs), set(world.timers)
        choices = set(world.choices)
        for effect in effects:
            match effect:
                case SendCommand(step, direction, attempt):
                    commands.add(CommandInFlight(step, direction, attempt))
                case RunStep():
                    runs.add(effect)
                case SetTimer(step, direction, attempt, kind):
                    timers.add(TimerFired(step, direction, attempt, kind))
                case ClearTimers(step, keep):
                    timers = {one for one in timers if not _is_cleared(one, step, keep=keep)}
                case Decide(step):
                    choices.add(step)
                case _:
                    pass
        return replace(
            world, commands=frozenset(commands), runs=_awaited(world, runs),
            timers=frozenset(timers), choices=frozenset(choices),
        )  # fmt: skip


def _bounded(node: Node, most: int) -> Node:
    def fewer(attempts: int | None) -> int:
        return most if attempts is None else min(attempts, most)

    undo = node.undo
    if undo is not None:
        undo = replace(undo, retry=replace(undo.retry, attempts=fewer(undo.retry.attempts)))
    retry = replace(node.retry, attempts=fewer(node.retry.attempts))
    return replace(node, retry=retry, undo=undo)


def _world(progress: SagaProgress, faults: int) -> World:
    return World(
        progress.phase, tuple(progress.steps.items()), progress.signals, faults=faults,
        progress=progress,
    )  # fmt: skip


def _seen(world: World, progress: SagaProgress) -> World:
    return replace(
        world, phase=progress.phase, steps=tuple(progress.steps.items()),
        signals=progress.signals, progress=progress,
    )  # fmt: skip


def _slow(event: SagaEvent, world: World) -> Slow:
    return Slow(event, (world.phase, world.steps, world.signals), world.progress)


def _spend(world: World) -> World:
    return replace(world, faults=world.faults - 1)


def _counted(world: World, step: str, direction: Direction) -> World:
    counts = {name: (done, undone) for name, done, undone in world.done}
    done, undone = counts.get(step, (0, 0))
    is_do = direction is Direction.DO
    counts[step] = (done + is_do, undone + (not is_do))
    return replace(world, done=tuple(sorted((name, *pair) for name, pair in counts.items())))


def _is_awaited(progress: SagaProgress, event: Answered) -> bool:
    """Whether the saga still waits for just this attempt."""
    step = progress.steps[event.step]
    if event.direction is Direction.DO:
        return step.status is StepStatus.RUNNING and step.attempt == event.attempt
    return step.status is StepStatus.UNDOING and step.undo_attempt == event.attempt


def _awaited(world: World, runs: set[RunStep]) -> frozenset[RunStep]:
    return frozenset(
        run
        for run in runs
        if _is_awaited(world.progress, Answered(run.step, run.direction, run.attempt, Answer.DONE))
    )


def _is_local(graph: Graph, event: Answered) -> bool:
    node = graph[event.step]
    if event.direction is Direction.DO:
        return node.kind is NodeKind.LOCAL
    return node.undo is not None and node.undo.kind is NodeKind.LOCAL


def _is_cleared(timer: TimerFired, step: str, *, keep: bool) -> bool:
    if not step:
        return True
    return timer.step == step and not (keep and timer.kind is TimerKind.DEADLINE)


def _may_be_signalled(world: World, node: Node) -> bool:
    status = world.progress.steps[node.name].status
    is_open = status in (StepStatus.WAITING, StepStatus.RUNNING, StepStatus.PARKED)
    return is_open and node.name not in world.signals


def _named(what: CommandInFlight | RunStep | Answered | TimerFired) -> str:
    undo = "undo of " if what.direction is Direction.UNDO else ""
    number = f" (attempt {what.attempt})" if what.attempt > 1 else ""
    return f"{undo}{what.step}{number}"


def _told(event: SagaEvent) -> str:
    match event:
        case Answered():
            return f"the reply to {_named(event)} comes: {event.answer}"
        case TimerFired(step="", kind=kind):
            return f"the {kind} of the saga fires"
        case TimerFired():
            return f"the {event.kind} of {_named(event)} fires"
        case _:
            return type(event).__name__


def _story(came_from: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    lines: list[str] = []
    while (step := came_from[world]) is not None:
        world, label = step
        lines.append(label)
    return lines[::-1]
