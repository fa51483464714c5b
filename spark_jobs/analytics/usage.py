"""Schema usage: which types, versions and fields occur, since when and until when.

What may be dropped is told from what was not seen for long: the newest moment of all records is
the measure, not today's date, for an archive may be old.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.spark_jobs.analytics.payloads import USAGE_DDL, counted_usage
from holdfast.spark_jobs.analytics.results import EVERYTHING, Ran, Scope
from holdfast.spark_jobs.errors import translated

if TYPE_CHECKING:
    from holdfast.spark_jobs.analytics.inputs import Source
    from holdfast.spark_jobs.analytics.spark_engine import SparkEngine

_MOST = 5_000
DAY = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldUsage:
    """A type, a version of it, or a field: how often, since when, last when."""

    type: str
    version: str
    path: str
    """Empty for the version itself."""
    kind: str
    """`event`, or the JSON type of the field."""
    count: int
    share: float
    """Of the events of that type and version."""
    first: float | None
    last: float | None
    unused: bool
    """Not seen in the last days that were asked about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageResult:
    """What occurs, by type and version."""

    ran: Ran
    fields: tuple[FieldUsage, ...]
    unused_days: float


def schema_usage(
    engine: SparkEngine,
    source: Source,
    scope: Scope = EVERYTHING,
    *,
    unused_days: float = 30.0,
) -> UsageResult:
    """Return which types, versions and fields occur in *source*."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    began = time.monotonic()
    with translated():
        chosen = engine.records(source, ("type", "schema_ref", "payload"), scope)
        sums = (
            chosen.mapInArrow(counted_usage, USAGE_DDL)
            .groupBy("type", "version", "path", "kind")
            .agg(f.sum("n").alias("count"), f.min("first").alias("first"),
                 f.max("last").alias("last"))
        )  # fmt: skip
        whole = Window.partitionBy("type", "version")
        rows = (
            sums.withColumn(
                "events", f.max(f.when(f.col("path") == "", f.col("count"))).over(whole)
            )
            .withColumn("newest", f.max("last").over(Window.partitionBy(f.lit(0))))
            .orderBy("type", "version", "path", "kind")
            .limit(_MOST)
            .collect()
        )
    return UsageResult(
        ran=Ran(engine=engine.name, why=engine.why,
                records=sum(row["count"] for row in rows if not row["path"]),
                seconds=round(time.monotonic() - began, 3)),
        unused_days=unused_days,
        fields=tuple(
            FieldUsage(
                type=row["type"], version=row["version"], path=row["path"], kind=row["kind"],
                count=row["count"], share=round(row["count"] / row["events"], 4),
                first=row["first"], last=row["last"],
                unused=row["last"] is not None and row["last"] < row["newest"] - unused_days * DAY,
            )
            for row in rows
        ),
    )  # fmt: skip
