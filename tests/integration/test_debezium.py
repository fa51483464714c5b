"""A real Debezium in place of our relay, and our consumer on what a real Debezium captured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from holdfast import Message
from holdfast.brokers.kafka import KafkaBroker
from holdfast.message import handling
from holdfast.outbox import Event, LeaseEngine, Outbox, Relay, create_tables
from holdfast.outbox.changes import change_event
from holdfast.testing import wait_until
from holdfast.urls import BrokerUrl
from tests.servers.debezium import Debezium, change_events, outbox_router

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

    from tests.servers import Kafka, Postgres


@pytest.fixture(scope="module")
def broker(kafka: Kafka) -> Iterator[KafkaBroker]:
    """Yield Kafka through our adapter."""
    broker = KafkaBroker(BrokerUrl.parse(f"kafka+confluent://{kafka.address}"))
    yield broker
    broker.close()


def database(postgres: Postgres, name: str) -> Engine:
    """Return an engine for a new database."""
    return create_engine(postgres.database(name))


def consumed(broker: KafkaBroker, topic: str, count: int) -> list[Message]:
    """Return the first *count* messages of *topic*, as a consumer of ours gets them."""
    source = broker.source([topic], group=f"reader-of-{topic}")
    messages: list[Message] = []

    def enough() -> bool:
        batch = source.poll(100, 0.2)
        messages.extend(delivery.message for delivery in batch)
        source.accept(batch)
        return len(messages) >= count

    wait_until(enough, deadline=60, what=f"{count} messages in {topic}")
    source.close()
    return messages


def stream_runs(engine: Engine, slot: str) -> None:
    """Return once Debezium reads its slot."""

    def active() -> bool:
        query = text("SELECT active FROM pg_replication_slots WHERE slot_name = :s")
        with engine.connect() as db:
            return bool(db.execute(query, {"s": slot}).scalar())

    wait_until(active, deadline=60, what="Debezium streams")


def events(prefix: str) -> list[Event]:
    """Return events with everything that a message can carry."""
    return [
        Event(
            body={"n": n, "text": "grüße"},
            topic=f"{prefix}-orders",
            key=f"k{n % 2}",
            type="OrderPlaced",
            headers=[("tenant", "acme"), ("raw", b"\xff\x00"), ("none", None), ("tenant", "two")],
        )
        for n in range(4)
    ] + [Event(body=b"\x00\xff", topic=f"{prefix}-orders", key="k0", type="Binary")]


def stage(engine: Engine, prefix: str) -> list[Message]:
    """Commit the events in the course of handling another message."""
    cause = Message.new("requests", b"")
    with Session(engine) as session, session.begin(), handling(cause):
        return Outbox(source="shop").add_all(session, events(prefix))


def comparable(message: Message) -> dict[str, Any]:
    """Return all that a consumer can see of *message* but its id, its time and its topic."""
    return {
        "type": message.type,
        "source": message.source,
        "key": message.key,
        "payload": message.payload,
        "headers": message.headers.pairs,
        "content_type": message.content_type,
        "caused": message.causation_id is not None,
        "correlated": message.correlation_id == message.causation_id,
    }


def test_our_consumer_takes_what_debezium_published_as_if_our_relay_had(
    postgres: Postgres, kafka: Kafka, broker: KafkaBroker
) -> None:
    """Identity, key, order, correlation, headers and payload are the same by either way."""
    engine = database(postgres, "routed")
    create_tables(engine)
    for topic in ("debezium-orders", "ours-orders"):
        broker.create_topic(topic, partitions=2)
    with Debezium(kafka, postgres, "routed", outbox_router()) as debezium:
        stream_runs(engine, debezium.slot)
        staged = stage(engine, "debezium")
        theirs = consumed(broker, "debezium-orders", 5)
        debezium.stop()
    with engine.begin() as db:  # Debezium leaves the rows: they are its user's to delete
        db.execute(text("DELETE FROM holdfast_outbox"))
    ours_staged = stage(engine, "ours")
    sink = broker.sink()
    Relay(LeaseEngine(engine, sink)).run_once()
    sink.close()
    ours = consumed(broker, "ours-orders", 5)
    engine.dispose()
    for sent, got in ((staged, theirs), (ours_staged, ours)):
        by_id = {message.id: message for message in got}
        assert set(by_id) == {message.id for message in sent}
        for message in sent:
            found = by_id[message.id]
            assert (found.time, found.correlation_id) == (message.time, message.correlation_id)
            assert comparable(found) == comparable(message)
        for key in (b"k0", b"k1"):
            order = [message.id for message in sent if message.key == key]
            assert [message.id for message in got if message.key == key] == order


@pytest.mark.parametrize("schemas", [False, True])
def test_the_helper_reads_the_changes_that_a_real_debezium_captured(
    postgres: Postgres, kafka: Kafka, broker: KafkaBroker, schemas: bool
) -> None:
    """Snapshot, insert, update, delete and tombstone, with and without schemas in the JSON."""
    name = f"plain_{int(schemas)}"
    engine = database(postgres, name)
    with engine.begin() as db:
        db.execute(text("CREATE TABLE item (id int PRIMARY KEY, name text, price numeric(8,2))"))
        db.execute(text("ALTER TABLE item REPLICA IDENTITY FULL"))
        db.execute(text("INSERT INTO item VALUES (1, 'old', 1.50)"))
    settings = change_events("public.item", prefix=name, schemas=schemas)
    settings = {**settings, "decimal.handling.mode": "string"}
    with Debezium(kafka, postgres, name, settings) as debezium:
        stream_runs(engine, debezium.slot)
        with engine.begin() as db:
            db.execute(text("INSERT INTO item VALUES (2, 'new', NULL)"))
            db.execute(text("UPDATE item SET name = 'newer' WHERE id = 2"))
            db.execute(text("DELETE FROM item WHERE id = 2"))
        got = consumed(broker, f"{name}.public.item", 5)
        debezium.stop()
    engine.dispose()
    changes = [change_event(message) for message in got]
    assert [change.op for change in changes if change.key == {"id": 1}] == ["r"]
    mine = [change for change in changes if change.key == {"id": 2}]
    assert [change.op for change in mine] == ["c", "u", "d", None]
    assert mine[0].after == {"id": 2, "name": "new", "price": None}
    assert mine[1].before is not None
    assert (mine[1].before["name"], mine[1].after["name"]) == ("new", "newer")  # type: ignore[index]
    assert (mine[2].after, mine[3].is_tombstone) == (None, True)
    assert (mine[0].source.schema, mine[0].source.table) == ("public", "item")  # type: ignore[union-attr]
    assert json.dumps(changes[0].after) == '{"id": 1, "name": "old", "price": "1.50"}'
