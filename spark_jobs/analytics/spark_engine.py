"""The questions by Spark: the same answers as DuckDB's, over what outgrows one machine.

Records get their fingerprints on the executors (`mapInArrow`), and are summed up where they are.
What comes to the driver is an answer: the largest groups, the unusual hours, never records. What
is used twice is kept on the executors, in memory or on disk.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from holdfast.spark_jobs.analytics import series
from holdfast.spark_jobs.analytics.fingerprints import (
    ABOUT,
    ABOUT_DDL,
    NEEDED,
    fingerprinted,
)
from holdfast.spark_jobs.analytics.found import (
    MOST_LISTED,
    found_nothing,
    inferred_deploys,
    with_clusters,
)
from holdfast.spark_jobs.analytics.inputs import dimension_error, specs_of
from holdfast.spark_jobs.analytics.results import (
    EVERYTHING,
    MOST_GROUPS,
    Anomaly,
    BlastResult,
    DeployEffect,
    GroupName,
    GroupRadius,
    Ran,
    Scope,
    TenantRadius,
    TrendsResult,
    TriageGroup,
    TriageResult,
)
from holdfast.spark_jobs.errors import translated
from holdfast.spark_jobs.sources import read

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from holdfast.spark_jobs.analytics.inputs import Dimension, Source
    from holdfast.spark_jobs.analytics.results import Deployed

_MOST_VERSIONS = 10_000
_FOUND = (
    "kind string, group_id string, start double, hours int, observed bigint, expected double, "
    "level string, consumer_group string, version string, before double, after double, "
    "verdict string, weight double"
)
_FOUND_ARROW = pa.schema([
    ("kind", pa.string()), ("group_id", pa.string()), ("start", pa.float64()),
    ("hours", pa.int32()), ("observed", pa.int64()), ("expected", pa.float64()),
    ("level", pa.string()), ("consumer_group", pa.string()), ("version", pa.string()),
    ("before", pa.float64()), ("after", pa.float64()), ("verdict", pa.string()),
    ("weight", pa.float64()),
])  # fmt: skip


class SparkEngine:
    """Answers on the cluster of *spark*."""

    name = "spark"

    def __init__(
        self, spark: SparkSession, *, why: str = "asked for", partitions: int | None = None
    ) -> None:
        self.spark = spark
        self.why = why
        self._partitions = partitions

    def triage(
        self,
        source: Source,
        scope: Scope = EVERYTHING,
        *,
        output: str | None = None,
    ) -> TriageResult:
        """Return the failure groups of *source*; *output* is a folder for all of them (Parquet)."""
        from pyspark.sql import functions as f

        began = time.monotonic()
        with translated(), self._kept(self._groups(source, scope)) as groups:
            total, count, outliers, undated = groups.agg(
                f.count("*"), *(f.coalesce(f.sum(name), f.lit(0)) for name in
                                ("count", "outliers", "undated"))).first() or (0,) * 4  # fmt: skip
            largest = groups.orderBy(f.desc("count"), "group_id").limit(MOST_GROUPS)
            named = [f.col(f"about.{name}").alias(name) for name in ABOUT.names]
            columns = ("group_id", "count", "first", "last", "keys", "tenants")
            rows = largest.select(*columns, *named).collect()
            if output is not None:
                groups.select(*columns, *named).write.mode("error").parquet(output)
        ran = self._ran(count, began, outliers, undated)
        return with_clusters(ran, [TriageGroup(**row.asDict()) for row in rows], total=total)

    def _groups(self, source: Source, scope: Scope) -> DataFrame:
        from pyspark.sql import functions as f

        return (
            self.letters(source, ("key_hash", "tenant"), scope)
            .groupBy("group_id")
            .agg(
                f.count("*").alias("count"), f.min("at").alias("first"), f.max("at").alias("last"),
                f.min("about").alias("about"),
                f.approx_count_distinct("key_hash", 0.02).alias("keys"),
                f.approx_count_distinct("tenant", 0.02).alias("tenants"),
                f.count_if("clock_outlier").alias("outliers"),
                f.count_if(f.col("at").isNull()).alias("undated"),
            )
        )  # fmt: skip

    def trends(
        self,
        source: Source,
        scope: Scope = EVERYTHING,
        *,
        deploys: Sequence[Deployed] | None = None,
    ) -> TrendsResult:
        """Return the failures by hour; without *deploys*, versions are known by first failures."""
        from pyspark.sql import functions as f

        began = time.monotonic()
        with translated(), self._kept(self._hourly(source, scope)) as hourly:
            count, outliers, undated, first, last = hourly.agg(
                f.coalesce(f.sum("n"), f.lit(0)), f.coalesce(f.sum("outliers"), f.lit(0)),
                f.coalesce(f.sum(f.when(f.col("hour").isNull(), f.col("n"))), f.lit(0)),
                f.min("hour"), f.max("hour")).first() or (0, 0, 0, None, None)  # fmt: skip
            if first is None or last is None:
                return found_nothing(self._ran(count, began, outliers, undated))
            dated = hourly.filter("hour IS NOT NULL")
            known = inferred_deploys(_versions(dated), first) if deploys is None else deploys
            with self._kept(_loud(dated).mapInArrow(
                    partial(_analysed, first=first, last=last, deploys=list(known)),
                    _FOUND)) as found:  # fmt: skip
                odd, effects, left_out = _listed(found)
            sums = dated.groupBy("hour").agg(f.sum("n").alias("n")).collect()
            overall = series.dense(
                np.array([row["hour"] for row in sums]), np.array([row["n"] for row in sums]),
                first, last,
            )  # fmt: skip
            ids = sorted({one.group_id for one in odd} | {one.group_id for one in effects})
            names = (
                hourly.filter(f.col("group_id").isin(ids)).groupBy("group_id")
                .agg(f.min("about").alias("about")).orderBy("group_id")
                .select("group_id", "about.title", "about.consumer_group").collect()
            ) if ids else []  # fmt: skip
        return TrendsResult(
            ran=self._ran(count, began, outliers, undated), first_hour=first,
            hourly=tuple(int(n) for n in overall),
            usual=tuple(round(float(n), 3) for n in series.usual(overall)),
            anomalies=odd, effects=effects, left_out=left_out,
            named=tuple(GroupName(**row.asDict()) for row in names),
        )  # fmt: skip

    def _hourly(self, source: Source, scope: Scope) -> DataFrame:
        from pyspark.sql import functions as f

        letters = self.letters(source, ("consumer_group", "service_version"), scope)
        hour = f.floor(f.col("at") / 3600).alias("hour")
        return letters.groupBy("group_id", "consumer_group", "service_version", hour).agg(
            f.count("*").alias("n"),
            f.min("at").alias("first"),
            f.min("about").alias("about"),
            f.count_if("clock_outlier").alias("outliers"),
        )

    def blast_radius(
        self,
        source: Source,
        scope: Scope = EVERYTHING,
        *,
        dimension: Dimension | None = None,
    ) -> BlastResult:
        """Return whom the failures hit, and what that is worth by *dimension*."""
        from pyspark.sql import functions as f

        began = time.monotonic()
        with translated(), self._kept(self._pairs(source, scope)) as pairs:
            named = pairs.filter("entity IS NOT NULL")
            table = self._dimension(dimension)
            distinct = named.select("entity").distinct()
            with self._kept(distinct.join(table, distinct["entity"] == table["key"], "left")
                            .select("entity", "value")) as worth:  # fmt: skip
                counted = worth.agg(f.count("*"), f.sum("value"), f.count("value"))
                entities, value, known = counted.first() or (0, None, 0)
                tenants, without, count, groups, outliers, undated = pairs.agg(
                    f.count_distinct("tenant"),
                    f.coalesce(f.sum(f.when(f.col("entity").isNull(), f.col("n"))), f.lit(0)),
                    f.coalesce(f.sum("n"), f.lit(0)), f.count_distinct("group_id"),
                    f.coalesce(f.sum("outliers"), f.lit(0)),
                    f.coalesce(f.sum("undated"), f.lit(0))).first() or (0,) * 6  # fmt: skip
                by_group = _by_group(pairs, named, worth)
                by_tenant = _by_tenant(pairs, named, worth)
        return BlastResult(
            ran=self._ran(count, began, outliers, undated), entities=entities, tenants=tenants,
            value=_rounded(value), without_entity=int(without), groups_total=groups,
            unknown_entities=0 if dimension is None else entities - known,
            groups=by_group, by_tenant=by_tenant,
        )  # fmt: skip

    def _pairs(self, source: Source, scope: Scope) -> DataFrame:
        from pyspark.sql import functions as f

        letters = self.letters(source, ("key_hash", "tenant", "entity_ref"), scope)
        entity = f.coalesce("entity_ref", "key_hash").alias("entity")
        return letters.groupBy("group_id", "tenant", entity).agg(
            f.count("*").alias("n"), f.min("about").alias("about"),
            f.count_if("clock_outlier").alias("outliers"),
            f.count_if(f.col("at").isNull()).alias("undated"),
        )  # fmt: skip

    def _dimension(self, dimension: Dimension | None) -> DataFrame:
        """Return the user's table as key and value; refuse one in which a key is twice."""
        from pyspark.sql import functions as f

        if dimension is None:
            return self.spark.createDataFrame([], "key string, value double")
        try:
            found = (
                self.spark.read.csv(dimension.place, header=True)
                if dimension.is_csv
                else self.spark.read.parquet(dimension.place)
            )
            table = found.select(
                f.col(_quoted(dimension.key)).cast("string").alias("key"),
                f.col(_quoted(dimension.value)).cast("double").alias("value"),
            ).filter("key IS NOT NULL")
            double = table.groupBy("key").count().filter("count > 1").orderBy("key").limit(3)
            names = [row["key"] for row in double.collect()]
        except Exception as error:
            raise dimension_error(dimension, error) from error
        if names:
            raise dimension_error(dimension, None, double=names)
        return table

    def confusion(self, source: Source, truth: Path) -> dict[tuple[str, str], int]:
        """Return how many records of each true cause are in each group."""
        letters = self.letters(source, ("dlq_id",), EVERYTHING)
        with translated():
            rows = (
                letters.join(self.spark.read.parquet(str(truth)), "dlq_id")
                .groupBy("group_id", "cause")
                .count()
                .collect()
            )
        return {(row["group_id"], row["cause"]): row["count"] for row in rows}

    def letters(self, source: Source, keep: tuple[str, ...], scope: Scope) -> DataFrame:
        """Return the fields *keep* of the records in *scope*, with `at`, `group_id` and `about`."""
        chosen = self.records(source, tuple(dict.fromkeys([*NEEDED, *keep])), scope)
        kept = (*keep, "at", "clock_outlier")
        own = ", ".join(f"{name} {chosen.schema[name].dataType.simpleString()}" for name in kept)
        schema = f"{own}, group_id string, about {ABOUT_DDL}"
        return chosen.mapInArrow(partial(fingerprinted, keep=kept), schema)

    def records(self, source: Source, fields: Sequence[str], scope: Scope) -> DataFrame:
        """Return *fields* of the records in *scope*, with `at` and `clock_outlier`.

        `stored_group` is the group that a record has by its source.
        """
        from pyspark.sql import functions as f

        found = [read(self.spark, one, partitions=self._partitions) for one in specs_of(source)]
        records = reduce(lambda one, other: one.unionByName(other), found)
        for name, value in scope.equal.items():
            records = records.filter(f.col(name) == value)
        columns = [
            f.col("group_id").alias("stored_group") if name == "stored_group" else f.col(name)
            for name in fields
        ]
        at = (f.unix_micros("failed_at") / 1_000_000).alias("at")
        chosen = records.select(*columns, "clock_outlier", at)
        if scope.since is not None:
            chosen = chosen.filter(f.col("at") >= scope.since)
        if scope.until is not None:
            chosen = chosen.filter(f.col("at") < scope.until)
        return chosen

    @contextmanager
    def _kept(self, frame: DataFrame) -> Iterator[DataFrame]:
        """Keep what *frame* computes while it is used, in memory or on disk."""
        kept = frame.persist()
        try:
            yield kept
        finally:
            kept.unpersist()

    def _ran(self, count: int, began: float, outliers: int, undated: int) -> Ran:
        return Ran(
            engine=self.name, why=self.why, records=int(count), outliers=int(outliers),
            undated=int(undated), seconds=round(time.monotonic() - began, 3),
        )  # fmt: skip


