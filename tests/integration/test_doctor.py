"""The doctor names each trouble with its fix, on a database that really has it."""

from __future__ import annotations

import json
import struct
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from holdfast.brokers import connect
from holdfast.clock import SystemClock
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.outbox import LeaseEngine, LeaseTerms, Outbox, Relay
from holdfast.outbox.doctor import Doctor, Finding, Limits, Severity
from holdfast.outbox.parked import ParkedKeys, ParkedSelection
from holdfast.outbox.relay.monitoring import default_slot
from holdfast.testing import wait_until
from tests.migrated import migrated
from tests.shell import shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from tests.servers import Postgres

SLOT = "holdfast_outbox"
QUICK = Limits(rate_seconds=0.05)


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def outbox(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Open an empty outbox on each kind of database."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        url = request.getfixturevalue(request.param).database("doctored")
    engine = open_database(url)
    migrated(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def pg(postgres: Postgres) -> Iterator[Engine]:
    """Open an empty outbox on PostgreSQL, and leave no slot behind."""
    engine = open_database(postgres.database("doctored_pg"))
    migrated(engine)
    yield engine
    with engine.begin() as db:
        mine = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database"
        db.execute(text(f"{mine} = current_database()"))
    engine.dispose()


@contextmanager
def relay(engine: Engine) -> Iterator[Relay]:
    """Keep a relay at work, one step at a time."""
    broker = connect("memory:")
    sink = broker.sink()
    running = Relay(LeaseEngine(engine, sink, terms=LeaseTerms(seconds=30)))
    running.engine.step()
    yield running
    running.stop()
    running.run()
    sink.close()
    broker.close()


def named(findings: list[Finding], check: str) -> list[Finding]:
    """Return the findings of one check, the worst first."""
    return sorted((f for f in findings if f.check == check), key=lambda f: -f.severity)


def add(engine: Engine, count: int = 1, **options: Any) -> None:
    """Commit some events."""
    with Session(engine) as session, session.begin():
        for number in range(count):
            Outbox().add(session, {"n": number}, topic="orders", key="k", **options)


def test_a_healthy_outbox_has_no_complaint(outbox: Engine) -> None:
    """With a relay at work and nothing waiting, everything is OK."""
    with relay(outbox):
        findings = Doctor(outbox, limits=QUICK).examine()
    # Slots are the server's, and other tests may have left some.
    assert [f for f in findings if f.severity and f.check != "slots"] == []
    assert "all 64 shards are served" in named(findings, "leases")[0].text


def test_every_complaint_comes_with_a_fix(outbox: Engine) -> None:
    """Whatever is not OK says what to do."""
    add(outbox)
    strict = Limits(oldest_seconds=(0.0, 0.0), overdue_seconds=(0.0, 0.0), rate_seconds=0.01)
    findings = Doctor(outbox, limits=strict).examine()
    assert any(finding.severity for finding in findings)
    assert all(finding.fix for finding in findings if finding.severity)


def test_waiting_events_are_counted_and_dated(outbox: Engine) -> None:
    """Backlog and age of the first event are told, and nobody at work is critical."""
    add(outbox, 3)
    wait_until(lambda: named(Doctor(outbox, limits=QUICK).examine(), "outbox")[0].facts[
        "oldest_seconds"] > 0.01, what="the first event grows old")  # fmt: skip
    strict = Limits(oldest_seconds=(0.01, 600), rate_seconds=0.01)
    findings = Doctor(outbox, limits=strict).examine()
    queue = named(findings, "outbox")[0]
    assert queue.severity is Severity.WARNING
    assert queue.facts["backlog"] == 3
    nobody = named(findings, "relays")[0]
    assert nobody.severity is Severity.CRITICAL
    assert "holdfast relay" in str(nobody.fix)


def test_an_event_in_a_shard_that_nobody_owns_is_named(outbox: Engine) -> None:
    """Another program wrote it; relays that share the work would pass it by for ever."""
    add(outbox, 2)
    assert not named(Doctor(outbox, limits=QUICK).examine(), "shards")
    with outbox.begin() as db:
        db.execute(text("UPDATE holdfast_outbox SET shard = 64"))
    found = named(Doctor(outbox, limits=QUICK).examine(), "shards")[0]
    assert found.severity is Severity.CRITICAL
    assert (found.facts["events"], found.facts["shard"]) == (2, 64)
    assert "single relay" in str(found.fix)


def test_delayed_events_that_nobody_moves_are_named(outbox: Engine) -> None:
    """What is overdue shows; what is only waiting for its time does not."""
    add(outbox, delay=3600)
    assert named(Doctor(outbox, limits=QUICK).examine(), "delayed")[0].severity is Severity.OK
    add(outbox, delay=0)
    strict = Limits(overdue_seconds=(0.01, 600), rate_seconds=0.01)
    overdue = wait_until(
        lambda: [f for f in named(Doctor(outbox, limits=strict).examine(), "delayed") if f.severity]
    )[0]
    assert overdue.facts["delayed"] == 2
    assert "has been due" in overdue.text


def test_a_relay_that_died_is_named_with_its_host(outbox: Engine) -> None:
    """A relay without a farewell shows, and so do the shards that nobody took over."""
    with outbox.begin() as db:
        db.execute(text(
            "INSERT INTO holdfast_outbox_relay (id, until, engine, host) "
            "VALUES ('gone', 1000, 'lease', 'pod-7')"
        ))  # fmt: skip
    findings = named(Doctor(outbox, limits=QUICK).examine(), "relays")
    assert any("pod-7" in finding.text for finding in findings)


def test_parked_keys_are_named_with_their_error(outbox: Engine, tmp_path: Path) -> None:
    """The first parked key and the command that lists all of them."""
    broker = connect(f"sqlite:///{tmp_path}/broker.db?max_message=100")
    sink = broker.sink()
    add(outbox)
    Relay(LeaseEngine(outbox, sink)).run_once()
    sink.close()
    broker.close()
    parked = named(Doctor(outbox, limits=QUICK).examine(), "parked")[0]
    assert parked.severity is Severity.WARNING
    assert "orders/k" in parked.text
    assert "exceeds the limit" in parked.text
    assert "parked list" in str(parked.fix)


class FastClock(SystemClock):
    """A host whose clock is five minutes ahead."""

    def now(self) -> datetime:
        """Return a time that is wrong."""
        return datetime.now(UTC) + timedelta(minutes=5)


def test_a_clock_that_is_off_is_named(outbox: Engine) -> None:
    """Five minutes of skew are critical, and the direction is told."""
    clock = named(Doctor(outbox, limits=QUICK, clock=FastClock()).examine(), "clock")[0]
    assert clock.severity is Severity.CRITICAL
    assert "the database is 5 min behind this host" in clock.text


def test_missing_tables_are_critical(tmp_path: Path) -> None:
    """Without tables there is one finding, and it names the command."""
    engine = open_database(f"sqlite:///{tmp_path}/empty.db")
    (finding,) = Doctor(engine).examine()
    engine.dispose()
    assert finding.severity is Severity.CRITICAL
    assert "holdfast db upgrade" in str(finding.fix)


def test_a_slot_that_pins_the_log_and_a_long_transaction_are_both_named(pg: Engine) -> None:
    """The slot with what it keeps and for how long that can go on; the pid and its query."""
    with pg.begin() as db:
        db.execute(text("CREATE TABLE ledger (n int)"))
    with pg.begin() as db:
        db.execute(text(f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')"))
    with pg.connect() as holder:
        pid = holder.execute(text("SELECT pg_backend_pid()")).scalar_one()
        holder.execute(text("INSERT INTO ledger VALUES (4711)"))
        with pg.begin() as db:
            db.execute(text("INSERT INTO ledger SELECT * FROM generate_series(1, 50000)"))
        limits = Limits(
            transaction_seconds=(0.05, 3600), retained_bytes=(1e6, 1e12), rate_seconds=0.05
        )
        slow = wait_until(
            lambda: [f for f in named(Doctor(pg, limits=limits).examine(), "transactions")
                     if f.facts.get("pid") == pid]
        )[0]  # fmt: skip
        findings = Doctor(pg, limits=limits).examine()
    assert slow.severity is Severity.WARNING
    assert "INSERT INTO ledger VALUES (4711)" in slow.text
    assert f"pg_terminate_backend({pid})" in str(slow.fix)
    slot = next(f for f in named(findings, "slots") if f.facts.get("slot") == SLOT)
    assert slot.severity is Severity.WARNING
    assert slot.facts["retained_bytes"] > 1e6
    assert "read by nobody" in slot.text
    assert f"pg_drop_replication_slot('{SLOT}')" in str(slot.fix)
    assert any("max_slot_wal_keep_size" in f.text for f in named(findings, "slots"))


def test_a_reader_that_only_looks_is_named_when_it_pins_vacuum(pg: Engine) -> None:
    """A forgotten report in REPEATABLE READ holds xmin although it writes nothing."""
    options = {"isolation_level": "REPEATABLE READ"}
    with pg.connect().execution_options(**options) as reader:
        pid = reader.execute(text("SELECT pg_backend_pid()")).scalar_one()
        limits = Limits(transaction_seconds=(0.02, 3600), rate_seconds=0.01)
        found = wait_until(
            lambda: [f for f in named(Doctor(pg, limits=limits).examine(), "transactions")
                     if f.facts.get("pid") == pid]
        )[0]  # fmt: skip
    assert found.facts["holds_xmin"] is True
    assert "idle in transaction" in found.text
    assert "holds xmin" in found.text


@contextmanager
def modest_role(pg: Engine, postgres: Postgres) -> Iterator[Engine]:
    """Yield the database as a role that may do nothing yet sees it."""
    with pg.begin() as db:
        db.execute(text("DROP ROLE IF EXISTS modest"))
        db.execute(text("CREATE ROLE modest LOGIN"))
    modest = open_database(postgres.url.replace("postgres@", "modest@").replace(
        "/postgres", "/doctored_pg"))  # fmt: skip
    yield modest
    modest.dispose()
    with pg.begin() as db:
        db.execute(text("DROP OWNED BY modest"))
        db.execute(text("DROP ROLE modest"))


def test_transactions_that_the_role_may_not_see_are_not_called_fine(
    pg: Engine, postgres: Postgres
) -> None:
    """PostgreSQL hides the times of others' sessions; the grant that is named shows them."""
    limits = Limits(transaction_seconds=(0.02, 3600), rate_seconds=0.01)
    options = {"isolation_level": "REPEATABLE READ"}
    with modest_role(pg, postgres) as modest, pg.connect().execution_options(**options) as reader:
        pid = reader.execute(text("SELECT pg_backend_pid()")).scalar_one()
        hidden = named(Doctor(modest, limits=limits).examine(), "transactions")[0]
        assert hidden.severity is Severity.WARNING
        assert f"{pid} (postgres)" in hidden.text
        with pg.begin() as db:
            db.execute(text(str(hidden.fix).removeprefix("run  ").removesuffix("  and look again")))
        modest.dispose()
        wait_until(
            lambda: [f for f in named(Doctor(modest, limits=limits).examine(), "transactions")
                     if f.facts.get("pid") == pid]
        )  # fmt: skip


def test_a_slot_that_holds_xmin_is_named(pg: Engine, postgres: Postgres) -> None:
    """A standby that went away with its feedback on keeps dead rows for ever."""
    with pg.begin() as db:
        db.execute(text("SELECT pg_create_physical_replication_slot('standby', true)"))
        start = db.execute(text("SELECT pg_current_wal_lsn()")).scalar_one()
        xmin = db.execute(text("SELECT CAST(CAST(pg_current_xact_id() AS xid) AS text)")).scalar()
    dsn = f"host={postgres.host} port={postgres.port} user=postgres"
    with closing(psycopg.connect(dsn, replication="true", autocommit=True)) as standby:
        standby.execute(f"START_REPLICATION SLOT standby PHYSICAL {start}")
        standby.pgconn.put_copy_data(b"h" + struct.pack("!qIIII", 0, int(xmin or 0), 0, 0, 0))
        standby.pgconn.flush()
        held = "SELECT xmin IS NOT NULL FROM pg_replication_slots WHERE slot_name = 'standby'"
        wait_until(lambda: _ask(pg, held), what="the feedback has come")
    add(pg, 200)
    with pg.begin() as db:
        db.execute(text("DELETE FROM holdfast_outbox"))
    limits = Limits(dead_rows=(100, 1e9), xmin_age=(1, 1e9), rate_seconds=0.01)
    dead = wait_until(
        lambda: [f for f in named(Doctor(pg, limits=limits).examine(), "vacuum")
                 if f.facts.get("dead", 0) >= 100],
        deadline=60,
    )[0]  # fmt: skip
    findings = named(Doctor(pg, limits=limits).examine(), "slots")
    with pg.begin() as db:
        db.execute(text("SELECT pg_drop_replication_slot('standby')"))
    slot = next(f for f in findings if f.facts.get("slot") == "standby")
    assert slot.severity is Severity.WARNING
    assert f"holds xmin {slot.facts['xmin_age']:,} transactions back" in slot.text
    assert "the oldest xmin is held by slot standby" in dead.text


def _ask(engine: Engine, question: str) -> Any:
    with engine.connect() as db:
        return db.execute(text(question)).scalar()


def test_a_slot_without_its_table_in_the_publication_is_critical(pg: Engine) -> None:
    """Events would be written and never streamed; the slot is the one that the engine makes."""
    with pg.begin() as db:
        db.execute(
            text(f"SELECT pg_create_logical_replication_slot('{default_slot(pg)}', 'pgoutput')")
        )
    missing = named(Doctor(pg, limits=QUICK).examine(), "publication")[0]
    assert missing.severity is Severity.CRITICAL
    assert "CREATE PUBLICATION" in str(missing.fix)
    with pg.begin() as db:
        db.execute(text("CREATE PUBLICATION holdfast_outbox"))
    empty = named(Doctor(pg, limits=QUICK).examine(), "publication")[0]
    assert empty.severity is Severity.CRITICAL
    with pg.begin() as db:
        db.execute(text(str(empty.fix).removeprefix("run  ")))
    assert named(Doctor(pg, limits=QUICK).examine(), "publication")[0].severity is Severity.OK


def test_a_role_without_privileges_is_told_what_to_grant(pg: Engine, postgres: Postgres) -> None:
    """The grant that the finding names is enough to make it go away."""
    with modest_role(pg, postgres) as modest:
        lacking = named(Doctor(modest, limits=QUICK).examine(), "privileges")
        assert {f.facts["table"] for f in lacking if f.severity} >= {"holdfast_outbox"}
        with pg.begin() as db:
            for finding in lacking:
                db.execute(text(str(finding.fix).removeprefix("run  ")))
        (fine,) = named(Doctor(modest, limits=QUICK).examine(), "privileges")
        assert fine.severity is Severity.OK
        add(pg, delay=0)
        broker = connect("memory:")
        sink = broker.sink()
        assert Relay(LeaseEngine(modest, sink)).run_once() == 1
        sink.close()
        broker.close()


def test_dead_rows_and_a_lost_vacuum_setting_are_named(pg: Engine) -> None:
    """Who resets the table's settings hears of it, with the statement that restores them."""
    with pg.begin() as db:
        db.execute(text("ALTER TABLE holdfast_outbox RESET (autovacuum_vacuum_scale_factor)"))
    add(pg, 200)
    with pg.begin() as db:
        db.execute(text("DELETE FROM holdfast_outbox"))
    limits = Limits(dead_rows=(100, 1e9), rate_seconds=0.01)
    dead = wait_until(
        lambda: [f for f in named(Doctor(pg, limits=limits).examine(), "vacuum")
                 if f.facts.get("dead", 0) >= 100],
        deadline=60,
    )[0]  # fmt: skip
    assert "VACUUM holdfast_outbox" in str(dead.fix)
    reset = next(f for f in Doctor(pg, limits=limits).examine() if "a share of its rows" in f.text)
    with pg.begin() as db:
        db.execute(text(str(reset.fix).removeprefix("run  ")))
    again = Doctor(pg, limits=limits).examine()
    assert not any("a share of its rows" in finding.text for finding in again)


def test_vacuum_settings_are_read_exactly(pg: Engine) -> None:
    """A scale factor of 0.2 is none of 0, and a table may be exempt from autovacuum."""
    with pg.begin() as db:
        options = "autovacuum_vacuum_scale_factor = 0.2, autovacuum_enabled = off"
        db.execute(text(f"ALTER TABLE holdfast_outbox SET ({options})"))
    exempt, share = named(Doctor(pg, limits=QUICK).examine(), "vacuum")[:2]
    assert "autovacuum is off for the outbox" in exempt.text
    assert exempt.severity is Severity.CRITICAL
    assert "a share of its rows" in share.text
    with pg.begin() as db:
        for finding in (exempt, share):
            db.execute(text(str(finding.fix).removeprefix("run  ")))
    assert not any(f.severity for f in named(Doctor(pg, limits=QUICK).examine(), "vacuum"))


def test_a_released_key_waits_for_a_relay_and_not_for_an_operator(
    outbox: Engine, tmp_path: Path
) -> None:
    """Nothing is left to do about it, and no error is made up for it."""
    broker = connect(f"sqlite:///{tmp_path}/broker.db?max_message=100")
    sink = broker.sink()
    add(outbox)
    Relay(LeaseEngine(outbox, sink)).run_once()
    sink.close()
    broker.close()
    ParkedKeys(outbox).release(
        ParkedSelection(topic="orders"), Operator(actor="ada", reason="OPS-1")
    )
    (released,) = named(Doctor(outbox, limits=QUICK).examine(), "parked")
    assert released.severity is Severity.OK
    assert released.text == "1 events were released: a relay publishes them"


def test_the_command_looks_at_the_slot_and_publication_of_the_relay(
    pg: Engine, tmp_path: Path
) -> None:
    """By the relay's table of the file, or by its variables in the environment."""
    with pg.begin() as db:
        db.execute(text("SELECT pg_create_logical_replication_slot('shop_slot', 'pgoutput')"))
    url = pg.url.render_as_string(hide_password=False)
    file = tmp_path / "holdfast.toml"
    file.write_text("[relay]\nslot = 'shop_slot'\npublication = 'shop_events'\n")
    said = "slot shop_slot is there but publication %s is not"
    asked = ("doctor", "--database", url)
    assert said % "shop_events" in shell(*asked, "--config", str(file)).stdout
    names = {"HOLDFAST_SLOT": "shop_slot", "HOLDFAST_PUBLICATION": "other_events"}
    assert said % "other_events" in shell(*asked, **names).stdout


def test_the_command_exits_by_the_worst_finding(tmp_path: Path) -> None:
    """0 nothing is wrong, 1 something is, 3 the database is down; the same findings as JSON."""

    def run(database: str, *more: str) -> tuple[int, list[dict[str, Any]]]:
        done = shell("doctor", "--json", "--within", "60s", "--database", database, *more)
        return done.returncode, json.loads(done.stdout)

    (tmp_path / "empty.db").touch()
    code, findings = run(f"sqlite:///{tmp_path}/empty.db")
    assert (code, findings[0]["severity"]) == (1, "critical")
    url = f"sqlite:///{tmp_path}/shop.db"
    engine = open_database(url)
    migrated(engine)
    with relay(engine):
        code, findings = run(url, "--broker", f"sqlite:///{tmp_path}/broker.db")
        assert code == 0, [f for f in findings if f["severity"] != "ok"]
    code, findings = run(url)
    engine.dispose()
    assert code == 1, findings  # the relay has ended
    code, findings = run("postgresql+psycopg://user:hunter2@127.0.0.1:1/shop")
    assert (code, findings[0]["check"], findings[0]["severity"]) == (3, "database", "down")
    assert "hunter2" not in str(findings)
