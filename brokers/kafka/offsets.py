"""Which deliveries are settled, and how much of that the broker knows.

What one member knows of one lane it owns: decisions only, no I/O.
"""

from __future__ import annotations

import itertools
import logging
from bisect import insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import msgspec

from holdfast.errors import HoldfastError, StaleDelivery

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.brokers.kafka.broker import KafkaSettings
    from holdfast.brokers.kafka.driver import GroupClient, Offsets
    from holdfast.clock import Clock
    from holdfast.ports import Delivery, Lane


FULL, DRAINED = 1000, 500
"""Backlog at which a lane stops fetching, and at which it goes on."""
_FULL_BYTES = 8 << 20


@dataclass(slots=True)
class KafkaLane:
    """Progress of one lane under one assignment.

    `open` holds every offset handed out and not settled for good, with the receipt of its
    last handing out. Offsets enter in ascending order and a release changes the receipt in
    place, so the first key is the contiguous watermark: everything before it is settled.
    One dict serves as registry and watermark, since this is the hot path.
    """

    lane: Lane
    epoch: int
    open: dict[int, int] = field(default_factory=dict)
    backlog: list[Delivery] = field(default_factory=list)
    """Fetched or released, to be handed out before anything newer; ascending."""
    next: int | None = None
    """The offset after the last one handed out."""
    committed: int | None = None
    """What is durable on the broker, as far as this assignment knows."""
    sent: int | None = None
    """What the commit on its way will make durable."""
    moved_at: float = 0.0
    """When it came or last brought something, by the monotonic clock."""
    choked: bool = False
    """Whether fetching stopped because of the backlog."""

    @property
    def is_full(self) -> bool:
        """Whether enough of it is in the backlog, by number or by size."""
        backlog = self.backlog
        return len(backlog) >= FULL or sum([len(one.body or b"") for one in backlog]) >= _FULL_BYTES

    def position(self, reached: int | None) -> int | None:
        """Return the lowest offset that must be read again after a crash; None if that is unknown.

        *reached* is how far the client has read: past the end of what was handed out, or with
        nothing handed out, there may be markers of transactions, which nobody settles.
        """
        if self.open:
            return next(iter(self.open))
        if self.backlog:
            return int(self.backlog[0].position)
        return self.next if reached is None else max(self.next or 0, reached)

    def launch(self, deliveries: list[Delivery]) -> None:
        """Note that *deliveries*, fetched and never handed out, are handed out now."""
        if deliveries:
            offsets = cast("list[int]", [delivery.position for delivery in deliveries])
            self.open.update(dict.fromkeys(offsets, 0))
            self.next = offsets[-1] + 1

    def relaunch(self, limit: int) -> list[Delivery]:
        """Hand out the first *limit* of the backlog."""
        batch, self.backlog = self.backlog[:limit], self.backlog[limit:]
        self.launch([d for d in batch if int(d.position) not in self.open])
        return batch

    def holds(self, delivery: Delivery) -> bool:
        """Whether *delivery* is the last handing out of an unsettled message."""
        return (
            delivery.epoch == self.epoch
            and self.open.get(int(delivery.position)) == delivery.receipt
        )

    def put_back(self, delivery: Delivery) -> None:
        """Note that *delivery* is to be handed out again, ahead of everything newer."""
        receipt = delivery.receipt + 1
        self.open[int(delivery.position)] = receipt
        insort(self.backlog, msgspec.structs.replace(delivery, receipt=receipt), key=_position)


def _position(delivery: Delivery) -> int:
    return int(delivery.position)


_log = logging.getLogger("holdfast.brokers.kafka")
_LOOK_SECONDS = 5.0
"""How long after the last change commits go on: the client reads markers a moment later."""


class OffsetTracker:
    """The lanes that a member owns, and the commits of their contiguous watermarks.

    A commit names its offsets and never passes an unsettled message. What was settled and
    not committed when the member dies is handed out again.
    """

    def __init__(self, lanes: dict[Lane, KafkaLane], clock: Clock, settings: KafkaSettings) -> None:
        self.lanes = lanes
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
        self.lanes[lane] = KafkaLane(lane, epoch, next=at, committed=at, moved_at=now)
        self._dirty = True

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        """Note that *deliveries* are done; stale ones are passed over."""
        lane, state = None, None
        for delivery in deliveries:
            if delivery.lane is not lane:
                lane = delivery.lane
                state = self.lanes.get(lane)
            if (  # KafkaLane.holds, without the call
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

    def commit(self, member: GroupClient, states: Iterable[KafkaLane]) -> None:
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

    def commit_if_due(self, member: GroupClient) -> None:
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

    def _positions(self, member: GroupClient, states: Iterable[KafkaLane]) -> Offsets:
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
