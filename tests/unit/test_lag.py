"""How a group is judged: a pure function over samples, and a watch over a broker."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import ConfigurationError, Message, UnknownGroup, Unsupported
from holdfast.brokers import connect
from holdfast.consumer.lag import LagSample, LagVerdict, LagWatch, LaneLag, verdict
from holdfast.consumer.monitoring import ConsumerMetrics, LagAges
from holdfast.ports import Delivery, Lane, LaneProgress
from holdfast.testing import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW = 10.0
OK, SLOW, STALLED, STOPPED = LagVerdict.OK, LagVerdict.SLOW, LagVerdict.STALLED, LagVerdict.STOPPED


def samples(*rows: tuple[float, int | str | None, int, int | None]) -> list[LagSample]:
    """Return samples from (time, committed, lag, members)."""
    return [LagSample(at=at, committed=c, lag=lag, members=m) for at, c, lag, m in rows]


@pytest.mark.parametrize(
    ("what", "seen", "expected"),
    [
        ("nothing waits", samples((0, 7, 0, 1)), OK),
        ("nobody is a member", samples((0, 7, 5, 0)), STOPPED),
        ("nobody is a member, and nothing waits", samples((0, 7, 0, 0)), STOPPED),
        ("a single look", samples((0, 7, 5, 1)), None),
        ("half a window without movement", samples((0, 7, 5, 1), (5, 7, 5, 1)), None),
        ("half a window with movement", samples((0, 7, 5, 1), (5, 9, 5, 1)), OK),
        ("half a window, and it grows", samples((0, 7, 5, 1), (5, 9, 8, 1)), None),
        ("a window without movement", samples((0, 7, 5, 1), (5, 7, 6, 1), (10, 7, 9, 1)), STALLED),
        ("nothing was ever settled", samples((0, None, 5, 1), (10, None, 5, 1)), STALLED),
        ("ids of entries do not move", samples((0, "1-0", 5, 1), (10, "1-0", 5, 1)), STALLED),
        ("it moves as fast as more comes", samples((0, 7, 5, 1), (10, 17, 5, 1)), OK),
        ("it catches up", samples((0, 7, 900, 1), (5, 99, 500, 1), (10, 200, 400, 1)), OK),
        ("it falls back", samples((0, 7, 5, 1), (5, 9, 50, 1), (10, 11, 500, 1)), SLOW),
        ("a wave is no trend", samples((0, 7, 5, 1), (4, 8, 9, 1), (7, 9, 9, 1), (10, 15, 5, 1)),
         OK),
        ("it had caught up meanwhile", samples((0, 7, 5, 1), (5, 12, 0, 1), (10, 12, 9, 1)), OK),
        ("somebody came only just", samples((0, 7, 5, 0), (5, 7, 5, 0), (10, 7, 5, 1)), None),
        ("somebody left", samples((0, 7, 5, 1), (10, 9, 5, 0)), STOPPED),
        ("it went back to an earlier place", samples((0, 7, 5, 1), (10, 2, 10, 1)), SLOW),
        ("a queue that stands", samples((0, None, 5, 2), (10, None, 5, 2)), STALLED),
        ("a queue that shrinks", samples((0, None, 9, 2), (10, None, 5, 2)), OK),
        ("a queue that grows", samples((0, None, 5, 2), (10, None, 9, 2)), SLOW),
        ("members are not told", samples((0, 7, 5, None), (10, 7, 5, None)), STALLED),
    ],
)  # fmt: skip
def test_a_lane_is_judged_by_its_samples(
    what: str, seen: Sequence[LagSample], expected: LagVerdict | None
) -> None:
    """The verdict follows from time, position, lag and members alone."""
    assert verdict(seen, WINDOW) is expected, what


@pytest.mark.parametrize(
    ("seconds", "retention", "left", "is_near"),
    [
        (10.0, None, None, False),
        (None, 100.0, None, False),
        (80.0, 100.0, 20.0, False),
        (81.0, 100.0, 19.0, True),
        (130.0, 100.0, -30.0, True),
    ],
)
def test_the_time_until_data_is_lost_follows_from_age_and_retention(
    seconds: float | None, retention: float | None, left: float | None, is_near: bool
) -> None:
    """Near is more than four fifths of the retention."""
    one = LaneLag(
        lane=Lane("orders", 0), progress=LaneProgress(unsettled=1), seconds=seconds, change=None,
        members=1, retention=retention, verdict=None,
    )  # fmt: skip
    assert (one.retention_left, one.is_near_retention) == (left, is_near)


def watched(clock: VirtualClock, url: str = "memory:?partitions=1&session=1000") -> LagWatch:
    """Return a watch over group `billing`, of which one member holds one of three orders."""
    broker = connect(url, clock=clock)
    for topic in ("orders", "orders.billing.retry.1m", "orders.billing.replay", "refunds"):
        broker.create_topic(topic)
    source = broker.source(["orders"], group="billing")
    with closing(broker.sink()) as sink:
        sink.publish([Message.new("orders", b"1", key="k") for _ in range(3)])
        sink.publish([Message.new("orders.billing.retry.1m", b"1", key="k")])
    [first, *_] = source.poll(10, 0.0)
    source.accept([first])
    source.flush()
    return LagWatch(broker, "billing", None, window=WINDOW, clock=clock)


def test_a_watch_finds_topics_with_their_retries_and_replays_and_judges_them() -> None:
    """What waits for a retry counts although nobody has read it yet."""
    clock = VirtualClock(auto=True)
    watch = watched(clock)
    clock.advance(30.0)
    began = clock.monotonic()
    found = {one.lane.topic: one for one in watch.judged()}
    assert clock.monotonic() - began == pytest.approx(WINDOW)
    assert sorted(found) == ["orders", "orders.billing.replay", "orders.billing.retry.1m"]
    orders, retry = found["orders"], found["orders.billing.retry.1m"]
    assert (orders.progress.committed, orders.progress.end) == (1, 3)
    assert (orders.progress.unsettled, orders.change, orders.members) == (2, 0, 1)
    assert orders.seconds == pytest.approx(30.0 + WINDOW)
    assert orders.verdict is STALLED
    assert (retry.progress.unsettled, retry.members, retry.verdict) == (1, 0, STOPPED)
    assert found["orders.billing.replay"].seconds == 0.0


def test_a_watch_forgets_what_is_older_than_its_window() -> None:
    """A group that moved long ago stands now; one sample stays from before the window."""
    clock = VirtualClock(auto=True)
    watch = watched(clock)
    for _ in range(4):
        orders = watch.look()[0]
        assert orders.verdict is None
        clock.advance(3.0)
    assert watch.look()[0].verdict is STALLED
    clock.advance(300.0)
    assert watch.look()[0].change == 0


def test_a_watch_that_is_sure_does_not_wait() -> None:
    """Where nothing waits, or nobody is there, one look is enough."""
    clock = VirtualClock(auto=True)
    broker = connect("memory:?partitions=1", clock=clock)
    broker.create_group("orders", "billing")
    watch = LagWatch(broker, "billing", ["orders"], window=WINDOW, clock=clock)
    began = clock.monotonic()
    [one] = watch.judged()
    assert (one.verdict, clock.monotonic()) == (STOPPED, began)
    with pytest.raises(UnknownGroup, match="does not know group 'biling'"):
        LagWatch(broker, "biling", None, window=WINDOW, clock=clock).look()
    with pytest.raises(ConfigurationError, match="empty"):
        LagWatch(broker, "", None, window=WINDOW, clock=clock)


def test_a_broker_that_declares_no_progress_is_asked_for_the_lag_of_named_topics() -> None:
    """An adapter of somebody else's still shows its counts; its topics must be named."""

    class Plain:
        name = "plain"

        def lag(self, group: str, topics: Sequence[str]) -> dict[Lane, int]:
            return {Lane(topic, 0): 4 for topic in topics}

    clock = VirtualClock(auto=True)
    plain: object = Plain()
    watch = LagWatch(plain, "billing", ["orders"], window=WINDOW, clock=clock)  # type: ignore[arg-type]
    [one] = watch.judged()
    assert (one.progress.unsettled, one.members, one.seconds) == (4, None, None)
    assert one.verdict is STALLED
    with pytest.raises(Unsupported, match="name them with --topic"):
        LagWatch(plain, "billing", None, window=WINDOW, clock=clock).look()  # type: ignore[arg-type]


