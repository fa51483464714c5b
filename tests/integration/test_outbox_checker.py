"""Nothing is lost and order holds per key, whatever is killed or restarted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.checker.run import Run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.servers import MariaDB, Postgres


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
    assert verdict.events > 50


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
    assert verdict.events > 100


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
    assert verdict.events > 100


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
