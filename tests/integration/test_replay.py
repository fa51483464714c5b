"""A replay sends each message to the group that failed, in order, once it is proven to help."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table, func, insert, select, update

from holdfast.brokers import connect
from holdfast.clock import SystemClock
from holdfast.db.audit import Operator, entries, verify
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterStore, capture
from holdfast.dlq.letter import Governance
from holdfast.dlq.replay import (
    EndingKind,
    Plans,
    Rate,
    ReplayHeaders,
    ReplayOptions,
    Selection,
    Sender,
    StopPolicy,
    confirmed,
    freeze,
    is_for,
    original,
)
from holdfast.dlq.replay.dry_run import dry_run
from holdfast.dlq.replay.edits import Edits, LetterEdit
from holdfast.dlq.replay.item_state import ItemState
from holdfast.dlq.replay.lease import Fenced, PlanLease, TakenPlan
from holdfast.dlq.replay.plan import NotNow, PlanState
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.schema import plan as plan_table
from holdfast.dlq.replay.sender import Pace
from holdfast.dlq.replay.survey import AlreadyClaimed, NothingToReplay, survey
from holdfast.dlq.store.rows import LetterEnvelope
from holdfast.dlq.store.schema import message as letters
from holdfast.dlq.store.schema import overtaken
from holdfast.errors import BrokerDown, ConfigurationError, UnknownTopic
from holdfast.message import Message
from holdfast.ports import Delivery, Lane
from holdfast.testing import VirtualClock, wait_until
from tests.migrated import migrated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from holdfast.dlq.replay.plan import PlanCounts, ReplayPlan
    from holdfast.ports import Broker

ADA = Operator(actor="ada", reason="fixed in 1.4.2")
BOB = Operator(actor="bob", reason="looks right")
FAST = Pace(batch=10, lease_seconds=2.0, poll_seconds=0.02)
QUICK = StopPolicy(canary=3, ramp=(0.5,), patience=30)

effects_metadata = MetaData()
effects = Table(
    "effect",
    effects_metadata,
    Column("seq", Integer, primary_key=True),
    Column("message_id", String(64)),
    Column("message_key", String(64)),
    Column("number", Integer),
)


class Group:
    """A consumer group of the plainest kind: dedup, effect and outcome in one transaction."""

    def __init__(self, engine: Engine, broker: Broker, name: str) -> None:
        self.engine = engine
        self.broker = broker
        self.name = name
        self.home = DeadLetterStore(engine)
        self.seen: list[Message] = []
        self.broken: Callable[[Message], bool] = lambda _: False

    def handle(self, message: Message) -> None:
        """Handle *message* once, or dead-letter it."""
        self.seen.append(message)
        if self.broken(message):
            error = _raised("total is negative")
            self.home.put(capture(message, error, group=self.name, handler="shop.bill"))
            return
        with self.engine.begin() as db:
            once = select(func.count()).where(effects.c.message_id == message.id)
            if not db.execute(once).scalar():
                number = msgspec.json.decode(message.payload or b"{}")["n"]
                values = {"message_id": message.id, "message_key": message.key_text,
                          "number": number}  # fmt: skip
                db.execute(insert(effects), values)
            confirmed(db, message)

    @contextmanager
    def running(self, *topics: str) -> Iterator[None]:
        """Consume *topics* in a thread of its own."""
        stop = threading.Event()

        def work() -> None:
            source = self.broker.source(topics, group=self.name)
            while not stop.is_set():
                for delivery in source.poll(50, 0.05):
                    if is_for(delivery.message, self.name):
                        self.handle(original(delivery.message))
                    source.accept([delivery])
            source.close()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


class Shop:
    """A store of dead letters, a broker and the group `billing` that failed."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        effects_metadata.create_all(engine)
        self.url = f"sqlite:///{folder}/broker.db"
        self.broker = connect(self.url)
        self.broker.create_topic("orders", partitions=3)
        self.billing = Group(engine, self.broker, "billing")
        self.plans = Plans(engine)

    def fail(self, count: int, *, keys: int = 7, start: int = 0, text: str = "bad total") -> None:
        """Dead-letter *count* messages of `orders`, as billing would have."""
        batch = []
        for n in range(start, start + count):
            key = f"k{n % keys}"
            message = Message.new(
                "orders", msgspec.json.encode({"n": n}), key=key, ids=lambda n=n: f"m-{n:05}"
            )
            delivery = Delivery(
                lane=Lane("orders", n % keys % 3), position=n, key=key.encode(), body=b""
            )
            batch.append(
                capture(message, _raised(text), group="billing", handler="shop.bill",
                        delivery=delivery)
            )  # fmt: skip
        self.billing.home.put_all(batch)

    def freeze(
        self, terms: ReplayOptions | None = None, operator: Operator = ADA, **selection: Any
    ) -> Any:
        """Make a plan for everything of billing."""
        chosen = selection or {"consumer_group": "billing"}
        return freeze(
            self.engine, Selection(**chosen), terms or ReplayOptions(policy=QUICK), operator
        ).plan

    def send(self, plan_id: str, pace: Pace = FAST) -> Any:
        """Send a plan to its end."""
        return Sender(self.engine, self.broker, pace=pace).run(plan_id)

    def items(self, plan_id: str) -> dict[str, int]:
        """Return the items of a plan by stored state."""
        query = select(item.c.state, func.count()).where(item.c.plan_id == plan_id)
        with self.engine.connect() as db:
            return {state: n for state, n in db.execute(query.group_by(item.c.state))}  # noqa: C416

    def effects(self) -> dict[str, list[int]]:
        """Return the numbers that took effect, by key, in the order in which they did."""
        found = defaultdict(list)
        with self.engine.connect() as db:
            for row in db.execute(select(effects).order_by(effects.c.seq)):
                found[row.message_key].append(row.number)
        return dict(found)