def _versions(dated: DataFrame) -> list[tuple[str, str, float]]:
    from pyspark.sql import functions as f

    rows = (
        dated.filter("service_version <> ''")
        .groupBy("consumer_group", "service_version")
        .agg(f.min("first").alias("first"))
        .orderBy("consumer_group", "service_version")
        .limit(_MOST_VERSIONS)
        .collect()
    )
    return [(row["consumer_group"] or "", row["service_version"], row["first"]) for row in rows]


def _loud(dated: DataFrame) -> DataFrame:
    """Return one row per group that is large enough to be unusual, with its hours."""
    from pyspark.sql import functions as f

    by_hour = dated.groupBy("group_id", "hour").agg(
        f.sum("n").alias("n"), f.min("consumer_group").alias("consumer_group")
    )
    return (
        by_hour.groupBy("group_id")
        .agg(
            f.min("consumer_group").alias("consumer_group"),
            f.collect_list("hour").alias("hours"),
            f.collect_list("n").alias("counts"),
            f.sum("n").alias("total"),
        )
        .filter(f.col("total") >= series.FEWEST)
    )


def _analysed(
    batches: Iterator[pa.RecordBatch], first: int, last: int, deploys: list[Deployed]
) -> Iterator[pa.RecordBatch]:
    """Look at each group of *batches*: what runs on the executors."""
    for batch in batches:
        rows: list[dict[str, Any]] = []
        for group in batch.to_pylist():
            hours, counts = np.array(group["hours"]), np.array(group["counts"])
            whole = series.dense(hours, counts, first, last)
            name = group["group_id"]
            rows += [
                {"kind": "anomaly", "group_id": name, "start": one.start, "hours": one.hours,
                 "observed": one.observed, "expected": one.expected, "level": one.level,
                 "weight": one.observed - one.expected}
                for one in series.anomalies(name, whole, first)
            ]  # fmt: skip
            own = [one for one in deploys if one.consumer_group == group["consumer_group"]]
            rows += [
                {"kind": "effect", "group_id": name, "start": one.at, "version": one.version,
                 "consumer_group": one.consumer_group, "before": one.before, "after": one.after,
                 "verdict": one.verdict, "weight": abs(one.after - one.before)}
                for one in series.deploy_effects(name, whole, first, own)
            ]  # fmt: skip
        yield pa.RecordBatch.from_pylist(rows, schema=_FOUND_ARROW)


