"""Bulk replay from PostgreSQL to Kafka, against the raw producer fed from memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from bench_kafka import _confluent_produce, _python_produce
from sqlalchemy import Text, Uuid, cast, func, insert, literal_column, select, true, update

from figures import Figure, Goal, compare, rate
from holdfast.brokers import connect
from holdfast.cli.migrations import Migrations
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterStore, capture
from holdfast.dlq.replay import Plans, ReplayOptions, Selection, Sender, StopPolicy, freeze
from holdfast.dlq.replay.lane_freeze import (
    Draft,
    LaneSizes,
    PlannedLetter,
    begin,
    claim_lane,
    finish,
)
from holdfast.dlq.replay.lane_sender import LaneOrder, send_lane
from holdfast.dlq.replay.lanes import LaneClaim
from holdfast.dlq.replay.lease import PlanLease
from holdfast.dlq.replay.reading import PlanReader
from holdfast.dlq.replay.schema import lane as lanes
from holdfast.dlq.replay.schema import plan as plans
from holdfast.dlq.replay.sender import Pace
from holdfast.dlq.replay.survey import surveyed
from holdfast.dlq.replay.target import Target
from holdfast.dlq.store.schema import message
from holdfast.message import Message
from holdfast.ports import Delivery, Lane, SinkPowers
from holdfast.testing import wait_until
from tests.servers import Kafka, Postgres

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy.engine import Engine

    from holdfast.dlq.replay import ReplayPlan
    from holdfast.ports import Broker, Published, Sink

ROUNDS = 5
WHO = Operator(actor="bench", reason="measure")
# Nobody consumes here: the run ends as soon as everything is sent.
TERMS = ReplayOptions(policy=StopPolicy(canary=0, ramp=(), patience=0.001), approve_above=10**9)
PACE = Pace(poll_seconds=0.001)


def figures() -> Iterator[Figure]:
    """Measure the sending of a frozen plan, driver by driver."""
    with Postgres() as postgres, Kafka() as kafka:
        engine = open_database(postgres.database("bench_replay"))
        Migrations(engine).upgrade()
        for name, scheme, produce, count, goal in (
            ("kafka-python", "kafka", _python_produce, 12_000, 0.85),
            ("confluent", "kafka+confluent", _confluent_produce, 100_000, 0.7),
        ):
            broker = connect(f"{scheme}://{kafka.address}")
            broker.create_topic("orders", partitions=4)
            plan = _frozen(engine, f"group-{name}", count)
            topic, messages = _wire(engine, broker, plan)
            produce(kafka.address, topic, messages)  # warm
            connected = _Connected(broker, messages[:10])
            yield compare(
                f"bulk replay, {name}",
                ours=lambda connected=connected, plan=plan: _replay(engine, connected, plan),
                peer=lambda produce=produce, topic=topic, messages=messages: produce(
                    kafka.address, topic, messages
                ),
                unit="messages/s",
                goal=Goal(at_least=goal),
                detail=f"{count} dead letters of 300 B in PostgreSQL, a frozen plan sent to its "
                "end, from taking its lease on; raw: one unbroken stream of the same records from "
                "memory, headers made beforehand; both connected beforehand",
                rounds=ROUNDS,
            )
            lane = _laned(engine, plan)
            yield compare(
                f"one lane of a bulk replay, {name}",
                ours=lambda connected=connected, lane=lane: _send_lane(engine, connected, lane),
                peer=lambda produce=produce, topic=topic, messages=messages: produce(
                    kafka.address, topic, messages
                ),
                unit="messages/s",
                goal=Goal(at_least=0.8),
                detail=f"{count} dead letters of 300 B in PostgreSQL as one lane, sent as a task "
                "of holdfast spark replay sends it, in batches of 5,000, each marked before the "
                "next goes; raw as above",
                rounds=ROUNDS,
            )
            connected.end()
            broker.close()
        engine.dispose()


class _Connected:
    """A broker whose sink is connected before the time is taken, as the raw producer is."""

    def __init__(self, broker: Broker, some: list[Message]) -> None:
        self._broker = broker
        self._sink = broker.sink()
        SinkPowers.of(self._sink).publish_within(some, 60.0)  # as the sender publishes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def sink(self) -> Any:
        return _Kept(self._sink)

    def end(self) -> None:
        self._sink.close()


class _Kept(SinkPowers):
    """A sink that stays open for the next round."""

    def __init__(self, sink: Sink) -> None:
        self.caps = sink.caps
        self._sink = SinkPowers.of(sink)
        self.publish_within = self._sink.publish_within  # type: ignore[method-assign]

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        return self._sink.publish(messages)

    def prepare(self) -> None:
        self._sink.prepare()

    def close(self) -> None:
        """Do nothing."""


def _frozen(engine: Engine, group: str, count: int) -> ReplayPlan:
    """Return a plan of *count* letters: copies of one that was captured, each with its own key."""
    made = Message.new("orders", b"x" * 300, key="key", type="OrderPlaced")
    delivery = Delivery(lane=Lane("orders", 0), position=0, key=made.key, body=b"")
    letter = capture(made, _raised(), group=group, handler="shop.bill", delivery=delivery)
    DeadLetterStore(engine).put(letter)
    number = literal_column("n")
    key = func.concat("key-", number % 997)
    own = {
        "dlq_id": cast(cast(func.md5(func.concat(group, number)), Uuid), Text),
        "message_id": cast(cast(func.md5(func.concat("m", group, number)), Uuid), Text),
        "message_key": func.convert_to(key, "UTF8"),
        "key_hash": func.left(func.encode(func.sha256(func.convert_to(key, "UTF8")), "hex"), 32),
        "lane": number % 997 % 4,
        "position": cast(number, Text),
    }
    columns = [column for column in message.c if column.name != "seq"]
    copies = (
        select(*(own.get(column.name, column) for column in columns))
        .select_from(message.join(func.generate_series(1, count - 1).alias("n"), true()))
        .where(message.c.dlq_id == letter.dlq_id)
    )
    with engine.begin() as db:
        db.execute(insert(message).from_select([column.name for column in columns], copies))
    plan = freeze(engine, Selection(consumer_group=group), TERMS, WHO).plan
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        db.exec_driver_sql("VACUUM ANALYZE")
    return plan


def _raised() -> ValueError:
    try:
        raise ValueError("bad")  # noqa: TRY301 - it needs a trace
    except ValueError as error:
        return error


def _wire(engine: Engine, broker: Broker, plan: ReplayPlan) -> tuple[str, list[Message]]:
    """Return the messages as the plan publishes them, and their topic."""
    batch = PlanReader(plan).batch(engine, 0, plan.total)
    target = Target(broker, None)
    # A fresh cluster has no coordinator for groups yet.
    wait_until(lambda: target.prepare(batch.places) or True, what="the broker knows groups")
    messages = list(batch.messages)
    return messages[0].topic, messages


def _replay(engine: Engine, broker: Any, plan: ReplayPlan) -> float:
    """Send the plan from its beginning: nobody confirmed anything."""
    with engine.begin() as db:
        again = {"sent": 0, "state": "draft"}
        db.execute(update(plans).where(plans.c.id == plan.id).values(**again))
    sender = Sender(engine, broker, pace=PACE)
    return rate(lambda: sender.run(plan.id), plan.total)


def _laned(engine: Engine, plain: ReplayPlan) -> ReplayPlan:
    """Return a plan of the same messages, all of them in one lane."""
    Plans(engine).abort(plain, WHO)
    selection = Selection(**plain.selection)
    manifest = surveyed(engine, selection, TERMS)
    draft = Draft(
        selection=selection, terms=TERMS, operator=WHO, high_water=manifest.high_water,
        sizes=LaneSizes(canary=(0,), rest=(len(manifest.letters),), aside=(0,)),
        fingerprints=tuple(manifest.fingerprints),
    )  # fmt: skip
    lease = begin(engine, draft)
    claim = LaneClaim.take(engine, lease.plan_id, 0, epoch=lease.epoch, attempt=0)
    letters = (
        PlannedLetter(one.dlq_id, one.seq, one.key_hash, one.fingerprint, "claimed", None)
        for one in manifest.letters
    )
    made = finish(lease, draft, claim_lane(claim, letters))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        db.exec_driver_sql("VACUUM ANALYZE")
    return made


def _send_lane(engine: Engine, broker: Any, plan: ReplayPlan) -> float:
    """Send the lane from its beginning: nobody confirmed anything."""
    with engine.begin() as db:
        db.execute(update(lanes).where(lanes.c.plan_id == plan.id).values(sent=lanes.c.start))
    lease = PlanLease.take(engine, plan.id, seconds=60)
    order = LaneOrder(
        plan_id=plan.id, lanes=1, epoch=lease.epoch, gate=plan.total, batch=PACE.batch
    )
    try:
        return rate(lambda: send_lane(order, 0, engine, broker, attempt=0), plan.total)
    finally:
        lease.release()


if __name__ == "__main__":
    began = time.monotonic()
    for figure in figures():
        print(figure)
    print(f"{time.monotonic() - began:.0f} s")
