"""What is wrong with the input of a Spark job is said in one sentence, and nothing is half done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyspark
import pytest
from pyarrow import parquet

from holdfast.cli import main
from holdfast.cli.exits import EXIT_FIX
from holdfast.errors import ConfigurationError
from holdfast.spark_jobs import records
from holdfast.spark_jobs.archive.adding import add
from holdfast.spark_jobs.archive.table import Archive
from holdfast.spark_jobs.errors import translated
from holdfast.spark_jobs.files import unreadable
from holdfast.spark_jobs.session import SparkTarget, settings_of
from holdfast.spark_jobs.sources import read
from tests.servers.spark import java_options
from tests.spark_letters import files_of, lettered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROGRAM = Path(__file__).parent / "programs/killed_driver.py"


def test_a_foreign_file_is_named_with_what_it_lacks(spark: SparkSession, tmp_path: Path) -> None:
    """Parquet of somebody else's is no dead letter, and must not be read as empty."""
    parquet.write_table(pa.table({"order": [1], "total": [2.5]}), tmp_path / "x.parquet")
    with pytest.raises(ConfigurationError, match=r"no field dlq_id \(its fields: order, total\)"):
        read(spark, f"parquet:{tmp_path}")


def test_a_table_format_of_the_session_is_passed_through(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Delta table that was overwritten: its log says which files count, not the folder."""
    table = str(tmp_path / "table")
    for count in (20, 12):
        letters = files_of(tmp_path / f"in{count}", [lettered(n) for n in range(count)])
        read(spark, letters).write.format("delta").mode("overwrite").save(table)
    with pytest.raises(SystemExit) as ended:
        main(["spark", "archive", "add", "--from", table, "--format", "delta", "--to",
              str(tmp_path / "letters"), "--json"])  # fmt: skip
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["total"] == 12
    assert len(list(Path(table).glob("*.parquet"))) > 1  # the first twenty are still there
    assert read(spark, f"delta:{table}").count() == 12


def test_a_format_that_the_session_has_not_is_told_with_what_brings_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The coordinate follows the installed Spark."""
    own = ".".join(pyspark.__version__.split(".")[:2])
    with pytest.raises(ConfigurationError, match=rf"iceberg-spark-runtime-{own}_2.13:VERSION"):
        read(spark, str(tmp_path), format="iceberg")
    with pytest.raises(ConfigurationError, match="'hudi': add its jar with --packages"):
        read(spark, f"hudi:{tmp_path}")
    absent = Exception("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: delta")
    assert f"delta-spark_{own}_2.13" in str(unreadable("/x", "delta", absent))


def test_a_corrupt_file_is_named_and_nothing_is_archived(
    spark: SparkSession, tmp_path: Path
) -> None:
    """One damaged file among good ones stops the job before anything is committed."""
    source = files_of(tmp_path / "in", [lettered(1)])
    archive = Archive(spark, f"{tmp_path}/letters")
    good = (tmp_path / "in/0.parquet").read_bytes()
    (tmp_path / "in/1.parquet").write_bytes(good[:100] + b"\x00" * 400 + good[500:])
    with pytest.raises(ConfigurationError, match=r"1\.parquet"), translated():
        add(archive, [source])
    (tmp_path / "in/1.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(ConfigurationError, match=r"1\.parquet"), translated():
        add(archive, [source])
    assert archive.state().number == 0
    (tmp_path / "in/1.parquet").unlink()
    assert add(archive, [source]).total == 1


def test_nothing_at_all_is_told(spark: SparkSession, tmp_path: Path) -> None:
    """A path that is not there is no empty source."""
    with pytest.raises(ConfigurationError, match="nothing at that path"):
        read(spark, f"parquet:{tmp_path}/absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="holds no parquet file"):
        read(spark, f"parquet:{tmp_path}/empty")
    with pytest.raises(ConfigurationError, match="cannot be read as delta"):
        read(spark, f"delta:{tmp_path}/empty")


def test_files_of_several_versions_are_read_together(spark: SparkSession, tmp_path: Path) -> None:
    """What an older one lacks is null, what a newer one has besides is left out and counted."""
    files_of(tmp_path / "in", [lettered(1)])
    rows = [records.record_of(lettered(n), stored_at=1.7e9) for n in (2, 3)]
    for row in rows:
        row["record_version"] = 9
        row["mood"] = "sour"
    schema = records.arrow_schema().append(pa.field("mood", pa.string()))
    parquet.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "in/newer.parquet")
    old = [name for name in records.NAMES if name not in ("verdict", "clock_outlier", "failed_at")]
    older = pa.Table.from_pylist(
        [records.record_of(lettered(4), stored_at=1.8e9) | {"record_version": 1}],
        schema=records.arrow_schema(old),
    )
    parquet.write_table(older, tmp_path / "in/older.parquet")
    frame = read(spark, f"parquet:{tmp_path}/in")
    assert tuple(frame.columns) == records.NAMES
    found = {row["dlq_id"]: row for row in frame.collect()}
    assert found[lettered(4).dlq_id]["verdict"] is None
    archive = Archive(spark, f"{tmp_path}/letters")
    done = add(archive, [f"parquet:{tmp_path}/in"])
    assert (done.total, done.newer) == (4, 2)


def test_an_export_of_the_store_is_read_as_records(spark: SparkSession, tmp_path: Path) -> None:
    """`holdfast dlq export --to x.parquet` is version 1: moments as seconds, other names."""
    from holdfast.cli.dlq.export import _parquet
    from holdfast.dlq.store.rows import fingerprint_of, letter_of, row_of

    original = lettered(5)
    row = row_of(original, fingerprint_of(original.failure), now=1.79e9) | {"seq": 17}
    _parquet(iter([[row]]), tmp_path / "export.parquet")
    [found] = read(spark, f"parquet:{tmp_path}/export.parquet").collect()
    assert letter_of(records.row_of_record(found.asDict())) == original
    assert (found["seq"], found["record_version"]) == (17, records.SCHEMA_VERSION)
    files_of(tmp_path, [lettered(6)])
    with pytest.raises(ConfigurationError, match="mixes files of two kinds"):
        read(spark, f"parquet:{tmp_path}")


def test_a_driver_that_is_killed_before_its_commit_changes_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Its files are there and do not count; the next run adds all, once, and a later one sweeps.

    The driver has no jars: what needs one is told the coordinate and the words that bring it.
    """
    source = files_of(tmp_path / "in", [lettered(n) for n in range(10)])
    archive = Archive(spark, f"{tmp_path}/letters")
    add(archive, [files_of(tmp_path / "before", [lettered(99)])])
    kept = archive.state()
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), archive.place, source, java_options()],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as driver:  # fmt: skip
        said = _until(driver, "about to commit")
        driver.kill()
    assert f"--packages org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}" in said
    assert "--packages org.postgresql:postgresql:" in said
    assert "--packages org.mariadb.jdbc:mariadb-java-client:" in said
    assert archive.state() == kept
    assert archive.records().count() == 1
    assert len(list((tmp_path / "letters/data").iterdir())) == 2
    done = add(archive, [source])
    assert (done.new, done.total) == (10, 11)
    assert archive.swept(grace=0.0) >= 1
    assert archive.records().count() == 11
    used = {file.path.split("/")[1] for file in archive.state().files}
    assert {one.name for one in (tmp_path / "letters/data").iterdir()} == used


def _until(driver: subprocess.Popen[str], word: str) -> str:
    assert driver.stdout is not None
    said = ""
    for line in driver.stdout:
        said += line
        if word in line:
            return said
    raise AssertionError(f"it ended before it said {word!r}: {said}")


def test_a_session_is_local_and_quiet_unless_told() -> None:
    """On the loopback interface, in UTC, without a web page; what is named wins."""
    local = settings_of(SparkTarget())
    assert local["spark.driver.bindAddress"] == "127.0.0.1"
    assert local["spark.ui.enabled"] == "false"
    assert local["spark.sql.session.timeZone"] == "UTC"
    far = settings_of(SparkTarget(master="spark://host:7077", packages=["a:b:1"], ui=True))
    assert "spark.driver.bindAddress" not in far
    assert (far["spark.jars.packages"], far["spark.ui.enabled"]) == ("a:b:1", "true")
    own = settings_of(SparkTarget(conf={"spark.sql.session.timeZone": "CET"}))
    assert own["spark.sql.session.timeZone"] == "CET"


def test_a_submitted_job_refuses_a_password_on_its_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spark writes that line into the event log and its page, before a job can do a thing."""
    words = ["spark", "triage", "--from", "postgresql+psycopg://app:hunter-5@db/shop"]
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    monkeypatch.setattr(sys, "argv", ["holdfast_job.py", *words])
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == EXIT_FIX
    assert "write ${NAME}" in said
    assert "hunter-5" not in said


@pytest.mark.parametrize(
    "given", [{"master": "yarn", "remote": "sc://h"}, {"remote": "sc://h", "jars": ["x.jar"]}]
)
def test_a_cluster_that_contradicts_itself_is_refused(given: dict[str, Any]) -> None:
    """Two places for one job, or jars for a server that is running already."""
    with pytest.raises(ConfigurationError):
        SparkTarget(**given)
