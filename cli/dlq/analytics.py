"""`triage`, `trends` and `blast-radius`: questions about all dead letters, by the faster engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.analytics import (
    Deploys,
    DimensionKey,
    DimensionPlace,
    DimensionValue,
    ScopeOptions,
    Shown,
    present,
)
from holdfast.cli.display import err, note
from holdfast.cli.dlq.progress import shown_work
from holdfast.cli.late import grouped
from holdfast.cli.options import AnyDatabase, Config, Json
from holdfast.errors import ConfigurationError
from holdfast.spark_jobs.analytics.engines import AnalyticsEngineName, choose
from holdfast.spark_jobs.analytics.inputs import Dimension, read_deploys, specs_of

Engine = Annotated[
    AnalyticsEngineName,
    typer.Option(help="auto takes DuckDB up to 50 million records, and Spark beyond."),
]
From = Annotated[
    list[str] | None,
    typer.Option(
        "--from", show_default=False,
        help="Parquet files instead of the store: parquet:FOLDER, or a file; may repeat.",
    ),
]  # fmt: skip
Memory = Annotated[str, typer.Option(help="What DuckDB keeps before it writes to disk.")]
Page = Annotated[
    Path | None, typer.Option("--report", help="Write a page with plots here, e.g. report.html.")
]


@grouped
def triage(
    *,
    config: Config = None,
    database: AnyDatabase = None,
    source: From = None,
    wanted: ScopeOptions,
    engine: Engine = AnalyticsEngineName.AUTO,
    memory: Memory = "2GB",
    report: Page = None,
    limit: Shown = 20,
    as_json: Json = False,
) -> None:
    """Fingerprint all dead letters anew and list the problems, with those that look like one."""
    scope, where = wanted.scope(), _sources(source, database)
    with _engine(engine, where, memory) as answers:
        found = answers.triage(where, scope)
    present(found, title="What failed", report=report, as_json=as_json, limit=limit)


@grouped
def trends(
    *,
    config: Config = None,
    database: AnyDatabase = None,
    source: From = None,
    wanted: ScopeOptions,
    deploys: Deploys = None,
    engine: Engine = AnalyticsEngineName.AUTO,
    memory: Memory = "2GB",
    report: Page = None,
    limit: Shown = 20,
    as_json: Json = False,
) -> None:
    """Show failures by hour, unusual times, and which deploy changed something."""
    scope, where = wanted.scope(), _sources(source, database)
    known = None if deploys is None else read_deploys(deploys)
    with _engine(engine, where, memory) as answers:
        found = answers.trends(where, scope, deploys=known)
    present(found, title="When it failed", report=report, as_json=as_json, limit=limit)


@grouped
def blast_radius(
    *,
    config: Config = None,
    database: AnyDatabase = None,
    source: From = None,
    wanted: ScopeOptions,
    place: DimensionPlace = None,
    key: DimensionKey = "entity_ref",
    value: DimensionValue = "value",
    engine: Engine = AnalyticsEngineName.AUTO,
    memory: Memory = "2GB",
    report: Page = None,
    limit: Shown = 20,
    as_json: Json = False,
) -> None:
    """Show which entities and tenants are hit, and what they are worth by a table of yours."""
    scope, where = wanted.scope(), _sources(source, database)
    dimension = None if place is None else Dimension(place=place, key=key, value=value)
    with _engine(engine, where, memory) as answers:
        found = answers.blast_radius(where, scope, dimension=dimension)
    present(found, title="Whom it hits", report=report, as_json=as_json, limit=limit)


def _sources(source: list[str] | None, database: str | None) -> list[str]:
    if source:
        return source
    if database is None:
        raise ConfigurationError("which dead letters? give --database, or --from parquet:FOLDER")
    return [database]


@contextmanager
def _engine(asked: AnalyticsEngineName, where: list[str], memory: str) -> Iterator[Any]:
    """Yield the engine that answers; which one, and why, is told on the side."""
    choice = choose(where, asked)
    note(f"engine: {choice.engine} ({choice.why})")
    if choice.engine is AnalyticsEngineName.SPARK:
        from holdfast.cli.spark.options import SparkOptions, running
        from holdfast.spark_jobs.analytics.spark_engine import SparkEngine

        with running("analytics", SparkOptions()) as spark:
            yield SparkEngine(spark, why=choice.why)
        return
    from holdfast.extras import driver

    for module in ("duckdb", "pyarrow", "numpy"):
        driver(module, extra="duckdb")
    from holdfast.spark_jobs.analytics.duckdb_engine import DuckDbEngine
    from holdfast.spark_jobs.analytics.reading import count

    total = sum(count(one) for one in specs_of(where)) if err.is_terminal else None
    with shown_work("dead letters read", total) as observe:
        yield DuckDbEngine(why=choice.why, memory=memory, observe=observe)
