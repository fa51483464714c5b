"""The watermark that is committed to Kafka: nothing unfinished is ever passed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from hypothesis import given
from hypothesis import strategies as st

from holdfast.brokers.kafka.broker import KafkaSettings
from holdfast.brokers.kafka.offsets import KafkaLane, OffsetTracker
from holdfast.ports import Delivery, Lane
from holdfast.testing import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.brokers.kafka.driver import GroupClient

LANE = Lane("orders", 0)
SETTINGS = KafkaSettings(servers=("nowhere:9092",))
handed_out = st.sets(st.integers(0, 30), min_size=1).map(sorted)


class Client:
    """The member's client: it has read nothing beyond what was handed out, and keeps commits."""

    def __init__(self) -> None:
        self.committed: list[int] = []

    def reached(self, _: Lane) -> int | None:
        return None

    def commit(self, offsets: dict[Lane, int], _: float) -> None:
        self.committed.append(offsets[LANE])


class Member:
    """One lane of which offsets are handed out, settled and committed."""

    def __init__(self) -> None:
        self.client = Client()
        self.tracker = OffsetTracker({}, VirtualClock(), SETTINGS)
        self.tracker.open(LANE)
        self.deliveries: dict[int, Delivery] = {}

    @property
    def lane(self) -> KafkaLane:
        return self.tracker.lanes[LANE]

    def hand_out(self, offsets: Iterable[int]) -> None:
        fetched = [
            Delivery(lane=LANE, position=n, key=None, body=b"", epoch=self.lane.epoch, receipt=0)
            for n in offsets
        ]
        self.lane.launch(fetched)
        self.deliveries |= {cast("int", one.position): one for one in fetched}

    def settle(self, *offsets: int) -> None:
        self.tracker.settle([self.deliveries[offset] for offset in offsets])

    def commit(self) -> int | None:
        """Return what the broker was told last; None if nothing."""
        client: Any = self.client
        self.tracker.commit(cast("GroupClient", client), [self.lane])
        return self.client.committed[-1] if self.client.committed else None


@given(handed_out, st.data())
def test_the_commit_is_that_of_the_brute_force_model(
    offsets: list[int], data: st.DataObject
) -> None:
    """After each settling it is the lowest unfinished offset, or one past the highest."""
    member, unfinished = Member(), set(offsets)
    member.hand_out(offsets)
    for offset in data.draw(st.permutations(offsets)):
        member.settle(offset)
        unfinished.discard(offset)
        model = min(unfinished) if unfinished else offsets[-1] + 1
        assert member.commit() == (model or None)  # 0 is where a group begins anyway


@given(handed_out, st.data())
def test_no_commit_ever_passes_an_unfinished_offset(
    offsets: list[int], data: st.DataObject
) -> None:
    """Whatever finishes in whatever order, a crash reads the unfinished ones again."""
    member = Member()
    member.hand_out(offsets)
    finished = data.draw(st.permutations(offsets))[: data.draw(st.integers(0, len(offsets)))]
    member.settle(*finished)
    committed = member.commit() or 0
    assert all(committed <= offset for offset in set(offsets) - set(finished))


def test_a_later_offset_does_not_cover_an_earlier_one() -> None:
    """Finishing 2 and 3 commits nothing while 1 is being handled."""
    member = Member()
    member.hand_out([1, 2, 3])
    member.settle(2, 3)
    assert member.commit() == 1


def test_gaps_do_not_hold_the_commit_back() -> None:
    """Compacted records and transaction markers are never handed out."""
    member = Member()
    member.hand_out([3, 9])
    member.settle(3)
    assert member.commit() == 9
    member.settle(9)
    assert member.commit() == 10


def test_nothing_is_committed_before_anything_was_handed_out() -> None:
    """A new lane has no position of its own."""
    assert Member().commit() is None


def test_a_released_offset_holds_the_commit_until_its_next_handing_out_is_settled() -> None:
    """What comes too late about the first one changes nothing."""
    member = Member()
    member.hand_out([1, 2])
    member.tracker.put_back(member.deliveries[1])
    member.settle(1, 2)
    assert member.commit() == 1
    (again,) = member.lane.relaunch(1)
    member.tracker.settle([again])
    assert member.commit() == 3


def test_what_was_handed_out_before_a_rewind_settles_nothing_after_it() -> None:
    """After a seek backwards, a crash must read the rewound messages again."""
    member = Member()
    member.hand_out([1, 2])
    before = list(member.deliveries.values())
    member.tracker.open(LANE, 1)
    member.hand_out([1, 2])
    member.tracker.settle(before)
    assert member.commit() is None
    assert member.lane.position(None) == 1
