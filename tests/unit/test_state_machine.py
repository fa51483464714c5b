"""An entity becomes only what its table allows; anything else is poison that explains itself."""

from __future__ import annotations

from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigurationError, PoisonMessage
from holdfast.sagas import InvalidTransition, StateMachine


class Status(StrEnum):
    PLACED = "placed"
    PAID = "paid"
    SHIPPED = "shipped"
    DELIVERED = "delivered"
    CANCELLED = "cancelled"


WAYS = {
    Status.PLACED: {Status.PAID, Status.CANCELLED},
    Status.PAID: {Status.SHIPPED, Status.CANCELLED},
    Status.SHIPPED: {Status.DELIVERED},
    Status.DELIVERED: set(),
    Status.CANCELLED: set(),
}
order: StateMachine[Status] = StateMachine("order", start=Status.PLACED, transitions=WAYS)


def test_an_order_goes_its_way() -> None:
    """Each move gives the new state."""
    status = order.start
    for after in (Status.PAID, Status.SHIPPED, Status.DELIVERED):
        status = order.move(status, after)
    assert status is Status.DELIVERED
    assert order.allowed(status) == frozenset()


def test_an_order_is_cancelled_only_before_it_is_shipped() -> None:
    """The error names from, to, and what would be allowed, and no retry is tried."""
    assert order.may(Status.PAID, Status.CANCELLED)
    with pytest.raises(InvalidTransition) as refused:
        order.move(Status.SHIPPED, Status.CANCELLED)
    said = "order cannot go from shipped to cancelled: it may become only delivered"
    assert str(refused.value) == said
    assert isinstance(refused.value, PoisonMessage)
    with pytest.raises(InvalidTransition, match="nothing any more"):
        order.move(Status.DELIVERED, Status.PLACED)


def test_a_state_that_is_none_is_poison_too() -> None:
    """As a row from another program may hold it."""
    plain = StateMachine("order", start="a", transitions={"a": {"b"}, "b": set()})
    with pytest.raises(InvalidTransition, match="no state of it"):
        plain.move("z", "b")


@pytest.mark.parametrize(
    ("ways", "problem"),
    [
        ({"a": {"b"}}, "leads to 'b', which has no line"),
        ({"b": set()}, "start='a' has no line"),
        ({"a": set(), "b": {"a"}}, "'b' cannot be reached from 'a'"),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(ways: dict[str, set[str]], problem: str) -> None:
    """Where it is written."""
    with pytest.raises(ConfigurationError, match=problem):
        StateMachine("order", start="a", transitions=ways)


def test_the_diagram_shows_every_way() -> None:
    """As a Mermaid state diagram with a beginning and ends."""
    lines = [line.strip() for line in order.diagram().splitlines()]
    assert lines[0] == "stateDiagram-v2"
    assert {"s0: placed", "[*] --> s0", "s0 --> s1", "s0 --> s4", "s3 --> [*]"} <= set(lines)
    assert sum(" --> s" in line for line in lines) == 6


@given(st.sampled_from(list(Status)), st.sampled_from(list(Status)))
def test_may_and_move_agree(before: Status, after: Status) -> None:
    """Whatever is asked."""
    if order.may(before, after):
        assert order.move(before, after) is after
    else:
        with pytest.raises(InvalidTransition):
            order.move(before, after)
