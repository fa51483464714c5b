"""Jobs where users run them: on a standalone cluster, by spark-submit."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyarrow import parquet

from holdfast.spark_jobs.archive.state import LocalFolder, StateLog
from tests.servers.spark import SparkCluster
from tests.servers.waiting import wait_until
from tests.spark_letters import files_of, lettered

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)  # six JVMs on a machine that does other things, too
PATIENCE = 600.0
BOTH = {
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
    "spark.cores.max": "2",
}
"""The job starts once both workers take part."""


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what `make spark-dist` builds."""
    to = tmp_path_factory.mktemp("dist")
    sys.path.insert(0, str(ROOT / "deploy/spark"))
    try:
        from build import build  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    build(to)
    return to


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkCluster]:
    """Start a master and two workers."""
    with SparkCluster() as found:
        yield found


def letters(folder: Path, count: int, files: int = 4) -> str:
    """Write *count* letters as several files and return their source."""
    each = count // files
    for number in range(files):
        files_of(folder, [lettered(number * each + n) for n in range(each)])
    return f"parquet:{folder}"


def archived(place: Path) -> list[str]:
    """Return the letters that the newest state of an archive names, read without Spark."""
    state = StateLog(LocalFolder(place)).newest()
    tables = [parquet.read_table(place / one.path, columns=["dlq_id"]) for one in state.files]
    return sorted(pa.concat_tables(tables)["dlq_id"].to_pylist()) if tables else []


def test_what_is_shipped_is_whole(shipped: Path) -> None:
    """A wheel, the same as a zip with the packages at its root, and the job file."""
    names = sorted(path.name for path in shipped.iterdir())
    assert sorted(Path(name).suffix for name in names) == [".py", ".whl", ".zip"]
    (packed,) = shipped.glob("*.zip")
    inside = set(zipfile.ZipFile(packed).namelist())
    assert {
        "holdfast/__init__.py",
        "holdfast/spark_jobs/records.py",
        "holdfast/dlq/vectors.json",
    } <= (inside)


def test_a_submitted_job_ends_right_although_a_worker_is_killed(
    cluster: SparkCluster, shipped: Path, tmp_path: Path
) -> None:
    """One of two workers is killed while the job writes: every letter is archived, once."""
    source = letters(tmp_path / "in", 2000)
    place = tmp_path / "letters"
    (packed,) = shipped.glob("*.zip")
    pid = cluster.submit(
        BOTH, [packed], str(shipped / "holdfast_job.py"),
        "archive", "add", "--from", source, "--to", str(place), "--json",
    )  # fmt: skip
    wait_until((place / "data").exists, "the job to write", PATIENCE)
    assert cluster.executors() >= 2
    cluster.kill_worker(0)
    assert cluster.wait(pid, PATIENCE) == 0, cluster.log[-4000:]
    assert f"holdfast from {packed}" in cluster.log or f"{packed.name}/holdfast" in cluster.log
    found = archived(place)
    assert len(found) == len(set(found)) == 2000
    assert StateLog(LocalFolder(place)).newest().number == 1


@pytest.mark.chaos
def test_many_workers_die_and_a_long_job_ends_right(shipped: Path, tmp_path: Path) -> None:
    """Forty thousand letters; both workers are killed in turn, and new ones come."""
    source = letters(tmp_path / "in", 40_000, files=16)
    place = tmp_path / "letters"
    (packed,) = shipped.glob("*.zip")
    with SparkCluster() as cluster:
        pid = cluster.submit(
            {"spark.cores.max": "2", "spark.task.maxFailures": "20"}, [packed],
            str(shipped / "holdfast_job.py"),
            "archive", "add", "--from", source, "--to", str(place),
        )  # fmt: skip
        for number in range(2):
            wait_until((place / "data").exists, "the job to write", PATIENCE)
            cluster.kill_worker(number)
            cluster.add_worker()
        assert cluster.wait(pid, 1800) == 0, cluster.log[-4000:]
    found = archived(place)
    assert len(found) == len(set(found)) == 40_000
