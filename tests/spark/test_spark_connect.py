"""Jobs by Spark Connect: a client that has no JVM, and the session of the tests as its server."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.db.engine import open_database
from holdfast.dlq import create_tables
from holdfast.spark_jobs.archive.state import LocalFolder, StateLog
from tests.spark_letters import files_of, lettered, stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

HOLDFAST = Path(sysconfig.get_path("scripts")) / "holdfast"


@pytest.fixture
def remote(spark: SparkSession) -> Iterator[str]:
    """Let the session serve Spark Connect, and return where."""
    jvm = spark._jvm
    service = jvm.org.apache.spark.sql.connect.service.SparkConnectService
    service.start(spark.sparkContext._jsc.sc())
    yield f"sc://127.0.0.1:{spark.conf.get('spark.connect.grpc.binding.port')}"
    never = jvm.scala.Option.empty()
    service.stop(never, never)


def test_a_job_runs_by_spark_connect(
    remote: str, tmp_path: Path, postgres: Any, event_log: Path
) -> None:
    """The same command with --remote: no JVM on this side, the same archive.

    The password of a store stays on this machine, or where the tasks run: it is not sent about.
    """
    source = files_of(tmp_path / "in", [lettered(n) for n in range(50)])
    url = postgres.database("spark_connect")
    engine = open_database(url)
    create_tables(engine)
    stored(engine, [lettered(n) for n in range(50, 53)])
    engine.dispose()
    (tmp_path / "word").write_text("hunter-connect-4")
    store = url.replace("postgres@", f"postgres:${{file:{tmp_path}/word}}@")
    done = subprocess.run(
        [HOLDFAST, "spark", "archive", "add", "--from", source, "--from", store, "--to",
         tmp_path / "letters",
         "--remote", remote, "--json", "--report", tmp_path / "archive.html"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["total"] == 53
    state = StateLog(LocalFolder(tmp_path / "letters")).newest()
    assert (state.number, state.rows) == (1, 53)
    told = [one.read_text(errors="replace") for one in event_log.rglob("*") if one.is_file()]
    assert not any("hunter-connect-4" in one for one in told)
    assert "Dead letters by day" in (tmp_path / "archive.html").read_text()
