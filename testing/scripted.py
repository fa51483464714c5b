"""A broker for simulation: any broker, with faults at chosen calls and a history of it all."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from contextlib import suppress
from functools import reduce
from typing import TYPE_CHECKING, Any, NoReturn

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import HoldfastError
from holdfast.testing.faults import Crash, Fault, FaultCall, FaultStep, Point
from holdfast.testing.history import EventHistory, HistoryEvent
from holdfast.testing.scripted_source import ScriptedSource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.message import Message
    from holdfast.ports import Broker, Delivery, Lane, Listener, Published, Sink, Source


class ScriptedBroker:
    """Stands for one process: its sinks and sources, which a crash kills together.

    Wraps *broker* (`memory:` unless given); several of them around one broker are several
    processes. Faults come in order of *faults*; `inject` adds more. After a crash the old
    sinks and sources raise `Crash` whatever is called, what they held comes again for the
    next member, and new ones made from here are those of the restarted process.
    """

    def __init__(
        self,
        *faults: Fault,
        broker: Broker | None = None,
        clock: Clock = SYSTEM_CLOCK,
        history: EventHistory | None = None,
    ) -> None:
        self.wrapped = _memory(clock) if broker is None else broker
        self.name = f"scripted {self.wrapped.name}"
        self.caps = self.wrapped.caps
        self.history = EventHistory() if history is None else history
        self.calls: Counter[Point] = Counter()
        """How many calls there were at each point."""
        self._faults = list(faults)
        self._lock = threading.Lock()
        self._names = itertools.count(1)
        self._sinks: list[ScriptedSink] = []
        self._sources: list[ScriptedSource] = []

    def inject(self, *faults: Fault) -> None:
        """Add *faults* behind those there are."""
        self._faults.extend(faults)

    def sink(self, **native: Any) -> Sink:
        """Return a sink of this process."""
        sink = ScriptedSink(self, f"sink {next(self._names)}", self.wrapped.sink(**native))
        self._sinks.append(sink)
        return sink

    def source(
        self,
        topics: Sequence[str],
        *,
        group: str,
        listener: Listener | None = None,
        **native: Any,
    ) -> Source:
        """Return a source of this process."""

        def opened(listener: Listener | None) -> Source:
            return self.wrapped.source(topics, group=group, listener=listener, **native)

        name = f"source {next(self._names)}"
        source = ScriptedSource(self, name, group=group, listener=listener, opened=opened)
        self._sources.append(source)
        return source

    def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        """Make sure that *topic* exists."""
        self.wrapped.create_topic(topic, partitions=partitions)

    def create_group(self, topic: str, group: str) -> None:
        """Make sure that what is published to *topic* from now on is kept for *group*."""
        self.wrapped.create_group(topic, group)

    def has_group(self, topic: str, group: str) -> bool:
        """Return whether *group* gets what is published to *topic* from now on."""
        return self.wrapped.has_group(topic, group)

    def prune(self, topics: Sequence[str] | None = None, **options: Any) -> Mapping[str, int]:
        """Delete what every group has settled."""
        return self.wrapped.prune(topics, **options)

    def lag(self, group: str, topics: Sequence[str]) -> Mapping[Lane, int]:
        """Return how many messages *group* has not yet settled, by lane."""
        return self.wrapped.lag(group, topics)

    def close(self) -> None:
        """Close the wrapped broker."""
        self.wrapped.close()

    def crash(self) -> None:
        """Kill the process: every sink and source that it has open is dead at once."""
        with self._lock:
            sinks, self._sinks = self._sinks, []
            sources, self._sources = self._sources, []
        for sink in sinks:
            sink.die()
        for source in sources:
            source.die()
        self.history.add(HistoryEvent(kind="crashed", member=self.name))

    def run(
        self,
        point: Point,
        make: Callable[[FaultCall], Any],
        *,
        messages: Sequence[Message] = (),
        deliveries: Sequence[Delivery] = (),
        rebalance: Callable[[], list[Delivery]] | None = None,
    ) -> Any:
        """Make one call through the faults that match it. For its sinks and sources."""
        with self._lock:
            self.calls[point] += 1
            number = self.calls[point]
        call = FaultCall(point=point, number=number, messages=messages, deliveries=deliveries)
        matching = [f for f in self._faults if f.point == point and f.when(call)]

        def around(inner: Callable[[FaultCall], Any], fault: Fault) -> Callable[[FaultCall], Any]:
            return lambda call: fault.effect(
                FaultStep(
                    call=call,
                    make=inner,
                    crash=lambda: self._crash(call),
                    rebalance=_nowhere if rebalance is None else rebalance,
                )
            )

        return reduce(around, reversed(matching), make)(call)

    def _crash(self, call: FaultCall) -> NoReturn:
        self.crash()
        raise Crash(f"at {call.point} {call.number}")


class ScriptedSink:
    """A sink of a scripted process."""

    def __init__(self, process: ScriptedBroker, name: str, wrapped: Sink) -> None:
        self.caps = wrapped.caps
        self.name = name
        self._process = process
        self._wrapped = wrapped
        self._is_dead = False

    def die(self) -> None:
        """Be dead from now on."""
        self._is_dead = True
        with suppress(HoldfastError):
            self._wrapped.close()

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Publish through the faults, and record what was stored and what was refused."""
        self._check_alive()
        results: list[Published] = self._process.run(
            "publish", self._publish, messages=tuple(messages)
        )
        return results

    def close(self) -> None:
        """Close through the faults."""
        self._check_alive()
        self._process.run("close", lambda _: self._wrapped.close())

    def _publish(self, call: FaultCall) -> list[Published]:
        results = self._wrapped.publish(call.messages)
        for message, result in zip(call.messages, results, strict=True):
            self._process.history.add(
                HistoryEvent(
                    kind="refused" if result.error else "published",
                    member=self.name,
                    id=message.id,
                    key=message.key,
                    lane=result.lane,
                )
            )
        return results

    def _check_alive(self) -> None:
        if self._is_dead:
            raise Crash(f"{self.name} belongs to a process that is dead")


def _memory(clock: Clock) -> Broker:
    from holdfast.brokers import connect  # only who wraps no broker of their own needs it

    return connect("memory:", clock=clock)


def _nowhere() -> list[Delivery]:
    raise ValueError("only a poll can be rebalanced")
