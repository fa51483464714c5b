"""The broker is killed in the middle of a replay and of a transform: nothing is lost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.cli import main
from holdfast.cli.exits import EXIT_DOWN
from holdfast.cli.migrations import Migrations
from holdfast.db.engine import open_database
from holdfast.dlq.replay import EndingKind, Plans, Rate, ReplayOptions, Selection, StopPolicy
from holdfast.dlq.replay.plan import PlanState
from holdfast.dlq.replay.sender import Pace
from holdfast.spark_jobs.archive.state import LocalFolder, NumberedLog
from holdfast.spark_jobs.planning import PlanRequest, make_plan
from holdfast.spark_jobs.replaying import SparkLanes, check_plan
from holdfast.spark_jobs.transforming import TransformState
from tests.spark.billing import Billing, check_effects, metadata
from tests.spark.replaying import ADA, Leader, copied, letters, replay_topics, url_of
from tests.spark.test_transforming import CENTS, numbers_by_key, on_topic, order, put

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession
    from sqlalchemy.engine import Engine

BATCH = 50
QUICK = "timeout=5&publish_within=15"
"""How soon the client gives a broker up that does not answer."""


@pytest.fixture
def store(postgres: Any) -> Iterator[Engine]:
    """Open a store on PostgreSQL."""
    engine = open_database(postgres.database("outages"))
    Migrations(engine).upgrade()
    metadata.create_all(engine)
    yield engine
    engine.dispose()


def test_a_replay_waits_for_a_broker_that_was_killed_and_every_effect_is_there_once(
    spark: SparkSession, store: Engine, own_kafka: Any, tmp_path: Path
) -> None:
    """Killed while lanes send, and started again: the lanes go on by themselves."""
    count, topic, group = 600, "outage-orders", "outage-billing"
    private = replay_topics(own_kafka.url, topic, group)
    copied(store, letters(1, key=lambda _: "x", topic=topic, group=group)[0], count, group=group)
    database, plans = url_of(store, tmp_path), Plans(store)
    request = PlanRequest(
        database=database, lanes=2, staging=str(tmp_path / "staging"),
        selection=Selection(consumer_group=group),
        terms=ReplayOptions(policy=StopPolicy(canary=0, ramp=(), patience=300),
                            rate=Rate.parse("100/s")),
    )  # fmt: skip
    plan = make_plan(spark, request, ADA).plan
    assert plan is not None
    # Less than Kafka takes to start: the client gives up, and the lane itself is patient.
    broker = f"{own_kafka.url}?timeout=5&publish_within=2"
    lanes = SparkLanes(spark=spark, database=database, broker=broker)
    leader = Leader(store, lanes, plan, Pace(batch=BATCH, lease_seconds=5.0, poll_seconds=0.1))
    leader.until_sent(100)
    own_kafka.kill()
    sent = leader.sent
    assert sent < count
    own_kafka.start()
    url = store.url.render_as_string(hide_password=False)
    with Billing(url, own_kafka.url, private, group).running() as billing:
        assert leader.ending().kind is EndingKind.CONFIRMED
    assert plans.find(plan.id).state is PlanState.DONE
    check_effects(store, billing, count, most_copies=2 * BATCH)
    check = check_plan(spark, database, plans.find(plan.id))
    assert (check.is_whole, check.confirmed, check.waiting) == (True, count, 0)


def test_a_transform_ends_with_the_next_command_when_its_broker_dies_and_goes_on_by_it(
    spark: SparkSession, own_kafka: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Killed once some rounds are out; the messages of the others wait in the checkpoint."""
    del spark  # the command finds the session that is there
    old, new = "outage-transform", "outage-transform.v2"
    orders = [order(n, topic=old, key=f"k{n % 7}") for n in range(300)]
    url = f"{own_kafka.url}?{QUICK}"
    source = f"{own_kafka.url}?topic={old}"
    put(url, old, orders)
    put(url, new, [])
    checkpoint = tmp_path / "c"
    log = NumberedLog(LocalFolder(checkpoint), TransformState, called="transform")

    def holdfast(code: int = 0) -> Any:
        ended: Any = 0
        try:
            main(["spark", "transform", "--from", source, "--to", f"{url}&topic={new}",
                  "--with", CENTS, "--checkpoint", str(checkpoint), "--lanes", "2", "--batch",
                  "60", "--patience", "3s", "--json"])  # fmt: skip
        except SystemExit as exit_:
            ended = exit_.code or 0
        out, err = capsys.readouterr()
        assert ended == code, err
        return json.loads(out) if out.strip() else " ".join(err.split())

    def killed(text: str) -> None:
        if text.startswith("round 2"):
            own_kafka.kill()

    monkeypatch.setattr("holdfast.cli.spark.transform.note", killed)
    said = holdfast(EXIT_DOWN)
    assert "round 3 of " in said
    assert "gave up: BrokerDown" in said
    assert f"holdfast spark transform --from {source}" in said
    assert f"--checkpoint {checkpoint}" in said
    marked = log.newest()
    assert (marked.phase, marked.done) == ("staged", 2)
    own_kafka.start()
    monkeypatch.undo()
    found = holdfast()
    assert (found["read"], found["written"], found["refused"]) == (300, 300, 0)
    assert (found["before"], found["is_whole"]) == (marked.written, True)
    sent = on_topic(url, new)
    assert {one.id for one in sent} == {one.id for one in orders}
    assert len(sent) - 300 <= 60
    assert all(numbers == sorted(numbers) for numbers in numbers_by_key(sent).values())
