"""Three outcomes, late replies, and undoing in the right order: event by event."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.backoff import Backoff
from holdfast.sagas.barrier import BarrierVerdict, Mark, MarkStatus, marked, verdict
from holdfast.sagas.graph import Graph, Node, NodeKind, Undo, build
from holdfast.sagas.states import (
    Accept,
    Answer,
    Answered,
    CancelRequested,
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
    SagaPhase,
    SagaProgress,
    SendCommand,
    SetTimer,
    Signalled,
    SkipRequested,
    Started,
    StepStatus,
    TimerFired,
    TimerKind,
)
from holdfast.sagas.transitions import begin, transition

DO, UNDO = Direction.DO, Direction.UNDO
TWICE = Backoff(attempts=2)


def step(name: str, *after: str, **options: Any) -> Node:
    kind = options.get("kind", NodeKind.COMMAND)
    undo = Undo(name=f"un{name}", kind=NodeKind.COMMAND, topic="t", timeout=5, retry=TWICE)
    given: dict[str, Any] = {"timeout": 5, "retry": TWICE, "undo": undo, "topic": "t"} | options
    if kind in (NodeKind.SIGNAL, NodeKind.CHOICE, NodeKind.TIMER):
        given["undo"] = None
    given["kind"] = kind
    return Node(name=name, after=frozenset(after), **given)


class Story:
    """One saga, driven by hand."""

    def __init__(self, *nodes: Node, deadline: float | None = None) -> None:
        self.graph: Graph = build("story", 1, nodes, deadline=deadline)
        self.progress: SagaProgress = begin(self.graph)
        self.effects: tuple[SagaEffect, ...] = ()
        self.tell(Started())

    def tell(self, event: Any) -> Story:
        self.progress, self.effects = transition(self.graph, self.progress, event)
        return self

    def done(self, name: str, attempt: int = 1, direction: Direction = DO) -> Story:
        return self.tell(Answered(name, direction, attempt, Answer.DONE))

    def failed(self, name: str, attempt: int = 1, answer: Answer = Answer.FAILED) -> Story:
        return self.tell(Answered(name, DO, attempt, answer))

    def undone(self, name: str, attempt: int = 1) -> Story:
        return self.done(name, attempt, UNDO)

    def fires(self, name: str, kind: TimerKind, attempt: int = 1, of: Direction = DO) -> Story:
        return self.tell(TimerFired(name, of, attempt, kind))

    def times_out(self, name: str, attempts: int = 2) -> Story:
        """Let every attempt at *name* go without an answer."""
        for attempt in range(1, attempts + 1):
            self.fires(name, TimerKind.TIMEOUT, attempt)
            if attempt < attempts:
                self.fires(name, TimerKind.RETRY, attempt)
        return self

    def status(self, name: str) -> StepStatus:
        return self.progress.steps[name].status

    @property
    def sent(self) -> list[tuple[str, str]]:
        return [(e.step, e.direction.value) for e in self.effects if isinstance(e, SendCommand)]

    @property
    def is_ignored(self) -> bool:
        return [type(effect) for effect in self.effects] == [Ignore]


def test_steps_follow_each_other_to_the_end() -> None:
    """Each reply sends the next command in the same transition."""
    story = Story(step("a"), step("b", "a"))
    assert story.sent == [("a", "do")]
    assert story.done("a").sent == [("b", "do")]
    assert Accept("a") in story.effects
    story.done("b")
    assert story.progress.phase is SagaPhase.COMPLETED
    assert story.effects[-1] == FinishSaga(SagaPhase.COMPLETED)


def test_a_failure_undoes_what_was_done_in_reverse() -> None:
    """The failed step itself had no effect and is not undone."""
    story = Story(step("a"), step("b", "a"), step("c", "b"))
    story.done("a").done("b").failed("c")
    assert story.sent == [("b", "undo")]
    assert story.undone("b").sent == [("a", "undo")]
    story.undone("a")
    assert story.progress.phase is SagaPhase.COMPENSATED
    assert story.progress.reason == "c: it has failed"


def test_what_was_not_answered_is_unknown_and_undone() -> None:
    """A timeout is no failure: the participant may have done it."""
    story = Story(step("a"), step("b", "a"))
    story.done("a").times_out("b")
    assert story.status("b") is StepStatus.UNDOING
    assert story.sent == [("b", "undo")]
    assert story.undone("b").sent == [("a", "undo")]


def test_a_step_without_answer_is_sent_again_before_it_is_given_up() -> None:
    """The attempt counts up, so that replies can be told apart."""
    story = Story(step("a"))
    story.fires("a", TimerKind.TIMEOUT)
    assert story.status("a") is StepStatus.RETRYING
    assert SetTimer("a", DO, 1, TimerKind.RETRY) in story.effects
    story.fires("a", TimerKind.RETRY)
    assert SendCommand("a", DO, 2) in story.effects


def test_a_late_success_of_a_superseded_attempt_is_accepted() -> None:
    """Whichever attempt did it, it is done."""
    story = Story(step("a"), step("b", "a"))
    story.fires("a", TimerKind.TIMEOUT).fires("a", TimerKind.RETRY).done("a", attempt=1)
    assert story.sent == [("b", "do")]


def test_a_late_failure_of_a_superseded_attempt_is_ignored() -> None:
    """The latest attempt may still succeed."""
    story = Story(step("a"))
    story.fires("a", TimerKind.TIMEOUT).fires("a", TimerKind.RETRY).failed("a", attempt=1)
    assert story.is_ignored
    assert story.status("a") is StepStatus.RUNNING


def test_a_late_failure_of_the_latest_attempt_makes_undoing_unnecessary() -> None:
    """While a sibling is waited for, the unknown step turns out to have had no effect."""
    story = Story(step("a"), step("b"))
    story.times_out("a")
    assert story.status("a") is StepStatus.UNKNOWN
    story.failed("a", attempt=2)
    assert story.status("a") is StepStatus.FAILED
    story.failed("b")
    assert story.progress.phase is SagaPhase.COMPENSATED


def test_a_late_success_while_siblings_are_waited_for_leaves_the_undoing_owed() -> None:
    """It is done after all."""
    story = Story(step("a"), step("b"))
    story.times_out("a").done("a", attempt=1)
    assert story.status("a") is StepStatus.DONE
    assert story.failed("b").sent == [("a", "undo")]


def test_nothing_is_undone_before_siblings_in_flight_have_an_outcome() -> None:
    """And nothing new begins meanwhile."""
    story = Story(step("first"), step("a", "first"), step("b", "first"), step("c", "b"))
    story.done("first").failed("a")
    assert story.progress.phase is SagaPhase.QUIESCING
    assert story.sent == []
    assert story.done("b").sent == [("b", "undo")]
    assert story.status("c") is StepStatus.WAITING
    assert story.undone("b").sent == [("first", "undo")]


def test_a_sibling_that_waits_for_its_retry_is_not_tried_again_on_the_way_back() -> None:
    """Without doubt it has failed, with doubt it is undone."""
    story = Story(step("a"), step("b"))
    story.failed("b", answer=Answer.FAILED_FOR_NOW).failed("a")
    assert story.status("b") is StepStatus.FAILED
    doubtful = Story(step("a"), step("b"))
    doubtful.fires("b", TimerKind.TIMEOUT).failed("a")
    assert doubtful.sent == [("b", "undo")]


def test_local_steps_signals_and_timers_in_flight_are_cancelled_at_once() -> None:
    """They have had no effect that is not committed with their outcome."""
    story = Story(
        step("a"),
        step("local", kind=NodeKind.LOCAL, timeout=None),
        step("sleep", kind=NodeKind.TIMER, timeout=None),
        step("signal", kind=NodeKind.SIGNAL),
    )
    assert RunStep("local", DO, 1) in story.effects
    story.failed("a")
    assert story.progress.phase is SagaPhase.COMPENSATED
    late = Answered("local", DO, 1, Answer.DONE)
    assert story.tell(late).is_ignored


def test_what_comes_after_the_end_is_told_and_changes_nothing() -> None:
    """Replies, timers and signals alike."""
    story = Story(step("a"))
    story.done("a")
    before = story.progress
    assert story.done("a").is_ignored
    assert story.fires("a", TimerKind.TIMEOUT).is_ignored
    assert story.tell(CancelRequested("no")).is_ignored
    assert story.progress == before


def test_a_duplicate_reply_changes_nothing() -> None:
    """The step is done already."""
    story = Story(step("a"), step("b", "a"))
    story.done("a")
    before = story.progress
    assert story.done("a").is_ignored
    assert story.progress == before


def test_a_compensation_is_tried_again_and_then_parked() -> None:
    """It is never lost; the human's word ends it."""
    story = Story(step("a"), step("b", "a"))
    story.done("a").failed("b")
    story.fires("a", TimerKind.TIMEOUT, of=UNDO)
    story.fires("a", TimerKind.RETRY, of=UNDO)
    story.tell(Answered("a", UNDO, 2, Answer.FAILED_FOR_NOW, "out of money"))
    assert story.progress.parked == ("a",)
    assert ParkStep("a", UNDO, "out of money") in story.effects
    story.tell(RetryRequested("a"))
    assert SendCommand("a", UNDO, 3) in story.effects
    story.tell(Answered("a", UNDO, 3, Answer.FAILED))
    assert story.tell(MarkedDone("a")).progress.phase is SagaPhase.COMPENSATED


