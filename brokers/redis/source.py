"""A member of a group on Redis.

Handing out the messages of owned lanes, in order.
"""

from __future__ import annotations

import itertools
from math import floor
from typing import TYPE_CHECKING

from holdfast.brokers.groups.member import GroupMember
from holdfast.brokers.groups.source import GroupSource
from holdfast.brokers.redis.connection import log
from holdfast.brokers.redis.lane import RedisLane, before
from holdfast.brokers.redis.wire import decoded
from holdfast.errors import BrokerDown, ConfigurationError, HoldfastError, Unsupported
from holdfast.ports import Delivery

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from holdfast.brokers.redis.connection import RedisConnection
    from holdfast.brokers.redis.group import RedisGroup
    from holdfast.brokers.redis.lane import Entry, LaneStore
    from holdfast.brokers.redis.wakeup import StreamWaiter
    from holdfast.clock import Clock
    from holdfast.ports import Caps, Lane, Listener


class LaneReader:
    """Hands out what waits and is due, then what is new; a key's messages never overtake."""

    def __init__(self, ledger: LaneStore, group: RedisGroup, clock: Clock) -> None:
        self._ledger = ledger
        self._group = group
        self._clock = clock
        self._receipts = itertools.count(1)
        self._turn = 0

    def hand_out(self, lanes: list[RedisLane], limit: int) -> list[Delivery]:
        """Return at most *limit* deliveries of *lanes*, each lane first in its turn."""
        self._turn += 1
        first = self._turn % max(len(lanes), 1)
        lanes = lanes[first:] + lanes[:first]
        batch: list[Delivery] = []
        try:
            clear = self._take_due(lanes, limit, batch)
            if clear and len(batch) < limit:
                self._take_new(clear, limit - len(batch), batch)
            elif not batch:
                self._group.is_rung |= self._ledger.is_rung(self._group.rung)
        except HoldfastError:
            self._take_back(lanes, batch)
            raise
        return batch

    def _take_due(
        self, lanes: Sequence[RedisLane], limit: int, batch: list[Delivery]
    ) -> list[RedisLane]:
        """Hand out what waits and is due; return the lanes in which none of it is left."""
        now = self._clock.monotonic()
        wanted: dict[str, list[str]] = {}
        clear = [state for state in lanes if not state.waiting]
        for state in lanes:
            if state.waiting and limit > 0:
                wanted[state.keys.stream] = due = state.due(now, limit)
                limit -= len(due)
                if limit > 0 and not state.is_full:
                    clear.append(state)
        if any(wanted.values()):
            news = self._ledger.again(wanted, lanes)
            self._group.is_rung |= news.is_rung
            for state, entries in news.entries:
                batch += [self._launch(state, e, state.waiting[e[0]].count) for e in entries]
        return [s for s in clear if s.waiting.keys().isdisjoint(wanted.get(s.keys.stream, ()))]

    def _take_new(self, lanes: Sequence[RedisLane], limit: int, batch: list[Delivery]) -> None:
        news = self._ledger.read(lanes, limit, self._group.rung)
        self._group.is_rung |= news.is_rung
        for state, entries in news.entries:
            if held := state.held_keys():
                self._take_around(state, entries, held, batch)
            else:
                batch += [self._launch(state, entry, 1) for entry in entries]

    def _take_around(
        self, state: RedisLane, entries: list[Entry], held: set[bytes], batch: list[Delivery]
    ) -> None:
        """Hand out *entries*, but let those of *held* keys wait behind the earlier one."""
        behind: dict[str, int] = {}
        for entry in entries:
            key, _, _ = decoded(entry[1])
            if key in held:
                behind[entry[0]] = 1
                state.wait(entry[0], 0.0, 1, key)
            else:
                batch.append(self._launch(state, entry, 1))
        if behind:
            self._ledger.park(state, behind)

    def _launch(self, state: RedisLane, entry: Entry, count: int) -> Delivery:
        position, fields = entry
        key, body, headers = decoded(fields)
        delivery = Delivery(
            lane=state.lane,
            position=position,
            key=key,
            body=body,
            headers=headers,
            timestamp=int(position.partition("-")[0]) / 1000,
            count=count,
            epoch=state.epoch,
            receipt=next(self._receipts),
        )
        state.launch(delivery)
        return delivery

    def _take_back(self, lanes: Sequence[RedisLane], batch: Sequence[Delivery]) -> None:
        """Keep what nobody will get from this call: it is pending in Redis, blamelessly."""
        states = {state.lane: state for state in lanes}
        for delivery in batch:
            states[delivery.lane].land(str(delivery.position), 0.0)


_FOREVER = 1e9


