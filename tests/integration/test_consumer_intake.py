"""What comes in that nobody expected: it becomes a dead letter, and the run goes on."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy.orm import Session  # noqa: TC002 - handlers ask for it by annotation

from holdfast.dlq import dead_letter
from holdfast.idempotency import idempotent
from holdfast.ports import Delivery, Lane
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast import Message
    from holdfast.consumer import Consumer
    from holdfast.ports import Source


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a database in files."""
    bench = Bench(tmp_path, f"sqlite:///{tmp_path}/db.db")
    yield bench
    bench.close()


def noting(bench: Bench) -> Consumer:
    """Return a consumer that notes what it handles, and when that was stored."""
    consumer = bench.consumer()

    @consumer.on("orders")
    @dead_letter()
    @idempotent
    def handle(order: str, session: Session, message: Message) -> None:
        bench.note(session, f"{order} {message.time.year}")

    return consumer


@pytest.mark.parametrize("stamp", [1.7e12, 1.7e15, -1e18, float("inf"), float("nan")])
def test_a_stamp_that_is_no_date_counts_as_unknown(stamp: float) -> None:
    """Brokers keep what a producer wrote; a message is readable whatever that is."""
    delivery = Delivery(lane=Lane("t", 0), position=1, key=None, body=b"x", timestamp=stamp)
    assert delivery.message.time.year == 1970


def test_a_stamp_in_microseconds_does_not_end_the_run(bench: Bench) -> None:
    """A foreign message, without a time of its own, is handled; so are those behind it."""
    bench.publish("foreign", key="k")
    with sqlite3.connect(bench.broker_file) as db:
        none = msgspec.msgpack.encode([])
        assert db.execute(
            "UPDATE hf_message SET stored = 1.7e12, headers = ?", (none,)
        ).rowcount  # what a CreateTime in microseconds is, taken for milliseconds
    db.close()
    bench.publish("next", key="k")
    with running(noting(bench)):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert bench.effects[0] == "foreign 1970"
    assert bench.effects[1].startswith("next 20")


class Careless:
    """A broker whose adapter hands out headers that are none with every message 'odd'."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def source(self, *topics: Any, **options: Any) -> Source:
        """Return a member that does so."""
        source: Any = self._broker.source(*topics, **options)
        poll = source.poll

        def careless(limit: int, timeout: float) -> list[Delivery]:
            found: list[Delivery] = poll(limit, timeout)
            for delivery in found:
                if delivery.body == b"odd":
                    delivery.headers = [("ce_id", 7), ("kept", b"yes")]  # type: ignore[list-item]
            return found

        source.poll = careless
        return source


@pytest.mark.parametrize("database", [True, False])
def test_a_message_that_cannot_be_read_is_a_dead_letter(tmp_path: Path, *, database: bool) -> None:
    """Its bytes are kept, its key is held, and every other key is handled."""
    bench = Bench(tmp_path, f"sqlite:///{tmp_path}/db.db", database=database)
    broker = bench.broker
    bench.broker = Careless(broker)  # type: ignore[assignment]
    bench.publish("odd", "behind", key="k")
    bench.publish("fine", key="other")
    seen: list[str] = []
    consumer = bench.consumer()

    @consumer.on("orders")
    @dead_letter()
    def handle(order: str) -> None:
        seen.append(order)

    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert consumer.tally.dead_lettered == 1
    if database:
        assert seen == ["fine"]
        ((letter,), (parked,)) = (bench.letters, bench.held)
        assert (letter.payload, letter.stage, parked.body) == (b"odd", "deserialize", b"behind")
    else:
        assert sorted(seen) == ["behind", "fine"]
    bench.broker = broker
    bench.close()
