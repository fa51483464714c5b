"""The `plan` job: a frozen replay plan of any size, divided into lanes by key.

Candidates come from the store or from an archive; the store itself says of each whether it is
pending, free and fit, by the very functions of `holdfast dlq replay`. That judgement is staged as
files, since it must not change when a task is begun again. Then every lane numbers and claims its
own messages. Nothing but counts, hashes and the canary passes through the driver.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.engine import open_database
from holdfast.db.transactions import committed
from holdfast.dlq.replay.item_state import ItemState
from holdfast.dlq.replay.lane_freeze import Draft, LaneHash, LaneSizes, begin, finish
from holdfast.dlq.replay.lanes import MOST_LANES, marks_of
from holdfast.dlq.replay.letters import high_water
from holdfast.dlq.replay.plan import NotNow, PlanState
from holdfast.dlq.replay.plans import Plans
from holdfast.dlq.replay.selection import digest
from holdfast.dlq.replay.survey import NothingToReplay
from holdfast.dlq.store.rows import key_hash
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.spark_jobs import sources
from holdfast.spark_jobs.errors import translated
from holdfast.spark_jobs.lane_tasks import JUDGED, ClaimLanes, Judge
from holdfast.spark_jobs.secrets import require_no_secret, revealed
from holdfast.spark_jobs.store import read_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession
    from sqlalchemy.engine import Engine

    from holdfast.db.audit import Operator
    from holdfast.dlq.replay.lease import PlanLease
    from holdfast.dlq.replay.plan import ReplayOptions, ReplayPlan
    from holdfast.dlq.replay.selection import Selection

_BEAT_SECONDS = 1.5
_NUMBER = "[0-9]{1,30}"
_CANARY, _REST, _ASIDE = 0, 1, 2
_GONE = "gone"
"""The state of a candidate that the store does not have pending and free."""
_MOST_KINDS = 10_000
"""Of failures in one plan; with more, the rest counts as new kinds when it fails again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is to be planned, and how it is to be sent."""

    database: str
    """The store, without secrets: `${NAME}` and `${file:…}` are looked up where it is opened."""
    selection: Selection
    terms: ReplayOptions
    source: str | None = None
    """Where candidates are looked for; None: in the store itself."""
    format: str | None = None
    lanes: int = 8
    staging: str
    """A folder that driver and executors share, for what is judged and not yet claimed."""

    def __post_init__(self) -> None:
        require_no_secret(self.database)
        if not 1 <= self.lanes <= MOST_LANES:
            raise ConfigurationError(f"{self.lanes} lanes: use 1 to {MOST_LANES}")
        if self.selection.is_empty:
            raise ConfigurationError(
                "nothing is selected: name a group, or filter by topic and so on"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a plan holds, or would hold."""

    total: int
    canary: int
    aside: dict[str, int]
    gone: int
    """Candidates that the store does not have pending, or that another plan has claimed."""
    largest_lane: int
    """Messages in the fullest lane: the replay takes as long as that one."""
    by_lane: tuple[int, ...]
    lanes: int
    high_water: int
    plan: ReplayPlan | None = None
    """None: nothing was written."""