def test_an_undoing_that_was_parked_ends_when_its_late_reply_comes() -> None:
    """Nobody has to do anything then."""
    story = Story(step("a"), step("b", "a"))
    story.done("a").failed("b")
    story.tell(Answered("a", UNDO, 1, Answer.FAILED))
    assert story.progress.parked == ("a",)
    assert story.undone("a").progress.phase is SagaPhase.COMPENSATED


def test_behind_the_pivot_there_is_only_one_way() -> None:
    """No failure, deadline or cancellation turns back; what cannot pass is parked."""
    story = Story(
        step("a"), step("pay", "a", pivot=True, undo=None), step("tell", "pay", undo=None),
        deadline=60,
    )  # fmt: skip
    story.done("a").done("pay")
    assert story.tell(CancelRequested("changed my mind")).is_ignored
    assert story.fires("", TimerKind.DEADLINE, 0).is_ignored
    story.failed("tell")
    assert story.progress.parked == ("tell",)
    assert story.progress.phase is SagaPhase.FORWARD
    story.tell(RetryRequested("tell"))
    assert story.done("tell", 2).progress.phase is SagaPhase.COMPLETED


def test_a_pivot_in_doubt_waits_for_a_human_or_for_its_late_reply() -> None:
    """Nobody else can say whether there is a way back."""
    nodes = (step("a"), step("pay", "a", pivot=True, undo=None))
    story = Story(*nodes).done("a").times_out("pay")
    assert story.progress.parked == ("pay",)
    assert story.done("pay").progress.phase is SagaPhase.COMPLETED
    failed = Story(*nodes).done("a").times_out("pay").failed("pay", attempt=2)
    assert failed.sent == [("a", "undo")]
    skipped = Story(*nodes).done("a").times_out("pay").tell(SkipRequested("pay"))
    assert skipped.sent == [("a", "undo")]


