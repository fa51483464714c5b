"""A replay over every broker: the same messages, each key in order, confirmed by the consumer."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session  # noqa: TC002 - handlers ask for it by annotation

from holdfast import Message, PoisonMessage
from holdfast.brokers import connect
from holdfast.brokers.rabbitmq.broker import RabbitBroker
from holdfast.consumer import Consumer, create_tables
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.dlq import dead_letter
from holdfast.dlq.replay import EndingKind, ReplayOptions, Selection, Sender, StopPolicy, freeze
from holdfast.dlq.replay.sender import Pace
from holdfast.dlq.store.schema import message as letters
from holdfast.headers import Headers
from holdfast.idempotency import idempotent
from tests.consuming import running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from holdfast.ports import Broker

pytestmark = pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning")
ADA = Operator(actor="ada", reason="fixed in 1.4.2")
HEADERS = Headers([("x", b"\xff\x00"), ("x", "two"), ("plain", "text")])
MESSAGES = 12


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Open a database."""
    made = open_database(f"sqlite:///{tmp_path}/shop.db")
    create_tables(made)
    yield made
    made.dispose()


@pytest.fixture(params=["kafka", "rabbitmq", "redis", "nats"])
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """Open each broker."""
    made = connect(request.getfixturevalue(request.param).url)
    yield made
    made.close()


def test_every_broker_brings_the_messages_back_in_order(broker: Broker, engine: Engine) -> None:
    """Ids, payloads and headers as they were; names for positions do not scramble a key."""
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    broker.create_topic(topic, partitions=2)
    if isinstance(broker, RabbitBroker):
        broker.create_group(topic, "g")  # it stores for groups that it knows
    broken, seen = [True], list[Message]()
    consumer = Consumer(broker, group="g", database=engine, quarantine=False, workers=4)

    @consumer.on(topic)
    @dead_letter()
    @idempotent
    def handle(order: Any, session: Session, message: Message) -> None:
        if broken[0]:
            raise PoisonMessage("a bug")
        seen.append(message)

    sent = [
        Message.new(topic, b"%d" % number, key=f"k{number % 2}", headers=HEADERS)
        for number in range(MESSAGES)
    ]
    sink = broker.sink()
    assert not [one.error for one in sink.publish(sent) if one.error]
    sink.close()
    with running(consumer):
        until(lambda: _count(engine, "pending") == MESSAGES, "all are dead letters")
        broken[0] = False
        terms = ReplayOptions(policy=StopPolicy(canary=2, ramp=(), patience=60))
        plan = freeze(engine, Selection(consumer_group="g"), terms, ADA).plan
        ending = Sender(engine, broker, pace=Pace(batch=5, poll_seconds=0.05)).run(plan.id)
    assert ending.kind is EndingKind.CONFIRMED
    assert _count(engine, "confirmed") == MESSAGES
    for key in (b"k0", b"k1"):
        mine = [message.id for message in seen if message.key == key]
        assert mine == [message.id for message in sent if message.key == key]
    came = {message.id: message for message in seen}
    for message in sent:
        replayed = came[message.id]
        assert (replayed.payload, replayed.topic) == (message.payload, topic)
        assert [pair for pair in replayed.headers if pair[0] in ("x", "plain")] == [*HEADERS]


def _count(engine: Engine, state: str) -> int:
    with engine.connect() as db:
        return db.execute(select(func.count()).where(letters.c.state == state)).scalar_one()
