"""The Spark session of a job: local by default, a cluster or Spark Connect when asked.

Local sessions stay on the loopback interface, retry failed tasks (`local[*,4]`: plain `local[*]`
never does) and give their Python workers this very interpreter. Every session computes in UTC.
A connector jar that is missing is found out before the job starts, with the words that bring it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError
from holdfast.extras import driver

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import SparkSession

LOCAL = "local[*,4]"
"""All cores, and four attempts per task."""
SUBMITTED = "submitted"
"""The master of a job that spark-submit started: whatever it was told."""

_ALWAYS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    # Two attempts of one lane at a time would send twice.
    "spark.speculation": "false",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.compression.codec": "zstd",
}
_LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
_STATIC = ("spark.speculation",)
"""What a Connect session cannot set."""
_SCALA = "2.13"


@dataclass(frozen=True, slots=True)
class Connector:
    """A jar that Spark does not bring: its class, and its Maven coordinate."""

    name: str
    needs: str
    coordinate: str

    def __str__(self) -> str:
        return self.coordinate


def connectors() -> Mapping[str, Connector]:
    """Return the jars that sources may need, for the PySpark that is installed."""
    version = driver("pyspark", extra="spark").__version__
    kafka = f"org.apache.spark:spark-sql-kafka-0-10_{_SCALA}:{version}"
    found = (
        Connector("kafka", "org.apache.spark.sql.kafka010.KafkaSourceProvider", kafka),
        Connector("postgresql", "org.postgresql.Driver", "org.postgresql:postgresql:42.7.4"),
        Connector("mysql", "org.mariadb.jdbc.Driver",
                  "org.mariadb.jdbc:mariadb-java-client:3.5.3"),
    )  # fmt: skip
    return {one.name: one for one in found}


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkTarget:
    """Where a job runs: on this machine, on a *master*, or behind a *remote* Connect server."""

    master: str | None = None
    remote: str | None = None
    jars: Sequence[str] = ()
    packages: Sequence[str] = ()
    ui: bool = False
    conf: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.master is not None and self.remote is not None:
            raise ConfigurationError("give --master or --remote, not both: they are two ways")
        if self.remote is not None and (self.jars or self.packages):
            raise ConfigurationError(
                "--jars and --packages belong to the Connect server: start it with them"
            )

    @property
    def is_local(self) -> bool:
        """Whether everything runs in processes of this machine."""
        return self.remote is None and (self.master or LOCAL).startswith("local")


def session(name: str, cluster: SparkTarget | None = None, **more: Any) -> SparkSession:
    """Return the session of job *name* on *cluster*, or with its fields given one by one."""
    where = SparkTarget(**more) if cluster is None else cluster
    sql = driver("pyspark.sql", extra="spark")
    builder: SparkSession.Builder = sql.SparkSession.builder.appName(f"holdfast {name}")
    settings = settings_of(where)
    for key, value in settings.items():
        builder = builder.config(key, value)
    if where.remote is not None:
        return builder.remote(where.remote).getOrCreate()
    if where.is_local:
        # Spark would take the first python3 of PATH, which may lack all that this one has.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if where.master != SUBMITTED:
        builder = builder.master(where.master or LOCAL)
    return builder.getOrCreate()


def has_session() -> bool:
    """Whether this thread has a session already, which `session` would return."""
    sql = driver("pyspark.sql", extra="spark")
    return sql.SparkSession.getActiveSession() is not None


def settings_of(where: SparkTarget) -> dict[str, str]:
    """Return Spark's settings for a session on *where*; those that it names itself win."""
    settings = dict(_ALWAYS)
    if where.remote is not None:
        settings = {key: value for key, value in settings.items() if key not in _STATIC}
        return settings | dict(where.conf)
    settings["spark.ui.enabled"] = str(where.ui).lower()
    if where.is_local:
        settings |= _LOOPBACK
        settings["spark.ui.showConsoleProgress"] = "false"
        settings["spark.log.level"] = "ERROR"
    if where.jars:
        settings["spark.jars"] = ",".join(where.jars)
    if where.packages:
        settings["spark.jars.packages"] = ",".join(where.packages)
    return settings | dict(where.conf)


def is_remote(spark: SparkSession) -> bool:
    """Whether *spark* is a Connect session: no JVM on this side."""
    return not hasattr(spark, "_jvm")


def require(spark: SparkSession, connector: str) -> None:
    """Raise `ConfigurationError` unless *spark* has the jar of *connector*; Connect's is its own.

    The error names the coordinate and the words that bring it.
    """
    if is_remote(spark):
        return
    wanted = connectors()[connector]
    if not _has_class(spark, wanted.needs):
        raise missing_jar(wanted)


def missing_jar(wanted: Connector) -> ConfigurationError:
    """Return the error that says how to get *wanted*."""
    return ConfigurationError(
        f"Spark has no {wanted.name} connector (class {wanted.needs}): add --packages "
        f"{wanted.coordinate}, or fetch it with: mvn dependency:copy "
        f"-Dartifact={wanted.coordinate} -DoutputDirectory=jars, and add --jars jars/…"
    )


def _has_class(spark: Any, name: str) -> bool:
    from py4j.protocol import Py4JJavaError

    try:
        spark._jsparkSession.sharedState().jarClassLoader().loadClass(name)
    except Py4JJavaError:
        return False
    return True
