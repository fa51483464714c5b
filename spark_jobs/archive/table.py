"""The table of an archive: reading its newest state, and changing it in one step.

Files lie in `data/RUN/day=2026-11-18/`, by the day of the original event: that never changes, so
two copies of a letter always meet in one day. A job writes the files of a run, and commits a
state that names them. Until then nobody sees them; if it fails they are removed.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import HoldfastError
from holdfast.ids import new_id
from holdfast.spark_jobs import records
from holdfast.spark_jobs.archive.state import (
    ArchiveState,
    DataFile,
    Dropped,
    StateLog,
    folder,
)
from holdfast.spark_jobs.files import upgraded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

UNKNOWN_DAY = "unknown"
"""The day of events whose clock cannot be right: before 2000, or from 2060 on."""
GRACE = 86_400.0
"""Seconds for which files stay that belong to the archive no more: somebody may read them."""
_DATA = "data"
_DAY = (
    "CASE WHEN event_at >= TIMESTAMP '2000-01-01 00:00:00 UTC'"
    " AND event_at < TIMESTAMP '2060-01-01 00:00:00 UTC'"
    f" THEN date_format(event_at, 'yyyy-MM-dd') ELSE '{UNKNOWN_DAY}' END"
)
_SHORT = 4
"""RUN/part/day=…/file: names alone repeat from day to day."""
_MOST_ROWS = 1_000_000
"""Records of one file, at most."""


class ArchiveDamaged(HoldfastError):
    """The files do not hold what was written or what the log says; nothing was committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveChange:
    """What a run did: the new files, and those that they replace."""

    added: Sequence[DataFile] = ()
    removed: Iterable[str] = ()