class RedisSource(GroupSource[RedisLane]):
    """Hands out the messages of the lanes it owns, and settles them one by one.

    A member that does not poll for *session* seconds is taken for dead: its lanes go to
    others, and what it held counts as a failure of each of those messages.
    """

    def __init__(
        self,
        link: RedisConnection,
        group: RedisGroup,
        ledger: LaneStore,
        doorbell: StreamWaiter,
        caps: Caps,
        clock: Clock,
        listener: Listener | None,
    ) -> None:
        self._membership = GroupMember(group, clock, listener)
        super().__init__(self._membership)
        self.caps = caps
        self._link = link
        self._group = group
        self._ledger = ledger
        self._dispenser = LaneReader(ledger, group, clock)
        self._doorbell = doorbell
        self._clock = clock

    # -- handing out ---------------------------------------------------------------------

    def poll(self, limit: int, timeout: float) -> list[Delivery]:
        """Return at most *limit* deliveries, due ones first, each lane in order."""
        self._open()
        until = self._clock.monotonic() + timeout
        self._rest(timeout)
        while True:
            self._keep()
            if batch := self._hand_out(limit):
                return batch
            left = until - self._clock.monotonic()
            if left <= 0:
                return []
            if not self._group.is_rung and self._wait(left):
                return self._hand_out(limit)

    def wake(self) -> None:
        """Make a waiting `poll` return."""
        self._doorbell.ring()

    def _rest(self, timeout: float) -> None:
        """Spend the time until the server may be asked again, if it did not answer last."""
        pause = self._link.pause
        if pause > 0:
            self._doorbell.rest(min(pause, timeout))
            if self._link.pause > 0:
                raise BrokerDown(f"{self._link.name} did not answer; trying again soon")

    def _wait(self, left: float) -> bool:
        now = self._clock.monotonic()
        moments = [left, self._membership.next_look - now]
        streams = {self._group.bell: self._group.rung}
        for state in self._readable():
            due = state.next_due()
            if due is not None:
                moments.append(due - now)
            if not state.is_full:
                streams[state.keys.stream] = state.last
        return self._doorbell.wait(streams, max(0.0, min(moments)))

    def _readable(self) -> list[RedisLane]:
        return [state for state in self._lanes.values() if state.lane not in self._paused]

    def _hand_out(self, limit: int) -> list[Delivery]:
        try:
            return self._dispenser.hand_out(self._readable(), limit)
        except HoldfastError:
            self._group.is_in_doubt = True  # something may have been read that never arrived
            raise

    # -- settling ------------------------------------------------------------------------

    def accept(self, deliveries: Sequence[Delivery]) -> None:
        """Settle *deliveries* for good; stored by the server when this returns."""
        self._open()
        settled: dict[str, list[str]] = {}
        lanes: dict[Lane, RedisLane] = {}
        for delivery in deliveries:
            if (state := self._owner(delivery)) is not None:
                lanes[state.lane] = state
                settled.setdefault(state.keys.stream, []).append(str(delivery.position))
        if not lanes:
            return
        self._ledger.accept(settled, lanes.values())
        for state in lanes.values():
            for position in settled[state.keys.stream]:
                state.flying.pop(position, None)

    def flush(self) -> None:
        """Nothing is held back: what was settled is stored already."""
        self._open()

    def reject(self, delivery: Delivery) -> None:
        """Settle *delivery* as refused: Redis keeps no dead letters of its own."""
        self.accept([delivery])

    def release(self, delivery: Delivery, *, blame: bool, delay: float | None = None) -> None:
        """Hand *delivery* out again after *delay*; its key's later messages wait behind it."""
        self._open()
        state = self._owner(delivery)
        if state is None:
            return
        position, count = str(delivery.position), (delivery.count or 1) + blame
        wait = 0.0 if delay is None else min(max(delay, 0.0), _FOREVER)
        due = self._clock.monotonic() + wait
        self._ledger.park(state, {position: count}, wait)
        state.land(position, due if wait else 0.0, int(blame))

    def extend(self, delivery: Delivery, seconds: float) -> None:
        """Refuse: a delivery has no lease, it stays with its owner."""
        del delivery, seconds
        raise Unsupported("extend a delivery", self._link.name, "it stays until it is settled")

    def _owner(self, delivery: Delivery) -> RedisLane | None:
        """Return the lane that still holds this very delivery, or None if it is stale."""
        state = self._lanes.get(delivery.lane)
        if state is None or state.epoch != delivery.epoch:
            return None
        held = state.flying.get(str(delivery.position))
        return state if held is not None and held.receipt == delivery.receipt else None

    # -- the group -----------------------------------------------------------------------

    def _keep(self) -> None:
        """Keep up with the group, and with what the server has pending where that is in doubt."""
        self._membership.keep()
        if self._group.is_in_doubt:
            for state in self._lanes.values():
                self._ledger.load(state, blame=False)
            self._group.is_in_doubt = False

    def lag(self) -> Mapping[Lane, int]:
        """Return the unsettled messages of each owned lane."""
        return self._ledger.lags(list(self._lanes))

    def seek(
        self, lane: Lane, *, offset: int | str | None = None, time: datetime | None = None
    ) -> None:
        """Move the group in *lane*; what is handed out now becomes stale.

        *offset* is a position, or milliseconds since 1970 alone as in Redis itself; 0 is the
        beginning.
        """
        self._open()
        state = self._sought(lane, offset, time)
        last = _just_before(offset if time is None else floor(time.timestamp() * 1000))
        if epoch := self._ledger.seek(state, last):
            self._lanes[lane] = RedisLane(lane, state.keys, epoch, state.member, last)

    def close(self) -> None:
        """Leave the group at once; its lanes are free for others when this returns."""
        if self._is_closed:
            return
        try:
            self._membership.leave()
        except BrokerDown as error:
            log.warning("%s; this member's lanes are free when its session ends", error)
        finally:
            self._is_closed = True
            self._doorbell.close()
            self._link.disconnect()


def _just_before(offset: int | str | None) -> str:
    try:
        last = before(str(offset))
    except ValueError as error:
        raise ConfigurationError(
            f"cannot seek to offset {offset!r}: use the position of a delivery, or 0"
        ) from error
    if last.startswith("-"):
        raise ConfigurationError(f"cannot seek to offset {offset}: use 0 or more")
    return last
