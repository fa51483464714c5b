"""Transactional ids per shard: Kafka itself turns away a relay that was replaced."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import func, select

from holdfast import ConfigurationError, Unsupported
from holdfast.brokers import connect
from holdfast.db.engine import open_database
from holdfast.ids import new_id
from holdfast.outbox import (
    Event,
    LeaseEngine,
    LeaseTerms,
    Outbox,
    Relay,
    ShardSinks,
    create_tables,
)
from holdfast.outbox.relay.leases import ShardLeaseLost
from holdfast.outbox.schema import outbox, parked, shard
from holdfast.outbox.schema import relay as relays
from holdfast.outbox.wal import WalEngine, drop_slot
from holdfast.testing import wait_until
from tests.checker.run import Run
from tests.kafka.members import SCHEMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from tests.servers import Kafka, Postgres

TERMS = LeaseTerms(seconds=60)
UNCOMMITTED = {
    "kafka": {"isolation_level": "read_uncommitted"},
    "kafka+confluent": {"isolation.level": "read_uncommitted"},
}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Return a database with the outbox tables."""
    engine = open_database(f"sqlite:///{tmp_path}/shop.db")
    create_tables(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def topic() -> str:
    """Return the name of a topic of this test alone."""
    return f"t-{new_id()}"


@pytest.fixture(params=SCHEMES)
def broker(request: pytest.FixtureRequest, kafka: Kafka, topic: str) -> Iterator[Any]:
    """Return a connection by either driver, with *topic* there."""
    broker: Any = connect(kafka.url.replace("kafka", request.param, 1))
    broker.create_topic(topic, partitions=2)
    yield broker
    broker.close()


def stage(engine: Engine, topic: str, count: int, keys: int = 3, size: int = 0) -> None:
    """Commit *count* events of some keys."""
    events = [
        Event(body={"n": n, "fill": "x" * size}, topic=topic, key=f"k{n % keys}")
        for n in range(count)
    ]
    with engine.begin() as db:
        Outbox().add_all(db, events)


def rows(engine: Engine, table: Any = outbox) -> int:
    """Return how many rows *table* has."""
    with engine.connect() as db:
        return db.execute(select(func.count()).select_from(table)).scalar_one()


def stored(broker: Any, topic: str, least: int, **native: Any) -> list[str]:
    """Return the ids of the messages that a new group sees, once there are *least*."""
    source = broker.source([topic], group=f"g-{new_id()}", **native)
    ids: list[str] = []
    quiet = 0

    def is_all() -> bool:
        nonlocal quiet
        batch = source.poll(1000, 0.2)
        ids.extend(delivery.message.id for delivery in batch)
        source.accept(batch)
        settled = bool(source.assignment()) and len(ids) >= least
        quiet = quiet + 1 if settled and not batch else 0
        return quiet > 2

    wait_until(is_all, deadline=60, what=f"{least} messages")
    source.close()
    return ids


class Gate:
    """A broker whose sinks wait before they commit."""

    def __init__(self, broker: Any) -> None:
        self.name, self.caps = broker.name, broker.caps
        self.entered, self.open = threading.Event(), threading.Event()
        self._broker = broker

    def sink(self, **native: Any) -> Any:
        sink = self._broker.sink(**native)
        commit = sink._producer.commit

        def late(until: float) -> None:
            self.entered.set()
            assert self.open.wait(60)
            commit(until)

        sink._producer.commit = late
        return sink


def expire(engine: Engine) -> None:
    """Let the time of every lease be over, though its owner does not know."""
    with engine.begin() as db:
        db.execute(shard.update().values(until=0))
        db.execute(relays.update().values(until=0))


def test_a_replaced_relay_cannot_commit(broker: Any, topic: str, engine: Engine) -> None:
    """Its open transaction ends with the takeover: consumers never see what it had sent."""
    stage(engine, topic, 6)
    gate = Gate(broker)
    frozen = ShardSinks(gate, topic)  # type: ignore[arg-type]
    zombie = LeaseEngine(engine, frozen, terms=TERMS)
    outcome: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                zombie.step()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test looks at it
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert gate.entered.wait(60)
    expire(engine)
    heirs = ShardSinks(broker, topic)
    assert Relay(LeaseEngine(engine, heirs, terms=TERMS)).run_once() == 6
    gate.open.set()
    thread.join(60)
    assert isinstance(outcome[0], ShardLeaseLost), outcome
    zombie.close()
    frozen.close()
    heirs.close()
    seen = stored(broker, topic, 6)
    assert (len(seen), len(set(seen))) == (6, 6)
    scheme = broker.name.partition(":")[0]
    assert len(stored(broker, topic, 7, **UNCOMMITTED[scheme])) > 6  # it had sent them


DYING = """
import os, sys
from holdfast.brokers import connect
from holdfast.db.engine import open_database
from holdfast.outbox import LeaseEngine, LeaseTerms, Relay, ShardSinks

class Dying:
    def __init__(self, broker):
        self.name, self.caps, self._broker = broker.name, broker.caps, broker
    def sink(self, **native):
        sink = self._broker.sink(**native)
        sink._producer.commit = lambda until: os.kill(os.getpid(), 9)
        return sink

database, broker, prefix = sys.argv[1:]
sinks = ShardSinks(Dying(connect(broker)), prefix)
Relay(LeaseEngine(open_database(database), sinks, terms=LeaseTerms(seconds=60))).run_once()
"""


def test_a_relay_killed_in_a_transaction_leaves_nothing_behind(
    broker: Any, topic: str, engine: Engine
) -> None:
    """Its heir takes the transaction back and publishes everything: each event is seen once."""
    stage(engine, topic, 6)
    command = [sys.executable, "-c", DYING, str(engine.url), broker.name, topic]
    assert subprocess.run(command, timeout=120, check=False).returncode == -9
    assert rows(engine) == 6
    expire(engine)
    heirs = ShardSinks(broker, topic)
    assert Relay(LeaseEngine(engine, heirs, terms=TERMS)).run_once() == 6
    heirs.close()
    seen = stored(broker, topic, 6)
    assert (len(seen), len(set(seen))) == (6, 6)


def test_an_opened_id_is_not_used_before_the_lease_is_confirmed(
    kafka: Kafka, topic: str, engine: Engine
) -> None:
    """A relay frozen before it opens its id would fence its heir; it asks again and stops."""
    broker: Any = connect(kafka.url)
    broker.create_topic(topic)
    stage(engine, topic, 2, keys=1)
    late = ShardSinks(_Late(broker, lambda: expire(engine)), topic)  # type: ignore[arg-type]
    moving = LeaseEngine(engine, late, terms=TERMS)
    with pytest.raises(ShardLeaseLost):
        Relay(moving).run_once()
    assert rows(engine) == 2
    late.close()
    heirs = ShardSinks(broker, topic)
    assert Relay(LeaseEngine(engine, heirs, terms=TERMS)).run_once() == 2
    heirs.close()
    assert len(stored(broker, topic, 2)) == 2
    broker.close()


class _Late:
    """A broker at which something happens while a sink is being opened."""

    def __init__(self, broker: Any, meanwhile: Callable[[], None]) -> None:
        self.name, self.caps = broker.name, broker.caps
        self._broker, self._meanwhile = broker, meanwhile

    def sink(self, **native: Any) -> Any:
        self._meanwhile()
        return self._broker.sink(**native)


def test_a_refused_event_parks_its_key_and_nothing_overtakes(
    kafka: Kafka, topic: str, engine: Engine
) -> None:
    """The transaction is rolled back as a whole, so later events of the key are not stored."""
    broker: Any = connect(kafka.url)
    broker.create_topic(topic)
    stage(engine, topic, 1, keys=1, size=5_000_000)
    stage(engine, topic, 5, keys=1)
    sinks = ShardSinks(broker, topic)
    moving = LeaseEngine(engine, sinks, terms=TERMS)
    assert Relay(moving).run_once() == 0
    assert (rows(engine), rows(engine, parked)) == (0, 6)
    sinks.close()
    broker.close()


@pytest.mark.parametrize("kind", ["lease", "wal"])
def test_both_engines_publish_in_transactions(
    kind: str, kafka: Kafka, topic: str, postgres: Postgres
) -> None:
    """Every event once, in the order of its key, from many shards at a time."""
    url = postgres.database(f"shard_sinks_{kind}")
    engine = open_database(url)
    create_tables(engine)
    stage(engine, topic, 300, keys=40)
    broker: Any = connect(kafka.url.replace("kafka", "kafka+confluent", 1))
    broker.create_topic(topic, partitions=2)
    sinks = ShardSinks(broker, topic)
    moving: Any = LeaseEngine(engine, sinks, terms=TERMS)
    if kind == "wal":
        moving = WalEngine(url, sinks, terms=TERMS)
    assert Relay(moving).run_once() == 300
    sinks.close()
    seen = stored(broker, topic, 300)
    assert (len(seen), len(set(seen))) == (300, 300)
    assert rows(engine) == 0
    if kind == "wal":
        drop_slot(engine)
    engine.dispose()
    broker.close()


@pytest.mark.chaos
def test_killed_relays_with_transactions_lose_nothing(
    kafka: Kafka, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The checker on Kafka, every shard in its own transactions: 0 lost, 0 out of order."""
    run = Run(
        database=f"sqlite:///{tmp_path}/s.db",
        broker=kafka.url.replace("kafka", "kafka+confluent", 1),
        sabotage="transactions",
        writers=2,
    )
    record_property("verdict", str(verdict := run.go()))
    assert verdict.clean, verdict
    assert verdict.events > 20


def test_a_broker_without_transactions_is_refused_at_the_start() -> None:
    """Not at the first event."""
    with pytest.raises(Unsupported, match="transactional id"):
        ShardSinks(connect("memory:"), "p")


@pytest.mark.parametrize("prefix", ["", "x" * 201])
def test_an_id_that_names_nothing_is_refused(prefix: str) -> None:
    """Empty or longer than Kafka keeps comfortably."""
    with pytest.raises(ConfigurationError, match="transactional id"):
        ShardSinks(connect("kafka://127.0.0.1:1"), prefix)
