"""The RabbitMQ adapter against pika at its best, on the same server, queues and headers."""

from __future__ import annotations

import itertools
import time
import zlib
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pika

from figures import Figure, Goal, compare, rate
from holdfast import Message
from holdfast.brokers.rabbitmq import RabbitBroker, names
from holdfast.cloudevents import to_wire
from holdfast.urls import BrokerUrl
from tests.servers import RabbitMQ

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COUNT, BATCH, LANES, PREFETCH, ACKS = 20_000, 500, 4, 256, 100
_numbers = itertools.count()


def figures() -> Iterator[Figure]:
    """Measure publishing with confirms, and consuming with acknowledgements."""
    with RabbitMQ() as server:
        broker = RabbitBroker(BrokerUrl.parse(server.url), partitions=LANES, maturity=0)
        with closing(broker):
            yield compare(
                "rabbitmq: publish",
                ours=lambda: _publish(broker),
                peer=lambda: _publish_raw(broker, server.url),
                unit="messages/s",
                goal=Goal(at_least=0.8),
                detail="300 B, batches of 500, quorum queues, against pika's SelectConnection "
                "with confirms pipelined, 1,000 at a time under way",
            )
            yield compare(
                "rabbitmq: consume and accept",
                ours=lambda: _consume(broker),
                peer=lambda: _consume_raw(broker, server.url),
                unit="messages/s",
                goal=Goal(at_least=0.8),
                detail="300 B, 4 lanes, prefetch 256, against pika's SelectConnection with an "
                "acknowledgement per 100, key and headers read",
            )


def _messages(topic: str) -> list[Message]:
    return [
        Message.new(topic, b"x" * 300, key=f"key-{n % 997}", type="OrderPlaced", source="shop")
        for n in range(COUNT)
    ]


def _topic(broker: RabbitBroker) -> str:
    topic = f"bench-{next(_numbers)}"
    broker.create_group(topic, "g")
    return topic


def _forget(broker: RabbitBroker, topic: str) -> None:
    """Delete the queues, so that later rounds find the server as earlier ones did."""
    parameters = pika.URLParameters(broker.name.replace("***", "guest"))
    with closing(pika.BlockingConnection(parameters)) as connection:
        channel = connection.channel()
        for lane in range(LANES):
            channel.queue_delete(names.lane_queue(topic, "g", lane))


def _publish(broker: RabbitBroker) -> float:
    topic = _topic(broker)
    messages = _messages(topic)
    with closing(broker.sink()) as sink:
        sink.publish(messages[:1])
        result = rate(
            lambda: [sink.publish(messages[i : i + BATCH]) for i in range(0, COUNT, BATCH)], COUNT
        )
    _forget(broker, topic)
    return result


class Raw:
    """A connection of pika's own loop, which runs *work* on a channel until it says stop."""

    def __init__(self, url: str, work: Callable[[Any, Callable[[], None]], None]) -> None:
        self._work = work
        self._connection = pika.SelectConnection(
            pika.URLParameters(url),
            on_open_callback=lambda connection: connection.channel(on_open_callback=self._opened),
            on_close_callback=lambda connection, _: connection.ioloop.stop(),
        )

    def _opened(self, channel: Any) -> None:
        self._work(channel, self._connection.close)

    def run(self) -> None:
        """Return when the work has stopped."""
        self._connection.ioloop.start()
        self._connection.ioloop.close()


def _publish_raw(broker: RabbitBroker, url: str) -> float:
    topic = _topic(broker)
    messages = [
        (str(zlib.crc32(m.key or b"") % LANES), m.id, _headers(m), m.payload)
        for m in _messages(topic)
    ]

    def work(channel: Any, stop: Callable[[], None]) -> None:
        left = enumerate(messages, start=1)
        under_way: set[int] = set()
        lowest = 1

        def fill() -> None:
            room = 2 * BATCH - len(under_way)
            if room < BATCH:
                return
            for tag, (key, id_, headers, body) in itertools.islice(left, room):
                properties = pika.BasicProperties(
                    headers=headers, message_id=id_, timestamp=1_700_000_000, delivery_mode=2
                )
                under_way.add(tag)
                channel.basic_publish(topic, key, body, properties, mandatory=True)
            if not under_way:
                stop()

        def confirmed(frame: Any) -> None:
            nonlocal lowest
            tag = frame.method.delivery_tag
            if frame.method.multiple:
                under_way.difference_update(range(lowest, tag + 1))
                lowest = tag + 1
            else:
                under_way.discard(tag)
            fill()

        channel.confirm_delivery(confirmed, callback=lambda _: fill())

    raw = Raw(url, work)
    result = rate(raw.run, COUNT)
    _forget(broker, topic)
    return result


def _headers(message: Message) -> dict[str, str]:
    pairs = to_wire(message, prefix="cloudEvents:")
    return {name: (value or b"").decode() for name, value in pairs}


def _consume(broker: RabbitBroker) -> float:
    """Return the rate from the first batch on: joining a group takes its time once."""
    topic = _filled(broker)
    with closing(broker.source([topic], group="g", prefetch=PREFETCH)) as source:
        while not (batch := source.poll(BATCH, 1.0)):
            pass
        source.accept(batch)
        count = COUNT - len(batch)

        def work() -> None:
            left = count
            while left:
                batch = source.poll(BATCH, 1.0)
                left -= len(batch)
                source.accept(batch)

        result = rate(work, count)
    _forget(broker, topic)
    return result


def _filled(broker: RabbitBroker) -> str:
    topic = _topic(broker)
    messages = _messages(topic)
    with closing(broker.sink()) as sink:
        for first in range(0, COUNT, BATCH):
            sink.publish(messages[first : first + BATCH])
    return topic


def _consume_raw(broker: RabbitBroker, url: str) -> float:
    """Return the rate from the first message on."""
    topic = _filled(broker)
    left = COUNT
    stamps: list[float] = []

    def work(channel: Any, stop: Callable[[], None]) -> None:
        channel.basic_qos(prefetch_count=PREFETCH)
        handled: list[Any] = []

        def received(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            nonlocal left
            if left == COUNT:
                stamps.append(time.perf_counter())
            headers = properties.headers
            key = headers["cloudEvents:partitionkey"].encode()
            pairs = [(name, value.encode()) for name, value in headers.items()]
            handled.append((key, body, pairs, method.delivery_tag))
            left -= 1
            if len(handled) >= ACKS or not left:
                channel.basic_ack(method.delivery_tag, multiple=True)
                handled.clear()
            if not left:
                stamps.append(time.perf_counter())
                stop()

        for lane in range(LANES):
            channel.basic_consume(names.lane_queue(topic, "g", lane), received)

    Raw(url, work).run()
    _forget(broker, topic)
    return COUNT / (stamps[1] - stamps[0])