class Archive:
    """An archive of dead letters at *place*, a folder of any file system that Spark knows."""

    def __init__(self, spark: SparkSession, place: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        is_local = "://" not in place
        self.spark = spark
        self.place = str(Path(place).absolute()) if is_local else place.rstrip("/")
        self.clock = clock
        self._folder = folder(spark, self.place)
        self._log = StateLog(self._folder)

    def state(self) -> ArchiveState:
        """Return the newest state."""
        return self._log.newest()

    def records(self, state: ArchiveState | None = None, days: Sequence[str] = ()) -> DataFrame:
        """Return the records of a state, the newest unless given; of *days* alone if given."""
        of = self.state() if state is None else state
        return self.read([file for file in of.files if not days or file.day in days])

    def read(self, files: Sequence[DataFile]) -> DataFrame:
        """Return the records in *files*, in whichever version they were written."""
        return upgraded(self.raw(files), of=self.place)

    def raw(self, files: Sequence[DataFile]) -> DataFrame:
        """Return the records in *files*, with Spark's own `_metadata` to be had."""
        if not files:
            return self.spark.createDataFrame([], records.ddl())
        paths = [f"{self.place}/{file.path}" for file in files]
        return self.spark.read.schema(records.ddl()).parquet(*paths)

    @contextmanager
    def run(self) -> Iterator[str]:
        """Yield the name of a new run; its files are removed when the body fails."""
        name = new_id()
        try:
            yield name
        except BaseException:
            with suppress(Exception):
                self.abandon(name)
            raise

    def write(self, run: str, part: str, frame: DataFrame) -> list[DataFile]:
        """Write records by day as files of *run*; return them, with what they hold."""
        where = f"{_DATA}/{run}/{part}"
        writer = (
            # Skewed days are split and small ones joined, by their real sizes.
            frame.select(*records.NAMES, day_of().alias("day"))
            .hint("rebalance", "day")
            .write.partitionBy("day")
            .option("maxRecordsPerFile", _MOST_ROWS)
            .mode("error")
        )
        writer.parquet(f"{self.place}/{where}")
        return self._described(where)

    def _described(self, where: str) -> list[DataFile]:
        """Return the files in the folder *where*; what is in them is counted by Spark."""
        from pyspark.sql import functions as F  # noqa: N812

        sizes = [one for one in self._folder.files(where) if one[0].endswith(".parquet")]
        if not sizes:
            return []
        frame = self.spark.read.schema("dlq_id string, failed_at timestamp").parquet(
            *[f"{self.place}/{path}" for path, _ in sizes]
        )
        counted = frame.groupBy(file_name().alias("name")).agg(
            F.count("*").alias("rows"),
            F.min("failed_at").cast("double").alias("first"),
            F.max("failed_at").cast("double").alias("last"),
        )
        found = {row["name"]: row for row in counted.collect()}
        return [_file(path, size, found) for path, size in sizes]

    def commit(
        self, before: ArchiveState, run: str, change: ArchiveChange, operation: str, **more: Any
    ) -> ArchiveState:
        """Commit what *run* did to the state *before*; `ArchiveBusy` if that is not the newest."""
        now = self.clock.now().timestamp()
        removed = set(change.removed)
        state = msgspec.structs.replace(
            before,
            number=before.number + 1,
            run=run,
            at=now,
            operation=operation,
            reason=more.pop("reason", ""),
            files=(*(f for f in before.files if f.path not in removed), *change.added),
            dropped=(*before.dropped, *(Dropped(path, now) for path in sorted(removed))),
            salt=before.salt or new_id(),
            **more,
        )
        self._log.commit(state)
        return state

    def forget(self, paths: Iterable[str]) -> None:
        """Delete files of which no state speaks any more."""
        for path in paths:
            self._folder.delete(path)

    def swept(self, grace: float = GRACE) -> int:
        """Delete what has left the archive *grace* seconds ago, and runs that never committed.

        Return how many files and runs that were.
        """
        state, now = self.state(), self.clock.now().timestamp()
        old = [one.path for one in state.dropped if now - one.at >= grace]
        self.forget(old)
        used = {file.path.split("/")[1] for file in state.files}
        used |= {one.path.split("/")[1] for one in state.dropped if one.path not in old}
        lost = [
            name
            for name in self._folder.names(_DATA)
            if name not in used and self._folder.age(f"{_DATA}/{name}", now) >= grace
        ]
        self.forget(f"{_DATA}/{name}" for name in lost)
        if old:
            kept = tuple(one for one in state.dropped if one.path not in set(old))
            with self.run() as run:
                after = msgspec.structs.replace(state, dropped=kept)
                self.commit(after, run, ArchiveChange(), "sweep")
        return len(old) + len(lost)

    def abandon(self, run: str) -> None:
        """Delete the files of *run*, of which no state speaks."""
        self._folder.delete(f"{_DATA}/{run}")


def _file(path: str, size: int, found: dict[str, Any]) -> DataFile:
    day, row = path.split("/")[-2].removeprefix("day="), found.get(short(path))
    if row is None:
        return DataFile(path=path, day=day, rows=0, bytes=size)
    return DataFile(
        path=path, day=day, rows=row["rows"], bytes=size, first=row["first"], last=row["last"]
    )


def day_of() -> Column:
    """Return the day of a record: of its original event, which never changes."""
    from pyspark.sql import functions as F  # noqa: N812

    return F.expr(_DAY)


def digest(state: ArchiveState, subject: str) -> str:
    """Return what stands for *subject* in the log."""
    return hashlib.sha256(f"{state.salt}:{subject}".encode()).hexdigest()


def not_erased(frame: DataFrame, state: ArchiveState) -> DataFrame:
    """Return *frame* without records of erased subjects that are older than the erasure."""
    from pyspark.sql import functions as F  # noqa: N812

    if not state.erased:
        return frame
    own = F.sha2(F.concat(F.lit(f"{state.salt}:"), F.col("subject")), 256)
    known = F.lit(False)
    for one in state.erased:
        at = F.coalesce(F.col("failed_at").cast("double"), F.lit(0.0))
        known = known | ((own == one.digest) & (at <= one.at))
    return frame.where(~F.coalesce(known, F.lit(False)))


def file_name() -> Column:
    """Return the name of the file that a record is in, as `short` writes it."""
    from pyspark.sql import functions as F  # noqa: N812

    return F.substring_index(F.col("_metadata.file_path"), "/", -_SHORT)


def short(path: str) -> str:
    """Return *path* without what Spark writes in its own way; the run and the day stay."""
    return "/".join(path.split("/")[-_SHORT:])


def require_rows(written: Sequence[DataFile], expected: int) -> None:
    """Raise `ArchiveDamaged` unless *written* holds as many records as *expected*."""
    found = sum(file.rows for file in written)
    if found != expected:
        raise ArchiveDamaged(
            f"{found:,} records were written where {expected:,} were due: nothing is committed; "
            "run it again, and look for files that were removed by hand if it stays so"
        )
