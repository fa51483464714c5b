"""Databases that a relay waits for, and those that it ends for."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import event, make_url, text
from sqlalchemy.exc import InternalError, OperationalError

from holdfast import ConfigurationError
from holdfast.backoff import Backoff
from holdfast.brokers import connect
from holdfast.cli.exits import EXIT_DOWN
from holdfast.cli.failures import exit_code
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.db.errors import outage
from holdfast.errors import DependencyDown
from holdfast.outbox import Event, LeaseEngine, LeaseTerms, Outbox, Relay, create_tables
from holdfast.outbox.parked import ParkedKeys, ParkedSelection
from holdfast.outbox.relay.leases import Leases, ShardLeaseLost
from holdfast.outbox.relay.monitoring import Backlog
from holdfast.outbox.relay.service import RelayService, RelaySettings
from holdfast.outbox.wal.protocol import replication_connection
from holdfast.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from sqlalchemy.engine import Engine

    from tests.servers import MariaDB, Postgres


def test_a_database_that_became_read_only_is_waited_for(postgres: Postgres) -> None:
    """A primary that was demoted is an outage: the relay goes on when a primary answers."""
    engine = open_database(postgres.database("relay_read_only"))
    create_tables(engine)
    broker = connect("memory:")
    broker.create_topic("t")
    relay = Relay(LeaseEngine(engine, broker.sink(), terms=LeaseTerms(seconds=1)),
                  backoff=Backoff(first=0.01, ceiling=0.1))  # fmt: skip
    with _at_work(relay):
        wait_until(lambda: relay.health.last_step > 0, what="the relay is at work")
        _read_only(engine, "on")
        wait_until(lambda: "read-only" in str(relay.health.outage), what="the relay waits")
        wait_until(lambda: relay.health.failures >= 3, what="the relay waits on")
        _read_only(engine, "off")
        wait_until(lambda: relay.health.outage is None, what="the relay goes on")
        with engine.begin() as db:
            Outbox().add(db, {}, topic="t")
        wait_until(lambda: relay.health.published == 1, what="the event was published")
    engine.dispose()


@contextmanager
def _at_work(relay: Relay) -> Iterator[threading.Thread]:
    """Run *relay* in a thread, which has ended when this is left, however it is left."""
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        yield thread
    finally:
        relay.stop()
        thread.join(90)


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_connections_that_die_at_any_moment_are_waited_out(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Idle in the pool, in a query or while one is taken: the relay goes on by itself."""
    server: Postgres | MariaDB = request.getfixturevalue(kind)
    url = server.database("relay_cut")
    engine, other = open_database(url), open_database(url)
    create_tables(engine)
    broker = connect("memory:")
    broker.create_topic("t")
    relay = Relay(LeaseEngine(engine, broker.sink(), terms=LeaseTerms(seconds=1)),
                  backoff=Backoff(first=0.01, ceiling=0.1))  # fmt: skip
    with _at_work(relay) as thread:
        for n in range(1, 31):
            _kill_connections(other)
            with other.begin() as db:
                Outbox().add(db, {}, topic="t")
            wait_until(
                lambda n=n: relay.health.published >= n or not thread.is_alive(),
                what=f"event {n} is published",
            )
            assert thread.is_alive()
    engine.dispose()
    other.dispose()


_KILLS = {
    "postgresql": text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    ),
    "mysql": text(
        "SELECT id FROM information_schema.processlist"
        " WHERE db = DATABASE() AND id <> CONNECTION_ID()"
    ),
}


def _kill_connections(engine: Engine) -> None:
    """End every connection to the database but our own."""
    with engine.connect() as db:
        for (number,) in db.execute(_KILLS[engine.dialect.name]).all():
            if engine.dialect.name == "mysql":
                with suppress(OperationalError):  # it ended by itself
                    db.execute(text("KILL :id"), {"id": number})


