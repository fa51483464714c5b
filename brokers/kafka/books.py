"""Which deliveries are settled, and how much of that the broker knows."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING

from holdfast.brokers.kafka.lane import LaneState
from holdfast.errors import HoldfastError, StaleDelivery

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.brokers.kafka.driver import Member, Offsets
    from holdfast.brokers.kafka.settings import KafkaSettings
    from holdfast.clock import Clock
    from holdfast.ports import Delivery, Lane

_log = logging.getLogger("holdfast.brokers.kafka")
_LOOK_SECONDS = 5.0
"""How long after the last change commits go on: the client reads markers a moment later."""


class Books:
    """The lanes that a member owns, and the commits of their contiguous watermarks.

    A commit names its offsets and never passes an unsettled message. What was settled and
    not committed when the member dies is handed out again.
    """

    def __init__(self, clock: Clock, settings: KafkaSettings) -> None:
        self.lanes: dict[Lane, LaneState] = {}
        self._clock = clock
        self._settings = settings
        self._epochs = itertools.count(1)
        self._committed_at = clock.monotonic()
        self._dirty = False
        self._look_until = 0.0
        self._is_failing = False

    def open(self, lane: Lane, at: int | None = None) -> None:
        """Start *lane* under a new epoch; what was handed out under an older one is stale."""
        now = self._clock.monotonic()
        epoch = next(self._epochs)
        self.lanes[lane] = LaneState(lane, epoch, next=at, committed=at, moved_at=now)
        self._dirty = True

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        """Note that *deliveries* are done; stale ones are passed over."""
        lane, state = None, None
        for delivery in deliveries:
            if delivery.lane is not lane:
                lane = delivery.lane
                state = self.lanes.get(lane)
            if (  # LaneState.holds, without the call
                state is not None
                and state.open.get(delivery.position) == delivery.receipt  # type: ignore[arg-type]
                and state.epoch == delivery.epoch
            ):
                del state.open[delivery.position]  # type: ignore[arg-type]
        self._dirty = True

    def put_back(self, delivery: Delivery) -> None:
        """Note that *delivery* is to be handed out again, unless it is stale."""
        state = self.lanes.get(delivery.lane)
        if state is not None and state.holds(delivery):
            state.put_back(delivery)

    def commit(self, member: Member, states: Iterable[LaneState]) -> None:
        """Make the watermarks of *states* durable; `BrokerDown` if they may not be."""
        offsets = self._positions(member, states)
        if not offsets:
            return
        try:
            member.commit(offsets, self._settings.timeout)
        except StaleDelivery as error:  # the next poll says which lanes are lost
            _log.warning("commit of %s refused: %s", _shown(offsets), error)
            return
        self._note(offsets, None)

    def commit_if_due(self, member: Member) -> None:
        """Start a commit of what was settled since the last one, every now and then."""
        now = self._clock.monotonic()
        if now - self._committed_at < self._settings.commit_every:
            return
        if self._dirty:
            self._look_until = now + _LOOK_SECONDS
        elif now > self._look_until:
            return
        self._committed_at = now
        self._dirty = False
        offsets = self._positions(member, self.lanes.values())
        for lane in [lane for lane, offset in offsets.items() if self.lanes[lane].sent == offset]:
            del offsets[lane]
        if offsets:
            for lane, offset in offsets.items():
                self.lanes[lane].sent = offset
            member.commit_soon(offsets, self._note)

    def _positions(self, member: Member, states: Iterable[LaneState]) -> Offsets:
        """Return the watermarks that are not known to be durable."""
        offsets: Offsets = {}
        for state in states:
            busy = state.open or state.backlog
            position = state.position(None if busy else member.reached(state.lane))
            if position and position != state.committed:
                offsets[state.lane] = position
        return offsets

    def _note(self, offsets: Offsets, error: HoldfastError | None) -> None:
        """Remember what became of a commit; a failed one is made again."""
        if error is not None:
            level = logging.DEBUG if self._is_failing else logging.WARNING  # once per outage
            _log.log(level, "commit of %s failed, to be repeated: %s", _shown(offsets), error)
            self._dirty = True
        self._is_failing = error is not None
        for lane, offset in offsets.items():
            if (state := self.lanes.get(lane)) is not None:
                if error is None:
                    state.committed = offset
                if state.sent == offset:
                    state.sent = None


def _shown(offsets: Offsets) -> str:
    return ", ".join(f"{lane.topic}/{lane.partition}@{offset}" for lane, offset in offsets.items())
