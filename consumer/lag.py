"""How far behind a group is: what its broker tells, watched over a window, and judged.

`LagWatch` asks the broker and keeps what it said for as long as the window; `verdict` decides
from such samples alone. Nothing is changed by looking.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from holdfast.consumer.intake.retry_topics import retry_topic
from holdfast.errors import ConfigurationError, Unsupported
from holdfast.headers import replay_topic
from holdfast.ports import BrokerPowers, GroupProgress, LaneProgress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.clock import Clock
    from holdfast.ports import Broker, Lane, Position

_LOOKS = 5  # within a window

NEAR_RETENTION = 0.8
"""The part of a topic's retention at which data loss is ahead."""


class LagVerdict(Enum):
    """How a group does in one lane."""

    OK = "ok"
    """Nothing is left to do, or it is being done as fast as more comes."""
    SLOW = "slow"
    """The lag grows: more comes than is settled."""
    STALLED = "stalled"
    """There is a lag, and nothing is settled although the group has members."""
    STOPPED = "stopped"
    """Nobody is a member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagSample:
    """What one look found in one lane."""

    at: float
    """By the monotonic clock."""
    lag: int
    committed: Position | None = None
    members: int | None = None
    """None where the broker does not tell."""


def verdict(samples: Sequence[LagSample], window: float) -> LagVerdict | None:
    """Judge a lane by the *samples* of a window, oldest first; None while they do not fill it.

    Without positions a lag that changes counts as movement: a queue tells no more.
    """
    last = samples[-1]
    if last.members == 0:
        return LagVerdict.STOPPED
    if last.lag == 0:
        return LagVerdict.OK
    if any(sample.lag == 0 for sample in samples):
        return LagVerdict.OK  # it had caught up, and something came since
    if any(sample.members == 0 for sample in samples):
        return None  # somebody came only just
    is_whole = samples[0].at <= last.at - window
    moved = any(
        one.committed != last.committed if last.committed is not None else one.lag != last.lag
        for one in samples
    )
    if not is_whole:
        return LagVerdict.OK if moved and last.lag <= samples[0].lag else None
    if not moved:
        return LagVerdict.STALLED
    return LagVerdict.SLOW if _grows([sample.lag for sample in samples]) else LagVerdict.OK


def _grows(lags: Sequence[int]) -> bool:
    """Whether the later half is above the earlier one: a single wave is no trend."""
    half = len(lags) // 2
    earlier, later = lags[:half], lags[len(lags) - half :]
    return sum(later) > sum(earlier)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLag:
    """How far behind a group is in one lane."""

    lane: Lane
    progress: LaneProgress
    seconds: float | None
    """Age of the oldest unsettled message; None where the broker does not tell."""
    change: int | None
    """How the lag changed within the window; None after a single look."""
    members: int | None
    retention: float | None
    """Seconds that the topic keeps messages, settled or not."""
    verdict: LagVerdict | None

    @property
    def retention_left(self) -> float | None:
        """Seconds until the oldest unsettled message is lost; None where none will be."""
        if self.retention is None or self.seconds is None:
            return None
        return self.retention - self.seconds

    @property
    def is_near_retention(self) -> bool:
        """Whether more than four fifths of the retention have passed."""
        if self.retention is None or self.seconds is None:
            return False
        return self.seconds > NEAR_RETENTION * self.retention


class LagWatch:
    """Looks at one group again and again, and judges it by the looks of the last *window*."""

    def __init__(
        self,
        broker: Broker,
        group: str,
        topics: Sequence[str] | None,
        *,
        window: float,
        clock: Clock,
    ) -> None:
        if not group or (topics is not None and not all(topics)):
            raise ConfigurationError("a topic or the group is an empty text: name it")
        self._broker = broker
        self._group = group
        self._topics = None if topics is None else list(dict.fromkeys(topics))
        self._window = window
        self._clock = clock
        self._keeps = False
        self._samples: dict[Lane, deque[LagSample]] = {}

    def look(self) -> list[LaneLag]:
        """Ask the broker once, and return every lane in order, with what the window shows."""
        found = progress(self._broker, self._group, self._topics)
        at, now = self._clock.monotonic(), self._clock.now().timestamp()
        # A lane that is gone, with its topic say, is forgotten.
        self._samples = {lane: self._samples.get(lane, deque()) for lane in found.lanes}
        return [self._lane(lane, found, at, now) for lane in sorted(found.lanes)]

    def judged(self) -> list[LaneLag]:
        """Look until every lane has its verdict, for as long as the window at most."""
        self._keeps = True  # looks that took their time make the window longer, not emptier
        found, began, is_over = self.look(), self._clock.monotonic(), False
        while not is_over and any(one.verdict is None for one in found):
            left = began + self._window - self._clock.monotonic()
            self._clock.sleep(max(min(self._window / _LOOKS, left), 0.0))
            is_over = self._clock.monotonic() - began >= self._window
            found = self.look()
        return found

    def _lane(self, lane: Lane, found: GroupProgress, at: float, now: float) -> LaneLag:
        one, members = found.lanes[lane], found.members.get(lane.topic)
        samples = self._samples[lane]
        samples.append(
            LagSample(at=at, lag=one.unsettled, committed=one.committed, members=members)
        )
        while not self._keeps and len(samples) > 1 and samples[1].at <= at - self._window:
            samples.popleft()  # one stays that is as old as the window, or older
        return LaneLag(
            lane=lane,
            progress=one,
            seconds=_age(one, now),
            change=one.unsettled - samples[0].lag if len(samples) > 1 else None,
            members=members,
            retention=found.retention.get(lane.topic),
            verdict=verdict(samples, self._window),
        )


def _age(one: LaneProgress, now: float) -> float | None:
    if one.unsettled == 0:
        return 0.0
    return None if one.oldest is None else max(now - one.oldest, 0.0)


def progress(broker: Broker, group: str, topics: Sequence[str] | None) -> GroupProgress:
    """Return how far *group* is in *topics*, or in all its topics with their retries and replays.

    A broker that declares no such power is asked for the lag of topics that are named.
    """
    powers = BrokerPowers.of(broker)
    if not powers.tells_progress:
        if topics is None:
            raise Unsupported("tell the topics of a group", broker.name, "name them with --topic")
        counts = broker.lag(group, topics)
        return GroupProgress(lanes={lane: LaneProgress(unsettled=n) for lane, n in counts.items()})
    found = powers.progress(group, topics)
    if topics is None:
        known = {lane.topic for lane in found.lanes}
        if unread := _aside(powers, group, known):
            return powers.progress(group, sorted(known | unread))
    return found


def _aside(powers: BrokerPowers, group: str, known: set[str]) -> set[str]:
    """Return the topics for retries and replays of *known* ones that the group has not read yet."""
    tiers = tuple(retry_topic(topic, group, "") for topic in known)
    replays = {replay_topic(topic, group) for topic in known}
    others = (powers.topics() or {}).keys() - known
    return {topic for topic in others if topic in replays or topic.startswith(tiers)}