def work(lane: Lane, stored: float | None) -> Any:
    """Return a message in hand."""
    delivery = Delivery(lane=lane, position=0, key=None, body=b"", timestamp=stored)
    return SimpleNamespace(delivery=delivery)


def test_the_age_of_a_lag_follows_from_what_is_in_hand() -> None:
    """The oldest in hand counts; in a pause it ages on, and it is forgotten with the lag."""
    ages, one, two = LagAges(), Lane("orders", 0), Lane("orders", 1)
    parked: Any = SimpleNamespace(delivery=None)
    in_hand = [work(one, 70.0), work(one, 40.0), work(one, 60.0), work(two, None), parked]
    assert ages.look({one: 5, two: 1}, in_hand, 100.0) == {one: 60.0, two: 0.0}
    assert ages.look({one: 4, two: 1}, [], 130.0) == {one: 90.0, two: 30.0}
    assert ages.look({one: 0, two: 1}, [], 140.0) == {one: 0.0, two: 40.0}
    assert ages.look({one: 2}, [], 150.0) == {one: 0.0}
    assert ages.look({one: 2}, [work(one, 155.0)], 151.0) == {one: 0.0}


def test_lag_is_shown_by_topic_and_partition_in_messages_and_seconds() -> None:
    """A partition that somebody else owns now is not shown any more; retention is."""
    metrics = ConsumerMetrics()
    metrics.begin(["orders"], lambda: 0, lambda: 0)

    def shown(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"holdfast_consumer_{name}", labels)

    assert shown("lag_seconds", topic="orders") == 0
    assert shown("retention_seconds", topic="orders") == float("inf")
    metrics.show_retention({"orders": 3600.0})
    assert shown("retention_seconds", topic="orders") == 3600.0
    one, two = Lane("orders", 0), Lane("orders", 1)
    metrics.show_lag({one: 5, two: 7}, {one: 60.0, two: 9.0}, ["orders"])
    assert (shown("lag", topic="orders"), shown("lag_seconds", topic="orders")) == (12, 60)
    assert shown("partition_lag", topic="orders", partition="1") == 7
    assert shown("partition_lag_seconds", topic="orders", partition="0") == 60
    metrics.show_lag({two: 1}, {two: 2.0}, ["orders"])
    assert shown("partition_lag", topic="orders", partition="0") is None
    assert (shown("lag", topic="orders"), shown("lag_seconds", topic="orders")) == (1, 2)
    metrics.show_lag({}, {}, ["orders"])
    assert (shown("lag", topic="orders"), shown("lag_seconds", topic="orders")) == (0, 0)
