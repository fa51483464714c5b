"""The model checker finds nothing in the saga, and finds each mechanism that is taken away."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.backoff import Backoff
from holdfast.sagas import Graph, Node, NodeKind
from holdfast.sagas.graph import Undo, build
from holdfast.sagas.transitions import _Transition
from holdfast.testing.sagas import (
    Bounds,
    SagaRules,
    SagaViolation,
    check_saga,
    replay,
    sample_saga,
)

RETRY = Backoff(attempts=5)


def step(name: str, *after: str, **options: Any) -> Node:
    undo = Undo(name=f"un{name}", kind=NodeKind.COMMAND, topic="t", timeout=5, retry=RETRY)
    given_: dict[str, Any] = {"kind": NodeKind.COMMAND, "timeout": 5, "retry": RETRY, "undo": undo}
    return Node(name=name, after=frozenset(after), **(given_ | options))


def order() -> Graph:
    """Return stock and payment side by side, then the shipment."""
    nodes = (step("reserve"), step("charge"), step("ship", "reserve", "charge"))
    return build("order", 1, nodes)


def pair() -> Graph:
    return build("pair", 1, (step("charge"), step("ship", "charge")))


def local(name: str, *after: str, **options: Any) -> Node:
    undo = Undo(name=f"un{name}", kind=NodeKind.LOCAL, retry=RETRY)
    return step(name, *after, **{"kind": NodeKind.LOCAL, "timeout": None, "undo": undo} | options)


def test_the_order_saga_with_a_parallel_group_keeps_its_promise() -> None:
    """Every order of events with up to two faults, all three endings among them."""
    checked = check_saga(order(), bounds=Bounds(faults=2))
    assert checked.worlds > 5000
    assert set(checked.endings) == {"completed", "compensated", "parked"}


def test_two_steps_keep_their_promise_under_three_faults() -> None:
    """Deep enough for both attempts to go without an answer and the undoing to fail."""
    checked = check_saga(pair(), bounds=Bounds(faults=3))
    assert set(checked.endings) == {"completed", "compensated", "parked"}


def test_pivots_local_steps_signals_choices_and_deadlines_keep_the_promise() -> None:
    """Each kind of step, with a way back and without."""
    graph = build(
        "full",
        1,
        (
            local("book"),
            Node(
                name="ok", kind=NodeKind.SIGNAL, timeout=9, retry=RETRY, after=frozenset({"book"})
            ),
            step("pay", "ok", pivot=True, undo=None),
            Node(name="route", kind=NodeKind.CHOICE, cases=("x", "y"), after=frozenset({"pay"})),
            step("fast", "route", undo=None, when=(("route", "x"),)),
            local("slow", "route", undo=None, when=(("route", "y"),)),
        ),
        deadline=60,
    )
    checked = check_saga(graph, bounds=Bounds(faults=2))
    assert set(checked.endings) == {"completed", "compensated", "parked"}


def test_without_the_barrier_a_late_command_is_done_after_its_undoing() -> None:
    """The counter-example is told as a story, and can be replayed."""
    with pytest.raises(SagaViolation) as found:
        check_saga(pair(), rules=SagaRules(barrier=False))
    story = found.value.story
    assert any("undo of" in line for line in story)
    with pytest.raises(SagaViolation):
        replay(pair(), story, rules=SagaRules(barrier=False))
    with pytest.raises(ValueError, match="cannot happen any more"):
        replay(pair(), [*story[:-1], "the moon falls"], rules=SagaRules(barrier=False))


def test_without_the_version_guard_an_update_is_lost() -> None:
    """A slow worker writes over what another one committed meanwhile."""
    with pytest.raises(SagaViolation, match="slow worker commits"):
        check_saga(order(), bounds=Bounds(faults=1), rules=SagaRules(version_guard=False))
    with pytest.raises(SagaViolation, match="done twice"):
        check_saga(
            build("local", 1, (local("book"),)),
            bounds=Bounds(faults=1),
            rules=SagaRules(version_guard=False),
        )


def test_a_timed_out_step_that_counts_as_failed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its effect would stand although the saga says that everything is undone."""
    real = _Transition._give_up

    def sure(self: _Transition, node: Node, *, doubt: bool, why: str) -> None:
        real(self, node, doubt=False, why=why)

    monkeypatch.setattr(_Transition, "_give_up", sure)
    with pytest.raises(SagaViolation, match="but its effect stands"):
        check_saga(pair())


def test_undoing_before_siblings_have_an_outcome_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A saga that does not quiesce ends while a command may still be done."""
    monkeypatch.setattr("holdfast.sagas.transitions.IN_FLIGHT", frozenset())
    with pytest.raises(SagaViolation):
        check_saga(order(), bounds=Bounds(faults=1))


def test_a_failure_of_a_superseded_attempt_that_counts_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attempt behind it is still under way."""
    real = _Transition._answered

    def gullible(self: _Transition, node: Node, event: Any) -> None:
        real(self, node, type(event)(event.step, event.direction,
             self.steps[node.name].attempt, event.answer))  # fmt: skip

    monkeypatch.setattr(_Transition, "_answered", gullible)
    with pytest.raises(SagaViolation, match="but its effect stands"):
        check_saga(pair(), bounds=Bounds(faults=3))


def test_a_saga_too_large_to_check_says_so() -> None:
    """And tells what to do about it."""
    with pytest.raises(ValueError, match="more than 100 worlds: check it with fewer faults"):
        check_saga(order(), bounds=Bounds(faults=2, worlds=100))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw any saga of up to six steps, in any order, with or without a pivot."""
    count = draw(st.integers(1, 6))
    nodes: list[Node] = []
    for number in range(count):
        earlier = [node.name for node in nodes]
        after = draw(st.sets(st.sampled_from(earlier))) if earlier else set()
        make = local if draw(st.booleans()) else step
        nodes.append(make(f"s{number}", *sorted(after)))
    if draw(st.booleans()):
        # One point of no return: all that is there comes before it, two steps behind.
        nodes.append(step("pivot", *(node.name for node in nodes), pivot=True, undo=None))
        nodes += [step("t1", "pivot", undo=None), local("t2", "pivot", undo=None)]
    graph = build("any", 1, nodes, deadline=60 if draw(st.booleans()) else None)
    return replace(graph)


@given(graphs(), st.integers(0, 2**32))
@settings(max_examples=60)
def test_no_random_run_of_any_saga_breaks_the_promise(graph: Graph, seed: int) -> None:
    """With many faults and three attempts, in sagas too large to look at every run."""
    sample_saga(graph, runs=4, randomness=Random(seed))
