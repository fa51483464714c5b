"""One Spark session for all Spark tests.

The JVM takes seconds to start and longer to be warm, so all of them run in one worker of a
parallel run, or those that mostly wait in another: the suite is distributed by file (`--dist
loadfile`), and `tests/conftest.py` gives the files of this folder two scopes. What needs a session
of another kind has a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.spark_jobs.session import SparkTarget, session
from tests.servers.install import spark_jars
from tests.servers.ports import free_port
from tests.servers.spark import java_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

PATIENCE = 900  # seconds: the first test of a worker also starts the JVM


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let Spark tests take their time: a deadline tells a hang, not a busy machine."""
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(PATIENCE))


CONF = {
    "spark.driver.extraJavaOptions": java_options(),
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.driver.memory": "1g",
    "spark.log.level": "ERROR",
    # A query of a few rows is sooner done than compiled; the cluster's tests compile theirs.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.streaming.stateStore.numThreads": "2",
}
DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "1",  # of a log of two lines; fifty otherwise
}
"""What makes Delta Lake a format of a session."""


def cluster(**more: Any) -> SparkTarget:
    """Return the small local cluster of the tests."""
    usual = {"master": "local[2,4]", "jars": [str(jar) for jar in spark_jars()]}
    conf = CONF | more.pop("conf", {})
    return SparkTarget(**usual | more, conf=conf)


@pytest.fixture(scope="session")
def event_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the shared session logs its events."""
    return tmp_path_factory.mktemp("spark-events")


@pytest.fixture(scope="session")
def spark(event_log: Path) -> Iterator[SparkSession]:
    """Share the run's Spark session."""
    log = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{event_log}",
        "spark.eventLog.compress": "false",
    }
    connect = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(free_port()),
    }
    found = session("tests", cluster(conf=log | connect | DELTA))
    yield found
    found.stop()