def _listed(
    found: DataFrame,
) -> tuple[tuple[Anomaly, ...], tuple[DeployEffect, ...], int]:
    from pyspark.sql import functions as f

    def most(kind: str) -> list[Any]:
        order = (f.desc("weight"), "group_id", "start")
        return found.filter(f.col("kind") == kind).orderBy(*order).limit(MOST_LISTED).collect()

    odd = tuple(
        Anomaly(group_id=row["group_id"], start=row["start"], hours=row["hours"],
                       observed=row["observed"], expected=row["expected"], level=row["level"])
        for row in most("anomaly")
    )  # fmt: skip
    effects = tuple(
        DeployEffect(group_id=row["group_id"], consumer_group=row["consumer_group"],
                            version=row["version"], at=row["start"], before=row["before"],
                            after=row["after"], verdict=row["verdict"])
        for row in most("effect")
    )  # fmt: skip
    return odd, effects, found.count() - len(odd) - len(effects)


def _by_group(pairs: DataFrame, named: DataFrame, worth: DataFrame) -> tuple[GroupRadius, ...]:
    from pyspark.sql import functions as f

    hit = named.select("group_id", "entity").distinct().join(worth, "entity")
    values = hit.groupBy("group_id").agg(
        f.count("*").alias("entities"), f.sum("value").alias("value")
    )
    sums = pairs.groupBy("group_id").agg(
        f.min("about").alias("about"), f.sum("n").alias("records"),
        f.count_distinct("tenant").alias("tenants"),
    )  # fmt: skip
    rows = (
        sums.join(values, "group_id", "left")
        .select("group_id", "about.title", "about.consumer_group", "records",
                f.coalesce("entities", f.lit(0)).alias("entities"), "tenants", "value")
        .orderBy(f.desc_nulls_last("value"), f.desc("entities"), "group_id")
        .limit(MOST_LISTED).collect()
    )  # fmt: skip
    return tuple(
        GroupRadius(
            **{**row.asDict(), "value": _rounded(row["value"]), "title": row["title"] or ""}
        )
        for row in rows
    )


def _by_tenant(pairs: DataFrame, named: DataFrame, worth: DataFrame) -> tuple[TenantRadius, ...]:
    from pyspark.sql import functions as f

    hit = named.select("tenant", "entity").distinct().join(worth, "entity")
    values = hit.groupBy("tenant").agg(
        f.count("*").alias("entities"), f.sum("value").alias("value")
    )
    rows = (
        pairs.filter("tenant IS NOT NULL").groupBy("tenant").agg(f.sum("n").alias("records"))
        .join(values, "tenant", "left")
        .select("tenant", "records", f.coalesce("entities", f.lit(0)).alias("entities"), "value")
        .orderBy(f.desc_nulls_last("value"), f.desc("entities"), "tenant")
        .limit(MOST_LISTED).collect()
    )  # fmt: skip
    return tuple(TenantRadius(**{**row.asDict(), "value": _rounded(row["value"])}) for row in rows)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(float(value), 2)
