"""Circuits that processes share through the database."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from holdfast.circuit import Breaker, CircuitPolicy, Closed, Open, Sharing
from holdfast.clock import SYSTEM_CLOCK
from holdfast.consumer import create_tables
from holdfast.consumer.parking.admin import ParkingAdmin
from holdfast.consumer.shared_circuits import CircuitAdmin, SqlSharedState
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.errors import ConfigurationError, NotFound
from holdfast.testing import wait_until
from tests.shell import shell

if TYPE_CHECKING:
    import subprocess
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
    states[0].say_open("bank", 600)
    second.refresh()
    assert isinstance(two.state, Open)
    assert not states[0].claim_probe("bank", 60)
    states[0].say_open("bank", 0.01)
    wait_until(lambda: states[0].claim_probe("bank", 60), what="it is time to probe")
    assert not states[1].claim_probe("bank", 60)
    states[0].say_closed("bank")
    second.refresh()
    assert isinstance(two.state, Closed)
    first.end()
    second.end()
    engine.dispose()


def test_an_operator_turns_a_circuit_in_every_process_and_it_is_audited(url: str) -> None:
    """Opened by hand it pauses all, closed by hand it lets all go on; who and why is kept."""
    engine = open_database(url)
    create_tables(engine)
    breaker = Breaker("bank", CircuitPolicy())
    sharing = Sharing(breaker, SqlSharedState(engine, clock=SYSTEM_CLOCK))
    admin, ada = CircuitAdmin(engine), Operator(actor="ada", reason="upkeep")
    with pytest.raises(NotFound, match="no process shares"):
        admin.open("bank", 60, ada)
    sharing.refresh()
    assert [(one.name, one.is_open) for one in admin.circuits()] == [("bank", False)]
    admin.open("bank", 600, ada)
    sharing.refresh()
    assert isinstance(breaker.state, Open)
    assert admin.circuits()[0].seconds > 300
    admin.close("bank", ada)
    sharing.refresh()
    assert isinstance(breaker.state, Closed)
    with pytest.raises(ConfigurationError, match="more than 0"):
        admin.open("bank", 0, ada)
    acts = [
        (act.action, act.subject, act.actor, act.reason) for act in ParkingAdmin(engine).audited()
    ]
    assert acts == [
        ("circuit.close", "bank", "ada", "upkeep"),
        ("circuit.open", "bank", "ada", "upkeep"),
    ]
    sharing.end()
    engine.dispose()


def test_the_circuits_command_shows_and_turns_them(tmp_path: Path) -> None:
    """As an operator calls it; nonsense is one clear sentence."""
    url = f"sqlite:///{tmp_path}/c.db"
    engine = open_database(url)
    create_tables(engine)
    SqlSharedState(engine, clock=SYSTEM_CLOCK).read("bank")

    def circuits(*args: str) -> subprocess.CompletedProcess[str]:
        return shell("circuits", *args, "--database", url)

    opened = circuits("open", "bank", "--for", "10m", "--reason", "upkeep")
    assert opened.returncode == 0, opened.stderr
    (found,) = json.loads(circuits("list", "--json").stdout)
    assert (found["name"], found["is_open"]) == ("bank", True)
    assert circuits("close", "bank", "--reason", "back").returncode == 0
    unknown = circuits("open", "bakn", "--reason", "upkeep")
    assert (unknown.returncode, "Traceback" in unknown.stderr) == (1, False)
    assert "circuits list" in unknown.stderr
    engine.dispose()
