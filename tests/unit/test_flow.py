"""A flow says what should happen; a circle in it, or a gap in the events, is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.errors import ConfigurationError
from holdfast.tracing import Chain, Flow, InvalidFlow, LineageOutcome, LineageRecord

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = 10_000.0


class Shipped: ...


def flow() -> Flow:
    return (
        Flow("order", start="Placed")
        .leads("Placed", to=("Paid", "Declined"), within="10m")
        .leads("Paid", to=Shipped, within="1h")
        .leads("Paid", to="Notified", within="5m")
    )


def record(
    event: str, type_: str, cause: str | None, ago: float, *,
    outcome: str = "published", service: str = "s", error: str | None = None,
) -> LineageRecord:  # fmt: skip
    return LineageRecord(
        event_id=event, type=type_, correlation_id="c", causation_id=cause, source="s", topic="t",
        key=None, time=NOW - ago, outcome=LineageOutcome(outcome), service=service, error=error,
        at=NOW - ago,
    )  # fmt: skip


def test_what_is_missing_has_a_name_a_cause_and_a_moment() -> None:
    """What is overdue comes first; what may still come in time is only expected."""
    chain = Chain([
        record("1", "Placed", None, 1000),
        record("2", "Paid", "1", 900),
        record("2", "Paid", "1", 890, outcome="handled", service="mail"),
    ])  # fmt: skip
    notified, shipped = chain.missing(flow(), now=NOW)
    assert notified.any_of == ("Notified",)
    assert notified.overdue_seconds == pytest.approx(600)
    assert notified.why == "Paid was handled by mail, and nobody published it"
    assert (shipped.any_of, shipped.is_overdue) == (("Shipped",), False)
    assert shipped.due_at == NOW - 900 + 3600


def test_one_of_several_is_enough_and_what_follows_only_the_other_is_not_missing() -> None:
    """A declined order is neither shipped nor anybody notified."""
    chain = Chain([record("1", "Placed", None, 5000), record("2", "Declined", "1", 4000)])
    assert chain.missing(flow(), now=NOW) == []


def test_each_event_needs_its_own_consequence() -> None:
    """Two orders of one request: the payment of the first is not that of the second."""
    chain = Chain([
        record("1", "Placed", None, 5000),
        record("2", "Placed", None, 5000),
        record("3", "Declined", "1", 4000),
    ])  # fmt: skip
    [missing] = chain.missing(flow(), now=NOW)
    assert missing.after == "2"


def test_a_far_descendant_counts_and_so_does_one_whose_cause_nobody_names() -> None:
    """Not every step between is declared, and not every producer names the cause."""
    far = [record("1", "Placed", None, 50), record("2", "Checked", "1", 40),
           record("3", "Declined", "2", 30)]  # fmt: skip
    assert Chain(far).missing(flow(), now=NOW) == []
    loose = [record("1", "Placed", None, 50), record("3", "Declined", None, 30)]
    assert Chain(loose).missing(flow(), now=NOW) == []


def test_a_chain_without_its_start_says_so() -> None:
    """It may be another flow's, or in another database."""
    [missing] = Chain([record("2", "Declined", "1", 30)]).missing(flow(), now=NOW)
    assert (missing.any_of, missing.is_overdue) == (("Placed",), False)


def test_a_dead_letter_is_the_reason_until_it_is_handled() -> None:
    """By the service where it died."""
    dead = [
        record("1", "Placed", None, 5000),
        record("1", "Placed", None, 4990, outcome="dead-lettered", service="pay", error="KeyError"),
        record("1", "Placed", None, 4980, outcome="handled", service="audit"),
    ]
    [missing] = Chain(dead).missing(flow(), now=NOW)
    assert missing.why == "Placed is a dead letter of pay: KeyError"
    replayed = record("1", "Placed", None, 100, outcome="handled", service="pay")
    [missing] = Chain([*dead, replayed]).missing(flow(), now=NOW)
    assert missing.why == "Placed was handled by pay, audit, and nobody published it"


def test_causes_that_go_round_still_make_a_tree() -> None:
    """Whoever writes ids by hand may write a circle; nobody hangs for it."""
    chain = Chain([record("1", "A", "2", 30), record("2", "B", "1", 20)])
    assert [one.id for one in chain.roots] == ["1"]
    assert [one.id for one in chain.descendants(chain.roots[0])] == ["2"]


def test_the_flow_is_drawn() -> None:
    """Names are nothing but text in the diagram."""
    drawn = flow().leads("Notified", to='Ev"il', within=5).diagram()
    assert drawn.splitlines()[:3] == ["flowchart TD", '    e0("Placed")', '    e1("Paid")']
    assert '    e0 -.->|"600 s"| e2' in drawn
    assert '    e1 -->|"3600 s"| e3' in drawn
    assert "Ev#34;il" in drawn


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: flow().leads(Shipped, to="Placed", within=5),
         "Shipped → Placed → Paid → Shipped is a circle"),
        (lambda: flow().leads("Paid", to="Paid", within=5), "Paid → Paid is a circle"),
        (lambda: flow().leads("Sent", to="Got", within=5), "nothing leads to 'Sent' yet"),
        (lambda: flow().leads("Paid", to=(), within=5), "leads to nothing"),
        (lambda: flow().leads("Paid", to="X", within="soon"), "within='soon'"),
        (lambda: flow().leads("Paid", to=7, within=5), "7 is no event"),  # type: ignore[arg-type]
        (lambda: Flow("order", start=""), "is no event"),
    ],
)  # fmt: skip
def test_a_flow_that_cannot_be_right_is_refused_when_it_is_written(
    wrong: Callable[[], object], told: str
) -> None:
    """With the event and the fix."""
    with pytest.raises(ConfigurationError, match=told):
        wrong()


def test_a_flow_is_a_value() -> None:
    """A longer one leaves the shorter as it is."""
    short = Flow("order", start="Placed")
    longer = short.leads("Placed", to="Paid", within=5)
    assert (len(short.expectations), len(longer.expectations)) == (0, 1)
    assert issubclass(InvalidFlow, ConfigurationError)
