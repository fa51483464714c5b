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
from holdfast.outbox.cdc import Cdc
from holdfast.outbox.cdc.events import change_event
from holdfast.testing import wait_until
from holdfast.urls import BrokerUrl
from tests.servers.debezium import Debezium, change_events, outbox_router
from tests.wal.shop import Recorder

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


KINDS = {
    "id": ("number PRIMARY KEY", "{id}"), "flag": ("bool", "true"),
    "i8": ("bigint", "9007199254740993"), "n": ("numeric(10,3)", "1.500"),
    "f8": ("float8", "0.1"), "f4": ("real", "'Infinity'"), "b": ("bytea", "'\\xff00'"),
    "j": ("json", "'{{\"a\": 1}}'"), "jb": ("jsonb", "'{{\"b\": 1, \"a\": null}}'"),
    "d": ("date", "'2026-02-03'"), "ts": ("timestamp", "'2026-02-03 04:05:06.7'"),
    "ts0": ("timestamp(0)", "'2026-02-03 04:05:06'"),
    "ts3": ("timestamp(3)", "'1969-12-31 23:59:59.789'"),
    "tz": ("timestamptz", "'2026-02-03 04:05:06+02'"),
    "tz0": ("timestamptz(0)", "'2026-02-03 04:05:06+02'"),
    "tz3": ("timestamptz(3)", "'infinity'"), "t": ("time", "'24:00:00'"),
    "t3": ("time(3)", "'01:02:03.5'"), "ttz": ("timetz", "'01:02:03.5+05:30'"),
    "iv": ("interval", "'1 year -2 days 04:05:06.7'"), "c": ("char(4)", "'ab'"),
    "u": ("uuid", "'01234567-89ab-cdef-0123-456789abcdef'"), "e": ("mood", "'happy'"),
    "ip": ("inet", "'10.0.0.1/8'"), "bits": ("bit(3)", "B'101'"), "bit1": ("bit(1)", "B'1'"),
    "x": ("xml", "'<a/>'"), "r": ("int4range", "'[1,5)'"),
    "texts": ("text[]", "'{{x,NULL,\"a,b\"}}'"), "moods": ("mood[]", "'{{happy}}'"),
    "times": ("timestamp[]", "'{{2026-02-03 04:05:06}}'"), "docs": ("jsonb[]", "'{{1}}'"),
    "nothing": ("text", "NULL"),
}  # fmt: skip
"""Columns with a value each; the key is a domain over a number."""


def test_our_capture_writes_the_values_that_a_real_debezium_writes(
    postgres: Postgres, kafka: Kafka, broker: KafkaBroker
) -> None:
    """Of nearly every type, by snapshot and stream: the same keys and rows of the same JSON."""
    engine = database(postgres, "typed")
    columns = ", ".join(f"{name} {kind}" for name, (kind, _) in KINDS.items())
    row = ", ".join(value for _, value in KINDS.values())
    with engine.begin() as db:
        db.exec_driver_sql("CREATE TYPE mood AS ENUM ('sad', 'happy')")
        db.exec_driver_sql("CREATE DOMAIN number AS int CHECK (VALUE > 0)")
        db.exec_driver_sql(f"CREATE TABLE item ({columns})")
        db.exec_driver_sql("ALTER TABLE item REPLICA IDENTITY FULL")
        db.exec_driver_sql(f"INSERT INTO item VALUES ({row.format(id=1)})")  # noqa: S608
    sink = Recorder()

    def capture() -> None:
        Relay(Cdc(engine, sink, tables=["public.item"], server="ours")).run_once()

    capture()
    settings = change_events("public.item", prefix="typed", schemas=False)
    modes = {"decimal.handling.mode": "string", "interval.handling.mode": "string"}
    with Debezium(kafka, postgres, "typed", {**settings, **modes}) as debezium:
        stream_runs(engine, debezium.slot)
        with engine.begin() as db:
            db.exec_driver_sql(f"INSERT INTO item VALUES ({row.format(id=2)})")  # noqa: S608
            db.exec_driver_sql("UPDATE item SET flag = NULL WHERE id = 1")
            db.exec_driver_sql("DELETE FROM item WHERE id = 2")
        theirs = consumed(broker, "typed.public.item", 5)
        debezium.stop()
    capture()
    engine.dispose()
    assert _changes(sink.messages) == _changes(theirs)


def _changes(messages: list[Message]) -> dict[tuple[str | None, str | None], Any]:
    """Return the rows by operation and key."""
    return {
        (change.op, message.key_text): (change.before, change.after)
        for message, change in ((message, change_event(message)) for message in messages)
    }
