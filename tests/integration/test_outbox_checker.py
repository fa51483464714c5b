"""Nothing is lost and order holds per key, whatever is killed or restarted.

And nothing stands still: a minute after the last fault the outbox is empty, no event is
parked, and every shard has an owner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.outbox.rows import shard_of
from holdfast.outbox.wal.cleanup import FIRST_ROWS
from tests.checker.run import Run
from tests.checker.writer import KEYS, TOPIC
from tests.servers import Kafka, MariaDB, Postgres, Redis

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.servers.fixtures import PrivateServer
    from tests.servers.server import Server

LONG = 120
"""Seconds of a long run, beside what the servers take to come back."""


@pytest.fixture
def survives(record_property: Callable[[str, object], None]) -> Callable[[Run], None]:
    """Offer to make a run, note its verdict in the report, and see every promise kept."""

    def check(run: Run) -> None:
        verdict = run.go()
        record_property("verdict", str(verdict))
        assert verdict.clean, str(verdict)
        assert verdict.events > 20
        assert verdict.restarts == len(run.faults), str(verdict)
        if not run.hands_over:
            assert verdict.kills > verdict.restarts, str(
                verdict
            )  # one before and after each, at least
        # A relay risks no more than a few events and as many as it has finished.
        lives = verdict.kills + run.relays * (verdict.restarts + 1)
        assert verdict.duplicates <= verdict.events + FIRST_ROWS * lives, str(verdict)

    return check


def test_sqlite_outbox_survives_killed_relays(
    tmp_path: Path, survives: Callable[[Run], None]
) -> None:
    """Two relays on one file, killed every half second: 0 lost, 0 out of order."""
    survives(Run(database=f"sqlite:///{tmp_path}/s.db", broker=f"sqlite:///{tmp_path}/b.db"))


@pytest.mark.parametrize(
    ("engine", "kind"), [("lease", "postgres"), ("lease", "mariadb"), ("wal", "postgres")]
)
def test_an_outbox_on_a_server_survives_killed_relays(
    engine: str,
    kind: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    survives: Callable[[Run], None],
) -> None:
    """Long and rolled-back transactions, three relays, kills: 0 lost, 0 out of order."""
    server: Postgres | MariaDB = request.getfixturevalue(kind)
    survives(
        Run(
            database=server.database(f"checker_{engine}"),
            broker=f"sqlite:///{tmp_path}/b.db",
            engine=engine,
            relays=3,
            writers=4,
        )
    )


def test_wal_relays_that_die_in_every_third_batch_lose_nothing(
    postgres: Postgres, tmp_path: Path, survives: Callable[[Run], None]
) -> None:
    """What they had not published comes again."""
    survives(_doomed(postgres, tmp_path, "doomed"))


def test_the_checker_sees_a_relay_that_deletes_before_it_has_published(
    postgres: Postgres, tmp_path: Path
) -> None:
    """The same run loses events when rows are deleted ahead of publishing."""
    verdict = _doomed(postgres, tmp_path, "ahead").go()
    assert verdict.lost, str(verdict)


def _doomed(postgres: Postgres, tmp_path: Path, sabotage: str) -> Run:
    return Run(
        database=postgres.database(f"checker_{sabotage}"),
        broker=f"sqlite:///{tmp_path}/b.db",
        engine="wal",
        relays=1,
        sabotage=sabotage,
    )


ENGINES = [
    ("lease", Postgres),
    ("wal", Postgres),
    ("lease", MariaDB),
]
"""Each engine on each server that it works on; SQLite is a file."""


@pytest.mark.parametrize(("engine", "database"), ENGINES)
def test_database_and_broker_may_be_killed_too(
    engine: str,
    database: type[Server],
    private_server: PrivateServer,
    survives: Callable[[Run], None],
) -> None:
    """Both die and come back in the middle: 0 lost, 0 out of order."""
    shop, broker = private_server(database), private_server(Redis)
    survives(
        Run(
            database=shop.url,
            broker=broker.url,
            engine=engine,
            seconds=4,
            faults=[lambda: _crash(broker), lambda: _crash(shop)],
        )
    )


def test_database_and_kafka_may_be_killed_too(
    private_server: PrivateServer, survives: Callable[[Run], None]
) -> None:
    """The same with Kafka, whose client has batches of its own under way."""
    shop, broker = private_server(Postgres), private_server(Kafka)
    faults = [lambda: _crash(broker), lambda: _crash(shop)]
    survives(Run(database=shop.url, broker=_impatient(broker), seconds=4, faults=faults))


@pytest.mark.chaos
@pytest.mark.parametrize("broker", [Redis, Kafka])
@pytest.mark.parametrize(("engine", "database"), ENGINES)
def test_a_long_run_of_kills_and_restarts(
    engine: str,
    database: type[Server],
    broker: type[Server],
    private_server: PrivateServer,
    survives: Callable[[Run], None],
) -> None:
    """Two minutes, every server killed six times: 0 lost, 0 out of order."""
    shop, to = private_server(database), private_server(broker)
    survives(
        Run(
            database=shop.url,
            broker=_impatient(to) if isinstance(to, Kafka) else to.url,
            engine=engine,
            seconds=LONG,
            relays=3,
            faults=[lambda: _crash(to), lambda: _crash(shop)] * 6,
        )
    )


@pytest.mark.chaos
@pytest.mark.parametrize("broker", [Redis, Kafka])
def test_a_long_run_of_kills_and_restarts_on_sqlite(
    broker: type[Server],
    tmp_path: Path,
    private_server: PrivateServer,
    survives: Callable[[Run], None],
) -> None:
    """The database is a file; the broker is killed six times."""
    to = private_server(broker)
    survives(
        Run(
            database=f"sqlite:///{tmp_path}/s.db",
            broker=_impatient(to) if isinstance(to, Kafka) else to.url,
            seconds=LONG,
            relays=3,
            faults=[lambda: _crash(to)] * 6,
        )
    )


def _impatient(kafka: Kafka) -> str:
    """Return a URL by which an outage shows within seconds."""
    return f"kafka+confluent://{kafka.address}?timeout=5&publish_within=3"


def _crash(server: Server) -> None:
    server.kill()
    server.start()


def test_the_checker_sees_a_relay_that_reads_by_a_cursor(
    postgres: Postgres, tmp_path: Path
) -> None:
    """Reading by `seq > last` loses what commits late, and the checker says so."""
    run = Run(
        database=postgres.database("checker_cursor"),
        broker=f"sqlite:///{tmp_path}/b.db",
        relays=1,
        writers=4,
        sabotage="cursor",
    )
    verdict = run.go()
    assert verdict.lost, str(verdict)


def test_the_checker_sees_a_relay_that_leaves_a_shard_out(tmp_path: Path) -> None:
    """Nothing is wrong with what is published; the rest stands, and the checker says where."""
    run = Run(
        database=f"sqlite:///{tmp_path}/s.db",
        broker=f"sqlite:///{tmp_path}/b.db",
        sabotage="skipping",
    )
    verdict = run.go()
    assert not verdict.clean, str(verdict)
    assert any("holdfast_outbox:" in str(place) for place in verdict.left), str(verdict)
    shard = shard_of(TOPIC, KEYS[0], "")
    assert verdict.where[0].startswith(f"{KEYS[0]} 1: in holdfast_outbox, shard {shard} of relay ")


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mariadb", "wal"])
def test_a_relay_that_wakes_up_after_its_lease_breaks_nothing(
    kind: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    survives: Callable[[Run], None],
) -> None:
    """It is about to park what its heir publishes, and is refused: 0 lost, 0 out of order."""
    survives(_handed_over(kind, tmp_path, request, "zombie"))


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mariadb"])
def test_the_checker_sees_a_relay_that_acts_without_the_epoch_guard(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The same run breaks the order of a key when nobody asks whose the shards are."""
    verdict = _handed_over(kind, tmp_path, request, "unguarded").go()
    assert ("key-0", 1) in verdict.disorder, str(verdict)


def _handed_over(kind: str, tmp_path: Path, request: pytest.FixtureRequest, sabotage: str) -> Run:
    url = f"sqlite:///{tmp_path}/s.db"
    if kind != "sqlite":
        server = request.getfixturevalue("postgres" if kind == "wal" else kind)
        url = server.database(f"checker_{sabotage}_{kind}")
    return Run(
        database=url,
        broker=f"sqlite:///{tmp_path}/b.db",
        engine="wal" if kind == "wal" else "lease",
        sabotage=sabotage,
        seconds=1,
        writers=2,
    )
