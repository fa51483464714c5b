"""Jobs where users run them: on a standalone cluster, by spark-submit."""

from __future__ import annotations

import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from holdfast.cli.migrations import Migrations
from holdfast.db.engine import open_database
from holdfast.dlq.replay import Plans, Rate, ReplayOptions, StopPolicy
from holdfast.dlq.replay.lane_check import PlanCheck, check_lane
from holdfast.dlq.replay.lanes import marks_of
from holdfast.dlq.replay.plan import PlanState
from holdfast.spark_jobs.analytics.duckdb_engine import DuckDbEngine
from holdfast.spark_jobs.archive.state import LocalFolder, StateLog
from holdfast.spark_jobs.generator import Recipe, generate
from tests.integration.test_replay import ADA, Shop
from tests.integration.test_replay_lanes import frozen
from tests.servers.spark import SparkCluster
from tests.servers.waiting import wait_until
from tests.spark.billing import Billing, check_effects
from tests.spark.billing import metadata as effects
from tests.spark.replaying import copied, replay_topics, url_of
from tests.spark.replaying import letters as letters_of
from tests.spark_letters import files_of, lettered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.engine import Engine

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


def submitted_triage(
    cluster: SparkCluster, shipped: Path, folder: Path, records: int, *, kills: int
) -> None:
    """Submit `triage` and kill a worker in the middle, *kills* times: the groups are right.

    Right is what DuckDB finds in the same letters.
    """
    made = generate(folder / "made", Recipe(records=records, entities=500))
    whole = parquet.read_table(made.letters)
    source, parts = folder / "in", max(40, records // 5000)
    source.mkdir()
    each = -(-whole.num_rows // parts)
    for number in range(parts):  # a task each
        parquet.write_table(whole.slice(number * each, each), source / f"{number}.parquet")
    output = folder / "groups"
    one_file = {"spark.sql.files.openCostInBytes": str(1 << 27)}
    pid = cluster.submit(
        BOTH | one_file, list(shipped.glob("*.zip")), str(shipped / "holdfast_job.py"),
        "triage", "--from", f"parquet:{source}", "--output", str(output), "--limit", "3",
    )  # fmt: skip
    killed_in_the_middle(
        cluster,
        lambda worker: cluster.tasks(worker)[1] > 8,  # it began with the files' schemas
        kills,
    )
    assert cluster.wait(pid, PATIENCE) == 0, cluster.log[-4000:]
    facts = ("group_id", "count", "first", "last", "title", "topic", "consumer_group")
    found = {tuple(row[name] for name in facts)
             for row in parquet.read_table(output).to_pylist()}  # fmt: skip
    expected = DuckDbEngine().triage(f"parquet:{source}")
    assert found == {tuple(getattr(one, name) for name in facts) for one in expected.groups}
    assert sum(row[1] for row in found) == expected.ran.records == records


def killed_in_the_middle(
    cluster: SparkCluster, began: Callable[[int], bool], kills: int = 1
) -> None:
    """Kill a worker with a task on it once the job has *begun* well; between kills one comes."""

    def is_due(worker: int) -> bool:
        begun, done = cluster.tasks(worker)
        return begun > done and began(worker)

    for number in range(kills):
        if number or cluster.alive() < 2:
            cluster.add_worker()
        worker = len(cluster.workers) - 1
        lost = cluster.log.count("Lost executor ")
        wait_until(lambda worker=worker: is_due(worker), "the job to be in the middle", PATIENCE)
        cluster.kill_worker(worker)
        wait_until(
            lambda lost=lost: cluster.log.count("Lost executor ") > lost,
            "the driver to miss its executor",
            PATIENCE,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How much is replayed, and how."""

    count: int
    batch: int
    rate: str
    kills: int = 1


def submitted_replay(
    cluster: SparkCluster, shipped: Path, store: Engine, kafka: str, folder: Path, how: Replay
) -> None:
    """Submit `replay` and kill a worker in the middle: every effect once, and in order."""
    topic, group = f"cluster-orders-{how.count}", "billing"
    private = replay_topics(kafka, topic, group)
    first = letters_of(1, key=lambda _: "x", topic=topic, group=group)[0]
    copied(store, first, how.count, group=group)
    policy = StopPolicy(canary=0, ramp=(), patience=120)
    plan = frozen(
        Shop(store, folder),
        ReplayOptions(policy=policy, rate=Rate.parse(how.rate), approve_above=how.count),
    )
    plans = Plans(store)

    def sent() -> int:
        return plans.tally(plans.find(plan.id)).published

    url = store.url.render_as_string(hide_password=False)
    if cluster.alive() < 2:
        cluster.add_worker()
    pid = cluster.submit(
        BOTH | {"spark.task.maxFailures": "8"}, list(shipped.glob("*.zip")),
        str(shipped / "holdfast_job.py"),
        "replay", plan.id, "--database", url_of(store, folder), "--broker", kafka,
        "--batch", str(how.batch), "--reason", "fixed in 1.4.2",
    )  # fmt: skip
    for _ in range(how.kills):
        share = sent() + 4 * how.batch
        killed_in_the_middle(cluster, lambda _worker, share=share: sent() > share)
    assert sent() < how.count
    plans.slow(plans.find(plan.id), ADA, Rate.parse("5000/s"))  # slow only until the last kill
    # No effect before all is out: what is confirmed is not sent again, whatever a lane's mark says.
    wait_until(lambda: sent() == how.count, "everything to be sent", PATIENCE)
    with Billing(url, kafka, private, group).running() as billing:
        assert cluster.wait(pid, PATIENCE) == 0, cluster.log[-4000:]
    assert plans.find(plan.id).state is PlanState.DONE
    check_effects(store, billing, how.count, most_copies=how.batch * how.kills)
    with store.connect() as db:
        findings = [check_lane(db, plan.id, mark) for mark in marks_of(db, plan.id)]
    check = PlanCheck.of(plans.find(plan.id), findings)
    assert (check.is_whole, check.confirmed, check.unconfirmed) == (True, how.count, 0)


@pytest.fixture
def store(postgres: Any) -> Iterator[Engine]:
    """Open a store on PostgreSQL."""
    engine = open_database(postgres.database("cluster"))
    Migrations(engine).upgrade()
    effects.create_all(engine)
    yield engine
    engine.dispose()


def test_a_submitted_triage_is_right_although_a_worker_is_killed(
    cluster: SparkCluster, shipped: Path, tmp_path: Path
) -> None:
    """One of two workers is killed while the other goes on: the same groups as by DuckDB."""
    submitted_triage(cluster, shipped, tmp_path, 4000, kills=1)
    (packed,) = shipped.glob("*.zip")
    assert f"holdfast from {packed}" in cluster.log or f"{packed.name}/holdfast" in cluster.log


def test_a_submitted_replay_is_right_although_a_worker_is_killed(
    cluster: SparkCluster, shipped: Path, store: Engine, kafka: Any, tmp_path: Path
) -> None:
    """The lane of the killed worker is sent on by another, from its mark."""
    how = Replay(count=400, batch=20, rate="60/s")
    submitted_replay(cluster, shipped, store, kafka.url, tmp_path, how)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_a_large_triage_and_a_large_replay_are_right_through_many_kills(
    shipped: Path, store: Engine, kafka: Any, tmp_path: Path
) -> None:
    """Three hundred thousand letters and twenty thousand messages, three workers killed each."""
    with SparkCluster() as cluster:
        submitted_triage(cluster, shipped, tmp_path, 300_000, kills=3)
        how = Replay(count=20_000, batch=200, rate="80/s", kills=3)
        submitted_replay(cluster, shipped, store, kafka.url, tmp_path, how)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
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
