"""The archive: each letter once, bit by bit, and whatever is killed or full loses nothing."""

from __future__ import annotations

import os
import resource
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import select, update

from holdfast.cli import main
from holdfast.db.engine import open_database
from holdfast.dlq import create_tables
from holdfast.dlq.destination import DeadLetterStore
from holdfast.dlq.store.schema import message
from holdfast.errors import ConfigurationError
from holdfast.spark_jobs import records
from holdfast.spark_jobs.archive import adding
from holdfast.spark_jobs.archive.adding import add
from holdfast.spark_jobs.archive.keeping import compact, erase, expire
from holdfast.spark_jobs.archive.state import (
    ArchiveBusy,
    ArchiveState,
    HadoopFolder,
    LocalFolder,
    StateLog,
)
from holdfast.spark_jobs.archive.table import UNKNOWN_DAY, Archive, ArchiveChange
from holdfast.spark_jobs.errors import DiskFull, translated
from holdfast.spark_jobs.sources import read
from tests.spark_letters import NOW, StillClock, files_of, lettered, stored

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession
    from sqlalchemy.engine import Engine


def ids(archive: Archive) -> list[str]:
    """Return the letters of *archive*, sorted; twice where one is there twice."""
    return sorted(row[0] for row in archive.records().select("dlq_id").collect())


@pytest.fixture
def engine(postgres: Any) -> Iterator[Engine]:
    """Return a store on PostgreSQL, which Spark reads by itself: SQLite takes a Python for each."""
    found = open_database(postgres.database("spark_archive"))
    create_tables(found)
    yield found
    found.dispose()


def url_of(engine: Engine) -> str:
    """Return the URL of *engine*."""
    return engine.url.render_as_string(hide_password=False)


def test_what_a_store_has_is_archived_once_and_bit_by_bit(
    spark: SparkSession, tmp_path: Path, engine: Engine
) -> None:
    """New letters are added, changed ones replaced, known ones left alone."""
    archive, url = Archive(spark, f"{tmp_path}/letters"), url_of(engine)
    stored(engine, [lettered(n, NOW - timedelta(days=n % 3)) for n in range(30)])
    first = add(archive, [url])
    assert (first.read, first.new, first.total) == (30, 30, 30)
    assert {file.day for file in archive.state().files} == {
        "2026-11-08", "2026-11-09", "2026-11-10",
    }  # fmt: skip
    again = add(archive, [url], full=True)
    assert (again.new, again.changed, again.known, again.total) == (0, 0, 30, 30)

    stored(engine, [lettered(n) for n in range(30, 40)])
    with engine.begin() as db:
        some = db.execute(select(message.c.dlq_id).where(message.c.seq <= 3)).scalars().all()
        closed = {"state": "discarded", "closed_at": NOW.timestamp() + 9e8, "closed_by": "ada"}
        db.execute(update(message).where(message.c.dlq_id.in_(some)).values(**closed))
    second = add(archive, [url])
    assert (second.read, second.new, second.changed, second.total) == (13, 10, 3, 40)
    assert len(set(ids(archive))) == len(ids(archive)) == 40
    states = archive.records().groupBy("state").count().collect()
    assert {row["state"]: row["count"] for row in states} == {"pending": 37, "discarded": 3}
    # A run that finds nothing leaves nothing behind.
    files = archive.state().files
    third = add(archive, [url])
    assert (third.new, third.changed) == (0, 0)
    assert archive.state().files == files
    assert {file.path.split("/")[1] for file in files} == set(LocalFolder(
        tmp_path / "letters").names("data")) - _dropped(archive)  # fmt: skip


def _dropped(archive: Archive) -> set[str]:
    state = archive.state()
    used = {file.path.split("/")[1] for file in state.files}
    return {one.path.split("/")[1] for one in state.dropped} - used


