"""Topics, groups and delays, as they are set up on the broker."""

from __future__ import annotations

import json
import logging
import math
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.brokers.rabbitmq import names
from holdfast.brokers.rabbitmq.answer import Answer
from holdfast.brokers.rabbitmq.control import Control
from holdfast.brokers.rabbitmq.failures import NotFound, Refused, closed
from holdfast.brokers.rabbitmq.outlet import Outlet, Parcel, await_batch
from holdfast.errors import BrokerDown, ConfigurationError, UnknownTopic
from holdfast.extras import driver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.brokers.rabbitmq.link import Link
    from holdfast.brokers.rabbitmq.settings import RabbitSettings
    from holdfast.clock import Clock

_log = logging.getLogger("holdfast.brokers.rabbitmq")
_EMPTY_SECONDS = 1.0  # after which a log that has shown nothing is taken for empty
_LOCK_PAUSE = 0.03
_MOST_LANES = 4096


class Topology:
    """Finds and makes topics and groups over one link."""

    def __init__(self, link: Link, settings: RabbitSettings, clock: Clock) -> None:
        self.control = Control(link, clock, settings.patience)
        self._link = link
        self._settings = settings
        self._clock = clock
        self._known: dict[str, int] = {}
        self._delays: set[int] = set()

    def lanes(self, topic: str) -> int:
        """Return how many lanes *topic* has, creating it where that is allowed."""
        if (known := self._known.get(topic)) is not None:
            return known
        lanes = self._recorded(topic)
        if lanes is None:
            if not self._settings.auto_create:
                raise UnknownTopic(topic, "create it with broker.create_topic(), or auto_create")
            return self.create(topic, self._settings.partitions)
        self._known[topic] = lanes
        return lanes

    def create(self, topic: str, partitions: int) -> int:
        """Make sure that *topic* exists, and return how many lanes it has.

        Who creates it at the same time with another number loses: the log's first record
        counts for everybody. The exchange comes last, so a topic that has one is complete.
        """
        if not 1 <= partitions <= _MOST_LANES:
            raise ConfigurationError(f"partitions={partitions}: use 1 to {_MOST_LANES}")
        lanes = self._recorded(topic)
        if lanes is None:
            # One at a time: RabbitMQ 3.10 drops the connection of whoever publishes to a
            # stream that somebody else's declaration has not finished.
            with self._alone(names.creation(topic)):
                lanes = self._record(topic, partitions)
                self.control.call("exchange_declare", exchange=topic, durable=True)
        self._known[topic] = lanes
        return lanes

    def create_group(self, topic: str, group: str) -> int:
        """Make sure that *group* gets what is published from now on; return the lanes."""
        lanes = self.lanes(topic)
        for partition in range(lanes):
            queue = names.lane_queue(topic, group, partition)
            self.control.call("queue_declare", queue=queue, durable=True, arguments=names.LANE)
            self.control.call("queue_bind", queue=queue, exchange=topic, routing_key=str(partition))
        return lanes

    def waiting(self, queue: str) -> int:
        """Return how many messages of *queue* are with no member; a missing one has none."""
        try:
            found = self.control.call("queue_declare", queue=queue, passive=True)
        except NotFound:
            return 0
        return int(found.message_count)

    def delay(self, seconds: float) -> str:
        """Return the name of an exchange where a message waits for *seconds* or a little more.

        A time to live on each message would not do: a queue looks at its head only, so a
        short delay would wait behind a long one. So there is a queue per delay, and since
        delays with jitter have any value, they are rounded up by at most a quarter: four
        queues per doubling serve all groups, a hundred of them all delays up to 28 days.
        The routing key names the lane's queue, where the message goes when its time is up.
        """
        step = delay_step(seconds)
        name = names.delay(step)
        if step not in self._delays:
            arguments = names.delay_arguments(step)
            self.control.call(
                "exchange_declare", exchange=name, exchange_type="fanout", durable=True
            )
            self.control.call("queue_declare", queue=name, durable=True, arguments=arguments)
            self.control.call("queue_bind", queue=name, exchange=name)
            self._delays.add(step)
        return name

    def forget_delays(self) -> None:
        """Declare the delays anew when they are needed next."""
        self._delays.clear()

    def _recorded(self, topic: str) -> int | None:
        """Return the lanes of *topic*; None if it does not exist, or not completely."""
        log = names.record(topic)
        try:
            self.control.call("exchange_declare", exchange=topic, passive=True)
            self.control.call("queue_declare", queue=log, passive=True)
        except NotFound:
            return None
        lanes = self._first_record(log, self._settings.patience)
        if lanes is None:
            raise BrokerDown(f"RabbitMQ does not show the first record of {log!r}")
        return lanes

    def _record(self, topic: str, partitions: int) -> int:
        """Make the log, with *partitions* as its first record unless it has one."""
        log = names.record(topic)
        lanes = None
        try:
            self.control.call("queue_declare", queue=log, passive=True)
        except NotFound:
            self.control.call("queue_declare", queue=log, durable=True, arguments=names.RECORD)
        else:  # somebody began and died
            lanes = self._first_record(log, _EMPTY_SECONDS)
        if lanes is None:
            self._propose(log, partitions)
            lanes = self._first_record(log, self._settings.patience)
        if lanes is None:
            raise BrokerDown(f"RabbitMQ does not give back what it stored in {log!r}")
        return lanes

    @contextmanager
    def _alone(self, lock: str) -> Iterator[None]:
        """Hold *lock*, a queue that belongs to one connection and ends with it."""
        until = self._clock.monotonic() + self._settings.patience
        while True:
            try:
                self.control.call("queue_declare", queue=lock, exclusive=True, auto_delete=True)
                break
            except Refused as error:
                if self._clock.monotonic() > until:
                    raise BrokerDown(f"another process holds {lock!r} for too long") from error
                self._clock.sleep(_LOCK_PAUSE)
        yield
        self.control.call("queue_delete", queue=lock)

    def _propose(self, log: str, partitions: int) -> None:
        pika = driver("pika", extra="rabbitmq")
        properties = pika.BasicProperties(
            content_type="application/json", delivery_mode=2, message_id=log
        )
        body = json.dumps({"partitions": partitions}).encode()
        outlet = Outlet(self._link)
        batch = outlet.send([Parcel("", log, properties, body, log)])
        await_batch(batch, self._link, self._clock, self._settings.patience)
        outlet.close()
        if batch.refused:
            raise BrokerDown(f"RabbitMQ did not store the number of lanes in {log!r}")

    def _first_record(self, log: str, patience: float) -> int | None:
        answer = Answer()
        self._link.post(partial(self._read, log, answer), partial(_give_up, answer))
        try:
            body = answer.get(self._clock, patience, f"the first record of {log!r}")
        except BrokerDown:
            if answer.done or not self._link.is_alive:
                raise
            answer.fail(BrokerDown("nobody waits any more"))
            return None
        try:
            lanes = json.loads(body)["partitions"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{log!r} begins with {body[:60]!r}, which is no record of lanes: "
                "another application uses this name; choose another topic"
            ) from error
        return int(lanes)

    def _read(self, log: str, answer: Answer) -> None:
        """Consume from the start of *log* until its first record is there."""

        def opened(channel: Any) -> None:
            channel.basic_qos(prefetch_count=1)
            channel.basic_consume(log, received, arguments={"x-stream-offset": "first"})

        def received(channel: Any, _: Any, __: Any, body: bytes) -> None:
            answer.give(body)
            if channel.is_open:
                channel.close()

        channel = self._link.connection.channel(on_open_callback=opened)
        channel.add_on_close_callback(lambda _, reason: answer.fail(closed(reason)))


def delay_step(seconds: float) -> int:
    """Return *seconds* in milliseconds, rounded up to three significant bits."""
    milliseconds = max(math.ceil(seconds * 1000) + 1, 4)  # a clock tick may already be half over
    scale = max(milliseconds.bit_length() - 3, 0)
    return -(-milliseconds >> scale) << scale


def _give_up(answer: Answer) -> None:
    answer.fail(BrokerDown("the connection to RabbitMQ is closed"))
