"""What README promises of an outage, with nothing set: no attempt burned, the intake paused."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import pytest
from sqlalchemy.orm import Session  # noqa: TC002 - a handler asks for it by annotation

from holdfast.circuit import Breaker, CircuitPolicy, LastCalls, circuit
from holdfast.consumer import Consumer
from holdfast.dlq import dead_letter
from holdfast.idempotency import idempotent
from holdfast.retry import Backoff, retry
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOO_MANY = 200
"""Runs of eight messages that only a consumer without a pause makes of an outage."""


@pytest.fixture(params=["sqlite", "postgresql"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """Return a bench on the embedded broker."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        url = request.getfixturevalue("postgres").database("default_outages")
    made = Bench(tmp_path, url)
    yield made
    made.close()


def paused(consumer: Consumer) -> float:
    """Return how many partitions are paused, as the metric tells."""
    return consumer.metrics.registry.get_sample_value("holdfast_consumer_paused") or 0.0


def test_the_intake_pauses_while_a_circuit_on_an_inner_function_is_open(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """As docs/circuit.md shows it: the handler waits with the dependency, and the log is quiet."""
    policy = CircuitPolicy(minimum_calls=2, window=LastCalls(4), open_seconds=1, permits=1)
    up, calls, runs, handled = threading.Event(), [0], [0], set[str]()

    @retry(Backoff(first=0.01, ceiling=0.01, attempts=2))
    @circuit("payment-gateway", breaker=Breaker("payment-gateway", policy))
    def charge() -> None:
        calls[0] += 1
        if not up.is_set():
            raise ConnectionRefusedError("nobody listens")

    consumer = Consumer(bench.broker, group=bench.group, database=bench.engine)

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.2, ceiling=30, attempts=5))
    @idempotent
    def handle(order: str, session: Session) -> None:
        runs[0] += 1
        charge()
        handled.add(order)

    for n in range(8):
        bench.publish(f"o{n}", key=f"k{n}")
    with caplog.at_level(logging.INFO, "holdfast"), running(consumer):
        until(lambda: paused(consumer) > 0 or runs[0] > TOO_MANY, "a pause")
        assert paused(consumer) > 0, f"{runs[0]} runs, {len(caplog.records)} log lines, no pause"
        probed = calls[0]
        until(lambda: calls[0] >= probed + 2 or runs[0] > TOO_MANY, "two more probes")
        up.set()
        until(lambda: len(handled) == 8, "everything handled")
        until(lambda: paused(consumer) == 0, "the intake on again")
    assert runs[0] <= TOO_MANY
    assert len(caplog.records) <= 40, [record.message for record in caplog.records]
    assert consumer.tally.dead_lettered == 0


def test_a_hundred_messages_that_cannot_connect_become_no_dead_letters(bench: Bench) -> None:
    """No circuit is named anywhere, and the decorators are those of README."""
    up = threading.Event()
    consumer = Consumer(bench.broker, group=bench.group, database=bench.engine)

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.2, ceiling=30, attempts=5))
    @idempotent
    def handle(order: str, session: Session) -> None:
        if not up.is_set():
            raise ConnectionError("nobody listens")
        bench.note(session, order)

    for n in range(100):
        bench.publish(f"o{n}", key=f"k{n}")
    tally = consumer.tally
    with running(consumer):
        until(lambda: paused(consumer) > 0 or tally.dead_lettered == 100, "a pause")
        assert tally.dead_lettered == 0, "the outage was held against the messages"
        up.set()
        until(lambda: tally.handled + tally.dead_lettered == 100, "everything handled")
    assert tally.dead_lettered == 0
    assert not bench.letters
    assert sorted(bench.effects) == sorted(f"o{n}" for n in range(100))
