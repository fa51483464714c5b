"""The questions by DuckDB: one process, no JVM, for what fits one machine.

Records come as a stream of Arrow batches that got their fingerprints on the way, so a record is
in memory once and briefly; DuckDB keeps groups, and writes to disk what is beyond its limit.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.extras import driver
from holdfast.spark_jobs.analytics import reading, series
from holdfast.spark_jobs.analytics.fingerprints import ABOUT, NEEDED, fingerprinted
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
    BlastResult,
    GroupName,
    GroupRadius,
    Ran,
    Scope,
    TenantRadius,
    TrendsResult,
    TriageGroup,
    TriageResult,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from holdfast.spark_jobs.analytics.inputs import Dimension, Source
    from holdfast.spark_jobs.analytics.results import Anomaly, Deployed, DeployEffect

_ABOUT = ", ".join(f"about.{name} AS {name}" for name in ABOUT.names)
_TRIAGE = """
CREATE TEMP TABLE groups AS
SELECT group_id, count(*) AS n, min("at") AS first, max("at") AS last,
       arg_min(about, about.sample) AS about,
       approx_count_distinct(key_hash) AS keys, approx_count_distinct(tenant) AS tenants,
       count(*) FILTER (WHERE clock_outlier) AS outliers,
       count(*) FILTER (WHERE "at" IS NULL) AS undated
FROM letters GROUP BY group_id
"""
_TOTALS = """
SELECT count(*), coalesce(sum(n), 0), coalesce(sum(outliers), 0), coalesce(sum(undated), 0)
FROM groups
"""
_LARGEST = f"""
SELECT group_id, n AS count, first, last, keys, tenants, {_ABOUT}
FROM groups ORDER BY n DESC, group_id LIMIT ?
"""  # noqa: S608 - names of our own
_HOURLY = """
CREATE TEMP TABLE hourly AS
SELECT group_id, consumer_group, service_version, CAST(floor("at" / 3600) AS BIGINT) AS hour,
       count(*) AS n, min("at") AS first, arg_min(about, about.sample) AS about,
       count(*) FILTER (WHERE clock_outlier) AS outliers
FROM letters GROUP BY ALL
"""
_LOUD = """
SELECT group_id, any_value(consumer_group), list(hour ORDER BY hour), list(n ORDER BY hour)
FROM (SELECT group_id, any_value(consumer_group) AS consumer_group, hour, sum(n)::BIGINT AS n
      FROM hourly WHERE hour IS NOT NULL GROUP BY group_id, hour)
GROUP BY group_id HAVING sum(n) >= ? ORDER BY group_id
"""
_TITLES = """
SELECT group_id, arg_min(about.title, about.sample), any_value(consumer_group)
FROM hourly WHERE list_contains(?, group_id) GROUP BY group_id ORDER BY group_id
"""
_PAIRS = """
CREATE TEMP TABLE pairs AS
SELECT group_id, tenant, coalesce(entity_ref, key_hash) AS entity, count(*) AS n,
       arg_min(about, about.sample) AS about, count(*) FILTER (WHERE clock_outlier) AS outliers,
       count(*) FILTER (WHERE "at" IS NULL) AS undated
FROM letters GROUP BY ALL
"""
_WORTH = """
CREATE TEMP TABLE worth AS
SELECT entity, dimension.value FROM (SELECT DISTINCT entity FROM pairs WHERE entity IS NOT NULL)
LEFT JOIN dimension ON dimension.key = entity
"""
_ALL = """
SELECT (SELECT count(*) FROM worth), (SELECT count(DISTINCT tenant) FROM pairs),
       (SELECT sum(value) FROM worth), (SELECT count(*) FROM worth WHERE value IS NULL),
       coalesce(sum(n) FILTER (WHERE entity IS NULL), 0), coalesce(sum(n), 0),
       count(DISTINCT group_id), coalesce(sum(outliers), 0), coalesce(sum(undated), 0)
FROM pairs
"""
_BY_GROUP = """
WITH hit AS (SELECT DISTINCT group_id, entity FROM pairs WHERE entity IS NOT NULL),
     values AS (SELECT group_id, count(*) AS entities, sum(value) AS value
                FROM hit JOIN worth USING (entity) GROUP BY group_id)
SELECT group_id, arg_min(about.title, about.sample), arg_min(about.consumer_group, about.sample),
       sum(n)::BIGINT AS records, coalesce(any_value(entities), 0) AS entities,
       count(DISTINCT tenant), any_value(values.value) AS value
FROM pairs LEFT JOIN values USING (group_id) GROUP BY group_id
ORDER BY value DESC NULLS LAST, entities DESC, group_id LIMIT ?
"""
_BY_TENANT = """
WITH hit AS (SELECT DISTINCT tenant, entity FROM pairs WHERE entity IS NOT NULL),
     values AS (SELECT tenant, count(*) AS entities, sum(value) AS value
                FROM hit JOIN worth USING (entity) GROUP BY tenant)
SELECT tenant, sum(n)::BIGINT AS records, coalesce(any_value(entities), 0) AS entities,
       any_value(values.value) AS value
