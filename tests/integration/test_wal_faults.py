"""The WAL engine through crashes, restarts, lost slots and wrong settings."""

from __future__ import annotations

import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import create_engine, text

from holdfast.errors import ConfigurationError
from holdfast.outbox import Outbox, Relay
from holdfast.outbox.doctor import Doctor, Limits
from holdfast.outbox.relay.monitoring import Backlog, SlotLag
from holdfast.outbox.wal import ReplicationDown, WalEngine
from holdfast.testing import check_nothing_lost, check_order_per_key, wait_until
from tests.checker.run import Run
from tests.servers import Postgres
from tests.wal.plain import PlainPostgres
from tests.wal.shop import Recorder, Shop, running, terms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.fixtures import PrivateServer

RELAY = Path(__file__).parents[1] / "wal" / "relay.py"
MOMENTS = ["before", "after", "deleted", "confirmed"]


@pytest.fixture
def shop(postgres: Postgres, request: pytest.FixtureRequest) -> Iterator[Shop]:
    """Yield a shop in a database of its own; its slot goes with it."""
    shop = Shop(postgres.database(f"walf_{zlib.crc32(request.node.name.encode())}"))
    yield shop
    shop.drop()


def relay(shop: Shop, path: Path, moment: str = "never", nth: int = 0) -> int:
    """Run a relay process until it dies, or until nothing is left; return how it ended."""
    argv = [sys.executable, str(RELAY), shop.url, str(path), moment, str(nth)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        if moment == "never":  # nothing may be left already: a signal before its handler kills
            wait_until(lambda: shop.left == 0, deadline=90, what="the outbox drained")
            end = shop.log_end
            wait_until(lambda: shop.confirmed >= end, deadline=90, what="the slot drained")
            process.terminate()
        return process.wait(90)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_relay_killed_at_the_worst_moments_loses_nothing(
    shop: Shop, tmp_path: Path, moment: str
) -> None:
    """Killed around publishing, deleting and confirming: all arrive, each key in order."""
    path = tmp_path / "published"
    path.touch()
    Relay(WalEngine(shop.engine, Recorder())).run_once()  # makes the slot
    sent: list[tuple[str, str]] = []
    for round_ in range(2):
        for number in range(20):
            event = (f"k{number % 3}", f"k{number % 3}:{round_}:{number}")
            shop.add(event)
            sent.append(event)
        assert relay(shop, path, moment, 1 + round_) == -9
    assert relay(shop, path) == 0
    seen = [(line.partition(":")[0], line) for line in path.read_text().splitlines()]
    check_nothing_lost(sent, seen)
    check_order_per_key(sent, seen)


@pytest.mark.chaos
def test_a_long_run_with_database_restarts_keeps_every_promise(
    private_server: PrivateServer, tmp_path: Path
) -> None:
    """A minute of kills of relays and of PostgreSQL itself."""
    server = private_server(Postgres)

    def crash() -> None:
        server.kill()
        server.start()

    run = Run(
        database=server.database("chaos"),
        broker=f"sqlite:///{tmp_path}/b.db",
        engine="wal",
        writers=4,
        seconds=60,
        faults=[crash, server.restart] * 3,
    )
    verdict = run.go()
    assert verdict.clean, verdict


def test_a_database_that_crashes_and_restarts_is_an_outage(private_server: PrivateServer) -> None:
    """The relay waits, goes on where it was, and has lost and reordered nothing."""
    server = private_server(Postgres)
    shop = Shop(server.database("restarts"))
    sink = Recorder()
    sent: list[tuple[str, str]] = []
    with running(WalEngine(shop.url, sink, terms=terms(10))) as relay:
        for life in range(3):
            for number in range(30):
                event = (f"k{number % 3}", f"{life}:{number}")
                shop.add(event)
                sent.append(event)
            if life < 2:
                server.kill()
                wait_until(lambda: relay.health.outage, what="the outage is noticed")
                server.start()
                shop.engine.dispose()
        wait_until(lambda: shop.left == 0, deadline=90, what="all is published")
    shop.engine.dispose()
    check_nothing_lost(sent, sink.seen)
    check_order_per_key(sent, sink.seen)
    assert relay.health.parked == 0


def test_a_slot_that_the_server_gave_up_is_made_anew(private_server: PrivateServer) -> None:
    """Beyond max_slot_wal_keep_size the slot is lost: the table still has everything."""
    server = private_server(Postgres)
    shop = Shop(server.database("limits"))
    server.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'")
    server.execute("ALTER SYSTEM SET min_wal_size = '32MB'")
    server.execute("ALTER SYSTEM SET max_wal_size = '32MB'")
    server.execute("SELECT pg_reload_conf()")
    sink = Recorder()
    Relay(WalEngine(shop.engine, sink)).run_once()
    backlog = Backlog(shop.engine, slot=shop.slot)
    standing = backlog.measure().slot
    assert standing is not None
    assert (standing.is_lost, standing.safe is not None) == (False, True)
    status = "SELECT wal_status FROM pg_replication_slots WHERE slot_name = :s"
    numbers = iter(range(1000))

    def lost() -> bool:
        shop.add(("k", str(next(numbers))))
        for _ in range(3):
            server.execute("SELECT pg_switch_wal()")
            server.execute("SELECT pg_logical_emit_message(false, 'noise', 'x')")
        server.execute("CHECKPOINT")
        return bool(shop.ask(status, s=shop.slot) == "lost")

    wait_until(lost, deadline=60, what="the slot is lost")
    count = next(numbers)
    assert backlog.measure().slot == SlotLag(is_lost=True)
    findings = Doctor(shop.engine, limits=Limits(rate_seconds=0.01)).examine()
    [found] = [finding for finding in findings if finding.facts.get("slot") == shop.slot]
    assert "makes a new slot and reads the table" in str(found.fix)
    with running(WalEngine(shop.engine, sink, terms=terms())):
        wait_until(lambda: shop.left == 0, what="the table is published")
        shop.add(("k", "last"))
        wait_until(lambda: "last" in sink.bodies, what="the stream runs")
        assert shop.ask(status, s=shop.slot) != "lost"
    assert sink.bodies == [*map(str, range(count)), "last"]
    shop.engine.dispose()


def test_a_refused_event_is_parked_though_its_row_is_gone(shop: Shop) -> None:
    """Inserted and deleted in one transaction, as is usual with Debezium: the log has it."""
    sink = Recorder()
    sink.refused.add("bad")
    kept = "SELECT string_agg(encode(payload, 'escape'), ' ' ORDER BY seq) FROM {}"
    query = kept.format("holdfast_outbox_parked")
    with running(WalEngine(shop.engine, sink)):
        shop.add(("other", "first"))
        wait_until(lambda: sink.bodies == ["first"], what="the relay streams")
        with shop.engine.begin() as db:
            Outbox().add(db, "bad", topic="orders", key="k")
            db.execute(text("DELETE FROM holdfast_outbox"))
        wait_until(lambda: shop.ask(query) == "bad", what="it is parked")
        shop.add(("k", "next"))
        wait_until(lambda: shop.ask(query) == "bad next", what="the next one waits behind it")
    assert sink.bodies == ["first"]


def refused(engine: WalEngine) -> str:
    """Return what the engine complains about."""
    with pytest.raises(ConfigurationError) as caught:
        Relay(engine).run()
    return str(caught.value)


def test_a_server_without_logical_replication_is_a_configuration_error(
    private_server: PrivateServer,
) -> None:
    """The message holds the command that mends it."""
    shop = Shop(private_server(PlainPostgres).database("plain"))
    said = refused(WalEngine(shop.engine, Recorder()))
    assert "ALTER SYSTEM SET wal_level=logical" in said
    shop.engine.dispose()


@pytest.fixture
def clerk(shop: Shop, postgres: Postgres) -> Iterator[str]:
    """Yield the url of a role that may read and write, and nothing more."""
    shop.ask("CREATE ROLE clerk LOGIN")
    shop.ask("GRANT ALL ON ALL TABLES IN SCHEMA public TO clerk")
    shop.ask("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO clerk")
    yield shop.url.replace("postgres@", "clerk@")
    shop.ask("DROP OWNED BY clerk")
    shop.ask("DROP ROLE clerk")


def test_missing_privileges_are_named_with_their_remedy(shop: Shop, clerk: str) -> None:
    """First the publication, then the right to replicate; then it works."""
    engine = create_engine(clerk)
    command = refused(WalEngine(engine, Recorder())).partition("run as the owner:  ")[2]
    assert command.startswith('CREATE PUBLICATION "holdfast_outbox" FOR TABLE "public"."holdfast')
    shop.ask(command)
    assert "ALTER ROLE clerk REPLICATION" in refused(WalEngine(engine, Recorder()))
    shop.ask("ALTER ROLE clerk REPLICATION")
    sink = Recorder()
    shop.add(("k", "1"))
    Relay(WalEngine(engine, sink)).run_once()
    assert sink.bodies == ["1"]
    engine.dispose()


def test_a_publication_without_the_table_is_named_with_its_remedy(shop: Shop) -> None:
    """Its rows would never arrive."""
    shop.ask("CREATE PUBLICATION holdfast_outbox")
    said = refused(WalEngine(shop.engine, Recorder()))
    command = said.partition("run  ")[2]
    assert command == "ALTER PUBLICATION holdfast_outbox ADD TABLE holdfast_outbox"
    shop.ask(command)
    shop.ask("ALTER PUBLICATION holdfast_outbox SET (publish = 'delete')")
    assert "leaves inserts out" in refused(WalEngine(shop.engine, Recorder()))


def test_a_slot_of_another_kind_is_left_alone(shop: Shop) -> None:
    """Another plugin's slot is not ours to read or drop."""
    shop.ask("SELECT pg_create_logical_replication_slot(:s, 'test_decoding')", s=shop.slot)
    assert "another program's" in refused(WalEngine(shop.engine, Recorder()))


def test_a_missing_table_is_named_with_its_remedy(shop: Shop) -> None:
    """The publication cannot be made without it."""
    shop.ask("DROP TABLE holdfast_outbox")
    assert "holdfast db upgrade" in refused(WalEngine(shop.engine, Recorder()))


def test_a_new_slot_waits_for_old_transactions_without_blocking_the_relay(shop: Shop) -> None:
    """Steps return while it waits, and an end of the relay ends the waiting."""
    with shop.engine.connect() as db:
        db.exec_driver_sql("SELECT pg_current_xact_id()")  # a transaction that writes
        engine = WalEngine(shop.engine, Recorder(), terms=terms())
        for _ in range(20):
            engine.step()
        assert engine._opening.begun
        ended = threading.Thread(target=engine.close)
        ended.start()
        ended.join(60)
        assert not ended.is_alive()


def test_a_database_that_is_gone_is_an_outage(shop: Shop, postgres: Postgres) -> None:
    """What psycopg reports arrives as something to wait for."""
    from sqlalchemy.engine import make_url

    from holdfast.outbox.wal.protocol import replication_connection

    with pytest.raises(ReplicationDown, match="connecting for replication"):
        replication_connection(make_url("postgresql://postgres@127.0.0.1:1/x"), "holdfast-x")
