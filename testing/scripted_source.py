"""A source of a scripted process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from holdfast.ports import BrokerPowers
from holdfast.testing.faults import Crash, FaultCall, Point
from holdfast.testing.history import EventHistory, HistoryEvent, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from holdfast.ports import Broker, Delivery, Lane, Listener, Position, Source

_MOST_TURNS = 100


class Process(Protocol):
    """What a source needs of the scripted process that it belongs to."""

    wrapped: Broker
    history: EventHistory

    def run(
        self,
        point: Point,
        make: Callable[[FaultCall], Any],
        *,
        deliveries: Sequence[Delivery] = (),
        rebalance: Callable[[], list[Delivery]] | None = None,
    ) -> Any:
        """Make one call through the faults that match it."""
        ...


class ScriptedSource:
    """Passes each call on through the faults, and records what became of it."""

    def __init__(
        self,
        process: Process,
        name: str,
        *,
        group: str,
        listener: Listener | None,
        opened: Callable[[Listener | None], Source],
    ) -> None:
        self.name = name
        self._process = process
        self._group = group
        self._opened = opened
        self._polled: list[Delivery] = []
        self._wrapped = opened(_Witness(self, listener))
        self.caps = self._wrapped.caps
        self._is_dead = False

    def die(self) -> None:
        """Be dead from now on; the wrapped member vanishes as if its process had been killed."""
        self._is_dead = True
        self._wrapped.wake()
        BrokerPowers.of(self._process.wrapped).abandon(self._wrapped)

    def poll(self, limit: int, timeout: float) -> list[Delivery]:
        """Poll through the faults, and record what is handed out."""
        deliveries: list[Delivery] = self._alive._process.run(
            "poll",
            lambda _: self._poll(limit, timeout),
            rebalance=lambda: self._rebalance(limit),
        )
        for delivery in deliveries:
            self._note("handed out", delivery)
        return deliveries

    def accept(self, deliveries: Sequence[Delivery]) -> None:
        """Accept through the faults."""

        def make(call: FaultCall) -> None:
            self._wrapped.accept(call.deliveries)
            for delivery in call.deliveries:
                self._note("accepted", delivery)

        self._alive._process.run("accept", make, deliveries=tuple(deliveries))

    def release(self, delivery: Delivery, *, blame: bool, delay: float | None = None) -> None:
        """Release through the faults."""

        def make(call: FaultCall) -> None:
            for delivery in call.deliveries:
                self._wrapped.release(delivery, blame=blame, delay=delay)
                self._note("released", delivery)

        self._alive._process.run("release", make, deliveries=(delivery,))

    def reject(self, delivery: Delivery) -> None:
        """Reject through the faults."""

        def make(call: FaultCall) -> None:
            for delivery in call.deliveries:
                self._wrapped.reject(delivery)
                self._note("rejected", delivery)

        self._alive._process.run("reject", make, deliveries=(delivery,))

    def extend(self, delivery: Delivery, seconds: float) -> None:
        """Extend through the faults."""

        def make(call: FaultCall) -> None:
            for delivery in call.deliveries:
                self._wrapped.extend(delivery, seconds)
                self._note("extended", delivery)

        self._alive._process.run("extend", make, deliveries=(delivery,))

    def flush(self) -> None:
        """Flush through the faults."""

        def make(_: FaultCall) -> None:
            self._wrapped.flush()
            self._record("flushed")

        self._alive._process.run("flush", make)

    def close(self) -> None:
        """Close through the faults."""

        def make(_: FaultCall) -> None:
            self._wrapped.close()
            self._record("closed")

        self._alive._process.run("close", make)

    def pause(self, lanes: Iterable[Lane]) -> None:
        """Pause *lanes*."""
        self._alive._wrapped.pause(lanes)

    def resume(self, lanes: Iterable[Lane]) -> None:
        """Resume *lanes*."""
        self._alive._wrapped.resume(lanes)

    def seek(
        self, lane: Lane, *, offset: Position | None = None, time: datetime | None = None
    ) -> None:
        """Move the group in *lane*."""
        self._alive._wrapped.seek(lane, offset=offset, time=time)

    def assignment(self) -> frozenset[Lane]:
        """Return the lanes that belong to this member now."""
        return self._alive._wrapped.assignment()

    def lag(self) -> Mapping[Lane, int]:
        """Return how many messages of each assigned lane are not yet settled."""
        return self._alive._wrapped.lag()

    def wake(self) -> None:
        """Make a waiting `poll` return."""
        self._wrapped.wake()

    @property
    def _alive(self) -> ScriptedSource:
        if self._is_dead:
            raise Crash(f"{self.name} belongs to a process that is dead")
        return self

    def _poll(self, limit: int, timeout: float) -> list[Delivery]:
        self._polled = []
        return self._wrapped.poll(limit, timeout)

    def _rebalance(self, limit: int) -> list[Delivery]:
        """Let a rival join and leave while polling; what left with its lane is dropped."""
        self._polled = []
        mine = self._wrapped.assignment()
        rival = self._opened(None)
        try:
            for _ in range(_MOST_TURNS):
                rival.poll(1, 0.0)
                self._poll_more(limit)
                if rival.assignment():
                    break
        finally:
            rival.close()
        for _ in range(_MOST_TURNS):
            self._poll_more(limit)
            if mine <= self._wrapped.assignment():
                break
        for surplus in self._polled[limit:]:
            self._wrapped.release(surplus, blame=False)
        return self._polled[:limit]

    def _poll_more(self, limit: int) -> None:
        more = self._wrapped.poll(limit, 0.0)  # which may take from `_polled` first
        self._polled += more

    def hear(self, kind: Kind, lanes: Sequence[Lane]) -> None:
        """Record a change of the assignment; deliveries not yet handed out leave with it."""
        if kind != "assigned":
            self._polled = [d for d in self._polled if d.lane not in lanes]
        for lane in lanes:
            self._record(kind, lane=lane)

    def _note(self, kind: Kind, delivery: Delivery) -> None:
        message = delivery.message
        self._record(kind, id=message.id, key=message.key, lane=delivery.lane)

    def _record(self, kind: Kind, **facts: Any) -> None:
        event = HistoryEvent(kind=kind, member=self.name, group=self._group, **facts)
        self._process.history.add(event)


class _Witness:
    """Tells the source what its listener is told, first."""

    def __init__(self, source: ScriptedSource, listener: Listener | None) -> None:
        self._source = source
        self._listener = listener

    def assigned(self, lanes: Iterable[Lane]) -> None:
        self._source.hear("assigned", lanes := list(lanes))
        if self._listener is not None:
            self._listener.assigned(lanes)

    def revoked(self, lanes: Iterable[Lane]) -> None:
        lanes = list(lanes)
        if self._listener is not None:
            self._listener.revoked(lanes)
        self._source.hear("revoked", lanes)  # what was settled inside comes before it

    def lost(self, lanes: Iterable[Lane]) -> None:
        self._source.hear("lost", lanes := list(lanes))
        if self._listener is not None:
            self._listener.lost(lanes)
