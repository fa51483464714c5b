"""The NATS adapter against nats-py at its best, on the same server and with the same bytes."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import nats

from figures import Figure, Goal, compare, rate
from holdfast import Message
from holdfast.brokers.nats import NatsBroker
from holdfast.brokers.nats.jetstream import headers_of
from holdfast.urls import BrokerUrl
from tests.servers import Nats

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

COUNT, BATCH, LANES, SAMPLES = 20_000, 500, 4, 200
_names = itertools.count()


def figures() -> Iterator[Figure]:
    """Measure publishing, consuming with settling, and the way of a single message."""
    with (
        Nats() as server,
        closing(NatsBroker(BrokerUrl.parse(server.url), partitions=LANES)) as broker,
    ):
        yield compare(
            "nats: publish",
            ours=lambda: _publish(broker),
            peer=lambda: _run(server, _publish_raw),
            unit="messages/s",
            goal=Goal(at_least=0.8),
            detail="300 B, batches of 500, 4 lanes, against publish_async with ready headers",
        )
        yield compare(
            "nats: consume and accept",
            ours=lambda: _consume(broker),
            peer=lambda: _run(server, _consume_raw),
            unit="messages/s",
            goal=Goal(at_least=0.8),
            detail="300 B, batches of 500, 4 lanes, against a push callback, headers read, ack",
        )
        yield compare(
            "nats: publish to waiting consumer",
            ours=lambda: _latency(broker),
            peer=lambda: _run(server, _latency_raw),
            unit="ms",
            goal=Goal(),
            detail=f"median of {SAMPLES}, against publish to a waiting fetch",
        )


def _run(server: Nats, work: Callable[[JetStreamContext], Coroutine[Any, Any, float]]) -> float:
    async def run() -> float:
        client = await nats.connect(server.url)
        try:
            return await work(client.jetstream())
        finally:
            await client.close()

    return asyncio.run(run())


def _messages(topic: str, count: int = COUNT) -> list[Message]:
    return [
        Message.new(topic, b"x" * 300, key=f"key-{n % 997}", type="OrderPlaced", source="shop")
        for n in range(count)
    ]


def _publish(broker: NatsBroker) -> float:
    messages = _messages(f"topic-{next(_names)}")
    with closing(broker.sink()) as sink:
        sink.publish(messages[:1])
        return rate(
            lambda: [sink.publish(messages[i : i + BATCH]) for i in range(0, COUNT, BATCH)], COUNT
        )


async def _publish_raw(stream: JetStreamContext, name: str = "") -> float:
    name = name or f"raw-{next(_names)}"
    subjects = [f"{name}.{lane}" for lane in range(LANES)]
    await stream.add_stream(name=name, subjects=subjects)
    ready = [(m.payload or b"", headers_of(m)) for m in _messages(name)]
    started = time.perf_counter()
    for first in range(0, COUNT, BATCH):
        futures = [
            await stream.publish_async(subjects[n % LANES], payload, headers=headers)
            for n, (payload, headers) in enumerate(ready[first : first + BATCH])
        ]
        for ack in await asyncio.gather(*futures):
            assert ack.seq > 0
    return COUNT / (time.perf_counter() - started)


def _consume(broker: NatsBroker) -> float:
    topic = f"topic-{next(_names)}"
    with closing(broker.sink()) as sink:
        messages = _messages(topic)
        for first in range(0, COUNT, BATCH):
            sink.publish(messages[first : first + BATCH])
    with closing(broker.source([topic], group="g")) as source:
        while not source.assignment():
            source.poll(0, 0.1)

        def drain() -> None:
            count = 0
            while count < COUNT:
                batch = source.poll(BATCH, 5.0)
                assert all(d.key and d.body and d.headers for d in batch)
                source.accept(batch)
                count += len(batch)
            source.flush()

        return rate(drain, COUNT)


async def _consume_raw(stream: JetStreamContext) -> float:
    """Consume by a callback, which is more than twice as fast as the library's `fetch`."""
    name = f"raw-{next(_names)}"
    await _publish_raw(stream, name)
    count = 0
    done = asyncio.Event()

    async def handle(message: Msg) -> None:
        nonlocal count
        headers = message.headers or {}
        assert headers["ce-partitionkey"]
        assert message.data
        assert [(key, value.encode()) for key, value in headers.items()]
        await message.ack()
        count += 1
        if count == COUNT:
            done.set()

    started = time.perf_counter()
    await stream.subscribe("", stream=name, durable="g", cb=handle, manual_ack=True)
    await done.wait()
    await stream._nc.flush()
    return COUNT / (time.perf_counter() - started)


def _latency(broker: NatsBroker) -> float:
    topic = f"topic-{next(_names)}"
    came: list[float] = []
    arrived = threading.Semaphore(0)
    with closing(broker.sink()) as sink, closing(broker.source([topic], group="g")) as source:
        while not source.assignment():
            source.poll(0, 0.1)

        def listen() -> None:
            while len(came) < SAMPLES:
                for delivery in source.poll(10, 1.0):
                    came.append(time.perf_counter())
                    source.accept([delivery])
                    arrived.release()

        listener = threading.Thread(target=listen)
        listener.start()
        waits = []
        for message in _messages(topic, SAMPLES):
            started = time.perf_counter()
            sink.publish([message])
            arrived.acquire()
            waits.append(came[-1] - started)
        listener.join()
    return statistics.median(waits) * 1000


async def _latency_raw(stream: JetStreamContext) -> float:
    name = f"raw-{next(_names)}"
    await stream.add_stream(name=name, subjects=[f"{name}.0"])
    pull = await stream.pull_subscribe("", durable="g", stream=name)
    waits = []
    for message in _messages(name, SAMPLES):
        waiting = asyncio.create_task(pull.fetch(1, timeout=5))
        await asyncio.sleep(0.002)
        started = time.perf_counter()
        await stream.publish(f"{name}.0", message.payload or b"", headers=headers_of(message))
        [came] = await waiting
        waits.append(time.perf_counter() - started)
        await came.ack()
    return statistics.median(waits) * 1000