FROM pairs LEFT JOIN values USING (tenant) WHERE tenant IS NOT NULL GROUP BY tenant
ORDER BY value DESC NULLS LAST, entities DESC, tenant LIMIT ?
"""
_CONFUSION = """
SELECT group_id, cause, count(*) FROM letters JOIN truth USING (dlq_id) GROUP BY ALL
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DuckDbEngine:
    """Answers in this process; *memory* is what DuckDB keeps before it writes to disk."""

    why: str = "asked for"
    memory: str = "2GB"
    folder: Path | None = None
    """Where it writes what is beyond its memory; a folder of the system's unless given."""
    observe: Callable[[int], None] = lambda _: None
    """Hears how many records were read so far."""

    name = "duckdb"

    def triage(self, source: Source, scope: Scope = EVERYTHING) -> TriageResult:
        """Return the failure groups of *source*."""
        began = time.monotonic()
        with self._letters(source, ("key_hash", "tenant"), scope) as db:
            db.execute(_TRIAGE)
            total, count, outliers, undated = db.execute(_TOTALS).fetchone()
            rows = db.execute(_LARGEST, [MOST_GROUPS]).fetchall()
        names = ("group_id", "count", "first", "last", "keys", "tenants", *ABOUT.names)
        groups = [TriageGroup(**dict(zip(names, row, strict=True))) for row in rows]
        ran = self._ran(count, began, outliers, undated)
        return with_clusters(ran, groups, total=total)

    def trends(
        self,
        source: Source,
        scope: Scope = EVERYTHING,
        *,
        deploys: Sequence[Deployed] | None = None,
    ) -> TrendsResult:
        """Return the failures by hour; without *deploys*, versions are known by first failures."""
        began = time.monotonic()
        with self._letters(source, ("consumer_group", "service_version"), scope) as db:
            db.execute(_HOURLY)
            count, outliers, undated, first, last = db.execute(
                "SELECT coalesce(sum(n), 0), coalesce(sum(outliers), 0), coalesce(sum(n) FILTER "
                "(WHERE hour IS NULL), 0), min(hour), max(hour) FROM hourly"
            ).fetchone()
            ran = self._ran(count, began, outliers, undated)
            if first is None:
                return found_nothing(ran)
            known = inferred_deploys(_versions(db), first) if deploys is None else deploys
            odd, effects = _analysed(db, first, last, known)
            everything = db.execute(
                "SELECT hour, sum(n)::BIGINT FROM hourly WHERE hour IS NOT NULL GROUP BY hour"
            ).fetchnumpy()
            hours, counts = (np.asarray(one) for one in everything.values())
            overall = series.dense(hours, counts, first, last)
            listed, changed, left_out = most_important(odd, effects)
            ids = sorted({one.group_id for one in listed} | {one.group_id for one in changed})
            names = db.execute(_TITLES, [ids]).fetchall() if ids else []
        ran = self._ran(count, began, outliers, undated)
        return TrendsResult(
            ran=ran, first_hour=first, hourly=tuple(int(n) for n in overall),
            usual=tuple(round(float(n), 3) for n in series.usual(overall)),
            anomalies=listed, effects=changed, left_out=left_out,
            named=tuple(GroupName(group_id=one, title=title or "", consumer_group=who or "")
                        for one, title, who in names),
        )  # fmt: skip

    def blast_radius(
        self,
        source: Source,
        scope: Scope = EVERYTHING,
        *,
        dimension: Dimension | None = None,
    ) -> BlastResult:
        """Return whom the failures hit, and what that is worth by *dimension*."""
        began = time.monotonic()
        with self._letters(source, ("key_hash", "tenant", "entity_ref"), scope) as db:
            db.execute(_PAIRS)
            _open_dimension(db, dimension)
            db.execute(_WORTH)
            row = db.execute(_ALL).fetchone()
            entities, tenants, value, unknown, without, count, groups, outliers, undated = row
            by_group = db.execute(_BY_GROUP, [MOST_LISTED]).fetchall()
            by_tenant = db.execute(_BY_TENANT, [MOST_LISTED]).fetchall()
        return BlastResult(
            ran=self._ran(count, began, outliers, undated), entities=entities, tenants=tenants,
            value=_rounded(value), unknown_entities=0 if dimension is None else unknown,
            without_entity=int(without), groups_total=groups,
            groups=tuple(
                GroupRadius(group_id=one, title=title or "", consumer_group=who or "",
                            records=records, entities=hit, tenants=owners, value=_rounded(worth))
                for one, title, who, records, hit, owners, worth in by_group),
            by_tenant=tuple(
                TenantRadius(tenant=one, records=records, entities=hit, value=_rounded(worth))
                for one, records, hit, worth in by_tenant),
        )  # fmt: skip

    def confusion(self, source: Source, truth: Path) -> dict[tuple[str, str], int]:
        """Return how many records of each true cause are in each group."""
        with self._letters(source, ("dlq_id",), EVERYTHING) as db:
            db.register("truth", db.read_parquet(f"{truth}/*.parquet"))
            return {(one, cause): n for one, cause, n in db.execute(_CONFUSION).fetchall()}

    def _ran(self, count: int, began: float, outliers: int, undated: int) -> Ran:
        return Ran(
            engine=self.name, why=self.why, records=int(count), outliers=int(outliers),
            undated=int(undated), seconds=round(time.monotonic() - began, 3),
        )  # fmt: skip

    @contextmanager
    def _letters(self, source: Source, keep: tuple[str, ...], scope: Scope) -> Iterator[Any]:
        """Yield a database in which `letters` is the stream of records with their groups."""
        duckdb = driver("duckdb", extra="duckdb")
        specs = specs_of(source)
        for spec in specs:
            if not reading.is_readable(spec):
                raise ConfigurationError(
                    f"DuckDB reads Parquet files and the SQL store, no {spec.format or spec.kind}: "
                    "use --engine spark"
                )
        wanted = tuple(dict.fromkeys([*NEEDED, *keep]))
        kept = (*keep, "at", "clock_outlier")
        raised: list[Exception] = []

        def stream() -> Iterator[pa.RecordBatch]:
            count = 0
            try:
                read = chain.from_iterable(reading.batches(one, wanted, scope) for one in specs)
                for batch in fingerprinted(read, kept):
                    count += batch.num_rows
                    self.observe(count)
                    yield batch
            except Exception as error:
                raised.append(error)
                raise

        reader = pa.RecordBatchReader.from_batches(_schema(kept), stream())
        settings = {"memory_limit": self.memory}
        if self.folder is not None:
            settings["temp_directory"] = str(self.folder)
        with duckdb.connect(config=settings) as db:
            db.register("letters", reader)
            try:
                yield db
            except duckdb.Error as error:
                if raised:  # ours, not DuckDB's words about it
                    raise raised[0] from error
                raise AnalyticsError(f"DuckDB: {str(error).splitlines()[0][:300]}") from error