def _raised(text: str) -> Exception:
    def fail() -> None:
        raise ValueError(text)

    try:
        fail()
    except ValueError as error:
        return error
    raise AssertionError


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """Open a shop on each database."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        url = request.getfixturevalue(request.param).database("replay")
    engine = open_database(url)
    migrated(engine)
    yield Shop(engine, tmp_path)
    engine.dispose()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Shop]:
    """Open a shop on SQLite, where the database makes no difference."""
    engine = open_database(f"sqlite:///{tmp_path}/shop.db")
    migrated(engine)
    yield Shop(engine, tmp_path)
    engine.dispose()


def test_everything_is_confirmed_once_in_order_and_by_the_failed_group_alone(shop: Shop) -> None:
    """Canary, ramp, rest; each key in the order of its source; no other group sees any."""
    shop.fail(60)
    shipping = Group(shop.engine, shop.broker, "shipping")
    plan = shop.freeze()
    with shop.billing.running("orders", "orders.billing.replay"), shipping.running("orders"):
        ending = shop.send(plan.id)
    assert ending.kind is EndingKind.CONFIRMED
    assert shop.items(plan.id) == {"confirmed": 60}
    assert shop.effects() == {f"k{k}": [n for n in range(60) if n % 7 == k] for k in range(7)}
    assert shipping.seen == []
    assert {m.topic for m in shop.billing.seen} == {"orders"}
    assert sorted(m.id for m in shop.billing.seen) == [f"m-{n:05}" for n in range(60)]
    with shop.engine.connect() as db:
        states = db.execute(select(letters.c.state).distinct()).scalars().all()
        assert states == ["confirmed"]
        assert verify(db).is_whole


def test_a_handler_that_is_still_broken_stops_the_plan_at_the_canary(shop: Shop) -> None:
    """Nothing but the canary was sent, and every message is still there."""
    shop.fail(40)
    shop.billing.broken = lambda _: True
    plan = shop.freeze()
    with shop.billing.running("orders.billing.replay"):
        ending = shop.send(plan.id)
        # The first failure stops the plan; the others of the canary are still on their way.
        wait_until(lambda: shop.items(plan.id).get("failed_again") == 3)
    assert ending.kind is EndingKind.STOPPED
    assert "canary" in ending.reason
    assert len(shop.billing.seen) == 3
    assert shop.plans.find(plan.id).sent == 3
    assert shop.effects() == {}
    with shop.engine.connect() as db:
        pending = select(func.count()).where(letters.c.state == "pending")
        assert db.execute(pending).scalar() == 40
        counts = select(letters.c.replay_count).where(letters.c.replay_count > 0)
        assert db.execute(counts).scalars().all() == [1, 1, 1]


def test_a_stopped_plan_goes_on_with_another_canary(small: Shop) -> None:
    """Once the handler is fixed; what failed again is not sent by this plan any more."""
    small.fail(40, keys=40)
    small.billing.broken = lambda _: True
    plan = small.freeze()
    with small.billing.running("orders.billing.replay"):
        small.send(plan.id)
        wait_until(lambda: small.items(plan.id).get("failed_again") == 3)
        small.billing.broken = lambda _: False
        resumed = small.plans.resume(small.plans.find(plan.id), ADA)
        assert resumed.policy.canary == 6
        ending = small.send(plan.id)
    assert ending.kind is EndingKind.PARTLY
    assert small.items(plan.id) == {"confirmed": 37, "failed_again": 3}


def test_what_stopped_a_plan_and_how_it_ended_is_in_the_audit(small: Shop) -> None:
    """The plan itself is pruned one day; who asks later reads it there."""
    small.fail(8, keys=8)
    small.billing.broken = lambda _: True
    plan = small.freeze()
    with small.billing.running("orders.billing.replay"):
        small.send(plan.id)
        wait_until(lambda: small.items(plan.id).get("failed_again") == 3)
        small.billing.broken = lambda _: False
        small.plans.resume(small.plans.find(plan.id), ADA)
        small.send(plan.id)
    with small.engine.connect() as db:
        made, stopped, _, done = reversed(entries(db, subject=plan.id))
        assert verify(db).is_whole
    assert (made.action, stopped.action, done.action) == (
        "replay.plan", "replay.stop", "replay.done"
    )  # fmt: skip
    assert "canary" in stopped.reason
    assert (stopped.actor, done.actor) == ("holdfast", "holdfast")
    assert done.detail == {"confirmed": 5, "failed_again": 3}


def test_a_message_that_fails_again_holds_back_the_later_ones_of_its_key(small: Shop) -> None:
    """Other keys go on."""
    small.fail(30, keys=3)
    small.billing.broken = lambda m: m.id == "m-00012"
    policy = StopPolicy(canary=3, ramp=(13 / 31,), failure_ratio=0.9)  # a gate right behind it
    plan = small.freeze(ReplayOptions(policy=policy))
    with small.billing.running("orders.billing.replay"):
        ending = small.send(plan.id, Pace(batch=3, lease_seconds=2, poll_seconds=0.02))
    assert ending.kind is EndingKind.PARTLY
    assert small.effects()["k0"] == [0, 3, 6, 9]
    assert small.items(plan.id) == {"confirmed": 24, "failed_again": 1, "held": 5}


@pytest.mark.parametrize(("ratio", "passing"), [(0.05, 1), (0.0, 1), (0.5, 3)])
def test_a_slow_plan_stops_as_soon_as_a_fast_one(small: Shop, ratio: float, passing: int) -> None:
    """The ratio is taken over the last outcomes, however long they took."""
    small.fail(30, keys=30)
    clock, source, handled = VirtualClock(auto=True), [], [0]

    def consume(plan: ReplayPlan, _: PlanCounts) -> None:
        """Be the consumer, whose handler breaks after the first few."""
        if plan.sent and not source:
            source.append(small.broker.source(["orders.billing.replay"], group="billing"))
        for delivery in source[0].poll(50, 0.0) if source else ():
            small.billing.broken = lambda _: handled[0] >= passing
            small.billing.handle(original(delivery.message))
            handled[0] += 1
            source[0].accept([delivery])

    policy = StopPolicy(canary=1, ramp=(), failure_ratio=ratio)
    plan = small.freeze(ReplayOptions(policy=policy, rate=Rate.parse("15/m")))
    ending = Sender(small.engine, small.broker, clock=clock, observe=consume).run(plan.id)
    source[0].close()
    assert ending.kind is EndingKind.STOPPED
    assert "failed again" in ending.reason
    assert small.items(plan.id)["failed_again"] <= max(20 * ratio, 1) + passing * ratio + 3


def test_two_operators_never_send_one_message_twice(shop: Shop) -> None:
    """The second gets what is unclaimed, or is told who has it."""
    shop.fail(20)
    first = shop.freeze()
    with pytest.raises(AlreadyClaimed, match=first.id[-8:]):
        shop.freeze(operator=BOB)
    shop.fail(5, start=20, keys=1000)  # of other keys: these need not wait for the first plan
    second = shop.freeze(operator=BOB)
    assert (first.total, second.total) == (20, 5)
    shop.plans.abort(first, ADA)
    assert shop.freeze(operator=BOB).total == 20


def test_operators_who_freeze_at_the_same_moment_share_the_messages(shop: Shop) -> None:
    """Each message has one live claim, whoever was quicker."""
    shop.fail(50)
    gate, results = threading.Barrier(3), []

    def work() -> None:
        gate.wait()
        try:
            results.append(shop.freeze().total)
        except AlreadyClaimed:
            results.append(0)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(results) == 50
    with shop.engine.connect() as db:
        live = db.execute(select(item.c.live).where(item.c.live.is_not(None))).scalars().all()
    assert len(live) == len(set(live)) == 50


def test_what_arrives_after_the_freeze_is_not_part_of_the_plan(small: Shop) -> None:
    """The manifest is frozen by its hash."""
    small.fail(5)
    plan = small.freeze()
    small.fail(5, start=5)
    assert small.plans.manifest_hash(plan) == plan.hash
    with small.billing.running("orders.billing.replay"):
        small.send(plan.id)
    assert len(small.billing.seen) == 5


def test_a_vanished_group_is_named(small: Shop) -> None:
    """With what to look at."""
    with pytest.raises(NothingToReplay, match="holdfast dlq groups"):
        small.freeze(groups=("gone",))
    with pytest.raises(ConfigurationError, match="nothing is selected"):
        freeze(small.engine, Selection(), ReplayOptions(), ADA)


def test_a_sender_that_lost_its_plan_writes_nothing_more(shop: Shop) -> None:
    """The epoch fences it, even while its own lease seems to last."""
    shop.fail(5)
    plan = shop.freeze()
    zombie = PlanLease.take(shop.engine, plan.id, seconds=0.2)
    successor = PlanLease.take(shop.engine, plan.id, seconds=30)
    with shop.engine.begin() as db, pytest.raises(Fenced):
        zombie.mark(db, sent=5)
    with shop.engine.begin() as db:
        assert successor.mark(db, sent=1)
    zombie.release()
    with pytest.raises(TakenPlan, match="being sent by"):
        PlanLease.take(shop.engine, plan.id, seconds=0.2)
    assert shop.plans.find(plan.id).sent == 1


@pytest.mark.parametrize("stored", [True, False])
def test_a_crash_around_a_publish_loses_nothing_and_doubles_no_effect(
    shop: Shop, stored: bool
) -> None:
    """Whether or not the broker took the batch; what is confirmed is not sent again at all."""
    shop.fail(40)
    plan = shop.freeze(ReplayOptions(policy=StopPolicy(canary=0, ramp=())))

    class Cut:
        """A broker whose sender dies right after the second batch was taken."""

        def __init__(self, broker: Broker) -> None:
            self._broker = broker
            self.batches = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._broker, name)

        def sink(self) -> Any:
            inner, outer = self._broker.sink(), self

            class Sink:
                caps = inner.caps

                def publish(self, messages: Any) -> Any:
                    outer.batches += 1
                    if outer.batches == 1:
                        return inner.publish(messages)
                    if stored:
                        inner.publish(messages)
                    raise KeyboardInterrupt

                def close(self) -> None:
                    inner.close()

            return Sink()

    with pytest.raises(KeyboardInterrupt):
        Sender(shop.engine, Cut(shop.broker), pace=FAST).run(plan.id)  # type: ignore[arg-type]
    assert shop.plans.find(plan.id).sent == 10
    with shop.billing.running("orders.billing.replay"):
        wait_until(lambda: shop.items(plan.id).get("confirmed") == (20 if stored else 10))
        ending = shop.send(plan.id)
    assert ending.kind is EndingKind.CONFIRMED
    assert len(shop.billing.seen) == 40
    assert sum(map(len, shop.effects().values())) == 40


def test_an_operator_elsewhere_pauses_and_aborts_a_running_plan(small: Shop) -> None:
    """The sender ends after the batch in hand; a pause can be resumed."""
    small.fail(60)
    plan = small.freeze(ReplayOptions(policy=StopPolicy(canary=0, ramp=()), rate=Rate.parse("2/s")))
    endings: list[Any] = []

    def send() -> None:
        engine = open_database(str(small.engine.url))
        endings.append(Sender(engine, connect(small.url), pace=FAST).run(plan.id))
        engine.dispose()

    with small.billing.running("orders.billing.replay"):
        thread = threading.Thread(target=send)
        thread.start()
        wait_until(lambda: small.plans.find(plan.id).sent > 0)
        paused = small.plans.pause(small.plans.find(plan.id), BOB)
        thread.join()
        assert endings[0].kind is EndingKind.PAUSED
        assert 0 < small.plans.find(plan.id).sent < 60
        small.plans.resume(paused, BOB)
        thread = threading.Thread(target=send)
        thread.start()
        wait_until(lambda: small.plans.find(plan.id).owner is not None)
        small.plans.abort(small.plans.find(plan.id), BOB)
        thread.join()
    assert endings[1].kind in (EndingKind.ABORTED, EndingKind.CONFIRMED)
    with pytest.raises(NotNow):
        small.send(plan.id)


def test_a_newer_event_that_was_handled_holds_the_older_ones_of_its_key(shop: Shop) -> None:
    """Unless the handler is declared commutative."""
    shop.fail(6, keys=2)
    with shop.engine.begin() as db:
        db.execute(
            update(letters).where(letters.c.message_id == "m-00004").values(state="confirmed")
        )
    plan = shop.freeze()
    assert plan.total == 3
    assert shop.items(plan.id) == {"claimed": 3, "held": 2}
    shop.plans.abort(plan, ADA)
    policy = StopPolicy(canary=3, commutative=True)
    assert shop.freeze(ReplayOptions(policy=policy)).total == 5


def test_a_message_replayed_too_often_is_parked(small: Shop) -> None:
    """A person must decide; it is not sent round and round."""
    small.fail(3, keys=3)
    small.billing.broken = lambda m: m.id == "m-00001"
    for round_ in range(3):
        plan = small.freeze()
        with small.billing.running("orders.billing.replay"):
            small.send(plan.id)
            wait_until(lambda plan=plan: "claimed" not in small.items(plan.id))
        assert small.items(plan.id)["failed_again"] == 1, round_
        small.plans.abort(small.plans.find(plan.id), ADA)
        with small.engine.connect() as db:
            count = select(letters.c.replay_count).where(letters.c.message_id == "m-00001")
            assert db.execute(count).scalar() == round_ + 1
    plan = small.freeze()
    assert small.items(plan.id) == {"parked": 1}
    with small.engine.connect() as db:
        state = select(letters.c.state).where(letters.c.message_id == "m-00001")
        assert db.execute(state).scalar() == "parked"


def test_a_large_plan_waits_for_somebody_else(small: Shop) -> None:
    """Not for the one who made it."""
    small.fail(10)
    plan = small.freeze(ReplayOptions(policy=QUICK, approve_above=9))
    with pytest.raises(NotNow, match="approv"):
        small.send(plan.id)
    with pytest.raises(NotNow, match="somebody else"):
        small.plans.approve(plan, Operator(actor=" ADA", reason="trust me"))
    approved = small.plans.approve(plan, BOB)
    assert approved.approved_by == "bob"
    with small.billing.running("orders.billing.replay"):
        assert small.send(plan.id).kind is EndingKind.CONFIRMED


def test_a_shared_topic_is_used_only_when_asked_for_and_skipped_by_others(small: Shop) -> None:
    """The marks name the one group that handles it."""
    small.fail(5)
    shipping = Group(small.engine, small.broker, "shipping")
    plan = small.freeze(ReplayOptions(policy=QUICK, to_topic="shared"))
    with small.billing.running("orders"), shipping.running("orders"):
        assert small.send(plan.id).kind is EndingKind.CONFIRMED
    assert len(small.billing.seen) == 5
    assert shipping.seen == []
    marks = ReplayHeaders.of(small.billing.seen[0].headers)
    assert marks is not None
    assert (marks.group, marks.plan, marks.topic, marks.count) == ("billing", plan.id, "orders", 1)


def test_a_target_topic_that_is_missing_is_named_and_nothing_is_sent(small: Shop) -> None:
    """The plan can be resumed once it is there."""
    small.fail(5)
    plan = small.freeze(ReplayOptions(policy=QUICK, to_topic="nowhere"))
    with pytest.raises(UnknownTopic, match="nowhere"):
        small.send(plan.id)
    assert small.plans.find(plan.id).sent == 0


def test_a_canary_that_nobody_confirms_stops_the_plan(small: Shop) -> None:
    """With the hint to look at the consumer."""
    small.fail(20)
    plan = small.freeze(ReplayOptions(policy=StopPolicy(canary=3, patience=0.3)))
    ending = small.send(plan.id)
    assert ending.kind is EndingKind.STOPPED
    assert "consumer" in ending.reason
    assert small.plans.find(plan.id).state is PlanState.STOPPED


def test_a_broker_that_is_away_for_a_moment_is_waited_for(small: Shop) -> None:
    """The same batch is published again; nothing is skipped."""
    small.fail(10)
    plan = small.freeze(ReplayOptions(policy=StopPolicy(canary=0, ramp=())))

    class Flaky:
        def __init__(self, broker: Broker) -> None:
            self._broker = broker
            self.refusals = 2

        def __getattr__(self, name: str) -> Any:
            return getattr(self._broker, name)

        def sink(self) -> Any:
            inner, outer = self._broker.sink(), self

            class Sink:
                caps = inner.caps

                def publish(self, messages: Any) -> Any:
                    if outer.refusals:
                        outer.refusals -= 1
                        raise BrokerDown("restarting")
                    return inner.publish(messages)

                def close(self) -> None:
                    inner.close()

            return Sink()

    with small.billing.running("orders.billing.replay"):
        sender = Sender(small.engine, Flaky(small.broker), pace=FAST)  # type: ignore[arg-type]
        assert sender.run(plan.id).kind is EndingKind.CONFIRMED


def test_ids_may_be_shortened_as_long_as_they_are_clear(small: Shop) -> None:
    """An ambiguous one is refused with the candidates."""
    small.fail(3)
    plan = small.freeze()
    assert small.plans.find(plan.id[-6:]).id == plan.id
    small.plans.abort(plan, ADA)
    small.freeze()
    with small.engine.begin() as db:
        ids = db.execute(select(plan_table.c.id)).scalars().all()
    common = ids[0][:2]
    with pytest.raises(ConfigurationError, match="write more"):
        small.plans.find(common)


def test_an_unconfirmed_message_becomes_unknown_and_not_forgotten(small: Shop) -> None:
    """Its claim stays until somebody confirms, resends or aborts."""
    small.fail(4)
    plan = small.freeze(ReplayOptions(policy=StopPolicy(canary=0, ramp=(), patience=0.2)))
    ending = small.send(plan.id)
    assert ending.kind is EndingKind.UNCONFIRMED
    found = small.plans.find(plan.id)
    assert small.plans.overdue(found, ADA) == 4
    assert small.plans.tally(found)[ItemState.UNKNOWN] == 4
    with small.billing.running("orders.billing.replay"):
        assert small.send(plan.id).kind is EndingKind.CONFIRMED


class Broken:
    """A broker that publishes nothing until it is told to; *meanwhile* runs at the first try."""

    def __init__(self, broker: Broker, meanwhile: Callable[[], Any]) -> None:
        self._broker = broker
        self._meanwhile = meanwhile
        self.tries = 0
        self.published = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def sink(self) -> Any:
        """Return a sink that fails once."""
        inner, outer = self._broker.sink(), self

        class Sink:
            caps = inner.caps

            def publish(self, messages: Any) -> Any:
                outer.tries += 1
                if outer.tries == 1:
                    outer._meanwhile()
                    raise BrokerDown("restarting")
                outer.published += len(messages)
                return inner.publish(messages)

            def close(self) -> None:
                inner.close()

        return Sink()


@pytest.mark.parametrize("act", ["pause", "abort"])
def test_an_operator_is_heard_while_the_broker_is_away(small: Shop, act: str) -> None:
    """What was not sent by then is not sent when the broker is back."""
    small.fail(5)
    plan = small.freeze(ReplayOptions(policy=StopPolicy(canary=0, ramp=())))
    broker = Broken(small.broker, lambda: getattr(small.plans, act)(small.plans.find(plan.id), BOB))
    ending = Sender(small.engine, broker, pace=FAST).run(plan.id)  # type: ignore[arg-type]
    assert ending.kind is (EndingKind.PAUSED if act == "pause" else EndingKind.ABORTED)
    assert (broker.tries, broker.published) == (1, 0)
    assert small.plans.find(plan.id).sent == 0


def test_what_was_closed_after_the_freeze_is_not_sent(shop: Shop) -> None:
    """It is skipped with the reason, and holds nothing of its key."""
    shop.fail(6, keys=2)
    plan = shop.freeze()
    with shop.engine.begin() as db:
        db.execute(
            update(letters).where(letters.c.message_id == "m-00000").values(state="discarded")
        )
    with shop.billing.running("orders.billing.replay"):
        assert shop.send(plan.id).kind is EndingKind.PARTLY
    assert shop.items(plan.id) == {"confirmed": 5, "skipped": 1}
    assert shop.effects()["k0"] == [2, 4]


def test_what_was_overtaken_after_the_freeze_is_held(shop: Shop) -> None:
    """An event of its key was handled meanwhile: the old one must not undo it."""
    shop.fail(6, keys=2)
    plan = shop.freeze()
    with shop.engine.begin() as db:
        own = select(letters.c.dlq_id).where(letters.c.message_id == "m-00002")
        newer = {"message_id": "m-99", "lane": 0, "position": "99", "handled_at": 1.0}
        db.execute(insert(overtaken), {"dlq_id": db.execute(own).scalar_one(), **newer})
    with shop.billing.running("orders.billing.replay"):
        assert shop.send(plan.id).kind is EndingKind.PARTLY
    assert shop.items(plan.id) == {"confirmed": 5, "held": 1}
    assert shop.effects()["k0"] == [0, 4]


@pytest.mark.parametrize("server", ["postgres", "mariadb"])  # SQLite has one writer at a time
def test_a_letter_that_is_closed_while_the_plan_is_made_is_left_out(
    request: pytest.FixtureRequest, tmp_path: Path, server: str
) -> None:
    """The claim looks again under a lock; who closes letters locks them, then looks at claims."""
    engine = open_database(request.getfixturevalue(server).database("replay"))
    migrated(engine)
    shop = Shop(engine, tmp_path)
    shop.fail(3)

    class Closing(SystemClock):
        """Between the survey and the claim the time is asked for."""

        closed = False

        def now(self) -> datetime:
            if not self.closed:
                self.closed = True
                with engine.begin() as db:
                    chosen = letters.c.message_id == "m-00001"
                    db.execute(update(letters).where(chosen).values(state="discarded"))
            return super().now()

    selection = Selection(consumer_group="billing")
    frozen = freeze(engine, selection, ReplayOptions(policy=QUICK), ADA, clock=Closing())
    assert frozen.plan.total == 2
    assert shop.items(frozen.plan.id) == {"claimed": 2}
    assert shop.plans.latest() == [frozen.plan]
    engine.dispose()


def test_the_followers_of_what_cannot_be_sent_are_held(shop: Shop) -> None:
    """Of a redacted or parked message, of one in another group, and of one that is claimed."""
    shop.fail(4, keys=1)
    with shop.engine.begin() as db:
        redacted = letters.c.message_id == "m-00001"
        db.execute(update(letters).where(redacted).values(replayable=False, envelope=_REDACTED))
    found = _survey(shop, consumer_group="billing")
    assert [letter.position for letter in found.letters] == ["0"]
    assert [state for _, state, _ in found.aside] == ["skipped", "held", "held"]
    assert "set aside" in found.aside[1][2]
    with shop.engine.begin() as db:
        db.execute(update(letters).where(redacted).values(replayable=True, replay_count=3))
    found = _survey(shop, consumer_group="billing")
    assert [state for _, state, _ in found.aside] == ["parked", "held", "held"]
    free = _survey(shop, StopPolicy(commutative=True), consumer_group="billing")
    assert len(free.letters) == 3


def test_an_earlier_message_in_another_group_holds_the_later_one(shop: Shop) -> None:
    """The dry run counts the conflict and names the other; both together go in order."""
    shop.fail(1, keys=1, text="bad total")
    with pytest.raises(ValueError, match="other") as raised:
        raise ValueError("other")  # of another place in the code, so of another group
    message = Message.new("orders", b"{}", key="k0", ids=lambda: "m-late")
    delivery = Delivery(lane=Lane("orders", 0), position=50, key=b"k0", body=b"")
    late = capture(message, raised.value, group="billing", handler="shop.bill", delivery=delivery)
    shop.billing.home.put(late)
    with shop.engine.connect() as db:
        first, second = db.execute(select(letters.c.group_id).order_by(letters.c.seq)).scalars()
    assert first != second
    found = _survey(shop, groups=(second,))
    assert found.letters == []
    assert f"pending in group {first[:8]}" in found.aside[0][2]
    assert dry_run(shop.engine, found, ReplayOptions()).conflicts == 1
    assert len(_survey(shop, groups=(first, second)).letters) == 2
    shop.freeze(groups=(first,))
    assert _survey(shop, groups=(second,)).letters == []  # it is on its way, not handled yet


def test_an_edit_that_leaves_a_redacted_field_does_not_make_a_message_fit(small: Shop) -> None:
    """Only one that puts the value back; an envelope of a newer version never."""
    small.fail(1)
    with small.engine.begin() as db:
        gone = {"replayable": False, "envelope": _REDACTED, "payload": b'{"n":"***"}'}
        db.execute(update(letters).values(**gone))
        dlq_id = db.execute(select(letters.c.dlq_id)).scalar_one()
    edits = Edits(small.engine)
    edits.edit(dlq_id, LetterEdit(headers=(("x-note", "seen"),)), ADA)
    found = _survey(small, consumer_group="billing")
    assert found.letters == []
    assert "redacted fields n" in found.aside[0][2]
    edits.edit(dlq_id, LetterEdit(payload=b'{"n":7}'), ADA)
    assert len(_survey(small, consumer_group="billing").letters) == 1
    with small.engine.begin() as db:
        newer = _REDACTED.replace('"newer":null', '"newer":{"v":9}')
        db.execute(update(letters).values(envelope=newer))
    assert "newer version" in _survey(small, consumer_group="billing").aside[0][2]


def _survey(shop: Shop, policy: StopPolicy = QUICK, **selection: Any) -> Any:
    with shop.engine.connect() as db:
        return survey(db, Selection(**selection), ReplayOptions(policy=policy))


def _redacted_envelope() -> str:
    message = Message.new("orders", b'{"n":1}', key="k0")
    letter = capture(message, _raised("x"), group="billing", handler="shop.bill")
    envelope = LetterEnvelope(
        coordinates=letter.coordinates,
        culprit=letter.culprit,
        failure=letter.failure,
        governance=Governance(redacted=("n",)),
    )
    return msgspec.json.encode(envelope).decode()


_REDACTED = _redacted_envelope()


def test_a_replay_carries_the_id_and_the_type_of_its_message_whole(shop: Shop) -> None:
    """However long they are and whatever is in them: dedup knows it by no other name."""
    made = Message.new("orders", b'{"n": 1}', key="k", ids=lambda: "i" * 300)
    made = made.with_(type="t" * 250 + "\x00" + "u" * 50, correlation_id="c" * 400)
    letter = capture(made, _raised("bad total"), group="billing", handler="shop.bill")
    shop.billing.home.put(letter)
    plan = shop.freeze(ReplayOptions(policy=StopPolicy(canary=0, ramp=(), patience=0.1)))
    assert shop.send(plan.id).kind is EndingKind.UNCONFIRMED
    source = shop.broker.source(["orders.billing.replay"], group="billing")
    (delivery,) = source.poll(10, 5.0)
    copy = delivery.message
    source.close()
    assert (copy.id, copy.type, copy.correlation_id) == (made.id, made.type, made.correlation_id)
    with shop.engine.begin() as db:
        confirmed(db, copy.with_(id="i" * 301))
    assert shop.items(plan.id) == {"claimed": 1}
    with shop.engine.begin() as db:
        confirmed(db, copy)
    assert shop.items(plan.id) == {"confirmed": 1}
