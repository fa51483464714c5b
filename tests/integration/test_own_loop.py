"""A loop of the user's own: what `Consumer.handler(topic).handle()` does beside the plan."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session  # noqa: TC002 - handlers ask for it by annotation

from holdfast import CircuitOpen, Message, PoisonMessage
from holdfast.circuit import Breaker, CircuitPolicy, LastCalls, circuit
from holdfast.consumer import HandlerEnding
from holdfast.dlq import dead_letter
from holdfast.idempotency import AttemptLog, idempotent
from holdfast.idempotency.schema import owner
from holdfast.message import current_message
from holdfast.retry import Backoff, retry
from tests.consuming import Bench, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.consumer import Consumer
    from tests.servers import Postgres

LIMIT = CircuitPolicy(minimum_calls=2, window=LastCalls(4), failure_rate=0.5, open_seconds=600)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a database in files."""
    bench = Bench(tmp_path, f"sqlite:///{tmp_path}/db.db")
    yield bench
    bench.close()


@pytest.fixture
def on_postgres(tmp_path: Path, postgres: Postgres) -> Iterator[Bench]:
    """Offer a database that can be looked at while a handler runs."""
    bench = Bench(tmp_path, postgres.database("own_loop"))
    yield bench
    bench.close()


def counted(consumer: Consumer, outcome: str) -> float | None:
    """Return what the metrics say."""
    return consumer.metrics.registry.get_sample_value(
        "holdfast_consumer_messages_total", {"topic": "orders", "outcome": outcome}
    )


def test_what_ends_is_counted_and_correlated(bench: Bench) -> None:
    """As a consumer that runs counts it."""
    consumer, seen = bench.consumer(), []

    @consumer.on("orders")
    @dead_letter()
    @idempotent
    def handle(order: str, session: Session) -> None:
        message = current_message()
        assert message is not None
        seen.append(message.correlation_id)
        if order == "bad":
            raise PoisonMessage("bad for ever")
        if order == "fails":
            raise ConnectionError("down")

    loop = consumer.handler("orders")
    good = Message.new("orders", b"x").with_(correlation_id=None)
    loop.handle(good)
    loop.handle(good)
    loop.handle(Message.new("orders", b"bad"))
    assert seen[0] == good.id
    tally = consumer.tally
    assert (tally.handled, tally.duplicates, tally.dead_lettered) == (1, 1, 1)
    assert tally.uncorrelated == 2
    assert counted(consumer, "handled") == counted(consumer, "dead_lettered") == 1


def test_too_many_dead_letters_stop_it(bench: Bench) -> None:
    """What comes then is given back unhandled, and nobody is blamed."""
    consumer = bench.consumer(dead_letter_limit=LIMIT)

    @consumer.on("orders")
    @dead_letter()
    @idempotent
    def handle(order: str, session: Session) -> None:
        raise PoisonMessage("bad for ever")

    loop = consumer.handler("orders")
    ends = [loop.handle(Message.new("orders", b"x")) for _ in range(4)]
    assert [end.ending for end in ends[:2]] == [HandlerEnding.DEAD_LETTERED] * 2
    assert [end.ending for end in ends[2:]] == [HandlerEnding.RELEASED] * 2
    assert isinstance(ends[-1].error, CircuitOpen)
    assert len(bench.letters) == 2


@pytest.mark.parametrize("is_async", [False, True])
def test_a_start_is_marked_while_the_handler_runs(on_postgres: Bench, is_async: bool) -> None:
    """So that the death of the process is seen; the mark is gone after, however it ended."""
    consumer, marks = on_postgres.consumer(takeover_seconds=0.3), []

    def look(order: str) -> None:
        marks.append([mark.owner for mark in on_postgres.marks])
        if order == "fails":
            raise ConnectionError("down")

    async def look_async(order: str) -> None:
        look(order)

    consumer.on("orders")(look_async if is_async else look)
    loop = consumer.handler("orders")
    for body in (b"x", b"fails"):
        message = Message.new("orders", body)
        asyncio.run(loop.handle_async(message)) if is_async else loop.handle(message)
        assert on_postgres.marks == []
    assert marks == [[consumer.owner]] * 2


def test_a_handler_that_takes_its_time_is_not_taken_for_a_crash(on_postgres: Bench) -> None:
    """Signs of life go on while it runs, and each lasts for `takeover_seconds` from then on."""
    consumer = on_postgres.consumer(takeover_seconds=3.0)

    def alive_until() -> float:
        with on_postgres.engine.connect() as db:
            mine = select(owner.c.until).where(owner.c.owner == consumer.owner)
            return db.execute(mine).scalar_one()

    def slow(order: str) -> None:
        first = alive_until()
        until(lambda: alive_until() > first + 2.0, "two signs of life")
        assert AttemptLog(on_postgres.engine).orphans() == []

    consumer.on("orders")(slow)
    assert consumer.handler("orders").handle(Message.new("orders", b"x")).acknowledge


def test_a_message_that_ended_its_process_too_often_is_dead_lettered(bench: Bench) -> None:
    """Deaths of processes in which nothing else ran; the handler does not see it again."""
    consumer = bench.consumer(crash_limit=2)
    message = Message.new("orders", b"x", key="k")

    @consumer.on("orders")
    @dead_letter()
    def handle(order: str) -> None:
        raise AssertionError("it must not run")

    ledger = AttemptLog(bench.engine, owner_seconds=0.01)
    name = consumer._routes["orders"].consumer
    for process in ("first", "second"):
        ledger.starting(name, [message.id], process)
        until(lambda: bool(ledger.orphans()), "the process is dead")
    outcome = consumer.handler("orders").handle(message)
    assert outcome.ending is HandlerEnding.DEAD_LETTERED
    assert type(outcome.error).__name__ == "ProcessKilled"
    assert "ProcessKilled" in bench.letters[0].error_type
    assert consumer.tally.crashed == 1


def test_an_outage_after_many_good_calls_gives_messages_back(bench: Bench) -> None:
    """No circuit is open yet, and nobody is dead for that; the one at fault is found out."""
    consumer, down = bench.consumer(), []
    breaker = Breaker("gateway of the loop", CircuitPolicy())

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.001, ceiling=0.002, attempts=2))
    @circuit(breaker.name, breaker=breaker)
    def handle(order: str, session: Session) -> None:
        if down or order == "bad":
            raise ConnectionError("no gateway")

    def ending(payload: bytes) -> HandlerEnding:
        return consumer.handler("orders").handle(Message.new("orders", payload)).ending

    assert {ending(b"good") for _ in range(20)} == {HandlerEnding.HANDLED}
    down.append("the gateway")
    assert {ending(b"late") for _ in range(5)} == {HandlerEnding.RELEASED}
    down.clear()
    bad = Message.new("orders", b"bad")
    endings = []
    for _ in range(3):
        endings.append(consumer.handler("orders").handle(bad).ending)
        assert ending(b"good") is HandlerEnding.HANDLED
    assert endings == [HandlerEnding.RELEASED, HandlerEnding.RELEASED, HandlerEnding.DEAD_LETTERED]
    assert bench.attempts == []