def test_the_archived_letter_is_the_stored_one(spark: SparkSession, tmp_path: Path) -> None:
    """Bytes, headers, null keys and the whole envelope come back as they were: from SQLite."""
    engine = open_database(f"sqlite:///{tmp_path}/store.db")
    create_tables(engine)
    originals = [lettered(1, payload=b"\x00\xff\xfe"), lettered(2, key=None)]
    store = DeadLetterStore(engine)
    store.put_all(originals)
    archive = Archive(spark, f"{tmp_path}/letters")
    add(archive, [str(engine.url)])
    from holdfast.dlq.store.rows import letter_of

    found = [letter_of(records.row_of_record(row.asDict())) for row in archive.records().collect()]
    assert sorted(found, key=lambda one: one.dlq_id) == sorted(
        originals, key=lambda one: one.dlq_id
    )


def test_of_two_copies_the_one_that_knows_more_stays(spark: SparkSession, tmp_path: Path) -> None:
    """Topics hold a letter once per failure: one record stays, and an old copy changes nothing."""
    archive = Archive(spark, f"{tmp_path}/letters")
    early, late = lettered(1, NOW - timedelta(hours=2)), lettered(2, NOW)
    again = msgspec.structs.replace(
        early, history=msgspec.structs.replace(early.history, last_failed_at=NOW.timestamp())
    )
    source = files_of(tmp_path / "a", [early, again, late, late])
    assert add(archive, [source]).total == 2
    older = files_of(tmp_path / "b", [early])
    done = add(archive, [older])
    assert (done.known, done.changed, done.total) == (1, 0, 2)
    newest = msgspec.structs.replace(
        again, history=msgspec.structs.replace(again.history, last_failed_at=NOW.timestamp() + 60)
    )
    done = add(archive, [files_of(tmp_path / "c", [newest])])
    assert (done.changed, done.total) == (1, 2)
    last = {row[0]: row[1] for row in archive.records().select("dlq_id", "failed_at").collect()}
    assert last[early.dlq_id].replace(tzinfo=UTC).timestamp() == NOW.timestamp() + 60


