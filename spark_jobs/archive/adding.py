"""Adding to an archive: what is new or has changed, each letter once.

First everything that comes in is written as files of the run. Then those are held against the
days of the archive that they touch: a letter that is there already is left out, and one that
changed takes the place of the old one, whose file is written anew. At last one commit makes it
all visible, together with how far the sources were read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError
from holdfast.spark_jobs import records
from holdfast.spark_jobs.archive.marks import store_horizon
from holdfast.spark_jobs.archive.table import (
    ArchiveChange,
    day_of,
    file_name,
    not_erased,
    require_rows,
    short,
)
from holdfast.spark_jobs.sources import SourceSpec, read
from holdfast.spark_jobs.store import read_store
from holdfast.spark_jobs.topics import kafka_ends, read_kafka
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import Column, DataFrame

    from holdfast.spark_jobs.archive.state import ArchiveState, DataFile
    from holdfast.spark_jobs.archive.table import Archive

OVERLAP = 86_400.0
"""Seconds before the last run in which letters may have changed by other hosts' clocks."""
PATIENCE = 30.0
"""Seconds to wait for transactions that are open when the store is read."""
_STAMP = ("state", "occurrences", "revision", "replay_count", "group_id", "closed_at",
          "last_failed_at", "retries", "verdict")  # fmt: skip
"""What changes of a stored letter."""
_CHANGES = ("stored_at", "closed_at", "last_failed_at")
"""When a stored letter changed, in the store's own columns."""
_RANK = ("occurrences", "last_failed_at", "revision", "replay_count", "closed_at")
"""Of two copies from topics or files, the one that knows more stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What a run of `add` did."""

    read: int = 0
    new: int = 0
    changed: int = 0
    known: int = 0
    files: int = 0
    total: int = 0
    newer: int = 0
    """Records that a newer version of Holdfast wrote; kept as far as this one knows them."""
    outliers: int = 0
    """Records whose host had a wrong clock."""
    unsettled: tuple[str, ...] = ()
    """Stores in which a transaction was still open: read again next time, nothing is missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Incoming:
    frame: DataFrame
    key: str
    mark: Mapping[str, Any] = field(default_factory=dict)
    is_settled: bool = True


def add(
    archive: Archive,
    sources: Sequence[str],
    *,
    full: bool = False,
    patience: float = PATIENCE,
    **reading: Any,
) -> Added:
    """Add what *sources* have and the archive has not; all of them is read again with *full*.

    Killed at any moment it leaves the archive as it was, and the next run reads the same again.
    """
    before = archive.state()
    with archive.run() as run:
        came = [_incoming(archive, before, one, full, patience, reading) for one in sources]
        frames = [not_erased(one.frame, before) for one in came]
        frame = reduce(lambda one, other: one.unionByName(other), frames)
        staged = archive.write(run, "new", _latest(frame))
        change, counts = _merged(archive, before, run, staged)
        marks = {**before.marks, **{one.key: dict(one.mark) for one in came if one.mark}}
        used = {file.path for file in change.added}
        archive.forget(sorted(file.path for file in staged if file.path not in used))
        state = before
        if change.added or change.removed or marks != before.marks:
            state = archive.commit(before, run, change, "add", marks=marks)
        if not change.added:
            archive.abandon(run)
    return Added(
        **counts,
        files=len(change.added),
        total=state.rows,
        unsettled=tuple(mask(one.key) for one in came if not one.is_settled),
    )


def _incoming(
    archive: Archive,
    state: ArchiveState,
    source: str,
    full: bool,
    patience: float,
    reading: Mapping[str, Any],
) -> _Incoming:
    spec = SourceSpec.parse(source, format=reading.get("format"))
    match spec.kind:
        case "store":
            return _store(archive, state, source, full, patience, reading)
        case "kafka":
            key = f"kafka://{spec.place}?topic={','.join(spec.topics)}"
            ends = kafka_ends(spec)
            start = None if full else state.marks.get(key, {}).get("offsets")
            if start is not None:  # partitions that were added since begin at their start
                start = {
                    topic: {part: start.get(topic, {}).get(part, -2) for part in parts}
                    for topic, parts in ends.items()
                }
            frame = read_kafka(archive.spark, spec, start=start, end=ends)
            return _Incoming(frame=frame, key=key, mark={"offsets": ends})
        case _:
            frame = read(archive.spark, spec, **{k: v for k, v in reading.items() if k != "format"})
            return _Incoming(frame=frame, key=mask(source))


def _store(
    archive: Archive,
    state: ArchiveState,
    source: str,
    full: bool,
    patience: float,
    reading: Mapping[str, Any],
) -> _Incoming:
    key = mask(source)
    known = state.marks.get(key, {})
    mark, since = int(known.get("seq", 0)), float(known.get("read_at", 0.0)) - OVERLAP
    began = archive.clock.now().timestamp()
    horizon = store_horizon(source, mark=mark, patience=patience, clock=archive.clock)
    # Later rows belong to the next run: what is read twice in one run could be two versions.
    where = f"seq <= {horizon.highest}"
    if known and not full:
        changed = " OR ".join(f"{name} >= {since!r}D" for name in _CHANGES)
        where = f"{where} AND (seq > {mark} OR {changed})"
    frame = read_store(
        archive.spark, source, partitions=reading.get("partitions"), where=where,
        low=None if full else mark,
    )  # fmt: skip
    return _Incoming(
        frame=frame,
        key=key,
        mark={"seq": horizon.settled, "read_at": began},
        is_settled=horizon.is_settled,
    )


def _latest(frame: DataFrame) -> DataFrame:
    """Return each letter of *frame* once, the copy that knows most."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    order = [F.col(name).desc_nulls_last() for name in ("seq", *_RANK)]
    numbered = F.row_number().over(Window.partitionBy("dlq_id").orderBy(*order))
    return frame.withColumn("_nth", numbered).where("_nth = 1").drop("_nth")


