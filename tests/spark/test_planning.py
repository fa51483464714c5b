"""A plan that Spark makes is the plan that `holdfast dlq replay` would make, divided into lanes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from holdfast.cli.migrations import Migrations
from holdfast.db.audit import entries
from holdfast.db.engine import open_database
from holdfast.dlq.replay import Plans, ReplayOptions, Selection, StopPolicy, freeze
from holdfast.dlq.replay.lanes import lane_of, marks_of
from holdfast.dlq.replay.plan import PlanState, gates
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.survey import NothingToReplay, surveyed
from holdfast.dlq.store.schema import message
from holdfast.errors import ConfigurationError
from holdfast.spark_jobs.planning import PlanRequest, make_plan
from holdfast.spark_jobs.store import read_store
from tests.dead_letters import emptied
from tests.spark.replaying import ADA, BILLING, change, ids, letters, overtake, put, url_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession
    from sqlalchemy.engine import Engine

POLICY = StopPolicy(canary=7, ramp=(0.25, 0.5))
TERMS = ReplayOptions(policy=POLICY)


@pytest.fixture(scope="module")
def database(postgres: Any) -> Iterator[Engine]:
    """Open a store on PostgreSQL, which Spark reads by JDBC."""
    engine = open_database(postgres.database("planning"))
    Migrations(engine).upgrade()
    yield engine
    engine.dispose()


@pytest.fixture
def store(database: Engine) -> Engine:
    """Empty the store."""
    return emptied(database)


def mixed(engine: Engine) -> None:
    """Store what a plan has to tell apart."""
    put(engine, letters(120, key=lambda n: f"k{n % 11}"))
    put(engine, letters(30, key=lambda n: None if n % 3 else "é", start=200, version="2",
                        text="no such customer"))  # fmt: skip
    put(engine, letters(40, key=lambda _: "hot", start=300))
    put(engine, letters(9, key=lambda n: f"k{n}", group="shipping"))
    known = ids(engine)
    overtake(engine, known["billing-000005"])  # superseded
    change(engine, known["billing-000008"], replay_count=3)  # parked by the cap
    change(engine, known["billing-000310"], replayable=False)  # cannot be sent as it is
    change(engine, known["billing-000201"], state="discarded")
    claimed = Selection(dlq_ids=(known["billing-000030"],))
    freeze(engine, claimed, TERMS, ADA)  # belongs to somebody else's plan


def test_a_plan_holds_what_the_command_would_plan_for_the_same_reasons(
    spark: SparkSession, store: Engine, tmp_path: Path
) -> None:
    """Same messages, same verdicts with the same words, same order within every key."""
    mixed(store)
    manifest = surveyed(store, BILLING, TERMS)
    request = PlanRequest(
        database=url_of(store, tmp_path), selection=BILLING, terms=TERMS, lanes=4,
        staging=str(tmp_path / "staging"),
    )  # fmt: skip
    made = make_plan(spark, request, ADA)
    assert made.plan is not None
    plan = Plans(store).find(made.plan.id)
    assert (plan.state, plan.lanes, plan.total) == (PlanState.DRAFT, 4, len(manifest.letters))

    wanted: dict[str, tuple[str, str | None]] = {
        one.dlq_id: ("claimed", None) for one in manifest.letters
    }
    wanted |= {one.dlq_id: (state.value, note) for one, state, note in manifest.aside}
    assert {state for state, _ in wanted.values()} == {"claimed", "held", "parked", "skipped"}
    with store.connect() as db:
        rows = db.execute(
            select(item).where(item.c.plan_id == plan.id).order_by(item.c.position)
        ).all()
        marks = marks_of(db, plan.id)
        audited = [one for one in entries(db) if one.subject == f"plan {plan.id}"]
    assert {row.dlq_id: (row.state, row.note) for row in rows} == wanted
    assert [row.position for row in rows] == list(range(len(rows)))
    assert all((row.live == row.dlq_id) == (row.state == "claimed") for row in rows)
    assert [one.action for one in audited] == ["replay.plan"]
    assert Plans(store).manifest_hash(plan) == plan.hash

    refs = {one.dlq_id: one for one in manifest.everything}
    by_key: dict[str, list[str]] = defaultdict(list)
    for one in manifest.letters:
        by_key[one.key_hash].append(one.dlq_id)
    own: dict[str, list[str]] = defaultdict(list)
    for row in rows[: plan.total]:
        assert row.key_hash == refs[row.dlq_id].key_hash
        own[row.key_hash].append(row.dlq_id)
    in_order = {
        key: sorted(some, key=lambda one: int(refs[one].position)) for key, some in by_key.items()
    }
    assert own == in_order

    for mark in marks:
        for row in rows[mark.start : mark.beyond]:
            assert lane_of(row.key_hash, 4) == mark.lane
    bounds = sorted({mark.start for mark in marks if mark.stage and mark.lane == 0})
    assert bounds == list(gates(plan.total, POLICY))
    canary = [refs[row.dlq_id] for row in rows[:7]]
    assert {one.version for one in canary} == {"1", "2"}


def test_an_archive_chooses_and_the_store_says_what_is_still_pending(
    spark: SparkSession, store: Engine, tmp_path: Path
) -> None:
    """Several records of one letter are one; what was closed since is not planned."""
    put(store, letters(30, key=lambda n: f"k{n % 5}"))
    database, files = url_of(store, tmp_path), str(tmp_path / "records")
    records = read_store(spark, database)
    records.union(records.where("position < 10")).write.parquet(files)
    known = ids(store)
    change(store, known["billing-000003"], state="discarded")
    with store.begin() as db:
        db.execute(message.delete().where(message.c.dlq_id == known["billing-000020"]))
    request = PlanRequest(
        database=database, selection=BILLING, lanes=2, source=f"parquet:{files}",
        terms=ReplayOptions(policy=StopPolicy(canary=0, ramp=())),
        staging=str(tmp_path / "staging"),
    )  # fmt: skip
    told = make_plan(spark, request, None)
    assert Plans(store).latest() == []
    assert (told.plan, told.total, told.gone, told.aside) == (None, 28, 2, {})
    made = make_plan(spark, request, ADA)
    assert (made.total, made.gone, made.aside) == (28, 2, {})
    nothing = Selection(consumer_group="nobody")
    with pytest.raises(NothingToReplay, match="consumer_group=nobody"):
        make_plan(spark, replace(request, selection=nothing), ADA)
    with pytest.raises(NothingToReplay, match="30 are closed, or claimed"):
        make_plan(spark, replace(request, selection=Selection(topic="orders", since=1.0)), ADA)


def test_a_request_that_makes_no_sense_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """With the words that say what to change."""
    good: dict[str, Any] = {
        "database": "sqlite:///x.db", "selection": BILLING, "terms": TERMS,
        "staging": str(tmp_path),
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match="1 to 4096"):
        PlanRequest(**good, lanes=0)
    with pytest.raises(ConfigurationError, match="nothing is selected"):
        PlanRequest(**{**good, "selection": Selection()})
    with pytest.raises(ConfigurationError, match=r"secret.*\$\{NAME\}"):
        PlanRequest(**{**good, "database": "postgresql+psycopg://ada:word@db/shop"})
