"""The broker: topics, sinks and sources over AMQP 0-9-1."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from holdfast.brokers.groups.broker import NoPrune, named, subscribed
from holdfast.brokers.rabbitmq import names
from holdfast.brokers.rabbitmq.connection import Reconnector
from holdfast.brokers.rabbitmq.settings import RabbitSettings
from holdfast.brokers.rabbitmq.sink import RabbitSink
from holdfast.brokers.rabbitmq.source import RabbitSource
from holdfast.brokers.rabbitmq.topology import Topology
from holdfast.clock import SYSTEM_CLOCK, Clock, Randomness, system_randomness
from holdfast.errors import InvalidMessage, UnknownGroup, UnknownTopic, Unsupported
from holdfast.ports import BrokerPowers, GroupProgress, Lane, LaneProgress

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.ports import Listener, Sink, Source
    from holdfast.urls import BrokerUrl


class RabbitBroker(NoPrune, BrokerPowers):
    """RabbitMQ, or what speaks AMQP 0-9-1 as it does.

    Several hosts, separated by commas, are tried in turn. Sinks, sources and the broker
    itself have a connection each.
    """

    tells_progress = True
    prune_instead = ("RabbitMQ", "what a group settles leaves its queue at once")

    def __init__(
        self,
        url: BrokerUrl,
        *,
        clock: Clock = SYSTEM_CLOCK,
        randomness: Randomness | None = None,
        **native: Any,
    ) -> None:
        self.name = str(url)
        self._url = url
        self._clock = clock
        self._random = system_randomness() if randomness is None else randomness
        self._settings = RabbitSettings.read(url.options, native)
        self._line = Reconnector(self._settings.parameters(url), clock)
        self._turn = threading.Lock()
        self._sources: weakref.WeakSet[RabbitSource] = weakref.WeakSet()
        self.caps = self._settings.caps()

    def sink(self, **native: Any) -> Sink:
        """Return a new sink with a connection of its own."""
        settings = self._settings.also(native)
        return RabbitSink(
            Reconnector(settings.parameters(self._url), self._clock), settings, self._clock
        )

    def source(
        self,
        topics: Sequence[str],
        *,
        group: str,
        listener: Listener | None = None,
        **native: Any,
    ) -> Source:
        """Return a new member of *group*, which gets what is published from now on."""
        subscribed(topics, group)
        settings = self._settings.also(native)
        line = Reconnector(settings.parameters(self._url), self._clock)
        source = RabbitSource(line, topics, group, settings, self._clock, self._random, listener)
        self._sources.add(source)
        return source

    @property
    def default_partitions(self) -> int:
        """How many lanes a topic gets that is made when first used."""
        return self._settings.partitions

    def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        """Make sure that *topic* exists; an existing one keeps its lanes."""
        if not topic:
            raise InvalidMessage("topic is empty: name the topic to create")
        with self._turn:
            self._topology().create(topic, partitions)

    def create_group(self, topic: str, group: str) -> None:
        """Make sure that *group* gets what is published to *topic* from now on."""
        named(topic, group)
        with self._turn:
            self._topology().create_group([topic], group)

    def has_group(self, topic: str, group: str) -> bool:
        """Return whether *group* has its queues: only then is anything kept for it."""
        named(topic, group)
        with self._turn:
            return self._topology().has_group(topic, group)

    def lag(self, group: str, topics: Sequence[str]) -> Mapping[Lane, int]:
        """Return what waits in the queues of *group*, and what sources of this object hold.

        RabbitMQ does not tell over AMQP what members elsewhere hold: `prefetch` messages of
        each lane at most. A topic that does not exist has no lanes.
        """
        with self._turn:
            topology = self._topology()
            waiting = {
                Lane(topic, partition): topology.waiting(names.lane_queue(topic, group, partition))
                for topic in topics
                for partition in range(topology.find(topic) or 0)
            }
        here = [source for source in self._sources if source.group == group]
        return {lane: n + sum(s.held(lane) for s in here) for lane, n in waiting.items()}

    def progress(self, group: str, topics: Sequence[str] | None = None) -> GroupProgress:
        """Return how much waits for *group* in *topics*, and how many members it has.

        Queues have no positions and tell no age, and AMQP lists no queues: topics are named.
        """
        if topics is None:
            fix = "name them, with --topic on the command line"
            raise Unsupported("tell the topics of a group", "RabbitMQ", fix)
        members: dict[str, int] = {}
        with self._turn:
            topology = self._topology()
            for topic in topics:
                if topology.find(topic) is None:
                    raise UnknownTopic(topic, "there is nothing to lag behind in it")
                if topology.consumers(names.lane_queue(topic, group, 0)) is None:
                    raise UnknownGroup(group, self.name)
                members[topic] = topology.consumers(names.members(topic, group)) or 0
        counts = self.lag(group, topics)
        return GroupProgress(
            lanes={lane: LaneProgress(unsettled=count) for lane, count in counts.items()},
            members=members,
        )

    def close(self) -> None:
        """Close the broker's own connection."""
        with self._turn:
            self._line.close()

    def _topology(self) -> Topology:
        return Topology(self._line.link(self._settings.patience), self._settings, self._clock)
