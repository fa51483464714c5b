"""Spark sends a plan in lanes through killed workers, a pause and a resume: once in effect."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.cli.migrations import Migrations
from holdfast.db.engine import open_database
from holdfast.dlq.replay import EndingKind, Plans, Rate, ReplayOptions, Selection, StopPolicy
from holdfast.dlq.replay.lane_sender import LanesSender
from holdfast.dlq.replay.lease import TakenPlan
from holdfast.dlq.replay.plan import PlanState
from holdfast.dlq.replay.sender import Pace
from holdfast.spark_jobs.planning import PlanRequest, make_plan
from holdfast.spark_jobs.replaying import SparkLanes, check_plan
from tests.spark.billing import Billing, check_effects, effects, metadata
from tests.spark.replaying import ADA, Leader, copied, letters, replay_topics, url_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession
    from sqlalchemy.engine import Engine

LANES, BATCH = 3, 50
PACE = Pace(batch=BATCH, lease_seconds=5.0, poll_seconds=0.1)


@pytest.fixture(scope="module")
def store(postgres: Any) -> Iterator[Engine]:
    """Open a store on PostgreSQL."""
    engine = open_database(postgres.database("replaying"))
    Migrations(engine).upgrade()
    metadata.create_all(engine)
    yield engine
    engine.dispose()


def python_workers(spark: SparkSession) -> list[int]:
    """Return the processes in which tasks of this session run Python."""
    jvm = spark.sparkContext._gateway.proc.pid
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int(
                    (folder / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except OSError:
                continue  # it has ended

    def within(pid: int, depth: int) -> list[int]:
        children = [child for child, parent in parents.items() if parent == pid]
        if depth == 0:
            return children
        return [one for child in children for one in within(child, depth - 1)]

    # Java starts a daemon, which forks a worker for each task that runs.
    return [pid for pid in within(jvm, 1) if _is_worker(pid)]


def _is_worker(pid: int) -> bool:
    try:
        return b"pyspark" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def kill_workers(spark: SparkSession) -> int:
    """Kill the Python processes of the tasks that run now; return how many there were."""
    killed = python_workers(spark)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    return len(killed)


def test_a_replay_through_killed_workers_and_a_resume_has_every_effect_once_and_in_order(
    spark: SparkSession, store: Engine, kafka: Any, tmp_path: Path
) -> None:
    """At most one batch of each lane that was killed is delivered again; verify agrees."""
    count, topic, group = 1500, "spark-orders", "spark-billing"
    private = replay_topics(kafka.url, topic, group)
    copied(store, letters(1, key=lambda _: "x", topic=topic, group=group)[0], count, group=group)
    database, plans = url_of(store, tmp_path), Plans(store)
    policy = StopPolicy(canary=10, ramp=(), patience=90)
    request = PlanRequest(
        database=database, lanes=LANES, staging=str(tmp_path / "staging"),
        selection=Selection(consumer_group=group),
        terms=ReplayOptions(policy=policy, rate=Rate.parse("100/s")),
    )  # fmt: skip
    made = make_plan(spark, request, ADA)
    assert made.plan is not None
    assert made.largest_lane >= count / 2
    plan = made.plan
    lanes = SparkLanes(spark=spark, database=database, broker=kafka.url)
    url = store.url.render_as_string(hide_password=False)
    with Billing(url, kafka.url, private, group).running() as billing:
        leader = Leader(store, lanes, plan, PACE)
        leader.until_sent(60)
        with pytest.raises(TakenPlan, match="being sent by"):
            LanesSender(store, lanes, pace=Pace(lease_seconds=0.2)).run(plan.id)
        killed = kill_workers(spark)
        assert killed
        leader.until_sent(leader.sent + 2 * BATCH)  # the lanes go on by themselves
        paused = plans.pause(plans.find(plan.id), ADA)
        assert leader.ending().kind is EndingKind.PAUSED
        assert leader.sent < count
        unfinished = check_plan(spark, database, plans.find(plan.id))
        assert unfinished.is_whole
        assert unfinished.unsent > 0
        plans.resume(paused, ADA, rate=Rate())
        ending = LanesSender(store, lanes, pace=PACE).run(plan.id)
    assert ending.kind is EndingKind.CONFIRMED
    assert plans.find(plan.id).state is PlanState.DONE
    check_effects(store, billing, count, most_copies=BATCH * killed)
    check = check_plan(spark, database, plans.find(plan.id))
    assert (check.is_whole, check.confirmed, check.waiting) == (True, count, 0)
    assert check.contradictions == 0


@pytest.mark.chaos
def test_a_hundred_thousand_messages_arrive_through_three_kills_and_a_resume(
    spark: SparkSession, store: Engine, kafka: Any, tmp_path: Path
) -> None:
    """As above, at full speed, with the lanes killed again and again."""
    count, batch, topic, group = 100_000, 500, "bulk-orders", "bulk-billing"
    private = replay_topics(kafka.url, topic, group)
    with store.begin() as db:
        db.execute(effects.delete())
    copied(store, letters(1, key=lambda _: "x", topic=topic, group=group)[0], count, group=group)
    database, plans = url_of(store, tmp_path), Plans(store)
    policy = StopPolicy(canary=20, ramp=(0.1,), patience=120)
    request = PlanRequest(
        database=database, lanes=4, staging=str(tmp_path / "staging"),
        selection=Selection(consumer_group=group),
        terms=ReplayOptions(policy=policy, approve_above=count),
    )  # fmt: skip
    plan = make_plan(spark, request, ADA).plan
    assert plan is not None
    lanes = SparkLanes(spark=spark, database=database, broker=kafka.url)
    url = store.url.render_as_string(hide_password=False)
    pace = Pace(batch=batch, lease_seconds=5.0, poll_seconds=0.2)
    with Billing(url, kafka.url, private, group).running() as billing:
        leader, killed = Leader(store, lanes, plan, pace), 0
        for share in (0.15, 0.3, 0.45):
            leader.until_sent(int(share * count))
            killed += kill_workers(spark)
        leader.until_sent(int(0.5 * count))
        plans.pause(plans.find(plan.id), ADA)
        assert leader.ending().kind is EndingKind.PAUSED
        plans.resume(plans.find(plan.id), ADA)
        ending = LanesSender(store, lanes, pace=pace).run(plan.id)
    assert ending.kind is EndingKind.CONFIRMED
    check_effects(store, billing, count, most_copies=batch * killed)
    check = check_plan(spark, database, plans.find(plan.id))
    assert (check.is_whole, check.confirmed, check.waiting) == (True, count, 0)
