"""What became of a batch: decided without any I/O."""

from __future__ import annotations

from holdfast.errors import BrokerDown, MessageTooLarge
from holdfast.outbox.relay.publishing import Overtaken, classify_results
from holdfast.outbox.rows import Row
from holdfast.ports import Published

STORED, TOO_LARGE, DOWN = Published(), Published(MessageTooLarge(2, 1)), Published(BrokerDown("x"))


def rows(*keys: str | None) -> list[Row]:
    """Return a row per key, numbered from 1."""
    return [Row(n, 0, "t", key, b"", "[]", "id", "T") for n, key in enumerate(keys, 1)]


def test_everything_stored_is_done() -> None:
    """Nothing to decide."""
    assert classify_results(rows("a", "b"), [STORED, STORED]).done == [1, 2]


def test_of_a_refused_key_only_what_came_before_is_done() -> None:
    """What follows waits behind it, other keys go on."""
    outcome = classify_results(rows("a", "a", "b", None), [STORED, TOO_LARGE, STORED, STORED])
    assert outcome.done == [1, 3, 4]
    assert [(row.seq, type(error)) for row, error in outcome.refused] == [(2, MessageTooLarge)]


def test_an_event_that_was_overtaken_says_so() -> None:
    """The operator learns that a release comes too late for the order of the key."""
    outcome = classify_results(rows("a", "a", "b", "a"), [TOO_LARGE, STORED, STORED, STORED])
    (first, error), *behind = outcome.refused
    assert (outcome.done, first.seq) == ([3], 1)
    assert [(row.seq, why) for row, why in behind] == [(2, None), (4, None)]
    assert isinstance(error, Overtaken)
    assert error.later == 2
    assert "2 later event(s) of its key" in str(error)


def test_an_outage_parks_nothing_and_keeps_the_rest_of_the_key() -> None:
    """The acknowledged prefix of each key is done, everything else is sent again."""
    outcome = classify_results(rows("a", "a", "a", "b"), [STORED, DOWN, STORED, STORED])
    assert (outcome.done, outcome.refused) == ([1, 4], [])
    assert isinstance(outcome.outage, BrokerDown)
