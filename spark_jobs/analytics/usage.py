"""Schema usage: which types, versions and fields occur, since when and until when.

What may be dropped is told from what was not seen for long: the newest moment of all records is
the measure, not today's date, for an archive may be old.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from holdfast.spark_jobs.analytics.payloads import USAGE_DDL, counted_usage
from holdfast.spark_jobs.analytics.results import EVERYTHING, FieldUsage, Ran, Scope, UsageResult
from holdfast.spark_jobs.errors import translated

if TYPE_CHECKING:
    from holdfast.spark_jobs.analytics.inputs import Source
    from holdfast.spark_jobs.analytics.spark_engine import SparkEngine

_MOST = 5_000
DAY = 86_400


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
