"""The `replay` job: a plan with lanes, sent by one task per lane.

The driver leads as the sender of a small plan does: it holds the plan's lease, goes from gate to
gate and stops when too much fails again. A task that dies is begun again by Spark and goes on from
the mark of its lane. Whoever runs `holdfast dlq plans pause` or `abort` ends all of them within a
batch each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.db.engine import open_database
from holdfast.dlq.replay.lane_check import LaneFinding, PlanCheck
from holdfast.dlq.replay.lane_sender import LaneResult
from holdfast.dlq.replay.lanes import marks_of
from holdfast.dlq.replay.plan import NotNow
from holdfast.errors import ConfigurationError
from holdfast.spark_jobs.errors import translated
from holdfast.spark_jobs.lane_tasks import CheckLanes, SendLane
from holdfast.spark_jobs.secrets import require_no_secret, revealed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.dlq.replay.lane_sender import LaneOrder
    from holdfast.dlq.replay.plan import ReplayPlan

BATCH = 1000
"""Messages between two marks of a lane: after a crash as many are sent again at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkLanes:
    """Sends the lanes of a plan as the tasks of one Spark job."""

    spark: SparkSession
    database: str
    broker: str
    master_key_file: str | None = None

    def __post_init__(self) -> None:
        require_no_secret(self.database)
        require_no_secret(self.broker)
        if _speculates(self.spark):
            raise ConfigurationError(
                "spark.speculation is on: two attempts of a lane would fence each other; set it to "
                "false for this job"
            )

    def __call__(self, order: LaneOrder) -> list[LaneResult]:
        """Send every lane up to the gate of *order*; one row and one task per lane."""
        send = SendLane(
            order=order,
            database=self.database,
            broker=self.broker,
            master_key_file=self.master_key_file,
        )
        lanes = self.spark.range(0, order.lanes, 1, order.lanes)
        with translated():
            rows = lanes.mapInArrow(send, SendLane.SCHEMA).collect()
        return [LaneResult(lane=row.lane, sent=row.sent, outage=row.outage) for row in rows]


def check_plan(spark: SparkSession, database: str, plan: ReplayPlan) -> PlanCheck:
    """Compare the plan, its ledger and what consumers confirmed, one task per lane and stage."""
    if not plan.lanes:
        raise NotNow(f"plan {plan.short} has no lanes: holdfast dlq verify {plan.short}")
    engine = open_database(revealed(database))
    try:
        with engine.connect() as db:
            count = len(marks_of(db, plan.id))
    finally:
        engine.dispose()
    check = CheckLanes(database=require_no_secret(database), plan_id=plan.id)
    tasks = spark.range(0, count, 1, min(count, 4 * plan.lanes))
    with translated():
        rows = tasks.mapInArrow(check, CheckLanes.SCHEMA).collect()
    return PlanCheck.of(plan, [LaneFinding(**row.asDict()) for row in rows])


def _speculates(spark: SparkSession) -> bool:
    return str(spark.conf.get("spark.speculation", "false")).lower() == "true"
