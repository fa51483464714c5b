"""Poison patterns: what failed payloads have and healthy ones have not.

For each failure group the share of payloads with a value, or without a field, is held against the
same share in a sample of payloads that were handled. What is in at least half of the failed ones,
and at least twice as often as among the healthy, is a pattern; its lift says how much more often.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError
from holdfast.spark_jobs.analytics.inputs import specs_of
from holdfast.spark_jobs.analytics.payloads import FACTS_DDL, counted_facts
from holdfast.spark_jobs.analytics.results import (
    EVERYTHING,
    PoisonPattern,
    PoisonResult,
    Ran,
    Scope,
)
from holdfast.spark_jobs.errors import translated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from holdfast.spark_jobs.analytics.inputs import Source
    from holdfast.spark_jobs.analytics.spark_engine import SparkEngine

FEWEST = 20
"""Smaller groups have no patterns: chance would make them."""
_SHARE, _LIFT = 0.5, 2.0
_PER_GROUP, _MOST = 5, 1_000


def poison_patterns(
    engine: SparkEngine,
    source: Source,
    healthy: Source,
    scope: Scope = EVERYTHING,
    *,
    hidden: frozenset[str] = frozenset(),
) -> PoisonResult:
    """Return what separates the payloads of *source* from the sample *healthy*."""
    from pyspark.sql import functions as f

    began = time.monotonic()
    with translated():
        count = partial(counted_facts, hidden=hidden)
        letters = engine.letters(source, ("payload",), scope).persist()
        failed = _summed(letters.mapInArrow(count, FACTS_DDL)).persist()
        usual = _summed(_payloads(engine, healthy).mapInArrow(count, FACTS_DDL)).persist()
        try:
            records = _total(failed)
            sample = _total(usual)
            if records and not sample:
                raise ConfigurationError(
                    "the healthy sample is empty: nothing can be held against the failed payloads"
                )
            found = _patterns(failed, usual, sample).collect() if records else []
            ids = sorted({row["group_id"] for row in found})
            names = {
                row["group_id"]: row
                for row in letters.filter(f.col("group_id").isin(ids)).groupBy("group_id")
                .agg(f.min("about").alias("about"))
                .select("group_id", "about.title", "about.consumer_group").collect()
            } if ids else {}  # fmt: skip
        finally:
            for frame in (letters, failed, usual):
                frame.unpersist()
    return PoisonResult(
        ran=Ran(engine=engine.name, why=engine.why, records=records,
                seconds=round(time.monotonic() - began, 3)),
        healthy=sample,
        patterns=tuple(
            PoisonPattern(title=names[row["group_id"]]["title"],
                          consumer_group=names[row["group_id"]]["consumer_group"],
                          **{name: row[name] for name in _COLUMNS})
            for row in found
        ),
    )  # fmt: skip


_COLUMNS = ("group_id", "path", "what", "value", "failed", "healthy", "lift", "support")


def _payloads(engine: SparkEngine, healthy: Source) -> DataFrame:
    """Return the payloads of the sample: any files with a column `payload`."""
    frames = []
    for spec in specs_of(healthy):
        if spec.kind != "files":
            raise ConfigurationError(
                "the healthy sample is read from files with a column payload, e.g. parquet:healthy/"
            )
        found = engine.spark.read.format(spec.format).load(spec.place)
        if "payload" not in found.columns:
            raise ConfigurationError(
                f"{spec.place} has no column payload, but {', '.join(found.columns)[:200]}"
            )
        frames.append(found.selectExpr("CAST(payload AS binary) AS payload"))
    whole = frames[0]
    for more in frames[1:]:
        whole = whole.union(more)
    return whole


def _summed(facts: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    return facts.groupBy("group_id", "path", "what", "value").agg(f.sum("n").alias("n"))


def _total(facts: DataFrame) -> int:
    from pyspark.sql import functions as f

    row = facts.filter("what = 'records'").agg(f.coalesce(f.sum("n"), f.lit(0))).first()
    return 0 if row is None else int(row[0])


def _patterns(failed: DataFrame, usual: DataFrame, sample: int) -> DataFrame:
    """Return the patterns of each group that is large enough, the strongest of it."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    groups = (
        failed.filter(f"what = 'records' AND n >= {FEWEST}")
        .select("group_id", f.col("n").alias("size"))
    )  # fmt: skip
    healthy = usual.select("path", "what", "value", f.col("n").alias("usual"))
    values = (
        failed.filter("what = 'value'").join(groups, "group_id")
        .join(healthy.filter("what = 'value'"), ["path", "what", "value"], "left")
        .select("group_id", "path", "what", "value", "n", "size",
                f.coalesce("usual", f.lit(0)).alias("usual"))
    )  # fmt: skip
    fields = healthy.filter(f"what = 'present' AND usual >= {sample * _SHARE}")
    present = failed.filter("what = 'present'").select("group_id", "path", "n")
    absent = (
        groups.crossJoin(fields.select("path", "usual"))
        .join(present, ["group_id", "path"], "left")
        .select("group_id", "path", f.lit("missing").alias("what"), f.lit("").alias("value"),
                (f.col("size") - f.coalesce("n", f.lit(0))).alias("n"), "size",
                (f.lit(sample) - f.col("usual")).alias("usual"))
    )  # fmt: skip
    lift = f.col("failed") / f.greatest(f.col("healthy"), f.lit(1 / (sample + 1)))
    strongest = Window.partitionBy("group_id").orderBy(f.desc("lift"), f.desc("failed"), "path")
    return (
        values.unionByName(absent)
        .withColumn("failed", f.round(f.col("n") / f.col("size"), 4))
        .withColumn("healthy", f.round(f.col("usual") / sample, 4))
        .withColumn("lift", f.round(lift, 2))
        .filter((f.col("failed") >= _SHARE) & (f.col("lift") >= _LIFT))
        .withColumn("place", f.row_number().over(strongest))
        .filter(f.col("place") <= _PER_GROUP)
        .orderBy(f.desc("size"), "group_id", "place")
        .limit(_MOST)
        .withColumnRenamed("n", "support")
        .select(*_COLUMNS)
    )
