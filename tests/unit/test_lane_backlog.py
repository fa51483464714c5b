"""What waits in a lane is handed out in order, and no key overtakes itself; for every adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast.brokers.embedded.lane import DelayedMessage, EmbeddedLane
from holdfast.brokers.redis.broker import Keys
from holdfast.brokers.redis.lane import RedisLane
from holdfast.ports import Delivery, Lane

if TYPE_CHECKING:
    from collections.abc import Callable

LANE = Lane("orders", 0)
NOW = 100.0
SOON = 105.0
Made = tuple[Any, "Callable[[int], Any]"]


def embedded(*entries: tuple[int, bytes | None, float]) -> Made:
    """Return a lane of the embedded broker in which *entries* wait."""
    lane = EmbeddedLane(LANE, 1, 1, 0, 100)
    for place, key, due in entries:
        lane.waiting[place] = DelayedMessage(key, due=due)
    return lane, int


def redis(*entries: tuple[int, bytes | None, float]) -> Made:
    """Return a lane on Redis in which *entries* wait; its positions are texts."""
    lane = RedisLane(LANE, Keys("hf").lane(LANE, "g"), 1, "me")
    for place, key, due in entries:
        lane.wait(f"{place}-0", due, 1, key)
    return lane, lambda place: f"{place}-0"


both = pytest.mark.parametrize("made", [embedded, redis])


@both
def test_nothing_passes_an_earlier_message_of_its_key(made: Callable[..., Made]) -> None:
    """Those of other keys, and keyless ones, do not wait for it."""
    lane, at = made((9, b"a", SOON), (10, b"a", 0.0), (11, b"b", 0.0), (12, None, 0.0))
    assert lane.due(NOW, 10) == [at(11), at(12)]
    assert lane.due(SOON, 10) == [at(9), at(10), at(11), at(12)]


@both
def test_a_key_is_held_while_anything_of_it_waits(made: Callable[..., Made]) -> None:
    """Due or not: who falls due between two looks at the clock must not be overtaken."""
    lane, _ = made((9, b"a", SOON), (10, b"b", 0.0), (11, None, 0.0))
    assert lane.held_keys() == {b"a", b"b"}
    assert made()[0].held_keys() == set()


@both
def test_what_is_due_comes_in_the_order_of_the_lane(made: Callable[..., Made]) -> None:
    """Not in that of its return, nor in that of texts; at most as many as are asked for."""
    lane, at = made((10, b"a", 0.0), (9, b"a", 0.0), (100, None, 0.0))
    assert lane.due(NOW, 2) == [at(9), at(10)]


@both
def test_the_next_moment_is_that_of_a_first_message(made: Callable[..., Made]) -> None:
    """One behind an undue message of its key cannot come any sooner."""
    lane, _ = made((9, b"a", SOON), (10, b"a", NOW))
    assert lane.next_due() == SOON
    assert made()[0].next_due() is None


def test_what_comes_back_waits_with_its_failures() -> None:
    """On the embedded broker it is counted as failures, on Redis as the next delivery."""
    lane, _ = embedded()
    lane.flying[7] = DelayedMessage(b"a", failures=1)
    assert lane.land(7, SOON, 1).failures == 2
    stream, _ = redis()
    stream.flying["7-0"] = Delivery(lane=LANE, position="7-0", key=b"a", body=b"", count=2)
    assert stream.land("7-0", SOON, 1).count == 3
    assert lane.due(NOW, 1) == stream.due(NOW, 1) == []
    assert not lane.flying
    assert not stream.flying
