"""What Kafka would refuse is parked before anything of its key is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from holdfast.brokers import connect
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.ids import new_id
from holdfast.outbox import Event, LeaseEngine, Outbox, Relay, create_tables
from holdfast.outbox.parked import EventEdit, ParkedKeys, ParkedSelection
from holdfast.outbox.schema import parked
from holdfast.testing import wait_until
from tests.kafka.members import SCHEMES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from tests.servers import Kafka, Postgres

LIMIT = 20_000


@pytest.fixture
def topic(kafka: Kafka) -> str:
    """Return a new topic whose own limit is below the client's."""
    from confluent_kafka.admin import AdminClient, NewTopic

    name = f"narrow-{new_id()}"
    new = NewTopic(name, num_partitions=1, config={"max.message.bytes": str(LIMIT)})
    admin = AdminClient({"bootstrap.servers": kafka.address})  # it must outlive its answer
    admin.create_topics([new])[name].result()
    return name


@pytest.fixture(params=SCHEMES)
def broker(request: pytest.FixtureRequest, kafka: Kafka) -> Iterator[Any]:
    """Return a connection by either driver."""
    broker: Any = connect(kafka.url.replace("kafka", request.param, 1))
    yield broker
    broker.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Return a database with the outbox tables."""
    engine = open_database(f"sqlite:///{tmp_path}/shop.db")
    create_tables(engine)
    yield engine
    engine.dispose()


def stage(engine: Engine, topic: str, *events: tuple[str, str]) -> None:
    """Commit events of key and text."""
    with engine.begin() as db:
        Outbox().add_all(db, [Event(body=body, topic=topic, key=key) for key, body in events])


def stored(broker: Any, topic: str, count: int) -> list[str]:
    """Return the first *count* texts in the topic, in order."""
    source, found = broker.source([topic], group=f"g-{new_id()}"), []

    def is_all() -> bool:
        batch = source.poll(100, 0.2)
        found.extend((delivery.body or b"").decode() for delivery in batch)
        source.accept(batch)
        return len(found) >= count

    wait_until(is_all, deadline=60, what=f"{count} messages")
    source.close()
    return found


LARGE = "x" * (LIMIT + 1)


def test_nothing_overtakes_what_is_too_large_for_its_topic(
    broker: Any, topic: str, engine: Engine
) -> None:
    """Later events of the key wait in order; released in a form that fits, all go in order."""
    stage(engine, topic, ("k", "1"), ("k", LARGE), ("k", "3"), ("other", "o"), ("k", "4"))
    sink = broker.sink()
    assert Relay(LeaseEngine(engine, sink)).run_once() == 2
    with engine.connect() as db:
        rows = db.execute(select(parked.c.seq, parked.c.error).order_by(parked.c.seq)).all()
    assert [error is not None for _, error in rows] == [True, False, False]
    assert f"exceeds the limit of {LIMIT}" in rows[0].error
    assert "are stored already" not in rows[0].error
    assert sorted(stored(broker, topic, 2)) == ["1", "o"]
    keys, why = ParkedKeys(engine), Operator(actor="ops", reason="smaller now")
    keys.edit(str(rows[0].seq), EventEdit(payload=b"2"), why)
    keys.release(ParkedSelection(topic=topic), why)
    assert Relay(LeaseEngine(engine, sink)).run_once() == 3
    sink.close()
    assert [text for text in stored(broker, topic, 5) if text != "o"] == ["1", "2", "3", "4"]


def test_the_wal_engine_foresees_it_as_well(kafka: Kafka, topic: str, postgres: Postgres) -> None:
    """Of the key only what came before the refused event is stored."""
    from holdfast.outbox.wal import WalEngine

    engine = open_database(postgres.database("foresight_wal"))
    create_tables(engine)
    stage(engine, topic, ("k", "1"), ("k", LARGE), ("k", "3"), ("other", "o"))
    broker: Any = connect(kafka.url.replace("kafka", "kafka+confluent", 1))
    sink = broker.sink()
    assert Relay(WalEngine(engine, sink)).run_once() == 2
    sink.close()
    assert sorted(stored(broker, topic, 2)) == ["1", "o"]
    broker.close()
    engine.dispose()


@pytest.mark.parametrize(
    ("scheme", "setting"),
    [("kafka", {"compression_type": "gzip"}), ("kafka+confluent", {"compression.type": "gzip"})],
)
def test_what_compression_makes_fit_is_not_refused(
    scheme: str, setting: dict[str, str], kafka: Kafka, topic: str, engine: Engine
) -> None:
    """The topic's limit is for what travels."""
    stage(engine, topic, ("k", LARGE), ("k", "2"))
    broker: Any = connect(kafka.url.replace("kafka", scheme, 1))
    sink = broker.sink(**setting)
    assert Relay(LeaseEngine(engine, sink)).run_once() == 2
    sink.close()
    assert stored(broker, topic, 2) == [LARGE, "2"]
    broker.close()
