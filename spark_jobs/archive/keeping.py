"""Keeping an archive in order: compaction, expiry, and the erasure of a subject.

Each writes some files anew and commits that in one step, as `add` does: killed at any moment it
leaves the archive as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from holdfast.dlq.store.rows import CLOSED
from holdfast.errors import ConfigurationError
from holdfast.spark_jobs.archive.state import Erased
from holdfast.spark_jobs.archive.table import ArchiveChange, digest, file_name, require_rows, short

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column

    from holdfast.spark_jobs.archive.state import ArchiveState, DataFile
    from holdfast.spark_jobs.archive.table import Archive

TARGET = 128 * 1024 * 1024
"""Bytes that a file should have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a run changed: files before and after, and records that are gone."""

    files_before: int = 0
    files_after: int = 0
    deleted: int = 0
    total: int = 0


def compact(archive: Archive, *, target: int = TARGET) -> Kept:
    """Join the small files of a day into few; the records stay the same."""
    before = archive.state()
    by_day: dict[str, list[DataFile]] = {}
    for file in before.files:
        if file.bytes < target // 2:
            by_day.setdefault(file.day, []).append(file)
    small = [file for files in by_day.values() if len(files) > 1 for file in files]
    if not small:
        return Kept(files_before=len(before.files), files_after=len(before.files),
                    total=before.rows)  # fmt: skip
    with archive.run() as run:
        added = archive.write(run, "compact", archive.read(small))
        require_rows(added, sum(file.rows for file in small))
        change = ArchiveChange(added=added, removed=[file.path for file in small])
        state = archive.commit(before, run, change, "compact")
    return Kept(files_before=len(before.files), files_after=len(state.files), total=state.rows)


def expire(archive: Archive, *, older_than: float, pending_too: bool = False) -> Kept:
    """Delete records whose last failure is *older_than* seconds ago, and that are closed.

    Those that are pending stay unless *pending_too*: nobody has decided about them. Records of
    unknown time stay.
    """
    from pyspark.sql import functions as F  # noqa: N812

    before = archive.state()
    until = archive.clock.now().timestamp() - older_than
    old = [file for file in before.files if file.first is not None and file.first < until]
    expired: Column = F.col("failed_at") < F.timestamp_seconds(F.lit(until))
    if not pending_too:
        expired = expired & F.col("state").isin(*CLOSED)
    return _without(archive, before, old, expired, operation="expire", reason="")


def erase(archive: Archive, subject: str, *, reason: str) -> Kept:
    """Delete every record of *subject*, and the files that held them, at once.

    The log keeps a digest, so that older records of the subject that a store or a topic still
    has are not taken in again.
    """
    from pyspark.sql import functions as F  # noqa: N812

    if not subject or not reason:
        raise ConfigurationError("whom, and why? give a subject and a reason")
    before = archive.state()
    if not before.files and not before.salt:
        return Kept()
    now = archive.clock.now().timestamp()
    erased = Erased(digest(before, subject), now)
    marked = msgspec.structs.replace(before, erased=(*before.erased, erased))
    return _without(
        archive, marked, before.files, F.col("subject") == subject, operation="erase",
        reason=reason, at_once=True,
    )  # fmt: skip


def _without(
    archive: Archive,
    before: ArchiveState,
    candidates: Sequence[DataFile],
    gone: Column,
    *,
    operation: str,
    reason: str,
    at_once: bool = False,
) -> Kept:
    """Commit the archive without the records that are *gone* from the *candidates*."""
    from pyspark.sql import functions as F  # noqa: N812

    hit = F.coalesce(gone, F.lit(False))
    counted = (
        archive.raw(candidates).where(hit).groupBy(file_name().alias("file"))
        .count().collect() if candidates else []
    )  # fmt: skip
    gone_by = {row["file"]: row["count"] for row in counted}
    old = [file for file in candidates if short(file.path) in gone_by]
    deleted = sum(gone_by.values())
    same = Kept(files_before=len(before.files), files_after=len(before.files), total=before.rows)
    if not old and operation != "erase":
        return same
    with archive.run() as run:
        added: list[DataFile] = []
        if sum(file.rows for file in old) > deleted:
            added = archive.write(run, operation, archive.read(old).where(~hit))
        require_rows(added, sum(file.rows for file in old) - deleted)
        change = ArchiveChange(added=added, removed=[file.path for file in old])
        state = archive.commit(before, run, change, operation, reason=reason)
    if at_once:
        # What was replaced earlier may hold the same person, too: the older files go with it.
        archive.forget([file.path for file in old] + [one.path for one in state.dropped])
    return Kept(files_before=len(before.files), files_after=len(state.files), deleted=deleted,
                total=state.rows)  # fmt: skip
