"""The SQL store as a source: partitioned reads by JDBC, or by Python where there is no JDBC.

A read is divided by `seq`, so that each task asks for its own range and the database never sends
everything through one connection. Each task sees the store as of its own start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy.engine import make_url

from holdfast.dlq.store.schema import message
from holdfast.errors import ConfigurationError, DependencyDown
from holdfast.spark_jobs import records
from holdfast.spark_jobs.files import upgraded
from holdfast.spark_jobs.secrets import revealed
from holdfast.spark_jobs.session import is_remote, require
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

TABLE = message.name
_FETCH = "2000"
_ROWS_PER_TASK = 250_000
_MOST_TASKS = 256
_DRIVERS = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql"}


def read_store(
    spark: SparkSession,
    url: str,
    *,
    partitions: int | None = None,
    options: Mapping[str, str] | None = None,
    where: str | None = None,
    low: int | None = None,
) -> DataFrame:
    """Return the records of the store at *url*; *options* go to Spark's JDBC reader untouched.

    *where* is a condition on the store's own columns, which the database sees to. Most rows that
    it leaves are expected above *low*: tasks are divided there.
    """
    frame = table(spark, url, TABLE, column="seq", low=low, partitions=partitions, options=options)
    return upgraded(frame if where is None else frame.where(where), of=mask(url))


def table(
    spark: SparkSession,
    url: str,
    name: str,
    *,
    column: str | None = None,
    low: int | None = None,
    partitions: int | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return any table *name* of the database at *url*, read in ranges of *column*.

    Over Spark Connect the server logs what a reader was told, a password with it: there a store
    that has one is read by Python, which looks it up where the tasks run.
    """
    parsed = make_url(revealed(url))
    backend = parsed.get_backend_name()
    if backend == "sqlite" or (is_remote(spark) and parsed.password is not None):
        from holdfast.spark_jobs.data_source import read_table

        return read_table(spark, url, name, column=column, partitions=partitions)
    connector = _DRIVERS.get(backend)
    if connector is None:
        raise ConfigurationError(f"{mask(url)}: Spark reads PostgreSQL, MySQL, MariaDB and SQLite")
    require(spark, connector)
    settings = jdbc_options(url) | dict(options or {})
    reader = spark.read.format("jdbc").options(**settings)
    if column is None:
        return reader.option("dbtable", name).load()
    quote = "`" if connector == "mysql" else '"'
    least, high = _bounds(spark, settings, f"{quote}{name}{quote}", f"{quote}{column}{quote}", url)
    low = least if low is None else max(low, least)
    wanted = partitions or max(1, min(_MOST_TASKS, -(-(high - low + 1) // _ROWS_PER_TASK)))
    return (
        reader.option("dbtable", name)
        .option("partitionColumn", column)
        .option("lowerBound", str(low))
        .option("upperBound", str(high + 1))
        .option("numPartitions", str(wanted))
        .load()
    )


def jdbc_options(url: str) -> dict[str, str]:
    """Return Spark's JDBC settings for a database *url*; the password is never part of the URL."""
    parsed = make_url(revealed(url))
    backend = parsed.get_backend_name()
    port = "" if parsed.port is None else f":{parsed.port}"
    host = parsed.host or "localhost"
    if ":" in host:
        host = f"[{host}]"
    if backend == "postgresql":
        address = f"jdbc:postgresql://{host}{port}/{parsed.database}"
        settings = {"driver": "org.postgresql.Driver"}
    else:
        # Under MySQL's name, by which Spark knows how that family quotes its columns.
        address = f"jdbc:mysql://{host}{port}/{parsed.database}?permitMysqlScheme"
        settings = {"driver": "org.mariadb.jdbc.Driver"}
    settings |= {"url": address, "fetchsize": _FETCH}
    if parsed.username is not None:
        settings["user"] = parsed.username
    if parsed.password is not None:
        settings["password"] = str(parsed.password)
    return settings


def _bounds(
    spark: SparkSession, settings: dict[str, str], name: str, column: str, url: str
) -> tuple[int, int]:
    query = f"SELECT min({column}) AS low, max({column}) AS high FROM {name}"  # noqa: S608
    try:
        row: Any = spark.read.format("jdbc").options(**settings).option("query", query).load()
        low, high = row.first()
    except Exception as error:
        raise store_down(url, error) from error
    return (0, 0) if low is None else (int(low), int(high))


def store_down(url: str, error: Exception) -> DependencyDown:
    """Return the error that says that the store did not answer, in one line and without secrets."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "Exception" in line] or lines or ["unknown"]
    return DependencyDown(f"the store {mask(url)} does not answer: {mask(causes[0][:300])}")


NARROW = tuple(field.name for field in records.STORED)
"""The fields that the store has as columns."""
