"""The verdict over killed sagas goes red for whatever it is there to see."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.saga_shop.verdict import Ending, Observed, judge

GOOD = Observed(
    started=["good", "bad", "stuck"],
    sagas={
        "good": Ending(status="completed"),
        "bad": Ending(status="compensated", reason="ship: no parcel"),
        "stuck": Ending(status="parked", reason="ship: no parcel", parked=("charge",)),
    },
    ledger=[
        ("stock", "good", 1), ("money", "good", 10), ("parcel", "good", 1),
        ("stock", "bad", 1), ("stock", "bad", -1),
        ("stock", "stuck", 1), ("money", "stuck", 10), ("stock", "stuck", -1),
    ],
    missing_stock=1,
    missing_money=20,
    standing={"sagas, outbox": 0, "lag": 0},
)  # fmt: skip


def with_ending(order: str, ending: Ending) -> Observed:
    return replace(GOOD, sagas={**GOOD.sagas, order: ending})


def test_a_good_run_is_good() -> None:
    """Completed, compensated, and parked with a reason."""
    assert judge(GOOD) == []


@pytest.mark.parametrize(
    ("observed", "words"),
    [
        (replace(GOOD, started=[*GOOD.started, "lost"]), "lost was started, and there is no saga"),
        (replace(GOOD, started=["good", "bad"]), "a saga of stuck, which was never started"),
        (with_ending("bad", Ending(status="running")), "bad has not ended: it is running"),
        (with_ending("bad", Ending(status="compensated")), "bad is compensated without a reason"),
        (with_ending("bad", Ending(status="parked", reason="x")), "no step of it is"),
        (with_ending("good", Ending(status="compensated", reason="x")),
         "good is compensated, but of it stands {'stock': 1, 'money': 10, 'parcel': 1}, not {}"),
        (with_ending("bad", Ending(status="completed")), "bad is completed, but of it stands {}"),
        (replace(GOOD, standing={"lag": 2}), "lag: 2 left"),
        (replace(GOOD, standing={"locks": 1}), "locks: 1 left"),
        (replace(GOOD, missing_stock=2), "2 left the shelves, and the ledger has 1"),
        (replace(GOOD, missing_money=10), "10 left the accounts, and the ledger has 20"),
    ],
)  # fmt: skip
def test_one_broken_promise_is_seen(observed: Observed, words: str) -> None:
    """By the words that name it."""
    (broken,) = judge(observed)
    assert words in broken


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([("stock", "good", 1)], "stock of good was done 2 times"),
        ([("stock", "bad", -1)], "stock of bad was undone 2 times"),
        ([("parcel", "bad", 1)], "bad is compensated, but of it stands {'parcel': 1}, not {}"),
        ([("money", "nobody", 10)], "something was done for nobody, which is no saga"),
    ],
)
def test_books_that_do_not_fit_are_seen(entries: list[tuple[str, str, int]], words: str) -> None:
    """Even where the totals are right."""
    ledger = [*GOOD.ledger, *entries]
    stock = sum(amount for what, _, amount in ledger if what == "stock")
    money = sum(amount for what, _, amount in ledger if what == "money")
    observed = replace(GOOD, ledger=ledger, missing_stock=stock, missing_money=money)
    assert any(words in broken for broken in judge(observed))


def test_done_twice_and_undone_twice_is_seen_though_nothing_is_missing() -> None:
    """Each of them is one too many."""
    again = [("money", "bad", 10), ("money", "bad", -10)] * 2
    assert judge(replace(GOOD, ledger=[*GOOD.ledger, *again])) == [
        "money of bad was done 2 times", "money of bad was undone 2 times"
    ]  # fmt: skip