def test_compaction_keeps_every_record_and_the_old_files_for_their_readers(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A day of many small files becomes one of few; a query that began before still ends."""
    archive = Archive(spark, f"{tmp_path}/letters", clock=StillClock(NOW))
    for n in range(4):
        add(
            archive,
            [files_of(tmp_path / f"in{n}", [lettered(n * 10 + m) for m in range(5)])],
        )
    before, running = ids(archive), archive.records()
    done = compact(archive)
    assert (done.files_before, done.files_after, done.total) == (4, 1, 20)
    assert ids(archive) == before
    assert running.count() == 20
    assert archive.swept() == 0
    later = Archive(spark, f"{tmp_path}/letters", clock=StillClock(NOW + timedelta(days=2)))
    assert later.swept() >= 4
    assert ids(later) == before
    assert len(list((tmp_path / "letters/data").rglob("*.parquet"))) == 1


def test_expiry_deletes_what_is_old_and_decided(spark: SparkSession, tmp_path: Path) -> None:
    """Pending letters stay unless it is said that they go, too; unknown times stay."""
    archive = Archive(spark, f"{tmp_path}/letters", clock=StillClock(NOW))
    old = NOW - timedelta(days=100)
    add(archive, [
        files_of(tmp_path / "closed", [lettered(1, old), lettered(2)], state="discarded"),
        files_of(tmp_path / "open", [lettered(3, old), lettered(4)]),
    ])  # fmt: skip
    done = expire(archive, older_than=90 * 86_400)
    assert (done.deleted, done.total) == (1, 3)
    assert expire(archive, older_than=90 * 86_400).deleted == 0
    assert expire(archive, older_than=90 * 86_400, pending_too=True).deleted == 1
    assert ids(archive) == sorted([lettered(2).dlq_id, lettered(4).dlq_id])


def test_an_erased_subject_is_gone_from_the_disk_and_does_not_come_back(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Not in a file, not in an older file, not by reading the same source again."""
    archive = Archive(spark, f"{tmp_path}/letters")
    source = files_of(tmp_path / "in", [
        lettered(1, subject="ada-4711", payload=b"ada's secret"), lettered(2, subject="bob"),
        lettered(3),
    ])  # fmt: skip
    add(archive, [source])
    compact(archive)
    done = erase(archive, "ada-4711", reason="request 17")
    assert (done.deleted, done.total) == (1, 2)
    left = [file for file in (tmp_path / "letters").rglob("*") if file.is_file()]
    assert not any(b"ada-4711" in file.read_bytes() for file in left)
    assert spark.read.parquet(*[str(f) for f in left if f.suffix == ".parquet"]).count() == 2
    assert add(archive, [source], full=True).total == 2
    assert archive.state().number == 2
    returned = lettered(9, datetime.now(UTC) + timedelta(hours=1), subject="ada-4711")
    assert add(archive, [files_of(tmp_path / "new", [returned])]).total == 3


def test_each_command_of_the_archive_writes_its_page(spark: SparkSession, tmp_path: Path) -> None:
    """Also those that find nothing to do."""
    place = f"{tmp_path}/letters"
    add(Archive(spark, place), [files_of(tmp_path / "in", [lettered(1)])])
    commands = {
        "compact": (),
        "expire": ("--older-than", "900d"),
        "erase": ("nobody", "--reason", "request 18"),
    }
    for name, words in commands.items():
        page = tmp_path / f"{name}.html"
        with pytest.raises(SystemExit) as ended:
            main(["spark", "archive", name, *words, "--to", place, "--report", str(page)])
        assert not ended.value.code
        assert "Dead letters by day" in page.read_text()


def test_two_jobs_at_once_are_one_job_and_an_error(spark: SparkSession, tmp_path: Path) -> None:
    """Whoever commits second is told so, and leaves no files."""
    archive = Archive(spark, f"{tmp_path}/letters")
    add(archive, [files_of(tmp_path / "a", [lettered(1)])])
    before = archive.state()
    other = Archive(spark, f"{tmp_path}/letters")
    with pytest.raises(ArchiveBusy), archive.run() as run:  # noqa: PT012 - a rival in between
        mine = archive.write(run, "new", archive.records())
        add(other, [files_of(tmp_path / "b", [lettered(2)])])
        archive.commit(before, run, ArchiveChange(added=mine), "add")
    assert ids(archive) == sorted([lettered(1).dlq_id, lettered(2).dlq_id])
    assert len(list((tmp_path / "letters/data").rglob("*.parquet"))) == 2


def test_a_full_disk_leaves_the_archive_as_it_was(spark: SparkSession, tmp_path: Path) -> None:
    """The job says so in one sentence, its files are removed, and the next run goes on."""
    archive = Archive(spark, f"{tmp_path}/letters")
    add(archive, [files_of(tmp_path / "a", [lettered(1)])])
    kept, before = archive.state(), ids(archive)
    noise = [lettered(n, payload=bytes((n * m) % 251 for m in range(4000))) for n in range(2, 80)]
    source = files_of(tmp_path / "b", noise)
    jvm = int(spark._jvm.java.lang.ProcessHandle.current().pid())
    with _room(jvm, 20_000), pytest.raises(DiskFull, match="make room"), translated():
        add(archive, [source])
    assert archive.state() == kept
    assert ids(archive) == before
    assert len(list((tmp_path / "letters/data").rglob("*.parquet"))) == 1
    assert add(archive, [source]).total == 79


class _room:  # noqa: N801 - used as a function, in `with`
    """Let no file of a process grow beyond some bytes: a write fails as on a full disk."""

    def __init__(self, pid: int, most: int) -> None:
        self._pid = pid
        self._most = most

    def __enter__(self) -> None:
        self._before = resource.prlimit(self._pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (self._most, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, self._before)


def test_a_disk_that_is_full_at_the_commit_is_told_too(tmp_path: Path) -> None:
    """The state before it counts, no draft is left, and the words are those of a full disk."""
    log = StateLog(LocalFolder(tmp_path))
    log.commit(ArchiveState(number=1))
    large = ArchiveState(number=2, operation="x" * 9000)
    with _room(os.getpid(), 4000), pytest.raises(DiskFull, match="make room"):
        log.commit(large)
    assert log.newest().number == 1
    assert [one.name for one in (tmp_path / "_holdfast").iterdir()] == ["000000000001.json"]


def test_letters_that_cannot_be_told_apart_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Without an id all of them would be taken for one letter, and the others be lost."""
    archive = Archive(spark, f"{tmp_path}/letters")
    source = files_of(tmp_path / "in", [lettered(1), lettered(2)], dlq_id=None)
    with pytest.raises(ConfigurationError, match="no dlq_id"):
        add(archive, [source])
    assert archive.state().number == 0


def test_clocks_that_cannot_be_right_share_one_day(spark: SparkSession, tmp_path: Path) -> None:
    """A host that lives in 1970 or 2099 makes no folder of its own, and is counted."""
    archive = Archive(spark, f"{tmp_path}/letters")
    wrong = [
        lettered(1, datetime(1970, 1, 2, tzinfo=UTC)),
        lettered(2, datetime(2099, 1, 1, tzinfo=UTC)),
    ]
    record = [records.record_of(one, stored_at=NOW.timestamp()) for one in [*wrong, lettered(3)]]
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_batches([records.batch_of(record)]), tmp_path / "x.parquet")
    done = add(archive, [f"parquet:{tmp_path}/x.parquet"])
    assert (done.outliers, done.total) == (2, 3)
    assert {file.day for file in archive.state().files} == {UNKNOWN_DAY, "2026-11-10"}
    moments = archive.records().select("failed_at").distinct().collect()
    assert [row[0].replace(tzinfo=UTC) for row in moments] == [NOW]


def test_an_empty_source_is_an_empty_archive(
    spark: SparkSession, tmp_path: Path, engine: Engine
) -> None:
    """Nothing to read is no error, and the archive can be read."""
    archive = Archive(spark, f"{tmp_path}/letters")
    done = add(archive, [url_of(engine)])
    assert (done.read, done.total) == (0, 0)
    assert read(spark, f"archive:{tmp_path}/letters").count() == 0


@pytest.mark.parametrize("kind", ["local", "hadoop"])
def test_a_state_is_committed_once(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """Of two commits of one number the second fails, and the first stays as it was."""
    where = LocalFolder(tmp_path) if kind == "local" else HadoopFolder(spark, f"file://{tmp_path}")
    where.put_new("_holdfast/000000000001.json", b'{"number": 1}')
    with pytest.raises(FileExistsError):
        where.put_new("_holdfast/000000000001.json", b'{"number": 2}')
    assert StateLog(where).newest().number == 1
    assert where.names("_holdfast") == ["000000000001.json"] or kind == "hadoop"
    assert [name for name, _ in where.files("")] == ["_holdfast/000000000001.json"] or (
        kind == "hadoop"
    )
    assert where.age("_holdfast", NOW.timestamp()) < 1e9
    where.delete("_holdfast")
    assert StateLog(where).newest().number == 0


def test_a_damaged_log_is_told_and_not_taken_for_an_empty_archive(tmp_path: Path) -> None:
    """Going on with an empty state would forget every file."""
    (tmp_path / "_holdfast").mkdir()
    (tmp_path / "_holdfast/000000000003.json").write_bytes(b'{"number": 3, "files"')
    with pytest.raises(ConfigurationError, match=r"000000000003\.json is damaged"):
        StateLog(LocalFolder(tmp_path)).newest()
    (tmp_path / "_holdfast/000000000004.json").write_bytes(b'{"number": 4, "format": 9}')
    with pytest.raises(ConfigurationError, match="upgrade Holdfast"):
        StateLog(LocalFolder(tmp_path)).newest()


def test_the_fields_that_tell_a_change_exist() -> None:
    """A renamed field would silently stop changes from being seen."""
    assert set(adding._STAMP) | set(adding._RANK) <= set(records.NAMES)
    assert set(adding._CHANGES) <= {one.name for one in message.columns}