def _merged(
    archive: Archive, before: ArchiveState, run: str, staged: Sequence[DataFile]
) -> tuple[ArchiveChange, dict[str, int]]:
    """Return what of the *staged* files goes in and which old ones they replace, with counts."""
    from pyspark.sql import functions as F  # noqa: N812

    rows = sum(file.rows for file in staged)
    counts = {"read": rows, "new": rows, "changed": 0, "known": 0, **_oddities(archive, staged)}
    days = {file.day for file in staged}
    there = [file for file in before.files if file.day in days]
    if not staged or not there:
        return ArchiveChange(added=staged), counts
    pairs = _pairs(archive, staged, there)
    by_file = (
        pairs.groupBy("file", "day")
        .agg(F.sum(F.col("replaces").cast("int")).alias("replaced"), F.count("*").alias("met"))
        .collect()
    )
    replaced = sum(row["replaced"] for row in by_file)
    known = sum(row["met"] for row in by_file) - replaced
    counts |= {"new": rows - replaced - known, "changed": replaced, "known": known}
    if not by_file:
        return ArchiveChange(added=staged), counts
    names = {row["file"] for row in by_file if row["replaced"]}
    old = [file for file in there if short(file.path) in names]
    touched = {row["day"] for row in by_file}
    again = [file for file in staged if file.day in touched]
    losers = pairs.where("NOT replaces").select("dlq_id")
    winners = pairs.where("replaces").select("dlq_id")
    kept = archive.read(again).join(losers, "dlq_id", "left_anti")
    if old:
        kept = kept.unionByName(archive.read(old).join(winners, "dlq_id", "left_anti"))
    written = archive.write(run, "merged", kept.select(*records.NAMES))
    require_rows(written, sum(f.rows for f in again) - known + sum(f.rows for f in old) - replaced)
    added = [file for file in staged if file.day not in touched] + written
    return ArchiveChange(added=added, removed=[file.path for file in old]), counts


def _pairs(archive: Archive, staged: Sequence[DataFile], there: Sequence[DataFile]) -> DataFrame:
    """Return the letters that come in and are there already, and whether the new copy wins."""
    from pyspark.sql import functions as F  # noqa: N812

    new = archive.read(staged).select(
        "dlq_id", day_of().alias("day"), F.col("seq").isNotNull().alias("is_stored"),
        _stamp().alias("new_stamp"), _rank().alias("new_rank"),
    )  # fmt: skip
    old = archive.raw(there).select(
        "dlq_id", file_name().alias("file"), _stamp().alias("old_stamp"),
        _rank().alias("old_rank"),
    )  # fmt: skip
    differs = F.col("new_stamp") != F.col("old_stamp")
    knows_more = F.col("new_rank") > F.col("old_rank")
    # What the store says counts: it also knows what people have done.
    replaces = differs & (F.col("is_stored") | knows_more)
    return new.join(old, "dlq_id").select("dlq_id", "day", "file", replaces.alias("replaces"))


def _stamp() -> Column:
    from pyspark.sql import functions as F  # noqa: N812

    return F.concat_ws(
        "|", *[F.coalesce(F.col(name).cast("string"), F.lit("-")) for name in _STAMP]
    )


def _rank() -> Column:
    from pyspark.sql import functions as F  # noqa: N812

    return F.struct(
        *[F.coalesce(F.col(name).cast("double"), F.lit(-1.0)).alias(name) for name in _RANK]
    )


def _oddities(archive: Archive, staged: Sequence[DataFile]) -> dict[str, int]:
    from pyspark.sql import functions as F  # noqa: N812

    if not staged:
        return {"newer": 0, "outliers": 0}
    newer = F.count_if(F.col("record_version") > records.SCHEMA_VERSION)
    nameless = F.count_if(F.col("dlq_id").isNull())
    row: Any = archive.raw(staged).agg(newer, F.count_if("clock_outlier"), nameless).first()
    if row[2]:  # letters without an id look like one letter to all that follows
        raise ConfigurationError(
            "some records have no dlq_id, so nobody can tell them apart: nothing is archived; look "
            "for them in the files with  dlq_id IS NULL"
        )
    return {"newer": row[0], "outliers": row[1]}
