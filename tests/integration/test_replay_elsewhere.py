"""A replay is confirmed also by a consumer that does not use the store of its dead letters."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import select

from holdfast import Message
from holdfast.brokers import connect
from holdfast.consumer import Consumer, HandlerEnding, create_tables
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterStore, DeadLetterTopic, capture, dead_letter
from holdfast.dlq import create_tables as create_store
from holdfast.dlq.replay import EndingKind, ReplayOptions, Selection, Sender, StopPolicy, freeze
from holdfast.dlq.replay.outcomes import confirmed
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.sender import Pace
from holdfast.dlq.store.schema import message as letters
from holdfast.dlq.topic.collector import Collector
from holdfast.errors import BrokerDown
from holdfast.headers import Headers, ReplayHeaders, replay_topic
from tests.consuming import running, until
from tests.dead_letters import emptied, letter, opened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from holdfast.ports import Broker

ADA = Operator(actor="ada", reason="fixed")
FAST = Pace(batch=10, lease_seconds=2.0, poll_seconds=0.02)
CAREFUL = StopPolicy(canary=1, ramp=(), patience=60)
TOPIC = "orders.billing.dlq"


class Ops:
    """The operators' database, into which a collector moves the dead letters of a topic."""

    def __init__(self, folder: Path) -> None:
        self.broker = connect(f"sqlite:///{folder}/broker.db?session=5")
        self.broker.create_topic("orders")
        self.broker.create_topic(TOPIC)
        self.engine = open_database(f"sqlite:///{folder}/ops.db")
        create_store(self.engine)

    @contextmanager
    def collecting(self) -> Iterator[Collector]:
        """Collect in a thread of the test."""
        source = self.broker.source([TOPIC], group="collector")
        collector = Collector(source, DeadLetterStore(self.engine))
        thread = threading.Thread(target=collector.run)
        thread.start()
        try:
            yield collector
        finally:
            collector.stop()
            thread.join(60)
            source.close()

    def publish(self, *orders: str, key: str | None = None) -> None:
        """Publish *orders*, each under a key of its own unless one is given."""
        sink = self.broker.sink()
        sink.publish([Message.new("orders", order.encode(), key=key or order) for order in orders])
        sink.close()

    def states(self) -> list[str]:
        """Return the states of the letters, sorted."""
        with self.engine.connect() as db:
            return sorted(db.execute(select(letters.c.state)).scalars())

    def replay(self, policy: StopPolicy = CAREFUL) -> EndingKind:
        """Replay what the group failed at, and wait for its end."""
        plan = freeze(
            self.engine, Selection(consumer_group="billing"), ReplayOptions(policy=policy), ADA
        ).plan
        return Sender(self.engine, self.broker, pace=FAST).run(plan.id).kind

    def outcomes(self) -> list[str]:
        """Return the states of the plan's messages, sorted."""
        with self.engine.connect() as db:
            return sorted(db.execute(select(item.c.state)).scalars())


@pytest.fixture
def ops(tmp_path: Path) -> Iterator[Ops]:
    """Offer the operators' side."""
    ops = Ops(tmp_path)
    yield ops
    ops.broker.close()
    ops.engine.dispose()


