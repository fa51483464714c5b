"""The verdict of the outbox checker goes red for whatever it is there to see."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.checker.verdict import Event, Row, Standing, judge

COMMITTED = {"ada": 2, "bob": 1}
ALL: list[Event] = [("ada", 1), ("bob", 1), ("ada", 2)]
SETTLED = Standing(
    counts={
        "holdfast_outbox": 0,
        "holdfast_outbox_delayed": 0,
        "holdfast_outbox_parked": 0,
        "shards without an owner": 0,
        "unread messages": 0,
    }
)
ROW = Row(event=("ada", 2), table="holdfast_outbox", shard=7, owner="r1")


def bodies(*events: Event) -> list[bytes]:
    """Return what the broker stores of *events*."""
    return [json.dumps({"key": key, "n": n}).encode() for key, n in events]


def stands(place: str, *rows: Row) -> Standing:
    """Return a run that settled but for one thing."""
    return replace(SETTLED, counts={**SETTLED.counts, place: 1}, rows=rows)


def test_a_good_run_is_good() -> None:
    """Every event is there in order, one of them twice, and nothing stands."""
    verdict = judge(COMMITTED, bodies(*ALL, ("ada", 1)), SETTLED)
    assert verdict.clean
    assert (verdict.duplicates, verdict.left, verdict.where) == (1, [], [])


def test_losses_inversions_and_phantoms_are_seen() -> None:
    """Each of them alone is red."""
    assert judge(COMMITTED, bodies(*ALL[:2]), SETTLED).lost == [("ada", 2)]
    assert judge(COMMITTED, bodies(*reversed(ALL)), SETTLED).disorder == [("ada", 1)]
    assert judge(COMMITTED, bodies(*ALL, ("bob", 2)), SETTLED).phantoms == [("bob", 2)]


@pytest.mark.parametrize("place", SETTLED.counts)
def test_whatever_is_left_is_seen(place: str) -> None:
    """A row, a parked event and a shard without owner, with every event published."""
    verdict = judge(COMMITTED, bodies(*ALL), stands(place))
    assert not verdict.clean
    assert verdict.left == [f"{place}: 1"]
    assert f"{place}: 1" in str(verdict)


@pytest.mark.parametrize(
    ("row", "where"),
    [
        (ROW, "in holdfast_outbox, shard 7 of relay r1"),
        (replace(ROW, owner=None), "in holdfast_outbox, shard 7 that nobody owns"),
        (
            replace(ROW, table="holdfast_outbox_parked", why="refused: too large"),
            "in holdfast_outbox_parked (refused: too large), shard 7 of relay r1",
        ),
    ],
)
@pytest.mark.parametrize("published", [2, 3])
def test_a_row_that_is_left_is_told_with_its_shard_and_owner(
    row: Row, where: str, published: int
) -> None:
    """Whether its event was published or not."""
    verdict = judge(COMMITTED, bodies(*ALL[:published]), stands(row.table, row))
    assert verdict.where == [f"ada 2: {where}"]
    assert where in str(verdict)


def test_an_event_that_was_published_and_not_read_is_told_from_one_that_is_nowhere() -> None:
    """Another reader finds the one at the broker, and nobody finds the other."""
    verdict = judge(COMMITTED, bodies(ALL[0]), replace(SETTLED, stored={("ada", 2)}))
    assert verdict.where == ["ada 2: published, but not read", "bob 1: nowhere"]
    assert not verdict.clean
