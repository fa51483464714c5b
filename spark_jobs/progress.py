"""How far a job is: what Spark tells of its stages, handed to whoever draws it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.spark_jobs.session import is_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """Tasks of the stages that run now."""

    done: int
    total: int
    running: int


@contextmanager
def watched(spark: SparkSession, tell: Callable[[JobProgress], object]) -> Iterator[None]:
    """Call *tell* from time to time while the body runs; never after it has ended."""
    follow = _remotely if is_remote(spark) else _locally
    with follow(spark, tell):
        yield


@contextmanager
def _locally(spark: Any, tell: Callable[[JobProgress], object]) -> Iterator[None]:
    ended = threading.Event()
    tracker = spark.sparkContext.statusTracker()

    def look() -> None:
        while not ended.wait(_LOOK_SECONDS):
            try:
                stages = [tracker.getStageInfo(one) for one in tracker.getActiveStageIds()]
            except Exception:  # noqa: BLE001 - the session ended; progress is no reason to fail
                return
            known = [stage for stage in stages if stage is not None]
            if known and not ended.is_set():
                tell(
                    JobProgress(
                        done=sum(stage.numCompletedTasks for stage in known),
                        total=sum(stage.numTasks for stage in known),
                        running=sum(stage.numActiveTasks for stage in known),
                    )
                )

    thread = threading.Thread(target=look, name="holdfast-spark-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _remotely(spark: Any, tell: Callable[[JobProgress], object]) -> Iterator[None]:
    def handle(stages: Any, inflight_tasks: int, operation_id: str | None, done: bool) -> None:
        del operation_id, done
        known = list(stages or ())
        tell(
            JobProgress(
                done=sum(stage.num_completed_tasks for stage in known),
                total=sum(stage.num_tasks for stage in known),
                running=inflight_tasks,
            )
        )

    spark.registerProgressHandler(handle)
    try:
        yield
    finally:
        spark.removeProgressHandler(handle)
