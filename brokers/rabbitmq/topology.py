"""Topics, groups and delays, as they are set up on the broker."""

from __future__ import annotations

import logging
import math
import re
from typing import TYPE_CHECKING

from holdfast.brokers.rabbitmq import names
from holdfast.brokers.rabbitmq.confirms import ConfirmChannel, Outgoing, await_batch
from holdfast.brokers.rabbitmq.connection import Control
from holdfast.brokers.rabbitmq.errors import ChannelRefused, QueueNotFound
from holdfast.errors import ConfigurationError, UnknownTopic
from holdfast.extras import driver

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.brokers.rabbitmq.connection import ConnectionThread
    from holdfast.brokers.rabbitmq.settings import RabbitSettings
    from holdfast.clock import Clock

_log = logging.getLogger("holdfast.brokers.rabbitmq")
_MOST_LANES = 4096
_told: set[str] = set()  # topics without an alternate exchange; each is told once a process


class Topology:
    """Finds and makes topics and groups over one link."""

    def __init__(self, link: ConnectionThread, settings: RabbitSettings, clock: Clock) -> None:
        self.control = Control(link, clock, settings.patience)
        self._link = link
        self._settings = settings
        self._clock = clock
        self._known: dict[str, int] = {}
        self._delays: dict[int, float] = {}

    def lanes(self, topic: str) -> int:
        """Return how many lanes *topic* has, creating it where that is allowed."""
        if (known := self._known.get(topic)) is not None:
            return known
        if (lanes := self.find(topic)) is None:
            if not self._settings.auto_create:
                raise UnknownTopic(topic, "create it with broker.create_topic(), or auto_create")
            lanes = self.create(topic, self._settings.partitions)
        self._known[topic] = lanes
        return lanes

    def find(self, topic: str) -> int | None:
        """Return the lanes of *topic*; None if it does not exist, or not completely."""
        names.others(topic)  # refuses what is too long before pika breaks over it
        try:
            self.control.call("exchange_declare", exchange=topic, passive=True)
            return self._count(topic)
        except QueueNotFound:
            return None

    def create(self, topic: str, partitions: int) -> int:
        """Make sure that *topic* exists, and return how many lanes it has.

        The number is an argument of a queue: the broker takes the first one declared and
        refuses every other, whoever comes at the same time.
        """
        if not 1 <= partitions <= _MOST_LANES:
            raise ConfigurationError(f"partitions={partitions}: use 1 to {_MOST_LANES}")
        lanes = partitions if self._is(topic, partitions) else self._count(topic)
        try:
            self._catch_all(topic)
        except ChannelRefused as error:
            if "alternate-exchange" not in str(error):
                raise
        return lanes

    def create_group(self, topics: Iterable[str], group: str) -> dict[str, int]:
        """Make sure that *group* gets what is published from now on; return lanes by topic.

        RabbitMQ notes that a quorum queue exists some time after it has answered, so what a
        new queue confirms would be lost with a server that is killed right then: a new
        queue gets no messages before it is some seconds old.
        """
        lanes = {topic: self.lanes(topic) for topic in topics}
        queues = {
            names.lane_queue(topic, group, partition): (topic, str(partition))
            for topic, count in lanes.items()
            for partition in range(count)
        }
        new = [topic for topic in lanes if not self._exists(names.ready(topic, group))]
        for queue in queues:
            self.control.call("queue_declare", queue=queue, durable=True, arguments=names.LANE)
        if new and self._settings.maturity:
            _log.info("group %s is new: waiting %g s", group, self._settings.maturity)
            self._clock.sleep(self._settings.maturity)
        for queue, (topic, key) in queues.items():
            self.control.call("queue_bind", queue=queue, exchange=topic, routing_key=key)
        # Behind the lanes: before all of them are bound it would take their messages, too.
        for topic in lanes:
            self._bind_others(topic, names.lane_queue(topic, group, 0))
        for topic in new:
            self.control.call("queue_declare", queue=names.ready(topic, group), durable=True)
        return lanes

    def _bind_others(self, topic: str, queue: str) -> None:
        """Let *queue* have what reaches *topic* under a routing key that is no lane.

        An exchange cannot be given an alternate one once it exists; one of an earlier time
        goes on as it was, until a policy of the server gives it one.
        """
        others = names.others(topic)
        try:
            self._catch_all(topic)
        except ChannelRefused as error:
            if topic not in _told:
                _told.add(topic)
                _log.warning(
                    "what others publish to exchange %r under a routing key that is no lane is "
                    "dropped, for it has no alternate exchange (%s). This gives it one:  "
                    "rabbitmqctl set_policy %s '^%s$' '{\"alternate-exchange\":\"%s\"}' "
                    "--apply-to exchanges",
                    topic, error, others, re.escape(topic), others,
                )  # fmt: skip
        try:
            self.control.call("queue_bind", queue=queue, exchange=others)
        except (QueueNotFound, ChannelRefused) as error:
            _log.warning("queue %r is not bound to exchange %r: %s", queue, others, error)

    def _catch_all(self, topic: str) -> None:
        """Make sure that *topic* has its exchange, with one for what is no lane behind it."""
        others, arguments = names.others(topic), names.topic_arguments(topic)
        self.control.call("exchange_declare", exchange=others, exchange_type="fanout", durable=True)
        self.control.call("exchange_declare", exchange=topic, durable=True, arguments=arguments)

    def has_group(self, topic: str, group: str) -> bool:
        """Return whether *group* has its queues of *topic*, and they are bound."""
        lanes = self.find(topic)
        if lanes is None:
            return False
        queues = [names.lane_queue(topic, group, lane) for lane in range(lanes)]
        # The last one is made when all the others are bound.
        return all(self._exists(queue) for queue in [*queues, names.ready(topic, group)])

    def waiting(self, queue: str) -> int:
        """Return how many messages of *queue* are with no member; a missing one has none."""
        try:
            found = self.control.call("queue_declare", queue=queue, passive=True)
        except QueueNotFound:
            return 0
        return int(found.message_count)

    def consumers(self, queue: str) -> int | None:
        """Return how many consumers *queue* has; None if there is no such queue."""
        try:
            found = self.control.call("queue_declare", queue=queue, passive=True)
        except QueueNotFound:
            return None
        return int(found.consumer_count)

    def delay(self, seconds: float) -> tuple[str, float]:
        """Return an exchange where a message waits for *seconds*, and since when it is safe.

        A time to live on each message would not do: a queue looks at its head only, so a
        short delay would wait behind a long one. So there is a queue per delay, and since
        delays with jitter have any value, they are rounded up by at most a quarter: four
        queues per doubling serve all groups, a hundred of them all delays up to 28 days.
        The routing key names the lane's queue, where the message goes when its time is up.
        """
        step = delay_step(seconds)
        name = names.delay(step)
        if step not in self._delays:
            is_new = self._settings.maturity > 0 and not self._exists(name)
            arguments = names.delay_arguments(step)
            self.control.call(
                "exchange_declare", exchange=name, exchange_type="fanout", durable=True
            )
            self.control.call("queue_declare", queue=name, durable=True, arguments=arguments)
            self.control.call("queue_bind", queue=name, exchange=name)
            wait = self._settings.maturity if is_new else 0.0
            self._delays[step] = self._clock.monotonic() + wait
        return name, self._delays[step]

    def forget_delays(self) -> None:
        """Declare the delays anew when they are needed next."""
        self._delays.clear()

    def _exists(self, queue: str) -> bool:
        try:
            self.control.call("queue_declare", queue=queue, passive=True)
        except QueueNotFound:
            return False
        return True

    def _count(self, topic: str) -> int:
        """Return the number of lanes.

        A queue does not tell its arguments, so it also holds as many messages as there are
        lanes. They are only a hint, which the broker confirms or which is corrected here.
        """
        queue = names.lanes(topic)
        hint = int(self.control.call("queue_declare", queue=queue, passive=True).message_count)
        try:
            if hint and self._is(topic, hint):
                return hint
        except ChannelRefused:  # this user may not declare
            return hint
        _log.warning("queue %r holds %d messages, which is wrong; counting anew", queue, hint)
        for lanes in range(1, _MOST_LANES + 1):
            if self._is(topic, lanes):
                return lanes
        raise ConfigurationError(
            f"queue {queue!r} exists and was not made by Holdfast: choose another topic"
        )

    def _is(self, topic: str, lanes: int) -> bool:
        """Return whether *topic* has so many *lanes*; one that did not exist has them now."""
        queue = names.lanes(topic)
        arguments = names.lanes_arguments(lanes)
        try:
            found = self.control.call(
                "queue_declare", queue=queue, durable=True, arguments=arguments
            )
        except ChannelRefused as error:
            if error.is_mismatch:
                return False
            raise
        if found.message_count < lanes:
            self._fill(queue, lanes)
        return True

    def _fill(self, queue: str, lanes: int) -> None:
        """Put *lanes* messages into *queue*, which drops all beyond that."""
        pika = driver("pika", extra="rabbitmq")
        properties = pika.BasicProperties(delivery_mode=2, message_id=queue)
        outlet = ConfirmChannel(self._link)
        batch = outlet.send([Outgoing("", queue, properties, b"", queue)] * lanes)
        await_batch(batch, self._link, self._clock, self._settings.patience)
        outlet.close()


def delay_step(seconds: float) -> int:
    """Return *seconds* in milliseconds, rounded up to three significant bits."""
    milliseconds = max(math.ceil(seconds * 1000) + 1, 4)  # a clock tick may already be half over
    scale = max(milliseconds.bit_length() - 3, 0)
    return -(-milliseconds >> scale) << scale
