"""Within a replay nothing of a key is handled before what came before it was handled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session  # noqa: TC002 - handlers ask for it by annotation

from holdfast import Message, PoisonMessage
from holdfast.backoff import Backoff
from holdfast.consumer.scheduling.work import HandlerEnding
from holdfast.db.audit import Operator
from holdfast.dlq import dead_letter
from holdfast.dlq.replay import EndingKind, ReplayOptions, Selection, Sender, StopPolicy, freeze
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.sender import Pace
from holdfast.idempotency import idempotent
from holdfast.retry import retry
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.consumer import Consumer

ADA = Operator(actor="ada", reason="fixed in 1.4.2")
EVERYTHING = Selection(consumer_group="g")
AT_ONCE = StopPolicy(canary=0, ramp=(), patience=0.05, failure_ratio=0.99)
"""Everything is sent before the consumer says a word."""
PACE = Pace(batch=10, lease_seconds=2.0, poll_seconds=0.02)


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a database of each kind."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        url = request.getfixturevalue(request.param).database("replay_order")
    bench = Bench(tmp_path, url)
    yield bench
    bench.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Bench]:
    """Offer them on SQLite, where the database makes no difference."""
    bench = Bench(tmp_path, f"sqlite:///{tmp_path}/shop.db")
    yield bench
    bench.close()


class Shop:
    """A handler for which the orders in `broken` are poison."""

    def __init__(
        self, bench: Bench, broken: set[str], *, commutative: bool = False, **options: Any
    ) -> None:
        self.bench = bench
        self.broken = broken
        self.seen: list[str] = []
        self.consumer: Consumer = bench.consumer(**options)

        @self.consumer.on("orders")
        @dead_letter(commutative=commutative)
        @idempotent
        def handle(order: str, session: Session) -> None:
            self.seen.append(order)
            if order in self.broken:
                raise PoisonMessage("a bug")
            bench.note(session, order)

    def consume(self) -> None:
        """Handle everything that is there, replays as well."""
        with running(self.consumer):
            until(lambda: lag(self.bench) == 0, "everything acknowledged")


def lag(bench: Bench) -> int:
    """Return how much of the topic and of its replays the group has not acknowledged."""
    return sum(bench.broker.lag("g", ["orders", "orders.g.replay"]).values())


def dead(bench: Bench, *orders: str, key: str = "sick", commutative: bool = False) -> None:
    """Have *orders* of one key dead-lettered, each of them."""
    bench.broker.create_topic("orders.g.replay", partitions=2)
    bench.publish(*orders, key=key)
    Shop(bench, set(orders), commutative=commutative, quarantine=False).consume()


def sent(bench: Bench, policy: StopPolicy = AT_ONCE) -> str:
    """Send a plan of everything to its end, though nobody consumes; return its id."""
    plan = freeze(bench.engine, EVERYTHING, ReplayOptions(policy=policy), ADA).plan
    ending = Sender(bench.engine, bench.broker, pace=PACE).run(plan.id)
    assert ending.kind is EndingKind.UNCONFIRMED
    return plan.id


def items(bench: Bench, plan_id: str) -> list[str]:
    """Return the states of a plan's items in the order of sending."""
    query = select(item.c.state).where(item.c.plan_id == plan_id).order_by(item.c.position)
    with bench.engine.connect() as db:
        return list(db.execute(query).scalars())


@pytest.mark.parametrize("quarantine", [True, False])
def test_after_a_failure_the_later_replays_of_the_key_are_not_handled(
    bench: Bench, quarantine: bool
) -> None:
    """They were published already; other keys go on, and the next replay brings them in order."""
    dead(bench, "1", "2", "3", "4")
    dead(bench, "well", key="other")
    first = sent(bench)
    shop = Shop(bench, {"2"}, quarantine=quarantine)
    shop.consume()
    assert sorted(bench.effects) == ["1", "well"]
    assert [order for order in shop.seen if order != "well"] == ["1", "2"]
    assert sorted(items(bench, first)) == ["confirmed", "confirmed", "failed_again", "held", "held"]
    assert shop.consumer.tally.held_back == 2
    pending = [bytes(row.payload) for row in bench.letters if row.state == "pending"]
    assert sorted(pending) == [b"2", b"3", b"4"]
    second = sent(bench)
    fixed = Shop(bench, set(), quarantine=quarantine)
    fixed.consume()
    assert fixed.seen == ["2", "3", "4"]
    assert items(bench, second) == ["confirmed"] * 3


def test_a_later_replay_that_comes_to_another_consumer_is_held_back_too(small: Bench) -> None:
    """What was decided is in the database, not in one process."""
    dead(small, "1", "2")
    sent(small)
    source = small.broker.source(["orders.g.replay"], group="g")
    copies: list[Any] = []
    while len(copies) < 2:
        copies += source.poll(10, 1.0)
    source.close()
    shop = Shop(small, {"1"})
    handler = shop.consumer.handler("orders")
    messages = [one.message.with_(topic="orders") for one in copies]
    assert handler.handle(messages[0]).ending is HandlerEnding.DEAD_LETTERED
    other = Shop(small, set()).consumer.handler("orders")
    outcome = other.handle(messages[1])
    assert outcome.ending is HandlerEnding.HELD_BACK
    assert outcome.acknowledge
    assert small.effects == []


def test_a_replay_that_waits_long_for_its_retry_is_not_overtaken(small: Bench) -> None:
    """It waits in hand: parked in the database it would stand behind what is newer."""
    dead(small, "1", "2", "3")
    sent(small)
    seen: list[str] = []
    consumer = small.consumer(patience=0.01)

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.5, ceiling=0.5, attempts=3))
    @idempotent
    def handle(order: str, session: Session) -> None:
        seen.append(order)
        if seen == ["1"]:
            raise TimeoutError("try again")
        small.note(session, order)

    with running(consumer):
        until(lambda: lag(small) == 0, "everything acknowledged")
    assert seen == ["1", "1", "2", "3"]
    assert small.effects == ["1", "2", "3"]


@pytest.mark.parametrize("declared", ["by the operator", "at the handler"])
def test_a_commutative_handler_gets_the_later_ones_all_the_same(
    small: Bench, declared: str
) -> None:
    """Order does not matter to it, so one failure holds nothing else."""
    at_handler = declared == "at the handler"
    dead(small, "1", "2", "3", commutative=at_handler)
    policy = StopPolicy(canary=0, ramp=(), patience=0.05, commutative=not at_handler)
    plan = sent(small, policy)
    shop = Shop(small, {"2"}, commutative=at_handler, quarantine=False)
    shop.consume()
    assert small.effects == ["1", "3"]
    assert items(small, plan) == ["confirmed", "failed_again", "confirmed"]


def test_an_ordinary_message_is_never_held_back(small: Bench) -> None:
    """Marks of a plan that this database does not know hold nothing either."""
    shop = Shop(small, set())
    plain = Message.new("orders", b"x", key="k")
    assert shop.consumer.handler("orders").handle(plain).ending is HandlerEnding.HANDLED