@pytest.fixture(params=["without a database", "with a database of its own"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine | None]:
    """Offer the database of the consumer, which is not that of the operators."""
    if request.param == "without a database":
        yield None
        return
    engine = open_database(f"sqlite:///{tmp_path}/own.db")
    create_tables(engine)
    yield engine
    engine.dispose()


def billing(
    broker: Broker, database: Engine | None, broken: set[str], done: list[str], **options: Any
) -> Consumer:
    """Return a consumer whose dead letters go to a topic."""
    consumer = Consumer(broker, group="billing", database=database, quarantine=False, **options)

    @consumer.on("orders")
    @dead_letter(DeadLetterTopic.on(broker))
    def bill(order: str) -> None:
        if order in broken:
            raise ValueError("a bug")
        done.append(order)

    return consumer


def test_a_replay_to_a_consumer_without_the_store_is_confirmed_by_broker(
    ops: Ops, database: Engine | None
) -> None:
    """Its confirmations reach the plan through the dead-letter topic; each ran once."""
    broken, done = {"a", "b", "c"}, []
    ops.publish("a", "b", "c")
    with ops.collecting() as collector, running(billing(ops.broker, database, broken, done)):
        until(lambda: ops.states() == ["pending"] * 3, "all three collected")
        broken.clear()
        assert ops.replay() is EndingKind.CONFIRMED
    assert sorted(done) == ["a", "b", "c"]
    assert ops.states() == ["confirmed"] * 3
    assert ops.outcomes() == ["confirmed"] * 3
    assert (collector.collected.stored, collector.collected.confirmed) == (3, 3)


def test_a_replay_that_fails_again_elsewhere_is_seen_as_that(
    ops: Ops, database: Engine | None
) -> None:
    """The letter comes back by the same topic, and stays one letter."""
    ops.publish("a")
    with ops.collecting(), running(billing(ops.broker, database, {"a"}, [])):
        until(lambda: ops.states() == ["pending"], "collected")
        assert ops.replay() is not EndingKind.CONFIRMED
        until(lambda: ops.outcomes() == ["failed_again"], "the failure is known")
    assert ops.states() == ["pending"]


@pytest.mark.parametrize("commutative", [False, True])
def test_after_a_failure_elsewhere_the_later_replays_of_the_key_are_not_handled(
    ops: Ops, database: Engine | None, commutative: bool
) -> None:
    """Who handles the key remembers it; unless the operator says that order does not matter."""
    broken, done = {"1", "2", "3"}, []
    ops.publish("1", "2", "3", key="sick")
    consumer = billing(ops.broker, database, broken, done)
    at_once = StopPolicy(
        canary=0, ramp=(), patience=60, failure_ratio=0.99, commutative=commutative
    )
    with ops.collecting(), running(consumer):
        until(lambda: ops.states() == ["pending"] * 3, "all three collected")
        broken -= {"2", "3"}
        assert ops.replay(at_once) is EndingKind.PARTLY
    if commutative:
        assert (done, consumer.tally.held_back) == (["2", "3"], 0)
        assert ops.outcomes() == ["confirmed", "confirmed", "failed_again"]
    else:
        assert (done, consumer.tally.held_back) == ([], 2)
        assert ops.outcomes() == ["failed_again", "held", "held"]
        assert ops.states() == ["pending"] * 3


def test_in_a_loop_of_ones_own_the_later_ones_of_a_failed_key_are_held_back(ops: Ops) -> None:
    """Also without a database; another key, and the failed message itself, may come again."""
    consumer = billing(ops.broker, None, {"1"}, done := [])
    handler = consumer.handler("orders")

    def ending(order: str, *, key: str = "k") -> HandlerEnding:
        message = Message.new("orders", order.encode(), key=key)
        marks = ReplayHeaders(group="billing", plan="p", dlq_id=f"d-{order}", topic="orders")
        return handler.handle(message.with_(headers=marks.stamped(message.headers))).ending

    assert ending("1") is HandlerEnding.DEAD_LETTERED
    assert ending("2") is HandlerEnding.HELD_BACK
    assert ending("3", key="other") is HandlerEnding.HANDLED
    assert ending("1") is HandlerEnding.DEAD_LETTERED
    assert done == ["3"]


class Deaf:
    """A broker whose dead-letter topics take nothing for a while."""

    def __init__(self, broker: Broker, refusals: int) -> None:
        self._broker = broker
        self.refusals = refusals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def create_topic(self, topic: str, **options: Any) -> Any:
        """Refuse some times."""
        if topic == TOPIC and self.refusals:
            self.refusals -= 1
            raise BrokerDown("the broker does not answer")
        return self._broker.create_topic(topic, **options)


def replayed(payload: bytes) -> Message:
    """Return a message as a replay sends it."""
    message = Message.new(replay_topic("orders", "billing"), payload, key="k")
    marks = ReplayHeaders(group="billing", plan="p", dlq_id="d", topic="orders")
    return message.with_(headers=marks.stamped(message.headers))


def test_a_confirmation_that_cannot_be_sent_is_sent_later_and_runs_nothing_again(
    ops: Ops, database: Engine | None
) -> None:
    """Nothing is acknowledged before the store can hear of it, and the handler runs once."""
    done: list[str] = []
    ops.broker.create_topic(replay_topic("orders", "billing"))
    sink = ops.broker.sink()
    sink.publish([replayed(b"a")])
    sink.close()
    deaf: Any = Deaf(ops.broker, refusals=3)
    consumer = Consumer(deaf, group="billing", database=database)

    @consumer.on("orders")
    def bill(order: str) -> None:
        done.append(order)

    with ops.collecting() as collector, running(consumer):
        until(lambda: collector.collected.unknown == 1, "the confirmation came")
    assert (done, deaf.refusals) == (["a"], 0)
    assert not any(ops.broker.lag("billing", [replay_topic("orders", "billing")]).values())


def test_a_loop_of_ones_own_confirms_as_well(ops: Ops) -> None:
    """`handle` of a consumer without a database tells the store by the broker."""
    consumer = Consumer(ops.broker, group="billing")
    consumer.on("orders")(lambda order: None)
    with ops.collecting() as collector:
        assert consumer.handler("orders").handle(replayed(b"1")).ending is HandlerEnding.HANDLED
        until(lambda: collector.collected.unknown == 1, "the confirmation came")


def test_what_only_looks_like_a_confirmation_is_kept_as_a_letter(ops: Ops) -> None:
    """Whatever comes on a dead-letter topic is stored; nothing is dropped for its looks."""
    sink = ops.broker.sink()
    sink.publish(
        [Message.new(TOPIC, body, headers={"x-dlq-outcome": "confirmed"}) for body in (b"{}", b"")]
    )
    sink.close()
    with ops.collecting() as collector:
        until(lambda: collector.collected.stored == 2, "both are stored")
    assert collector.collected.confirmed == 0


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def kept(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Open a store of each kind."""
    made = opened(request, tmp_path_factory.mktemp("elsewhere"))
    yield made
    made.dispose()


@pytest.fixture
def store(kept: Engine) -> Engine:
    """Return the store, empty."""
    return emptied(kept)


def report(plan: str, dlq_id: str, message_id: str | None = None) -> Message:
    """Return a confirmation as it comes on a topic."""
    said = msgspec.json.encode({"plan": plan, "dlq_id": dlq_id, "message_id": message_id})
    return Message.new(TOPIC, said, headers={"x-dlq-outcome": "confirmed"})


def test_a_confirmation_of_what_no_plan_sent_closes_nothing(
    ops: Ops, store: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody may write to a topic: it is logged and counted, and the collector goes on."""
    DeadLetterStore(store).put_all([letter(1), letter(2)])
    ids = {"id-1": letter(1).dlq_id, "id-2": letter(2).dlq_id}
    chosen = Selection(dlq_ids=(ids["id-1"],))
    plan = freeze(store, chosen, ReplayOptions(), ADA).plan.id
    sink = ops.broker.sink()
    sink.publish([
        report("no-such-plan", ids["id-1"]),
        report(plan, ids["id-2"]),  # pending, but not in that plan
        report(plan, ids["id-1"], "another message"),
        report("\0", "\0"),
        report("p" * 500, ids["id-1"]),
    ])  # fmt: skip
    source = ops.broker.source([TOPIC], group="reports")
    collector = Collector(source, DeadLetterStore(store))
    collector.run(until_idle=True)
    assert (collector.collected.confirmed, collector.collected.unknown) == (0, 3)
    assert (collector.collected.stored, collector.collected.unreadable) == (2, 2)
    assert caplog.text.count("nothing is closed") == 3
    with store.connect() as db:
        pending = select(letters.c.message_id).where(letters.c.state == "pending")
        assert ids.keys() <= set(db.execute(pending).scalars())
    sink.publish([report(plan, ids["id-1"], "id-1"), report(plan, ids["id-2"], "id-2")])
    collector.run(until_idle=True)
    assert collector.collected.confirmed == 1
    with store.connect() as db:
        closed = select(letters.c.message_id).where(letters.c.state == "confirmed")
        assert db.execute(closed).scalars().all() == ["id-1"]
    sink.close()
    source.close()


@pytest.mark.parametrize("plan", ["\0", "p" * 500, "", "not the plan"])
def test_marks_that_no_plan_made_neither_confirm_nor_stop_a_consumer(
    store: Engine, plan: str
) -> None:
    """A message with forged marks is handled, or dead-lettered, as any other."""
    DeadLetterStore(store).put(letter(1))
    marks = {"x-replay-group": "billing", "x-replay-plan": plan, "x-replay-topic": "orders",
             "x-replay-dlq-id": letter(1).dlq_id}  # fmt: skip
    forged = letter(1).message.with_(headers=Headers(marks))
    with store.begin() as db:
        assert confirmed(db, forged)
        assert db.execute(select(letters.c.state)).scalars().all() == ["pending"]
    DeadLetterStore(store).put(
        capture(forged, ValueError("x"), group="billing", handler="shop.bill")
    )
    with store.connect() as db:
        assert db.execute(select(letters.c.occurrences)).scalars().all() == [2]


def test_threads_that_share_a_topic_home_lose_no_letter(ops: Ops) -> None:
    """A sink is not for several threads at once: the home lets them take turns."""
    orders = [f"o{n}" for n in range(60)]
    ops.publish(*orders)
    consumer = billing(ops.broker, None, set(orders), [], workers=8)
    with ops.collecting(), running(consumer):
        until(lambda: consumer.tally.dead_lettered == 60, "all are dead letters")
        until(lambda: len(ops.states()) == 60, "all are collected")
