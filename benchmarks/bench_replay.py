"""Bulk replay from PostgreSQL to Kafka, against the raw producer fed from memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from bench_kafka import _confluent_produce, _python_produce
from sqlalchemy import Text, Uuid, cast, func, insert, literal_column, select, true, update

from figures import Figure, Goal, compare, rate
from holdfast.brokers import connect
from holdfast.cli.migrations import Migrations
from holdfast.database import open_database
from holdfast.dlq import StoreHome, capture
from holdfast.dlq.audit import Warrant
from holdfast.dlq.replay import Policy, Selection, Sender, Terms, freeze
from holdfast.dlq.replay.flight import Brief
from holdfast.dlq.replay.outgoing import Reader
from holdfast.dlq.replay.schema import plan as plans
from holdfast.dlq.replay.sender import Pace
from holdfast.dlq.replay.target import Target
from holdfast.dlq.schema import message
from holdfast.message import Message
from holdfast.ports import Delivery, Lane
from holdfast.testing import wait_until
from tests.servers import Kafka, Postgres

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

    from holdfast.dlq.replay import Plan
    from holdfast.ports import Broker, Sink

ROUNDS = 5
WHO = Warrant(actor="bench", reason="measure")
# Nobody consumes here: the run ends as soon as everything is sent.
TERMS = Terms(policy=Policy(canary=0, ramp=(), patience=0.001), approve_above=10**9)
PACE = Pace(poll_seconds=0.001)


def figures() -> Iterator[Figure]:
    """Measure the sending of a frozen plan, driver by driver."""
    with Postgres() as postgres, Kafka() as kafka:
        engine = open_database(postgres.database("bench_replay"))
        Migrations(engine).upgrade()
        for name, scheme, produce, count in (
            ("kafka-python", "kafka", _python_produce, 12_000),
            ("confluent", "kafka+confluent", _confluent_produce, 100_000),
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
                goal=Goal(at_least=0.8),
                detail=f"{count} dead letters of 300 B in PostgreSQL, a frozen plan sent to its "
                "end, from taking its lease on; raw: one unbroken stream of the same records from "
                "memory, headers made beforehand; both connected beforehand",
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
        assert isinstance(self._sink, Brief)  # as the sender publishes
        self._sink.publish_within(some, 60.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def sink(self) -> Any:
        return _Kept(self._sink)

    def end(self) -> None:
        self._sink.close()


class _Kept:
    """A sink that stays open for the next round."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def close(self) -> None:
        """Do nothing."""


def _frozen(engine: Engine, group: str, count: int) -> Plan:
    """Return a plan of *count* letters: copies of one that was captured, each with its own key."""
    made = Message.new("orders", b"x" * 300, key="key", type="OrderPlaced")
    delivery = Delivery(lane=Lane("orders", 0), position=0, key=made.key, body=b"")
    letter = capture(made, _raised(), group=group, handler="shop.bill", delivery=delivery)
    StoreHome(engine).put(letter)
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


def _wire(engine: Engine, broker: Broker, plan: Plan) -> tuple[str, list[Message]]:
    """Return the messages as the plan publishes them, and their topic."""
    batch = Reader(plan).batch(engine, 0, plan.total)
    target = Target(broker, None)
    # A fresh cluster has no coordinator for groups yet.
    wait_until(lambda: target.prepare(batch.places) or True, what="the broker knows groups")
    return batch.messages[0].topic, batch.messages


def _replay(engine: Engine, broker: Any, plan: Plan) -> float:
    """Send the plan from its beginning: nobody confirmed anything."""
    with engine.begin() as db:
        again = {"sent": 0, "state": "draft"}
        db.execute(update(plans).where(plans.c.id == plan.id).values(**again))
    sender = Sender(engine, broker, pace=PACE)
    return rate(lambda: sender.run(plan.id), plan.total)


if __name__ == "__main__":
    began = time.monotonic()
    for figure in figures():
        print(figure)
    print(f"{time.monotonic() - began:.0f} s")
