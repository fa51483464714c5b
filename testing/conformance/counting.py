"""What the broker's own count counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.ports import Caps, Counts

if TYPE_CHECKING:
    from holdfast.testing.conformance.stage import ConformanceStage


class CountingPromises:
    """The count means what is declared."""

    def test_a_first_delivery_counts_one(self, stage: ConformanceStage) -> None:
        """Counts start at 1; a broker that does not count says None."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a", b"b")
        first = expected_count(stage.caps, failures=0, deliveries=1)
        assert [delivery.count for delivery in member.take(2)] == [first, first]

    def test_a_blamed_release_counts(self, stage: ConformanceStage) -> None:
        """Every blamed release adds one, for either kind of count."""
        counts = self._released(stage, blame=True)
        assert counts == [expected_count(stage.caps, failures=n, deliveries=n + 1) for n in (1, 2)]

    def test_a_blameless_release_counts_only_where_it_must(self, stage: ConformanceStage) -> None:
        """It adds nothing where `blameless_release` is declared or only failures count."""
        counts = self._released(stage, blame=False)
        free = stage.caps.blameless_release
        assert counts == [
            expected_count(stage.caps, failures=0, deliveries=1 if free else n + 1) for n in (1, 2)
        ]

    def test_leaving_blames_nobody(self, stage: ConformanceStage) -> None:
        """What a closed member held goes to the next one as a blameless release does."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a")
        member.take(1)
        member.close()
        [again] = stage.member(topic).take(1)
        deliveries = 1 if stage.caps.blameless_release else 2
        assert again.body == b"a"
        assert again.count == expected_count(stage.caps, failures=0, deliveries=deliveries)

    def _released(self, stage: ConformanceStage, *, blame: bool) -> list[int | None]:
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a")
        for _ in range(2):
            member.source.release(member.take(1)[0], blame=blame)
        member.take(1)
        return [delivery.count for delivery in member.inbox[1:]]


def expected_count(caps: Caps, *, failures: int, deliveries: int) -> int | None:
    """Return what the broker's count must be after so many failures and deliveries."""
    match caps.counts:
        case Counts.NONE:
            return None
        case Counts.DELIVERY:
            return deliveries
        case Counts.FAILURE:
            return failures + 1