def _read_only(engine: Engine, state: str) -> None:
    # Not from the relay's own pool: what is set here would stay with the connection.
    url = engine.url.render_as_string(hide_password=False)
    own = open_database(url, isolation_level="AUTOCOMMIT")
    with own.connect() as db:
        db.execute(text("SET default_transaction_read_only = off"))
        name = db.execute(text("SELECT current_database()")).scalar_one()
        db.execute(text(f"ALTER DATABASE {name} SET default_transaction_read_only = {state}"))
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"
        db.execute(text(f"{others} AND pid <> pg_backend_pid()"), {"name": name})
    own.dispose()


class _Driver(Exception):
    def __init__(self, state: str | None, number: int = 0) -> None:
        super().__init__(number, "words")
        self.sqlstate = state


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (_Driver("25006"), True),
        (_Driver("57P01"), True),
        (_Driver("53100"), True),
        (_Driver("55006"), True),
        (_Driver(None, 1290), True),
        (_Driver(None, 1792), True),
        (_Driver("42501"), False),
        (_Driver("42P01"), False),
        (_Driver(None, 1146), False),
    ],
)
def test_only_what_passes_by_itself_is_an_outage(error: _Driver, *, passes: bool) -> None:
    """A full disk, a restart, a failover; not a missing table or privilege."""
    assert outage(InternalError("SELECT 1", {}, error)).passes is passes


@pytest.mark.parametrize("number", [1142, 1143, 1146])
def test_what_mysql_drivers_call_operational_may_be_wrong_settings(number: int) -> None:
    """Missing privileges and tables do not pass by themselves."""
    assert not outage(OperationalError("SELECT 1", {}, _Driver(None, number))).passes


def test_missing_privileges_end_the_relay_with_the_grant(postgres: Postgres) -> None:
    """The same sentence with and without `--once`."""
    url = postgres.database("relay_privileges")
    owner = open_database(url)
    create_tables(owner)
    with owner.begin() as db:
        db.execute(text("DROP ROLE IF EXISTS relay_clerk"))
        db.execute(text("CREATE ROLE relay_clerk LOGIN"))
    clerk = open_database(owner.url.set(username="relay_clerk").render_as_string())
    for run in ("run", "run_once"):
        relay = Relay(LeaseEngine(clerk, connect("memory:").sink()))
        with pytest.raises(ConfigurationError, match=r"GRANT SELECT, INSERT.* TO") as told:
            getattr(relay, run)()
    with owner.begin() as db:
        grants = str(told.value).partition("let its owner run  ")[2]
        db.execute(text(grants.replace("<the relay's role>", "relay_clerk")))
        Outbox().add(db, "x" * 3000, topic="t", key="large")
        Outbox().add(db, {}, topic="t", key="late", delay=0)
    _work_as(clerk)
    clerk.dispose()
    with owner.begin() as db:
        assert Backlog(owner).measure().parked == 0
        db.execute(text("DROP OWNED BY relay_clerk"))
        db.execute(text("DROP ROLE relay_clerk"))
    owner.dispose()


def _work_as(clerk: Engine) -> None:
    """Do all that a relay and an operator do: delayed events, a refusal, a release."""
    small, large = connect("memory:?max_message=2000"), connect("memory:")
    assert Relay(LeaseEngine(clerk, small.sink())).run_once() == 1
    ParkedKeys(clerk).release(ParkedSelection(topic="t"), Operator(actor="ada", reason="OPS-1"))
    assert Relay(LeaseEngine(clerk, large.sink())).run_once() == 1


def test_what_may_pass_later_is_no_mistake_in_the_command() -> None:
    """Exit code 3, so that a supervisor tries again; 2 would keep the relay down."""
    assert exit_code(ShardLeaseLost()) == EXIT_DOWN


