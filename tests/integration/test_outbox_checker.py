"""Nothing is lost and order holds per key, whatever is killed or restarted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.checker.run import Run
from tests.servers import MariaDB, Postgres, Redis

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.servers.server import Server


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Callable[[object], None]:
    """Note a verdict in the test report."""
    return lambda verdict: record_property("verdict", str(verdict))


def test_sqlite_outbox_survives_killed_relays(
    tmp_path: Path, report: Callable[[object], None]
) -> None:
    """Two relays on one file, killed every half second: 0 lost, 0 out of order."""
    run = Run(database=f"sqlite:///{tmp_path}/s.db", broker=f"sqlite:///{tmp_path}/b.db")
    report(verdict := run.go())
    assert verdict.clean, verdict
    assert verdict.events > 20


def test_postgres_outbox_survives_killed_relays(
    postgres: Postgres, tmp_path: Path, report: Callable[[object], None]
) -> None:
    """Long and rolled-back transactions, three relays, kills: 0 lost, 0 out of order."""
    run = Run(
        database=postgres.database("checker_lease"),
        broker=f"sqlite:///{tmp_path}/b.db",
        relays=3,
        writers=4,
    )
    report(verdict := run.go())
    assert verdict.clean, verdict
    assert verdict.events > 20


def test_mariadb_outbox_survives_killed_relays(
    mariadb: MariaDB, tmp_path: Path, report: Callable[[object], None]
) -> None:
    """The same on MariaDB, where auto-increment has the same gaps."""
    run = Run(
        database=mariadb.database("checker_lease"),
        broker=f"sqlite:///{tmp_path}/b.db",
        relays=3,
        writers=4,
    )
    report(verdict := run.go())
    assert verdict.clean, verdict
    assert verdict.events > 20


def test_the_wal_engine_survives_killed_relays(
    postgres: Postgres, tmp_path: Path, report: Callable[[object], None]
) -> None:
    """The stream is confirmed only up to what was published: 0 lost, 0 out of order."""
    run = Run(
        database=postgres.database("checker_wal"),
        broker=f"sqlite:///{tmp_path}/b.db",
        engine="wal",
        writers=4,
    )
    report(verdict := run.go())
    assert verdict.clean, verdict
    assert verdict.events > 20


def test_events_without_a_row_survive_killed_relays(
    postgres: Postgres, tmp_path: Path, report: Callable[[object], None]
) -> None:
    """Only the log holds them, and every relay dies before its third batch is published."""
    report(verdict := _emitted(postgres, tmp_path, "doomed").go())
    assert verdict.clean, verdict
    assert verdict.events > 20


def test_the_checker_sees_a_relay_that_confirms_before_it_has_published(
    postgres: Postgres, tmp_path: Path
) -> None:
    """The same run loses events when the log is confirmed ahead of publishing."""
    verdict = _emitted(postgres, tmp_path, "ahead").go()
    assert verdict.lost, verdict


def _emitted(postgres: Postgres, tmp_path: Path, sabotage: str) -> Run:
    return Run(
        database=postgres.database(f"checker_{sabotage}"),
        broker=f"sqlite:///{tmp_path}/b.db",
        engine="emitted",
        relays=1,
        sabotage=sabotage,
    )


@pytest.mark.parametrize("engine", ["lease", "wal"])
def test_database_and_broker_may_be_killed_too(
    engine: str, private_server: Callable[..., Server], report: Callable[[object], None]
) -> None:
    """PostgreSQL and Redis die and come back in the middle: 0 lost, 0 out of order."""
    database, broker = private_server(Postgres), private_server(Redis)
    run = Run(
        database=database.url,
        broker=broker.url,
        engine=engine,
        seconds=4,
        faults=[lambda: _crash(broker), lambda: _crash(database)],
    )
    report(verdict := run.go())
    assert verdict.clean, verdict
    assert verdict.events > 20


@pytest.mark.chaos
@pytest.mark.parametrize("engine", ["lease", "wal"])
def test_a_long_run_of_kills_and_restarts_on_postgres(
    engine: str, private_server: Callable[..., Server], report: Callable[[object], None]
) -> None:
    """Five minutes, every server killed six times: 0 lost, 0 out of order."""
    database, broker = private_server(Postgres), private_server(Redis)
    run = Run(
        database=database.url,
        broker=broker.url,
        engine=engine,
        seconds=300,
        relays=3,
        faults=[lambda: _crash(broker), lambda: _crash(database)] * 6,
    )
    report(verdict := run.go())
    assert verdict.clean, verdict


@pytest.mark.chaos
def test_a_long_run_of_kills_and_restarts_on_mariadb(
    private_server: Callable[..., Server], report: Callable[[object], None]
) -> None:
    """The same on MariaDB."""
    database, broker = private_server(MariaDB), private_server(Redis)
    run = Run(
        database=database.url,
        broker=broker.url,
        seconds=300,
        relays=3,
        faults=[lambda: _crash(broker), lambda: _crash(database)] * 6,
    )
    report(verdict := run.go())
    assert verdict.clean, verdict


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
    assert verdict.lost, verdict


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mariadb"])
def test_a_relay_that_wakes_up_after_its_lease_breaks_nothing(
    kind: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    report: Callable[[object], None],
) -> None:
    """It is about to park what its heir publishes, and is refused: 0 lost, 0 out of order."""
    report(verdict := _handed_over(kind, tmp_path, request, "zombie").go())
    assert verdict.clean, verdict
    assert verdict.events > 20


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_the_checker_sees_a_relay_that_acts_without_the_epoch_guard(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The same run breaks the order of a key when nobody asks whose the shards are."""
    verdict = _handed_over(kind, tmp_path, request, "unguarded").go()
    assert ("key-0", 1) in verdict.disorder, verdict


def _handed_over(kind: str, tmp_path: Path, request: pytest.FixtureRequest, sabotage: str) -> Run:
    url = f"sqlite:///{tmp_path}/s.db"
    if kind != "sqlite":
        url = request.getfixturevalue(kind).database(f"checker_{sabotage}")
    broker = f"sqlite:///{tmp_path}/b.db"
    return Run(database=url, broker=broker, sabotage=sabotage, seconds=1, writers=2)
