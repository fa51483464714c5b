"""The Redis adapter against redis-py at its best, on the same server and with the same bytes."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec
import redis

from figures import Figure, Goal, compare, rate
from holdfast import Message
from holdfast.brokers.redis import RedisBroker
from holdfast.cloudevents import to_wire
from holdfast.urls import BrokerUrl
from tests.servers import Redis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COUNT, BATCH, LANES, SAMPLES = 20_000, 500, 4, 200
_names = itertools.count()
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[tuple[str, bytes | None]]).decode


def figures() -> Iterator[Figure]:
    """Measure publishing, consuming with settling, and the way of a single message."""
    with Redis() as server:
        broker = RedisBroker(BrokerUrl.parse(server.url), partitions=LANES)
        raw = redis.Redis(host=server.host, port=server.port, protocol=2)
        with closing(broker), closing(raw):
            yield compare(
                "redis: publish",
                ours=lambda: _publish(broker),
                peer=lambda: _publish_raw(raw),
                unit="messages/s",
                goal=Goal(at_least=0.8),
                detail="300 B, batches of 500, 4 lanes, against pipelined XADD in MULTI",
            )
            yield compare(
                "redis: consume and accept",
                ours=lambda: _consume(broker, raw),
                peer=lambda: _consume_raw(raw),
                unit="messages/s",
                goal=Goal(at_least=0.8),
                detail="300 B, batches of 500, 4 lanes, against XREADGROUP, headers read, XACK",
            )
            yield compare(
                "redis: publish to waiting consumer",
                ours=lambda: _latency(broker),
                peer=lambda: _latency_raw(raw),
                unit="ms",
                goal=Goal(),
                detail=f"median of {SAMPLES}, against XADD to a blocked XREADGROUP",
            )


def _messages(topic: str, count: int = COUNT) -> list[Message]:
    return [
        Message.new(topic, b"x" * 300, key=f"key-{n % 997}", type="OrderPlaced", source="shop")
        for n in range(count)
    ]


def _publish(broker: RedisBroker) -> float:
    messages = _messages(f"topic-{next(_names)}")
    with closing(broker.sink()) as sink:
        sink.publish(messages[:1])
        return rate(
            lambda: [sink.publish(messages[i : i + BATCH]) for i in range(0, COUNT, BATCH)], COUNT
        )


def _publish_raw(raw: redis.Redis) -> float:
    name = f"raw-{next(_names)}"
    messages = [(m.key, m.payload, to_wire(m)) for m in _messages(name)]
    return rate(lambda: _store_raw(raw, name, messages), COUNT)


def _store_raw(raw: redis.Redis, name: str, messages: list[Any]) -> None:
    for first in range(0, len(messages), BATCH):
        # As a transaction: with every write synced, the server then syncs once per batch.
        pipeline = raw.pipeline(transaction=True)
        for n, (key, body, headers) in enumerate(messages[first : first + BATCH]):
            fields = {"key": key, "body": body, "headers": _pack(headers)}
            pipeline.xadd(f"{name}-{n % LANES}", fields)
        pipeline.execute()


def _consume(broker: RedisBroker, raw: redis.Redis) -> float:
    topic = f"topic-{next(_names)}"
    with closing(broker.sink()) as sink, closing(broker.source([topic], group="g")) as source:
        source.poll(1, 0.0)
        sink.publish(_messages(topic))

        def work() -> None:
            left = COUNT
            while left:
                batch = source.poll(BATCH, 1.0)
                left -= len(batch)
                source.accept(batch)

        result = rate(work, COUNT)
    raw.flushall()
    return result


def _consume_raw(raw: redis.Redis) -> float:
    name = f"raw-{next(_names)}"
    _store_raw(raw, name, [(m.key, m.payload, to_wire(m)) for m in _messages(name)])
    streams = {f"{name}-{lane}": ">" for lane in range(LANES)}
    for stream in streams:
        raw.xgroup_create(stream, "g", "0")

    def work() -> None:
        left = COUNT
        while left:
            for stream, entries in raw.xreadgroup("g", "c", streams, count=BATCH // LANES):
                handled = [
                    (entry[b"key"], entry[b"body"], _unpack(entry[b"headers"]))
                    for _, entry in entries
                ]
                left -= len(handled)
                raw.xack(stream, "g", *(position for position, _ in entries))

    result = rate(work, COUNT)
    raw.flushall()
    return result


def _latency(broker: RedisBroker) -> float:
    topic = f"topic-{next(_names)}"
    with closing(broker.sink()) as sink, closing(broker.source([topic], group="g")) as source:
        source.poll(1, 0.0)
        messages = iter(_messages(topic, SAMPLES))

        def receive() -> None:
            while not (batch := source.poll(1, 1.0)):
                pass
            source.accept(batch)

        return _round_trips(lambda: sink.publish([next(messages)]), receive)


def _latency_raw(raw: redis.Redis) -> float:
    name = f"raw-{next(_names)}"
    raw.xgroup_create(name, "g", "0", mkstream=True)
    messages = iter(_messages(name, SAMPLES))

    def send() -> None:
        message = next(messages)
        headers = _pack(to_wire(message))
        fields = {"key": message.key, "body": message.payload, "headers": headers}
        raw.xadd(name, fields)

    def receive() -> None:
        while not (answer := raw.xreadgroup("g", "c", {name: ">"}, count=1, block=1000)):
            pass
        raw.xack(name, "g", answer[0][1][0][0])

    return _round_trips(send, receive)


def _round_trips(send: Callable[[], object], receive: Callable[[], object]) -> float:
    """Return the median milliseconds from before *send* to after *receive* in a thread."""
    ready, done = threading.Semaphore(0), threading.Semaphore(0)
    stamps: list[float] = []

    def listen() -> None:
        for _ in range(SAMPLES):
            ready.release()
            receive()
            stamps.append(time.perf_counter())
            done.release()

    thread = threading.Thread(target=listen)
    thread.start()
    waits = []
    for n in range(SAMPLES):
        ready.acquire()
        time.sleep(0.002)  # until it waits
        sent = time.perf_counter()
        send()
        done.acquire()
        waits.append(1000 * (stamps[n] - sent))
    thread.join()
    return statistics.median(waits)