def test_a_cancellation_while_the_pivot_is_in_flight_waits_for_its_outcome() -> None:
    """Done, it was too late; failed, everything is undone."""
    nodes = (
        step("a"), step("pay", "a", pivot=True, undo=None), step("tell", "pay", undo=None),
    )  # fmt: skip
    story = Story(*nodes).done("a").tell(CancelRequested("stop"))
    assert story.sent == []
    assert story.done("pay").sent == [("tell", "do")]
    assert Story(*nodes).done("a").tell(CancelRequested("stop")).failed("pay").sent == [
        ("a", "undo")
    ]


def test_the_deadline_of_the_saga_turns_back() -> None:
    """Without waiting for the next failure."""
    story = Story(step("a"), step("s", "a", kind=NodeKind.SIGNAL), deadline=60)
    story.done("a").fires("", TimerKind.DEADLINE, 0)
    assert story.sent == [("a", "undo")]
    assert story.progress.reason == "the deadline of the saga has passed"


def test_the_deadline_of_a_step_ends_its_attempts() -> None:
    """However many would be left."""
    story = Story(step("a", deadline=9, retry=Backoff()))
    story.fires("a", TimerKind.TIMEOUT).fires("a", TimerKind.RETRY)
    assert story.fires("a", TimerKind.DEADLINE, 0).sent == [("a", "undo")]