def make_plan(
    spark: SparkSession,
    request: PlanRequest,
    operator: Operator | None,
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> Planned:
    """Freeze a plan as *request* says; without an *operator* only tell what it would hold."""
    engine = open_database(revealed(request.database))
    try:
        with translated():
            return _made(spark, engine, request, operator, clock)
    finally:
        engine.dispose()


def _made(
    spark: SparkSession,
    engine: Engine,
    request: PlanRequest,
    operator: Operator | None,
    clock: Clock,
) -> Planned:
    with engine.connect() as db:
        below = high_water(db)
    judged = _staged(spark, request, below)
    counts = _counts(judged, request.lanes)
    total = sum(counts.planned)
    aside = {state: n for state, n in counts.states.items()
             if state not in (ItemState.CLAIMED, _GONE)}  # fmt: skip
    _require_some(judged, request, total, aside, counts.states.get(_GONE, 0))
    canary = _canary(judged, min(request.terms.policy.canary, total))
    sizes = _sizes(counts, canary, request.lanes)
    found = Planned(
        total=total,
        canary=len(canary),
        aside=aside,
        gone=counts.states.get(_GONE, 0),
        largest_lane=max(counts.planned),
        by_lane=tuple(counts.planned),
        lanes=request.lanes,
        high_water=below,
    )
    if operator is None:
        return found
    kinds = judged.where("state != 'gone'").select("fingerprint").distinct().limit(_MOST_KINDS)
    draft = Draft(
        selection=request.selection,
        terms=request.terms,
        operator=operator,
        high_water=below,
        sizes=sizes,
        fingerprints=tuple(sorted(row.fingerprint or "" for row in kinds.collect())),
        aside=aside,
    )
    lease = begin(engine, draft, clock=clock)
    plan = _frozen(judged, request, draft, lease, [one.dlq_id for one in canary])
    return Planned(**{**_fields(found), "plan": plan})


def _fields(found: Planned) -> dict[str, Any]:
    return {name: getattr(found, name) for name in Planned.__slots__}


def candidates(spark: SparkSession, request: PlanRequest, below: int) -> DataFrame:
    """Return what is to be judged, with the lane of each and its place within its key."""
    from pyspark.sql import functions as f

    if request.source is None:
        records = read_store(spark, request.database)
    else:
        records = sources.read(spark, request.source, format=request.format)
    found = records.where(_matches(request.selection)).where(
        f.col("seq").isNull() | (f.col("seq") <= below)
    )
    if request.source is not None:
        found = found.dropDuplicates(["dlq_id"])  # several attempts of a letter are one
    own = f.concat(f.unhex(f.lit("00")), f.encode("dlq_id", "UTF-8"))
    scope = f.concat(f.col("topic"), f.lit("\x1f"), f.col("consumer_group"), f.lit("\x1f"))
    keyed = f.concat(f.encode(scope, "UTF-8"), f.coalesce(f.col("key"), own))
    return found.select(
        "dlq_id",
        "seq",
        f.substring(f.sha2(keyed, 256), 1, 32).alias("key_hash"),
        place_of().alias("place"),
    ).withColumn("lane", f.pmod(f.crc32(f.encode("key_hash", "UTF-8")), f.lit(request.lanes)))


def place_of() -> Column:
    """Return text that sorts as the `position` of a message does; empty where that is no number."""
    from pyspark.sql import functions as f

    numbers = f.transform(f.split("position", "[-:.]"), lambda part: f.lpad(part, 30, "0"))
    is_placed = f.col("position").rlike(rf"\A{_NUMBER}([-:.]{_NUMBER}){{0,4}}\z")
    return f.when(is_placed, f.array_join(numbers, "")).otherwise("")


def _matches(selection: Selection) -> Column:
    """Return the conditions of *selection* on records; the same as `Selection.where` on rows."""
    from functools import reduce
    from operator import and_

    from pyspark.sql import functions as f

    from holdfast.db.text import cut

    key = None if selection.key is None else key_hash(selection.key.encode())
    equal = {
        "consumer_group": selection.consumer_group, "topic": selection.topic,
        "error_class": selection.kind, "tenant": selection.tenant,
        "service_version": selection.version, "state": selection.state,
        "correlation_id": cut(selection.correlation), "key_hash": key,
    }  # fmt: skip
    found = [f.col(name) == value for name, value in equal.items() if value is not None]
    if selection.groups:
        found.append(f.col("group_id").isin(*selection.groups))
    if selection.dlq_ids:
        found.append(f.col("dlq_id").isin(*selection.dlq_ids))
    if selection.error is not None:
        tail = f.col("error_type").endswith(f".{selection.error}")
        found.append((f.col("error_type") == selection.error) | tail)
    if selection.due:
        found.append(f.col("due_at") <= f.lit(SYSTEM_CLOCK.now()))
    if selection.since is not None:
        found.append(_seconds("last_failed_at") >= selection.since)
    if selection.until is not None:
        found.append(_seconds("last_failed_at") < selection.until)
    return reduce(and_, found)


def _seconds(name: str) -> Column:
    from pyspark.sql import functions as f

    return f.unix_micros(name) / 1_000_000.0


def _staged(spark: SparkSession, request: PlanRequest, below: int) -> DataFrame:
    """Judge every candidate by lane and key, and keep the judgement: tasks may be begun again."""
    path = f"{request.staging.rstrip('/')}/judged"
    judge = Judge(
        database=request.database, selection=request.selection, terms=request.terms, below=below
    )
    (
        candidates(spark, request, below)
        # Not `repartition`: adaptive execution would put several lanes into one task.
        .repartitionById(request.lanes, _int("lane"))
        .sortWithinPartitions("key_hash", "place", "seq", "dlq_id")
        .mapInArrow(judge, JUDGED)
        .write.mode("overwrite")
        .parquet(path)
    )
    return spark.read.schema(JUDGED).parquet(path)


def _int(name: str) -> Column:
    from pyspark.sql import functions as f

    return f.col(name).cast("int")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    planned: list[int]
    aside: list[int]
    states: dict[str, int]


def _counts(judged: DataFrame, lanes: int) -> _Counts:
    planned, aside, states = [0] * lanes, [0] * lanes, dict[str, int]()
    for lane, state, count in judged.groupBy("lane", "state").count().collect():
        states[state] = states.get(state, 0) + count
        if state == ItemState.CLAIMED:
            planned[lane] += count
        elif state != _GONE:
            aside[lane] += count
    return _Counts(planned=planned, aside=aside, states=states)


def _require_some(
    judged: DataFrame, request: PlanRequest, total: int, aside: dict[str, int], gone: int
) -> None:
    """Refuse a plan that sends nothing, and say why; the loop cap parks by one."""
    if total or aside.get(ItemState.PARKED):
        return
    if not aside:
        what = ", ".join(f"{k}={v}" for k, v in request.selection.described().items())
        rest = f"; {gone:,} are closed, or claimed by another plan" if gone else ""
        raise NothingToReplay(f"no dead letter is pending and free under {what}{rest}")
    first: Any = judged.where("note IS NOT NULL").select("dlq_id", "state", "note").first()
    raise NotNow(
        f"none of the {sum(aside.values()):,} messages can be sent: {first.dlq_id[:8]} is "
        f"{first.state}, {first.note}"
    )


def _canary(judged: DataFrame, size: int) -> list[Any]:
    """Return the *size* messages that go first: the first of their keys, of every kind of failure.

    Where there are fewer keys than that, those at the front of the order fill it up.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    if not size:
        return []
    planned = judged.where(f.col("state") == ItemState.CLAIMED.value)
    stratum = Window.partitionBy("fingerprint", "version").orderBy("place", "seq", "dlq_id")
    columns = ("dlq_id", "lane", "key_hash")
    chosen = (
        planned.where("is_first")
        .withColumn("rank", f.row_number().over(stratum))
        .where(f.col("rank") <= size)
        .orderBy("rank", "fingerprint", "version", "dlq_id")
        .select(*columns)
        .limit(size)
        .collect()
    )
    if len(chosen) < size:
        known = {row.dlq_id for row in chosen}
        front = planned.orderBy("place", "seq", "dlq_id").select(*columns).limit(size).collect()
        chosen += [row for row in front if row.dlq_id not in known][: size - len(chosen)]
    return chosen


def _sizes(counts: _Counts, canary: Sequence[Any], lanes: int) -> LaneSizes:
    first = [0] * lanes
    for row in canary:
        first[row.lane] += 1
    rest = [all_ - some for all_, some in zip(counts.planned, first, strict=True)]
    return LaneSizes(canary=tuple(first), rest=tuple(rest), aside=tuple(counts.aside))


def _frozen(
    judged: DataFrame,
    request: PlanRequest,
    draft: Draft,
    lease: PlanLease,
    canary: Sequence[str],
) -> ReplayPlan:
    """Let every lane claim its messages; the plan is a draft once all have."""
    from pyspark.sql import functions as f

    is_canary = f.col("dlq_id").isin(*canary) if canary else f.lit(False)
    sort = (
        f.when(f.col("state") != ItemState.CLAIMED.value, _ASIDE)
        .when(is_canary, _CANARY)
        .otherwise(_REST)
    )
    claim = ClaimLanes(database=request.database, plan_id=lease.plan_id, epoch=lease.epoch)
    claimed = (
        judged.where(f.col("state") != _GONE)
        .withColumn("sort", sort)
        .repartitionById(request.lanes, "lane")
        .sortWithinPartitions("sort", "place", "seq", "dlq_id")
        .mapInArrow(claim, claim.SCHEMA)
    )
    try:
        with kept(lease):
            rows = claimed.collect()
        return finish(lease, draft, _hashes(lease, rows))
    except BaseException:
        with suppress(HoldfastError):
            _abandon(lease, draft)
        raise


def _hashes(lease: PlanLease, rows: Sequence[Any]) -> list[LaneHash]:
    """Return the hashes of all lanes: what has no messages had no task to tell one."""
    told = {(row.stage, row.lane): row.hash for row in rows}
    with lease.engine.connect() as db:
        marks = marks_of(db, lease.plan_id)
    for mark in marks:
        if mark.start == mark.beyond:
            told.setdefault((mark.stage, mark.lane), digest(()))
    return [LaneHash(stage, lane, text) for (stage, lane), text in told.items()]


def _abandon(lease: PlanLease, draft: Draft) -> None:
    """Free what a plan that could not be made has claimed."""
    plans = Plans(lease.engine, clock=lease.clock)
    found = plans.find(lease.plan_id)
    if found.state is PlanState.FREEZING:
        plans.abort(found, draft.operator)


@contextmanager
def kept(lease: PlanLease) -> Iterator[None]:
    """Renew *lease* while the body runs."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(_BEAT_SECONDS):
            with suppress(HoldfastError):  # an outage; who lost the lease is told by its claims
                committed(lease.engine, lease.mark, clock=lease.clock)

    thread = threading.Thread(target=work, name="holdfast-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
