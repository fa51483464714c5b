"""A capture beside others, after a loss, and with wrong settings: nothing is lost in silence."""

from __future__ import annotations

import logging
import threading
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine

from holdfast.clock import SystemClock
from holdfast.errors import ConfigurationError
from holdfast.outbox import Relay
from holdfast.outbox.cdc import Cdc
from holdfast.outbox.cdc.events import UNAVAILABLE
from holdfast.outbox.cdc.service import CaptureService, CdcSettings
from holdfast.outbox.wal import ReplicationDown
from holdfast.testing import wait_until
from tests.cdc.source import Source, captured, events, told
from tests.shell import shell
from tests.wal.plain import PlainPostgres
from tests.wal.shop import Recorder, running, steps_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers import Postgres
    from tests.servers.fixtures import PrivateServer


@pytest.fixture
def source(postgres: Postgres, request: pytest.FixtureRequest) -> Iterator[Source]:
    """Yield a database of its own; its slot goes with it."""
    with captured(postgres, request.node.name) as source:
        yield source


def refused(cdc: Cdc) -> str:
    """Return what the capture complains about."""
    with pytest.raises(ConfigurationError) as caught:
        Relay(cdc).run()
    return str(caught.value)


@pytest.mark.parametrize(
    ("columns", "identity"),
    [("n int", "DEFAULT"), ("n int PRIMARY KEY", "NOTHING"), ("n int UNIQUE", "DEFAULT")],
)
def test_a_table_without_an_identity_is_refused_before_its_writers_suffer(
    source: Source, columns: str, identity: str
) -> None:
    """PostgreSQL refuses updates of a published table whose rows it cannot tell apart."""
    source.run(f"CREATE TABLE bare ({columns})", f"ALTER TABLE bare REPLICA IDENTITY {identity}")
    said = refused(source.cdc(Recorder(), "item", "bare"))
    source.run("INSERT INTO bare VALUES (1)", "UPDATE bare SET n = 2", "DELETE FROM bare")
    assert source.ask("SELECT count(*) FROM pg_publication") == 0
    source.run(f"CREATE PUBLICATION {source.slot} FOR TABLE item, bare")
    assert refused(source.cdc(Recorder(), "item", "bare")) == said
    source.run(said.partition("run  ")[2])
    sink = Recorder()
    Relay(source.cdc(sink, "item", "bare", snapshot=True)).run_once()
    source.run("INSERT INTO bare VALUES (1)", "UPDATE bare SET n = 2", "DELETE FROM bare")
    Relay(source.cdc(sink, "item", "bare")).run_once()
    assert [event.op for event in events(sink)][:1] == ["c"]
    assert "d" in [event.op for event in events(sink)]


def test_a_partition_without_an_identity_is_named(source: Source) -> None:
    """Its own identity counts, not that of the partitioned table."""
    source.run(
        "CREATE TABLE log (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE log_1 PARTITION OF log FOR VALUES FROM (0) TO (9)",
        "ALTER TABLE log_1 REPLICA IDENTITY NOTHING",
    )
    said = refused(source.cdc(Recorder(), "log"))
    assert "ALTER TABLE public.log_1 REPLICA IDENTITY FULL" in said


def test_a_publication_that_leaves_changes_out_is_refused(source: Source) -> None:
    """Updates and deletes would be missing in silence."""
    source.run(f"CREATE PUBLICATION {source.slot} FOR TABLE item WITH (publish = 'insert')")
    said = refused(source.cdc(Recorder()))
    assert "leaves updates and deletes and truncates out" in said
    source.run(said.partition("run  ")[2])
    assert Relay(source.cdc(Recorder(), snapshot=True)).run_once() == 0