def test_a_choice_skips_the_other_cases() -> None:
    """And what follows goes on behind the case that was taken."""
    story = Story(
        step("route", kind=NodeKind.CHOICE, timeout=None, cases=("x", "y")),
        step("fast", "route", when=(("route", "x"),)),
        step("slow", "route", when=(("route", "y"),)),
        step("last", "fast", "slow"),
    )
    assert Decide("route") in story.effects
    assert story.tell(Decided("route", "y")).sent == [("slow", "do")]
    assert story.status("fast") is StepStatus.SKIPPED
    assert story.done("slow").sent == [("last", "do")]


def test_a_signal_that_comes_early_is_kept() -> None:
    """And taken up when its turn comes."""
    story = Story(step("a"), step("ok", "a", kind=NodeKind.SIGNAL), step("b", "ok"))
    story.tell(Signalled("ok"))
    assert story.progress.signals == ("ok",)
    assert story.done("a").sent == [("b", "do")]
    assert Accept("ok") in story.effects
    assert story.progress.signals == ()


def test_a_signal_that_does_not_come_is_a_failure() -> None:
    """Nothing has happened, so only what came before is undone."""
    story = Story(step("a"), step("ok", "a", kind=NodeKind.SIGNAL))
    assert story.done("a").fires("ok", TimerKind.TIMEOUT).sent == [("a", "undo")]


def test_a_timer_of_an_earlier_attempt_fires_in_vain() -> None:
    """It was not removed in time, which happens."""
    story = Story(step("a"))
    story.fires("a", TimerKind.TIMEOUT).fires("a", TimerKind.RETRY)
    assert story.fires("a", TimerKind.TIMEOUT, 1).is_ignored


@pytest.mark.parametrize(
    ("mark", "direction", "attempt", "expected"),
    [
        (None, DO, 1, BarrierVerdict.EXECUTE),
        (None, UNDO, 1, BarrierVerdict.NOTHING),
        (Mark(MarkStatus.DONE), DO, 2, BarrierVerdict.REPEAT),
        (Mark(MarkStatus.DONE), UNDO, 1, BarrierVerdict.EXECUTE),
        (Mark(MarkStatus.UNDONE), DO, 1, BarrierVerdict.REFUSE),
        (Mark(MarkStatus.UNDONE), UNDO, 2, BarrierVerdict.REPEAT),
        (Mark(MarkStatus.FAILED, 2), DO, 1, BarrierVerdict.REPEAT),
        (Mark(MarkStatus.FAILED, 2), DO, 2, BarrierVerdict.REPEAT),
        (Mark(MarkStatus.FAILED, 2), DO, 3, BarrierVerdict.EXECUTE),
        (Mark(MarkStatus.FAILED, 2), UNDO, 1, BarrierVerdict.NOTHING),
    ],
)
def test_the_barrier(
    mark: Mark | None, direction: Direction, attempt: int, expected: BarrierVerdict
) -> None:
    """An early undo does nothing, a late do is refused, nothing is done twice."""
    assert verdict(mark, direction, attempt) is expected


def test_an_undoing_that_failed_leaves_the_mark_of_what_was_done() -> None:
    """So it is tried again, and the do is still not done twice."""
    done = Mark(MarkStatus.DONE)
    assert marked(done, UNDO, 1, Answer.FAILED) == done
    assert marked(None, UNDO, 1, Answer.DONE) == Mark(MarkStatus.UNDONE)
