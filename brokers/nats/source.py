"""A member of a group on NATS JetStream."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.brokers.groups.member import GroupMember
from holdfast.brokers.groups.source import GroupSource
from holdfast.brokers.nats.ack_tokens import ACK, NAK, PROGRESS, TERM, Answer, nak_after
from holdfast.brokers.nats.jetstream import parts_of
from holdfast.brokers.nats.lane import AGAIN, NatsLane
from holdfast.errors import BrokerDown, ConfigurationError, StaleDelivery, Unsupported
from holdfast.message import utc
from holdfast.ports import Delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from holdfast.brokers.nats.acks import AckSender
    from holdfast.brokers.nats.connection import Connection
    from holdfast.brokers.nats.fetch import PullIntake
    from holdfast.brokers.nats.membership import NatsGroup
    from holdfast.ports import Caps, Lane, Listener, Position

_LOOK = 0.25  # seconds between looks at the connection and the clock while polling
_GLANCE = 0.01  # seconds that a poll without timeout waits for what is on its way
_LINGER = 0.02  # seconds that messages on their way may hold up those that came


class NatsSource(GroupSource[NatsLane]):
    """Hands out the messages of the lanes it owns, and settles them one by one."""

    def __init__(
        self,
        connection: Connection,
        group: NatsGroup,
        intake: PullIntake,
        courier: AckSender,
        *,
        caps: Caps,
        timeout: float,
        listener: Listener | None,
    ) -> None:
        self._membership = GroupMember(group, group.clock, listener)
        super().__init__(self._membership)
        self.caps = caps
        self._connection = connection
        self._group = group
        self._consumers = group.consumers
        self._intake = intake
        self._courier = courier
        self._timeout = timeout
        self._clock = group.clock
        self._set_up = 0
        self._turn = 0
        self._renewed = float("-inf")
        self._is_woken = False

    # -- handing out -------------------------------------------------------------------

    def poll(self, limit: int, timeout: float) -> list[Delivery]:
        """Return at most *limit* deliveries, each lane in order."""
        self._open()
        until = self._clock.monotonic() + max(timeout, _GLANCE)
        settled = until
        while True:
            self._connection.bell.clear()
            self._up(max(until - self._clock.monotonic(), 0.0))
            self._membership.keep()
            self._consumers.tend(self._lanes, self._group.entry)
            self._intake.absorb()
            self._renew()
            now = self._clock.monotonic()
            ready = self._count_ready()
            settled = min(settled, now + _LINGER) if ready else until
            if ready >= limit or now >= settled or (ready and not self._is_filling()):
                batch = self._hand_out(limit, now)
                if batch or now >= until:
                    return batch
            self._ask(limit, now)
            if not self._is_woken:
                look = AGAIN if any(s.gathers for s in self._lanes.values()) else _LOOK
                self._clock.wait(self._connection.bell, min(settled - now, look))
            if self._is_woken:
                self._is_woken = False
                self._intake.absorb()
                return self._hand_out(limit, self._clock.monotonic())

    def wake(self) -> None:
        """Make a waiting `poll` return."""
        self._is_woken = True
        self._connection.bell.set()

    def _is_open(self, state: NatsLane) -> bool:
        return state.lane not in self._paused and not state.revoked and not state.gone

    def _count_ready(self) -> int:
        return sum(len(state.ready) for state in self._lanes.values() if self._is_open(state))

    def _is_filling(self) -> bool:
        return any(s.is_filling for s in self._lanes.values() if self._is_open(s))

    def _ask(self, limit: int, now: float) -> None:
        lanes = sum(self._is_open(state) for state in self._lanes.values())
        if lanes:
            # A request ends on the server before our membership does: no message goes to us
            # once the lane may be somebody else's.
            seconds = min(self._group.session / 2, self._group.alive_until - now)
            self._intake.ask(-(-limit // lanes), seconds, self._paused)

    def _hand_out(self, limit: int, now: float) -> list[Delivery]:
        lanes = [state for state in self._lanes.values() if self._is_open(state)]
        self._turn += 1
        first = self._turn % len(lanes) if lanes else 0
        batch: list[Delivery] = []
        for state in lanes[first:] + lanes[:first]:
            for arrival, flight in state.take(limit - len(batch), now):
                message = arrival.content
                key, body, headers = parts_of(message.headers, message.data)
                flight.key = key
                batch.append(
                    Delivery(
                        lane=state.lane,
                        position=arrival.position,
                        key=key,
                        body=body,
                        headers=headers,
                        timestamp=arrival.stored,
                        count=arrival.count,
                        epoch=state.epoch,
                        lease_until=arrival.lease_until,
                        receipt=flight,
                    )
                )
        if batch:
            with suppress(BrokerDown):  # what is handed out now must reach the caller
                self._ask(limit, now)  # the next ones travel while these are handled
        return batch

    # -- settling ----------------------------------------------------------------------

    def accept(self, deliveries: Sequence[Delivery]) -> None:
        """Settle *deliveries* for good; confirmed by the server when `flush` returns."""
        self._ready()
        words: dict[Lane, list[Answer]] = {}
        for delivery in deliveries:
            state = self._ours(delivery)
            if state is not None and (reply := state.settle(int(delivery.position))):
                words.setdefault(delivery.lane, []).append((reply, ACK))
        for answers in words.values():
            self._courier.tell(answers)

    def reject(self, delivery: Delivery) -> None:
        """Settle *delivery* as refused; the server keeps it for other groups."""
        self._ready()
        state = self._ours(delivery)
        if state is not None and (reply := state.settle(int(delivery.position))):
            self._courier.tell([(reply, TERM)])

    def release(self, delivery: Delivery, *, blame: bool, delay: float | None = None) -> None:
        """Hand *delivery* out again after *delay*; the server counts it, blamed or not."""
        del blame
        self._ready()
        if delay is not None and delay > (self.caps.delay or 0.0):
            raise Unsupported(f"delay a release for {delay:g} s", "NATS", "use at most a year")
        state = self._ours(delivery)
        if state is not None:
            word = NAK if not delay else nak_after(delay)
            due = None if not delay else self._clock.monotonic() + delay
            self._courier.mention([(state.release(int(delivery.position), due), word)])

    def extend(self, delivery: Delivery, seconds: float) -> None:
        """Keep *delivery* for *seconds*, at least for a lease; polling renews it until then."""
        self._ready()
        if self._ours(delivery) is None:
            raise StaleDelivery(f"{delivery.lane} {delivery.position} is not held here any more")
        now = self._clock.monotonic()
        flight = delivery.receipt
        flight.keep_until = now + seconds
        flight.lease_until = delivery.lease_until = now + (self.caps.lease or 0.0)
        self._courier.mention([(flight.reply, PROGRESS)])

    def flush(self) -> None:
        """Return once the server has confirmed everything settled so far."""
        self._persist(lambda: self._consumers.flush(self._lanes))

    def _ours(self, delivery: Delivery) -> NatsLane | None:
        state = self._lanes.get(delivery.lane)
        if state is None or state.gone or state.epoch != delivery.epoch:
            return None
        held = state.flying.get(int(delivery.position))
        return state if held is not None and held is delivery.receipt else None

    # -- the group ---------------------------------------------------------------------

    def lag(self) -> Mapping[Lane, int]:
        """Return the unsettled messages of each owned lane."""
        self._ready()
        return self._consumers.lag(self._lanes.values())

    def seek(
        self, lane: Lane, *, offset: Position | None = None, time: datetime | None = None
    ) -> None:
        """Move the group in *lane* to a sequence of its stream, or to a time.

        What is handed out now becomes stale.
        """
        self._ready()
        state = self._sought(lane, offset, time)
        start: int | str
        if time is not None:
            start = utc(time).isoformat()
        elif isinstance(offset, int):
            start = offset
            if not 0 <= start <= (end := self._consumers.end(lane)):
                raise ConfigurationError(f"cannot seek to offset {start}: use 0 to {end}")
        else:
            raise ConfigurationError(f"offset {offset!r}: positions on NATS are numbers")
        entry = None if state.gone else self._group.move(lane, start)
        if entry is None:
            raise StaleDelivery(f"{lane} belongs to another member by now")
        self._lanes[lane] = self._consumers.move(state, entry)

    def close(self) -> None:
        """Leave the group; lanes and everything unsettled are free when this returns."""
        if self._is_closed:
            return
        try:
            if self._group.has_joined:
                self._persist(self._leave)
        except BrokerDown:
            self._membership.lose(self._lanes)
            raise
        finally:
            self._is_closed = True
            self._connection.close()

    def _leave(self) -> None:
        self._membership.lose([lane for lane, state in self._lanes.items() if state.gone])
        self._membership.leave()

    def _ready(self) -> None:
        """Make sure that the server hears us, and that we know which lanes are still ours."""
        self._open()
        self._up(2.0)
        self._group.fence(self._lanes)

    def _persist(self, work: Callable[[], None]) -> None:
        """Do *work*, if need be over a new connection, while the server may take to answer."""
        until = self._clock.monotonic() + self._timeout
        while True:
            try:
                self._ready()
                work()
            except BrokerDown:
                if self._connection.is_up or self._clock.monotonic() >= until:
                    raise
            else:
                return

    def _up(self, patience: float) -> None:
        self._connection.ensure(patience)
        if self._set_up != self._connection.generation:
            self._group.reconnected(self._connection, self._lanes.values())
            self._set_up = self._connection.generation

    def _renew(self) -> None:
        """Renew leases, some times per lease."""
        now = self._clock.monotonic()
        if now - self._renewed >= (self.caps.lease or 0.0) / 8:
            self._renewed = now
            self._consumers.keep_alive(self._lanes.values())
