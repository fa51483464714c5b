"""Captured tables through a real Kafka, with the default driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.brokers import connect
from holdfast.outbox import Relay
from holdfast.outbox.cdc import Cdc
from holdfast.outbox.cdc.events import ChangeEvent, change_event
from holdfast.testing import wait_until
from tests.cdc.source import Source, captured

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Kafka, Postgres


@pytest.fixture
def source(postgres: Postgres, request: pytest.FixtureRequest) -> Iterator[Source]:
    """Yield a database of its own; its slot goes with it."""
    with captured(postgres, request.node.name) as source:
        yield source


def test_a_table_arrives_in_kafka_and_is_read_back(source: Source, kafka: Kafka) -> None:
    """Snapshot, insert, update, delete and tombstone, in the order of each key."""
    broker = connect(f"kafka://{kafka.address}")
    topic = f"{source.server}.public.item"
    broker.create_topic(topic)
    sink = broker.sink()

    def capture() -> int:
        return Relay(Cdc(source.engine, sink, tables=["item"], server=source.server)).run_once()

    source.run("INSERT INTO item VALUES (1, 'a'), (2, 'b')")
    assert capture() == 2
    source.run("INSERT INTO item VALUES (3, 'c')", "UPDATE item SET name = 'x' WHERE id = 1")
    source.run("DELETE FROM item WHERE id = 1")
    assert capture() == 4
    reader = broker.source([topic], group=source.server)
    got: list[ChangeEvent] = []

    def all_read() -> bool:
        deliveries = reader.poll(10, 0.2)
        got.extend(change_event(delivery.message) for delivery in deliveries)
        reader.accept(deliveries)
        return len(got) == 6

    wait_until(all_read, what="all events are read")
    for end in (reader, sink, broker):
        end.close()
    by_key = {n: [event for event in got if event.key == {"id": n}] for n in (1, 2, 3)}
    assert [(e.op, e.after and e.after["name"]) for e in by_key[1]] == [
        ("r", "a"), ("u", "x"), ("d", None), (None, None),
    ]  # fmt: skip
    assert by_key[1][3].is_tombstone
    assert [(e.op, e.after and e.after["name"]) for e in by_key[2]] == [("r", "b")]
    assert [(e.op, e.after and e.after["name"]) for e in by_key[3]] == [("c", "c")]