def test_a_new_key_does_not_empty_a_large_column(source: Source) -> None:
    """The server sends the old key with empty columns, and the large one not at all."""
    sink = Recorder()
    source.run(
        "CREATE TABLE doc (id int PRIMARY KEY, body text)",
        "ALTER TABLE doc ALTER body SET STORAGE EXTERNAL",
        "INSERT INTO doc VALUES (1, repeat('x', 5000))",
    )
    Relay(source.cdc(Recorder(), "doc")).run_once()
    source.run("UPDATE doc SET id = 2")
    Relay(source.cdc(sink, "doc")).run_once()
    assert [event.op for event in events(sink)] == ["d", None, "c"]
    assert events(sink)[-1].after == {"id": 2, "body": UNAVAILABLE}


def test_the_key_is_what_identifies_a_row_in_the_log(source: Source) -> None:
    """With an index as replica identity it is that index, in the snapshot as in the stream."""
    sink = Recorder()
    source.run(
        "CREATE TABLE part (id int PRIMARY KEY, code text NOT NULL, note text)",
        "CREATE UNIQUE INDEX by_code ON part (code) INCLUDE (note)",
        "ALTER TABLE part REPLICA IDENTITY USING INDEX by_code",
        "INSERT INTO part VALUES (1, 'a')",
    )
    with running(source.cdc(sink, "part")):
        wait_until(lambda: sink.messages, what="the snapshot is published")
        source.run("UPDATE part SET id = 2", "DELETE FROM part")
        wait_until(lambda: len(sink.messages) == 4, what="the changes are published")
    assert [event.op for event in events(sink)] == ["r", "u", "d", None]
    assert [event.key for event in events(sink)] == [{"code": "a"}] * 4


def test_changes_from_before_a_table_was_renamed_keep_their_key(source: Source) -> None:
    """The log knows it; today's catalog has no such table any more."""
    sink = Recorder()
    Relay(source.cdc(Recorder())).run_once()
    source.run("INSERT INTO item VALUES (1, 'a')")
    source.run("ALTER TABLE item RENAME TO thing", "ALTER TABLE thing RENAME COLUMN id TO number")
    Relay(source.cdc(sink, "thing")).run_once()
    assert told(sink) == [("c", 1, "a")]
    assert sink.messages[0].topic.endswith("public.item")


def test_names_are_written_as_in_sql(source: Source) -> None:
    """Capitals, spaces and quotes included."""
    sink = Recorder()
    source.run(
        """CREATE TABLE "Order ""Line" ("Id" int PRIMARY KEY)""",
        """INSERT INTO "Order ""Line" VALUES (1)""",
    )
    with running(source.cdc(sink, """public."Order ""Line" """, publication="Mine")):
        wait_until(lambda: sink.messages, what="the snapshot is published")
        source.run("""DELETE FROM "Order ""Line" """)
        wait_until(lambda: len(sink.messages) == 3, what="the stream is published")
    assert [event.key for event in events(sink)] == [{"Id": 1}] * 3
    assert {message.topic for message in sink.messages} == {f"{source.server}.public.Order__Line"}
    assert events(sink)[0].source.table == 'Order "Line'  # type: ignore[union-attr]


def test_a_truncated_table_is_told(source: Source) -> None:
    """Consumers must forget every row."""
    sink = Recorder()
    source.run("CREATE TABLE other (id int PRIMARY KEY)")
    with running(source.cdc(sink, "item", "other")) as relay:
        wait_until(lambda: relay.health.last_step > 0, what="the capture runs")
        source.run("INSERT INTO item VALUES (1, 'a')")
        wait_until(lambda: sink.messages, what="the stream is published")
        source.run("TRUNCATE item, other")
        wait_until(lambda: len(sink.messages) == 3, what="both are told")
    topics = [message.topic.rpartition(".")[2] for message in sink.messages]
    assert [event.op for event in events(sink)] == ["c", "t", "t"]
    assert sorted(topics[1:]) == ["item", "other"]


