"""Bulk replay from PostgreSQL to Kafka, against the raw producer fed from memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench_kafka import _confluent_produce, _python_produce

from figures import Figure, Goal, compare, rate
from holdfast.brokers import connect
from holdfast.cli.migrations import Migrations
from holdfast.database import open_database
from holdfast.dlq import StoreHome, capture
from holdfast.dlq.audit import Warrant
from holdfast.dlq.replay import Plans, Policy, Selection, Sender, Terms, freeze
from holdfast.dlq.replay.letters import outgoing
from holdfast.dlq.replay.sender import Pace
from holdfast.dlq.replay.target import Target
from holdfast.message import Message
from holdfast.ports import Delivery, Lane
from holdfast.testing import wait_until
from tests.servers import Kafka, Postgres

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

    from holdfast.ports import Broker

COUNT = 20_000
WHO = Warrant(actor="bench", reason="measure")
# Nobody consumes here: the run ends as soon as everything is sent.
TERMS = Terms(policy=Policy(canary=0, ramp=(), patience=0.001), approve_above=10**9)
PACE = Pace(poll_seconds=0.001)


def figures() -> Iterator[Figure]:
    """Measure the sending of a frozen plan, driver by driver."""
    with Postgres() as postgres, Kafka() as kafka:
        engine = open_database(postgres.database("bench_replay"))
        Migrations(engine).upgrade()
        _fill(engine)
        for name, scheme, produce in (
            ("kafka-python", "kafka", _python_produce),
            ("confluent", "kafka+confluent", _confluent_produce),
        ):
            broker = connect(f"{scheme}://{kafka.address}")
            topic, messages = _wire(engine, broker)
            produce(kafka.address, topic, messages)  # warm
            yield compare(
                f"bulk replay, {name}",
                ours=lambda broker=broker: _replay(engine, broker),
                peer=lambda produce=produce, topic=topic, messages=messages: produce(
                    kafka.address, topic, messages
                ),
                unit="messages/s",
                goal=Goal(at_least=0.8),
                detail=f"{COUNT} dead letters of 300 B in PostgreSQL, a frozen plan sent to its "
                "end; raw: one unbroken stream of the same records from memory",
            )
            broker.close()
        engine.dispose()


def _fill(engine: Engine) -> None:
    home = StoreHome(engine)
    error = _raised()
    for start in range(0, COUNT, 1000):
        letters = []
        for number in range(start, start + 1000):
            made = Message.new("orders", b"x" * 300, key=f"key-{number % 997}", type="OrderPlaced")
            delivery = Delivery(
                lane=Lane("orders", number % 997 % 4), position=number, key=made.key, body=b""
            )
            letters.append(
                capture(made, error, group="billing", handler="shop.bill", delivery=delivery)
            )
        home.put_all(letters)


def _raised() -> ValueError:
    try:
        raise ValueError("bad")  # noqa: TRY301 - it needs a trace
    except ValueError as error:
        return error


def _wire(engine: Engine, broker: Broker) -> tuple[str, list[Message]]:
    """Return the messages as a plan would publish them, and their topic."""
    broker.create_topic("orders", partitions=4)
    plan = freeze(engine, Selection(consumer_group="billing"), TERMS, WHO).plan
    target = Target(broker, None)
    with engine.connect() as db:
        batch = outgoing(db, plan.id, 0, COUNT)
    # A fresh cluster has no coordinator for groups yet.
    wait_until(lambda: target.addressed(batch[0], plan.id), what="the broker knows groups")
    found = [target.addressed(one, plan.id) for one in batch]
    Plans(engine).abort(plan, WHO)
    return found[0].topic, found


def _replay(engine: Engine, broker: Broker) -> float:
    plan = freeze(engine, Selection(consumer_group="billing"), TERMS, WHO).plan
    sender = Sender(engine, broker, pace=PACE)
    figure = rate(lambda: sender.run(plan.id), COUNT)
    plans = Plans(engine)
    plans.abort(plans.find(plan.id), WHO)
    return figure
