"""Handlers of 2 ms: order per key against order per partition, on the same broker."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from figures import Figure, Goal, compare, rate
from holdfast import Message
from holdfast.brokers import connect
from holdfast.consumer import Consumer, Order

if TYPE_CHECKING:
    from collections.abc import Iterator

COUNT, KEYS = 2_000, 1_000
_DETAIL = f"memory broker, 1 partition, {COUNT} messages, {KEYS} keys, 32 threads, no database"


def figures() -> Iterator[Figure]:
    """Measure how much one partition gains by running its keys side by side."""
    yield compare(
        "consumer: order per key / per partition",
        ours=lambda: _handled(Order.KEY),
        peer=lambda: _handled(Order.LANE),
        unit="messages/s",
        goal=Goal(at_least=5.0),
        detail=_DETAIL,
    )


def _handled(order: Order) -> float:
    broker = connect("memory:", partitions=1)
    sink = broker.sink()
    sink.publish([Message.new("orders", b"{}", key=f"key-{n % KEYS}") for n in range(COUNT)])
    consumer = Consumer(
        broker, group="bench", order=order, workers=32, batch=500, backlog=COUNT,
        drain_seconds=5.0,
    )  # fmt: skip
    done = itertools.count(1)  # one step of it is atomic

    @consumer.on("orders")
    def handle(order: dict) -> None:  # type: ignore[type-arg]
        time.sleep(0.002)
        if next(done) == COUNT:
            consumer.stop()

    return rate(consumer.run, COUNT)