def test_a_slot_that_is_gone_is_refused_until_a_new_snapshot_is_asked_for(source: Source) -> None:
    """What was deleted in between would never show."""
    sink = Recorder()
    source.run("INSERT INTO item VALUES (1, 'a'), (2, 'b')")
    Relay(source.cdc(sink)).run_once()
    wait_until(source.drop_slot, what="the slot is gone")
    source.run("DELETE FROM item WHERE id = 1")
    said = refused(source.cdc(sink))
    assert f"replication slot {source.slot} is missing" in said
    assert "start with --snapshot" in said
    assert told(sink) == [("r", 1, "a"), ("r", 2, "b")]
    Relay(source.cdc(sink, snapshot=True)).run_once()
    assert told(sink)[2:] == [("r", 2, "b")]


def test_a_slot_that_goes_while_it_is_read_ends_the_capture(source: Source) -> None:
    """Even one that was told to take a snapshot, and even if the publication is gone, too."""
    sink = Recorder()
    cdc = source.cdc(sink, snapshot=True)
    steps_until(cdc, lambda: cdc._reading, "it streams")
    source.run(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
        "WHERE active AND database = current_database()"
    )
    wait_until(source.drop_slot, what="the slot is gone")
    source.run(f"DROP PUBLICATION {source.slot}")
    assert "--snapshot" in refused(cdc)


