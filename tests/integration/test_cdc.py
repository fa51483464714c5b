"""Captured tables: the rows there are, then every change, without a gap."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.brokers import connect
from holdfast.errors import ConfigurationError
from holdfast.outbox import Relay
from holdfast.outbox.cdc import Cdc
from holdfast.outbox.cdc.events import UNAVAILABLE, change_event
from holdfast.testing import wait_until
from tests.cdc.source import Source, captured, events, told
from tests.shell import shell
from tests.wal.shop import Recorder, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers import Postgres


@pytest.fixture
def source(postgres: Postgres, request: pytest.FixtureRequest) -> Iterator[Source]:
    """Yield a database of its own; its slot goes with it."""
    with captured(postgres, request.node.name) as source:
        yield source


def test_a_table_is_read_once_and_then_followed(source: Source) -> None:
    """Rows of the snapshot, then inserts, updates and deletes in the order of commits."""
    sink = Recorder()
    source.run("INSERT INTO item SELECT n, 'old' FROM generate_series(1, 5) AS n")
    with running(source.cdc(sink, batch=2)):
        wait_until(lambda: len(sink.seen) == 5, what="the snapshot is published")
        source.run("INSERT INTO item VALUES (6, 'new')", "UPDATE item SET name='x' WHERE id = 1")
        source.run("DELETE FROM item WHERE id = 2", "UPDATE item SET id = 7 WHERE id = 6")
        wait_until(lambda: len(sink.seen) == 12, what="the changes are published")
    assert told(sink) == [
        *(("r", n, "old") for n in range(1, 6)),
        ("c", 6, "new"), ("u", 1, "x"), ("d", 2, None), (None, 2, None),
        ("d", 6, None), (None, 6, None), ("c", 7, "new"),
    ]  # fmt: skip
    first, last = events(sink)[0], events(sink)[-1]
    assert sink.messages[0].topic == f"{source.server}.public.item"
    assert first.source is not None
    assert last.source is not None
    assert (first.source.snapshot, last.source.snapshot) == ("true", "false")
    assert (last.source.db, last.source.schema, last.source.table) == (
        source.server, "public", "item",
    )  # fmt: skip
    assert last.source.tx is not None


def test_a_second_start_goes_on_where_the_first_ended(source: Source) -> None:
    """No second snapshot, nothing lost in between, and rolled-back changes never appear."""
    sink = Recorder()
    source.run("INSERT INTO item VALUES (1, 'a')")
    assert Relay(source.cdc(sink)).run_once() == 1
    source.run("INSERT INTO item VALUES (2, 'b')")
    with pytest.raises(Exception, match="division by zero"):
        source.run("INSERT INTO item VALUES (3, 'never')", "SELECT 1 / 0")
    assert Relay(source.cdc(sink)).run_once() == 1
    assert told(sink) == [("r", 1, "a"), ("c", 2, "b")]


def test_the_snapshot_and_the_stream_meet_without_a_gap(source: Source) -> None:
    """Rows written while the snapshot is taken come exactly once, by one of the two ways."""
    sink = Recorder()
    stop = threading.Event()
    written = []

    def write() -> None:
        while not stop.is_set():
            number = len(written) + 1
            source.run(f"INSERT INTO item VALUES ({number}, 'n')")  # noqa: S608
            written.append(number)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        wait_until(lambda: len(written) > 50, what="some rows are there")
        with running(source.cdc(sink, batch=10)):
            wait_until(
                lambda: {"r", "c"} <= {op for op, _, _ in told(sink)}, what="both ways were used"
            )
            stop.set()
            writer.join()
            wait_until(lambda: len(sink.seen) >= len(written), what="all are published")
    finally:
        stop.set()
        writer.join()
    assert [key for _, key, _ in told(sink)] == written


def test_an_interrupted_snapshot_starts_again(source: Source) -> None:
    """The slot is kept only behind the last row, so that no row can be missing."""
    sink = Recorder()
    source.run("INSERT INTO item SELECT n, 'x' FROM generate_series(1, 10) AS n")
    first = source.cdc(sink, batch=3)
    wait_until(lambda: first.step().published, what="a part is published", every=0)
    assert first.progress
    first.close()
    sink.messages.clear()
    source.run("INSERT INTO item VALUES (11, 'x')")
    Relay(source.cdc(sink, batch=3)).run_once()
    assert told(sink) == [("r", n, "x") for n in range(1, 12)]


def test_a_broker_outage_repeats_nothing_and_loses_nothing(source: Source) -> None:
    """In the snapshot and in the stream."""
    sink = Recorder()
    sink.down = True
    source.run("INSERT INTO item VALUES (1, 'a')")
    with running(source.cdc(sink)) as relay:
        wait_until(lambda: relay.health.failures > 2, what="the outage is noticed")
        sink.down = False
        wait_until(lambda: sink.seen, what="the snapshot is published")
        sink.down = True
        failures = relay.health.failures
        source.run("INSERT INTO item VALUES (2, 'b')")
        source.run("INSERT INTO item VALUES (3, 'c')")
        wait_until(lambda: relay.health.failures > failures + 2, what="it is noticed again")
        sink.down = False
        wait_until(lambda: len(sink.seen) == 3, what="the stream is published")
    assert told(sink) == [("r", 1, "a"), ("c", 2, "b"), ("c", 3, "c")]


def test_snapshot_and_stream_write_values_alike(source: Source) -> None:
    """A row read by the snapshot and the same row from the stream are the same JSON.

    What is generated is in neither: the stream does not tell it.
    """
    columns = {
        "id": "whole PRIMARY KEY", "flag": "bool", "n": "numeric(10,3)", "f": "float8",
        "b": "bytea", "j": "jsonb", "d": "date", "ts": "timestamp", "tz": "timestamptz",
        "t": "time", "c": "char(4)", "a": "text[]", "u": "uuid", "nothing": "text",
        "twice": "int GENERATED ALWAYS AS (id * 2) STORED",
    }  # fmt: skip
    listed = ", ".join(f"{name} {kind}" for name, kind in columns.items())
    row = (
        "true, 1.500, 0.1, '\\xff00', '{\"a\": 1}', '2026-02-03', '2026-02-03 04:05:06.7',"
        " '2026-02-03 04:05:06+02', '01:02:03', 'ab', '{x,NULL}',"
        " '01234567-89ab-cdef-0123-456789abcdef', NULL"
    )
    sink = Recorder()
    source.run("CREATE DOMAIN whole AS int", f"CREATE TABLE kinds ({listed})")
    source.run(f"INSERT INTO kinds VALUES (1, {row})")  # noqa: S608
    with running(source.cdc(sink, "public.kinds")):
        wait_until(lambda: sink.seen, what="the snapshot is published")
        source.run(f"INSERT INTO kinds VALUES (2, {row})")  # noqa: S608
        wait_until(lambda: len(sink.seen) == 2, what="the stream is published")
    read, inserted = (event.after or {} for event in events(sink))
    assert {**read, "id": 2} == inserted
    assert read == {
        "id": 1, "flag": True, "n": "1.500", "f": 0.1, "b": "/wA=", "j": '{"a": 1}',
        "d": 20487, "ts": 1770091506700000, "tz": "2026-02-03T02:05:06.000000Z",
        "t": 3723000000, "c": "ab  ", "a": ["x", None],
        "u": "01234567-89ab-cdef-0123-456789abcdef", "nothing": None,
    }  # fmt: skip


def test_full_replica_identity_brings_the_old_row_and_large_columns_are_never_null(
    source: Source,
) -> None:
    """Without it an unchanged large column is marked as unavailable."""
    sink = Recorder()
    source.run(
        "CREATE TABLE doc (id int PRIMARY KEY, n int, body text)",
        "ALTER TABLE doc ALTER body SET STORAGE EXTERNAL",
        "CREATE TABLE whole (LIKE doc INCLUDING ALL)",
        "ALTER TABLE whole REPLICA IDENTITY FULL",
    )
    with running(source.cdc(sink, "doc", "whole")) as relay:
        wait_until(lambda: relay.health.last_step > 0, what="the capture runs")
        for table in ("doc", "whole"):
            source.run(f"INSERT INTO {table} VALUES (1, 1, repeat('x', 5000))")  # noqa: S608
            source.run(f"UPDATE {table} SET n = 2")  # noqa: S608
        wait_until(lambda: len(sink.seen) == 4, what="the changes are published")
    plain, whole = events(sink)[1], events(sink)[3]
    assert plain.before is None
    assert plain.after == {"id": 1, "n": 2, "body": UNAVAILABLE}
    assert whole.before == {"id": 1, "n": 1, "body": "x" * 5000}
    assert whole.after == {"id": 1, "n": 2, "body": "x" * 5000}


def test_a_changed_table_is_followed(source: Source) -> None:
    """New columns are in the events from then on."""
    sink = Recorder()
    source.run("INSERT INTO item VALUES (1, 'a')")
    with running(source.cdc(sink)):
        wait_until(lambda: sink.seen, what="the snapshot is published")
        source.run("ALTER TABLE item ADD COLUMN price numeric")
        source.run("INSERT INTO item VALUES (2, 'b', 1.5)")
        wait_until(lambda: len(sink.seen) == 2, what="the change is published")
    assert events(sink)[1].after == {"id": 2, "name": "b", "price": "1.5"}


def test_a_message_that_the_broker_refuses_ends_the_capture_with_its_reason(
    source: Source,
) -> None:
    """To leave a change out would be a silent loss; nothing of it is confirmed."""
    sink = Recorder()
    Relay(source.cdc(sink)).run_once()
    source.run("INSERT INTO item VALUES (1, 'a')")
    Relay(source.cdc(probe := Recorder())).run_once()
    source.run("INSERT INTO item VALUES (2, 'b')")
    sink.refuse_all = True
    with pytest.raises(ConfigurationError, match=r"public.item with key \{\"id\":2\} is refused"):
        Relay(source.cdc(sink)).run()
    sink.refuse_all = False
    Relay(source.cdc(sink)).run_once()
    assert told(probe) == [("c", 1, "a")]
    assert told(sink) == [("c", 2, "b")]


def test_a_second_capture_stands_by(source: Source) -> None:
    """One reader per slot; the next goes on when the first ends."""
    one, two = Recorder(), Recorder()
    first, second = source.cdc(one), source.cdc(two)
    wait_until(lambda: first.step().idle, what="the first one streams", every=0)
    wait_until(lambda: second.step().standby, what="the second one stands by", every=0)
    first.close()
    source.run("INSERT INTO item VALUES (1, 'a')")
    with running(second):
        wait_until(lambda: two.seen, what="the second one goes on")
    assert one.seen == []


def test_nonsense_is_refused_with_the_fix(source: Source) -> None:
    """Before anything is created on the server."""
    sink = Recorder()
    with pytest.raises(ConfigurationError, match="name the tables"):
        Cdc(source.engine, sink, tables=[], server="s")
    with pytest.raises(ConfigurationError, match="begins the topics"):
        Cdc(source.engine, sink, tables=["item"], server="a b")
    with pytest.raises(ConfigurationError, match="table missing does not exist"):
        Relay(source.cdc(sink, "missing")).run()
    with pytest.raises(ConfigurationError, match="cannot be captured"):
        Cdc("sqlite://", sink, tables=["t"], server="s")


def test_the_command_captures_a_table_into_a_broker(source: Source, tmp_path: Path) -> None:
    """`holdfast cdc --once` publishes what is there, with topics made on demand."""
    source.run("INSERT INTO item VALUES (1, 'a')")
    url = source.engine.url.render_as_string(hide_password=False)
    broker_url = f"sqlite:///{tmp_path}/b.db"
    arguments = ["--database", url, "--broker", broker_url, "--server", source.server]
    arguments += ["--table", "item", "--create-topics", "--once", "--log-format", "text"]
    done = shell("cdc", *arguments)
    assert done.returncode == 0, done.stderr
    assert "published 1 changes" in done.stdout + done.stderr
    broker = connect(broker_url)
    reader = broker.source([f"{source.server}.public.item"], group="g")
    (delivery,) = wait_until(lambda: reader.poll(10, 1.0), deadline=60, what="the change")
    assert change_event(delivery.message).after == {"id": 1, "name": "a"}
    reader.close()
    broker.close()