class AnalyticsError(HoldfastError):
    """An engine could not answer: no memory, no disk, or a fault of its own."""


def _schema(kept: Sequence[str]) -> pa.Schema:
    kinds = {"at": pa.float64(), "clock_outlier": pa.bool_()}
    columns = [(name, kinds.get(name, pa.string())) for name in kept]
    return pa.schema([*columns, ("group_id", pa.string()), ("about", ABOUT)])


def _versions(db: Any) -> list[tuple[str, str, float]]:
    rows = db.execute(
        "SELECT consumer_group, service_version, min(first) FROM hourly WHERE hour IS NOT NULL "
        "AND service_version <> '' GROUP BY ALL ORDER BY ALL"
    )
    return [(who or "", version, at) for who, version, at in rows.fetchall()]


def _analysed(
    db: Any, first: int, last: int, deploys: Sequence[Deployed]
) -> tuple[list[Anomaly], list[DeployEffect]]:
    odd: list[Anomaly] = []
    effects: list[DeployEffect] = []
    rows = db.execute(_LOUD, [series.FEWEST])
    while some := rows.fetchmany(500):
        for group_id, consumer, hours, counts in some:
            whole = series.dense(np.array(hours), np.array(counts), first, last)
            odd += series.anomalies(group_id, whole, first)
            own = [one for one in deploys if one.consumer_group == consumer]
            effects += series.deploy_effects(group_id, whole, first, own)
    return odd, effects


def most_important(
    odd: Sequence[Anomaly], effects: Sequence[DeployEffect]
) -> tuple[tuple[Anomaly, ...], tuple[DeployEffect, ...], int]:
    """Return the largest anomalies and effects, and how many are left out."""
    anomalies = sorted(odd, key=lambda one: (one.expected - one.observed, one.group_id, one.start))
    changed = sorted(effects, key=lambda one: (-abs(one.after - one.before), one.group_id, one.at))
    left = max(0, len(anomalies) - MOST_LISTED) + max(0, len(changed) - MOST_LISTED)
    return tuple(anomalies[:MOST_LISTED]), tuple(changed[:MOST_LISTED]), left


def _open_dimension(db: Any, dimension: Dimension | None) -> None:
    """Make `dimension` a table of key and value; refuse one in which a key is twice."""
    if dimension is None:
        db.execute("CREATE TEMP TABLE dimension (key VARCHAR, value DOUBLE)")
        return
    reader = "read_csv" if dimension.is_csv else "read_parquet"
    key, value = (name.replace('"', '""') for name in (dimension.key, dimension.value))
    try:
        db.execute(
            f'CREATE TEMP TABLE dimension AS SELECT CAST("{key}" AS VARCHAR) AS key, '  # noqa: S608
            f'CAST("{value}" AS DOUBLE) AS value FROM {reader}(?) WHERE "{key}" IS NOT NULL',
            [dimension.files],
        )
    except Exception as error:
        raise dimension_error(dimension, error) from error
    double = db.execute(
        "SELECT key FROM dimension GROUP BY key HAVING count(*) > 1 ORDER BY key LIMIT 3"
    ).fetchall()
    if double:
        raise dimension_error(dimension, None, double=[row[0] for row in double])


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(float(value), 2)