def test_a_second_process_stands_by_while_the_first_takes_the_snapshot(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once, and takes over when the first one dies."""
    caplog.set_level(logging.INFO, "holdfast.outbox.cdc")
    one, two = Recorder(), Recorder()
    source.run("INSERT INTO item VALUES (1, 'a'), (2, 'b')")
    first, second = source.cdc(one, batch=1), source.cdc(two)
    steps_until(first, lambda: first.progress, "the snapshot began")
    for _ in range(2):
        wait_until(lambda: second.step().standby, what="the second one stands by", every=0)
    assert [r.message for r in caplog.records if "standing by" in r.message] == [
        "standing by: another process takes the snapshot"
    ]
    first.close()
    with running(second):
        wait_until(lambda: len(two.messages) == 2, what="the second one takes the snapshot")


def test_a_capture_that_was_frozen_sends_nothing_more_by_its_old_stream(source: Source) -> None:
    """By its own clock: another may have sent newer states of the rows meanwhile."""
    clock, sink = JumpingClock(), Recorder()
    cdc = source.cdc(sink, batch=1, clock=clock)
    steps_until(cdc, lambda: cdc._reading, "it streams")
    sink.gate.clear()
    source.run("INSERT INTO item VALUES (1, 'a'), (2, 'b'), (3, 'c')")
    steps_until(cdc, sink.entered.is_set, "the first change is on its way")
    clock.ahead += 100
    with pytest.raises(ReplicationDown, match="too long silent"):
        cdc.step()
    sink.gate.set()
    steps_until(cdc, lambda: cdc._reading, "it reads the slot anew")
    steps_until(cdc, lambda: len(sink.messages) == 4, "all is published")
    assert told(sink) == [("c", 1, "a"), ("c", 1, "a"), ("c", 2, "b"), ("c", 3, "c")]
    sink.entered.clear()
    source.run("INSERT INTO item VALUES (4, 'd')")
    behind = "SELECT 1 FROM pg_stat_replication WHERE sent_lsn < pg_current_wal_lsn()"
    wait_until(lambda: source.ask(behind) is None, what="the change has arrived")
    clock.ahead += 100
    with pytest.raises(ReplicationDown):
        cdc.step()
    cdc.close()
    assert not sink.entered.is_set()


class JumpingClock(SystemClock):
    """A clock that goes on while the process stands still."""

    ahead = 0.0

    def monotonic(self) -> float:
        """Return the time, with what was slept through."""
        return super().monotonic() + self.ahead


@pytest.fixture
def clerk(source: Source) -> Iterator[str]:
    """Yield the url of a role that may do nothing."""
    source.run("CREATE ROLE clerk LOGIN")
    yield source.url.replace("postgres@", "clerk@")
    source.run("DROP OWNED BY clerk")
    source.run("DROP ROLE clerk")


def test_each_missing_privilege_is_named_with_its_remedy(source: Source, clerk: str) -> None:
    """One after the other, until it works."""
    engine = create_engine(clerk)
    sink = Recorder()
    source.run("INSERT INTO item VALUES (1, 'a')")

    def said(**options: Any) -> str:
        return refused(Cdc(engine, sink, tables=["public.item"], server=source.server, **options))

    source.run(said().partition("run as the owner:  ")[2])
    assert "start with --snapshot" in said()  # whether it ever ran cannot be told
    assert "ALTER ROLE clerk REPLICATION" in said(snapshot=True)
    source.run("ALTER ROLE clerk REPLICATION")
    command = said(snapshot=True).partition("run  ")[2]
    assert command == "GRANT SELECT ON public.item TO clerk"
    source.run(command, "ALTER TABLE item ENABLE ROW LEVEL SECURITY")
    assert "BYPASSRLS" in said(snapshot=True)
    source.run("ALTER ROLE clerk BYPASSRLS")
    source.run("CREATE SCHEMA hidden", "CREATE TABLE hidden.t (id int PRIMARY KEY)")
    hidden = Cdc(engine, sink, tables=["hidden.t"], server=source.server)
    assert "GRANT USAGE ON SCHEMA" in refused(hidden)
    cdc = Cdc(engine, sink, tables=["item"], server=source.server, snapshot=True)
    assert Relay(cdc).run_once() == 1
    engine.dispose()


def test_a_server_without_logical_replication_is_refused(private_server: PrivateServer) -> None:
    """The message holds the command that mends it."""
    source = Source(create_engine(private_server(PlainPostgres).database("plain")), "plain")
    assert "ALTER SYSTEM SET wal_level=logical" in refused(source.cdc(Recorder()))
    source.engine.dispose()


def arguments(source: Source, tmp_path: Path, *more: str) -> list[str]:
    """Return a command line."""
    broker = f"sqlite:///{tmp_path}/b.db"
    given = ["cdc", "--broker", broker, "--server", source.server, "--table", "item"]
    return [*given, *more]


@pytest.mark.parametrize("wrong", ["postgres@", "/cdc_"])
def test_a_wrong_role_or_database_ends_the_command(
    source: Source, tmp_path: Path, wrong: str
) -> None:
    """With one sentence; a database that is merely down is waited for."""
    url = source.url.replace(wrong, wrong.replace("s", "x").replace("c", "x"))
    done = shell(*arguments(source, tmp_path, "--database", url))
    assert done.returncode == 2, done.stderr
    assert "does not exist" in done.stderr.splitlines()[-1]


def test_once_beside_a_running_capture_says_that_it_did_nothing(
    source: Source, tmp_path: Path
) -> None:
    """With exit code 3: the same command may work later."""
    cdc = source.cdc(Recorder())
    steps_until(cdc, lambda: cdc._reading, "it streams")
    done = shell(*arguments(source, tmp_path, "--database", source.url, "--once"))
    assert done.returncode == 3, done.stdout
    assert "another capture reads the replication slot" in done.stderr
    cdc.close()


def test_a_broker_that_is_down_at_the_start_is_waited_for(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    """It shows in the probes and the metrics."""
    caplog.set_level(logging.INFO, "holdfast.cli")
    capture = CaptureService(
        CdcSettings(
            database=source.url, broker="redis://127.0.0.1:1", tables=["item"],
            server=source.server, create_topics=True, http="127.0.0.1:0",
        )
    )  # fmt: skip
    pages: dict[str, str] = {}

    def look() -> None:
        try:
            wait_until(lambda: capture.relay.health.failures > 1, what="the outage is noticed")
            address = caplog.messages[0].rpartition("http://")[2]
            for page in ("healthz", "metrics"):
                with urllib.request.urlopen(f"http://{address}/{page}", timeout=10) as answer:
                    pages[page] = answer.read().decode()
        finally:
            capture.relay.stop()

    watcher = threading.Thread(target=look)
    watcher.start()
    with capture:
        capture.run()
    watcher.join()
    assert pages["healthz"] == "waiting\n"
    assert "holdfast_cdc_outage 1.0" in pages["metrics"]
    assert "holdfast_cdc_published_total 0.0" in pages["metrics"]
