"""Circuits that processes share through the database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.circuit import Breaker, CircuitPolicy, Closed, Open, Sharing
from holdfast.clock import SYSTEM_CLOCK
from holdfast.consumer import create_tables
from holdfast.consumer.circuits import SqlSharedState
from holdfast.database import open_database
from holdfast.testing import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import MariaDB, Postgres


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, postgres: Postgres, mariadb: MariaDB
) -> str:
    """Offer a fresh database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/c.db"
    server = postgres if request.param == "postgres" else mariadb
    return server.database("shared_circuits")


def test_what_one_process_finds_out_pauses_the_other_and_one_probes(url: str) -> None:
    """Open spreads, the probe goes to one of them, closing spreads too."""
    engine = open_database(url)
    create_tables(engine)
    policy = CircuitPolicy(open_seconds=0.5, permits=1)
    one, two = Breaker("bank", policy), Breaker("bank", policy)
    states = [SqlSharedState(engine, clock=SYSTEM_CLOCK) for _ in range(2)]
    assert states[0].read("bank") is None
    assert not states[0].claim_probe("bank", 5)
    first, second = Sharing(one, states[0]), Sharing(two, states[1])
    states[0].say_open("bank", 0.5)
    second.refresh()
    assert isinstance(two.state, Open)
    wait_until(lambda: states[0].claim_probe("bank", 60), what="it is time to probe")
    assert not states[1].claim_probe("bank", 60)
    states[0].say_closed("bank")
    second.refresh()
    assert isinstance(two.state, Closed)
    first.end()
    second.end()
    engine.dispose()
