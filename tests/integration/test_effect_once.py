"""Each message's effect happens once, whatever is duplicated, poisoned, killed or rebalanced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast import new_id
from tests.effects.run import Run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import Kafka, Nats, Postgres, RabbitMQ, Redis

# kafka-python reads its own schemas in a way that Python 3.11 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning")

SHORT = {"count": 600, "kills": 1}
LONG = {"count": 10_000, "kills": 12, "keys": 300, "deadline": 1500.0}
SIZES = [
    pytest.param(SHORT, id="short"),
    pytest.param(LONG, id="long", marks=pytest.mark.chaos),
]


def check(run: Run) -> None:
    """Every good message once and in order, every poison dead once, nothing else."""
    verdict = run.go()
    assert verdict.clean, verdict
    assert verdict.handled_by > 1, "no second process took part"


def database(postgres: Postgres, broker: str, size: dict[str, Any]) -> str:
    """Return the address of a fresh database for one run."""
    return postgres.database(f"effects_{broker}_{size['count']}")


@pytest.mark.parametrize("size", SIZES)
def test_effects_happen_once_on_sqlite(
    postgres: Postgres, tmp_path: Path, size: dict[str, Any]
) -> None:
    """The embedded broker, with PostgreSQL as the database."""
    url = f"sqlite:///{tmp_path}/b.db?session=2"
    check(Run(broker=url, database=database(postgres, "sqlite", size), **size))


@pytest.mark.parametrize("size", SIZES)
def test_effects_happen_once_on_kafka(
    postgres: Postgres, kafka: Kafka, size: dict[str, Any]
) -> None:
    """Kafka, whose commits are cumulative."""
    native = {"session_timeout_ms": 2500, "heartbeat_interval_ms": 250}
    url = f"kafka://{kafka.address}"
    check(Run(broker=url, native=native, database=database(postgres, "kafka", size), **size))


@pytest.mark.parametrize("size", SIZES)
def test_effects_happen_once_on_rabbitmq(
    postgres: Postgres, rabbitmq: RabbitMQ, size: dict[str, Any]
) -> None:
    """RabbitMQ, which counts deliveries in its own way."""
    check(Run(broker=rabbitmq.url, database=database(postgres, "rabbitmq", size), **size))


@pytest.mark.parametrize("size", SIZES)
def test_effects_happen_once_on_redis(
    postgres: Postgres, redis: Redis, size: dict[str, Any]
) -> None:
    """Redis Streams, where lanes are owned by leases."""
    native = {"session": 2.0, "prefix": new_id()}
    check(Run(broker=redis.url, native=native, database=database(postgres, "redis", size), **size))


@pytest.mark.parametrize("size", SIZES)
def test_effects_happen_once_on_nats(postgres: Postgres, nats: Nats, size: dict[str, Any]) -> None:
    """NATS JetStream, whose deliveries have a lease."""
    native = {"session": 2.0, "lease": 2.0}
    check(Run(broker=nats.url, native=native, database=database(postgres, "nats", size), **size))


@pytest.mark.parametrize("size", SIZES)
def test_effects_of_batches_happen_once_on_sqlite(
    postgres: Postgres, tmp_path: Path, size: dict[str, Any]
) -> None:
    """Many messages share a transaction; a killed process leaves all of one or nothing."""
    url = f"sqlite:///{tmp_path}/b.db?session=2"
    check(Run(broker=url, database=database(postgres, "batches", size), batch=40, **size))


@pytest.mark.chaos
@pytest.mark.parametrize("size", [pytest.param(SHORT, id="short"), pytest.param(LONG, id="long")])
def test_effects_of_batches_happen_once_on_kafka(
    postgres: Postgres, kafka: Kafka, size: dict[str, Any]
) -> None:
    """The same where commits are cumulative."""
    native = {"session_timeout_ms": 2500, "heartbeat_interval_ms": 250}
    url = f"kafka://{kafka.address}"
    name = database(postgres, "kafka_batches", size)
    check(Run(broker=url, native=native, database=name, batch=40, **size))


def test_the_checker_sees_a_dedup_row_in_a_transaction_of_its_own(
    postgres: Postgres, tmp_path: Path
) -> None:
    """What failed once counts as done: exactly the flaky messages have no effect."""
    run = Run(broker=f"sqlite:///{tmp_path}/b.db?session=2", count=100, kills=0,
              database=postgres.database("effects_apart"), sabotage="dedup_apart")  # fmt: skip
    verdict = run.go()
    assert not verdict.clean
    flaky = [order["number"] for order in run._orders() if order["kind"] == "flaky"]
    assert verdict.missing == flaky


def test_the_checker_sees_an_acknowledgement_before_the_commit(
    postgres: Postgres, tmp_path: Path
) -> None:
    """What a killed process had in hand is gone."""
    run = Run(broker=f"sqlite:///{tmp_path}/b.db?session=2", count=1000, kills=1,
              database=postgres.database("acked"), sabotage="acknowledge_first")  # fmt: skip
    verdict = run.go()
    assert not verdict.clean
    assert 0 < len(verdict.missing) < run.count


@pytest.mark.parametrize("batch", [0, 20])
def test_a_message_that_kills_its_process_is_quarantined_and_the_group_goes_on(
    postgres: Postgres, tmp_path: Path, batch: int
) -> None:
    """Every start of it is fatal; after three on its own it is a dead letter, and all else runs.

    Those that shared its batch ran alone once, too, and are cleared by that.
    """
    url = f"sqlite:///{tmp_path}/b.db?session=1"
    name = postgres.database(f"effects_deadly_{batch}")
    run = Run(broker=url, database=name, count=40, kills=0, deadly=1, batch=batch)
    verdict = run.go()
    assert verdict.clean, verdict
