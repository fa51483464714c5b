"""Notices a client that reads nothing although there is something to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from holdfast.brokers.kafka.cluster import Cluster
    from holdfast.brokers.kafka.driver import GroupClient
    from holdfast.brokers.kafka.offsets import KafkaLane
    from holdfast.clock import Clock
    from holdfast.ports import Lane

_LOOKS = 3
"""How often it looks within the time after which a client counts as standing still."""
_JOIN = 4
"""How many times that long a group may take to let a member in: it waits for slow ones."""


class StandstillDetector:
    """Compares where a member stands with where its lanes end, asked over another connection.

    Clients come back by themselves from most that happens to their servers, and from the rest
    never: they then wait in silence, or fail on, for good. Whoever uses one makes it anew when
    this gives a reason. A look costs one question, and only where a lane has been silent.
    """

    def __init__(self, cluster: Cluster, clock: Clock, seconds: float) -> None:
        self._cluster = cluster
        self._clock = clock
        self._seconds = seconds
        self.reset()

    def reset(self) -> None:
        """Forget what was seen: the client is new."""
        now = self._clock.monotonic()
        self._look_at = now + self._seconds / _LOOKS
        self._joined_at = self._heard_at = self._asked_at = now
        self._behind: dict[Lane, tuple[int, float]] = {}

    def reason(
        self, member: GroupClient, lanes: Mapping[Lane, KafkaLane], paused: Collection[Lane]
    ) -> str | None:
        """Return why *member*, just polled, is to be made anew; None if it is not."""
        now = self._clock.monotonic()
        self._heard_at = now
        if now < self._look_at:
            return None
        self._look_at = now + self._seconds / _LOOKS
        if member.is_joined():
            self._joined_at = now
        elif now - self._joined_at > _JOIN * self._seconds:
            return f"the group has not let it in for {now - self._joined_at:.0f} s"
        silent = {
            lane: state
            for lane, state in lanes.items()
            if lane not in paused
            and not state.choked
            and not state.backlog
            and now - state.moved_at >= self._seconds / _LOOKS
        }
        return self._stands(member, silent, now)

    def _stands(
        self, member: GroupClient, silent: Mapping[Lane, KafkaLane], now: float
    ) -> str | None:
        before, self._behind = self._behind, {}
        if not silent:
            return None
        try:
            ends = self._cluster.ends(silent)
        except HoldfastError:  # no reason to change the client
            return None
        for lane, state in silent.items():
            position = max(member.reached(lane) or 0, state.next or 0)
            if ends[lane] <= position:
                continue
            known, since = before.get(lane, (position, now))
            if known != position:
                since = now
            if now - since >= self._seconds:
                return (
                    f"{lane.topic}/{lane.partition} has stood at {position} for "
                    f"{now - since:.0f} s and ends at {ends[lane]}"
                )
            self._behind[lane] = position, since
        return None

    def is_deaf(self, topic: str) -> bool:
        """Whether the client has failed for long, and another one gets an answer at once."""
        now = self._clock.monotonic()
        if now - self._heard_at < self._seconds or now - self._asked_at < self._seconds:
            return False
        self._asked_at = now
        try:
            self._cluster.lanes(topic)
        except HoldfastError:
            return False
        return True