def _shop(tmp_path: Path, held: float) -> RelaySettings:
    """Return the settings of a relay whose shards a dead one holds for some seconds."""
    database = f"sqlite:///{tmp_path}/s.db"
    engine = open_database(database)
    create_tables(engine)
    with engine.begin() as db:
        Outbox().add(db, {}, topic="t")
    Leases(engine, LeaseTerms(seconds=held)).renew()
    engine.dispose()
    broker = connect(f"sqlite:///{tmp_path}/b.db")
    broker.create_topic("t")
    broker.close()
    return RelaySettings(database=database, broker=f"sqlite:///{tmp_path}/b.db", lease_seconds=2)


def test_once_takes_over_from_a_relay_that_died(tmp_path: Path) -> None:
    """It waits for the lease to end instead of saying that nothing was there."""
    with RelayService(_shop(tmp_path, held=1)) as service:
        assert service.run_once().published == 1


def test_once_says_when_others_hold_what_waits(tmp_path: Path) -> None:
    """A cron job must not report success while events wait."""
    with (
        RelayService(_shop(tmp_path, held=600)) as service,
        pytest.raises(DependencyDown, match="1 events wait in shards that other relays hold"),
    ):
        service.run_once()


def test_a_program_runs_a_relay_as_a_service_and_ends_it(tmp_path: Path) -> None:
    """With probes and metrics, and without the command line."""
    settings = replace(_shop(tmp_path, held=0.01), http="127.0.0.1:0")
    with RelayService(settings) as service:
        running = threading.Thread(target=service.run)
        running.start()
        wait_until(lambda: service.relay.health.published == 1, what="it publishes")
        service.stop()
        running.join(90)
        assert not running.is_alive()
        assert service.waiting() == 0


def _pooled(engine: Engine) -> Engine:
    """Let every connection come back as another one, as behind a pooler in transaction mode."""

    def another(connection: Any, _record: object) -> None:
        if connection is not None:  # a broken one is not kept
            connection.pgconn.exec_(b"DEALLOCATE ALL")

    event.listen(engine, "checkin", another)
    return engine


def _relayed(url: str) -> int:
    """Publish 20 events one by one through such a pooler; return how many wait then."""
    engine = open_database(url)
    create_tables(engine)
    broker = connect("memory:")
    broker.create_topic("t")
    with engine.begin() as db:
        Outbox().add_all(db, [Event(body=n, topic="t") for n in range(20)])
    try:
        Relay(LeaseEngine(_pooled(engine), broker.sink(), batch=1)).run_once()
        return Backlog(engine).measure().waiting
    finally:
        engine.dispose()


def test_a_relay_behind_a_pooler_works_without_prepared_statements(postgres: Postgres) -> None:
    """What psycopg calls prepare_threshold can be set in the URL."""
    assert _relayed(postgres.database("pooled") + "?prepare_threshold=none") == 0


def test_a_pooler_that_mixes_up_prepared_statements_is_named(postgres: Postgres) -> None:
    """The relay ends with the setting that mends it."""
    with pytest.raises(ConfigurationError, match=r"\?prepare_threshold=none"):
        _relayed(postgres.database("pooled"))


def test_a_nonsensical_threshold_is_refused() -> None:
    """And not with a traceback at the fifth statement."""
    with pytest.raises(ConfigurationError, match="use a number, or none"):
        open_database("postgresql+psycopg://h/d?prepare_threshold=often")


def test_a_connection_that_was_cut_without_a_word_is_soon_noticed(postgres: Postgres) -> None:
    """By the kernel, of queries and of the stream; what the URL says itself is left alone."""
    url = postgres.database("noticed")
    engine = open_database(url)
    with engine.connect() as db:
        raw: Any = db.connection.driver_connection
        assert raw.info.get_parameters()["tcp_user_timeout"] == "30000"
    engine.dispose()
    with replication_connection(make_url(f"{url}?tcp_user_timeout=5000"), "test") as stream:
        said = stream.info.get_parameters()
        assert (said["tcp_user_timeout"], said["keepalives_idle"]) == ("5000", "30")
