"""A newer event of a key that was handled holds the dead one back from a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session  # noqa: TC002 - handlers ask for it by annotation

from holdfast import Message, PoisonMessage
from holdfast.consumer import Consumer, Order
from holdfast.consumer.parking.admin import ParkingAdmin
from holdfast.db.audit import Operator
from holdfast.dlq import DeadLetterStore, capture, close, dead_letter
from holdfast.dlq.replay import ReplayOptions, Selection, Sender, StopPolicy, freeze
from holdfast.dlq.replay.dry_run import dry_run
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.sender import Pace
from holdfast.dlq.replay.survey import superseded, survey
from holdfast.dlq.store.retention import prune
from holdfast.dlq.store.schema import message as stored
from holdfast.dlq.store.schema import overtaken
from holdfast.idempotency import idempotent
from holdfast.ports import Delivery, Lane
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ADA = Operator(actor="ada", reason="fixed in 1.4.2")
EVERYTHING = Selection(consumer_group="g")
TERMS = ReplayOptions(policy=StopPolicy(canary=0, ramp=(), patience=60))


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a database of each kind."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        url = request.getfixturevalue(request.param).database("overtaking")
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
    """A handler for which 'bad…' is poison until it is fixed."""

    def __init__(self, bench: Bench, *, commutative: bool = False, **options: Any) -> None:
        self.bench = bench
        self.broken = True
        self.consumer: Consumer = bench.consumer(**options)

        @self.consumer.on("orders")
        @dead_letter(commutative=commutative)
        @idempotent
        def handle(order: str, session: Session) -> None:
            if self.broken and order.startswith("bad"):
                raise PoisonMessage("bad for ever")
            bench.note(session, order)

    def consume(self) -> None:
        """Handle everything that is there."""
        with running(self.consumer):
            until(lambda: self.bench.lag == 0, "everything acknowledged")


def held(bench: Bench) -> dict[str, str]:
    """Return why which messages would be held, by payload."""
    with bench.engine.connect() as db:
        manifest = survey(db, EVERYTHING, TERMS)
    names = {row.dlq_id: bytes(row.payload).decode() for row in bench.letters}
    return {names[letter.dlq_id]: why for letter, _, why in manifest.aside}


def sendable(bench: Bench, terms: ReplayOptions = TERMS) -> int:
    """Return how many a replay would send."""
    with bench.engine.connect() as db:
        return len(survey(db, EVERYTHING, terms).letters)


def test_a_newer_event_that_was_handled_holds_the_dead_one(bench: Bench) -> None:
    """The dry run and the plan say which message superseded it; other keys are sent."""
    shop = Shop(bench, quarantine=False)
    bench.publish("bad-1", key="sick")
    (newer, _) = bench.publish("after", "after-2", key="sick")
    bench.publish("bad-2", key="other")
    shop.consume()
    assert sorted(bench.effects) == ["after", "after-2"]
    assert list(held(bench)) == ["bad-1"]
    assert f"message {newer}" in held(bench)["bad-1"]
    with bench.engine.connect() as db:
        report = dry_run(bench.engine, survey(db, EVERYTHING, TERMS), TERMS)
    assert (report.count, report.aside) == (1, {"held": 1})
    assert newer in report.aside_examples[0][1]
    frozen = freeze(bench.engine, EVERYTHING, TERMS, ADA)
    fixed = Shop(bench, quarantine=False)
    fixed.broken = False
    with running(fixed.consumer):
        Sender(bench.engine, bench.broker, pace=Pace(batch=10, poll_seconds=0.02)).run(
            frozen.plan.id
        )
    assert sorted(bench.effects) == ["after", "after-2", "bad-2"]
    with bench.engine.connect() as db:
        notes = select(item.c.note).where(item.c.state == "held")
        assert newer in db.execute(notes).scalar_one()


def test_a_commutative_handler_gets_it_all_the_same(bench: Bench) -> None:
    """Declared at the handler, or by the operator for one replay."""
    declared = Shop(bench, quarantine=False, commutative=True)
    bench.publish("bad-1", "after", key="sick")
    declared.consume()
    assert sendable(bench) == 1
    said = ReplayOptions(policy=StopPolicy(canary=0, ramp=(), commutative=True))
    shop = Shop(bench, quarantine=False)
    bench.publish("bad-2", "after-2", key="undeclared")
    shop.consume()
    assert list(held(bench)) == ["bad-2"]
    assert sendable(bench, said) == 2


def test_an_older_event_that_is_handled_later_supersedes_nothing(small: Bench) -> None:
    """What the group handled before the dead one, and duplicates of it, are older."""
    shop = Shop(small, quarantine=False)
    first = Message.new("orders", b"before", key="sick")
    small.send(first)
    small.publish("bad", key="sick")
    small.publish("elsewhere", key="well")
    shop.consume()
    assert held(small) == {}
    small.send(first)  # an at-least-once producer: dedup knows it
    Shop(small, quarantine=False).consume()
    assert held(small) == {}
    assert sorted(small.effects) == ["before", "elsewhere"]


def test_a_quarantined_key_has_nothing_newer_until_an_operator_lets_it_go(small: Bench) -> None:
    """Held messages are not handled; released ones go ahead of the dead one, and that shows."""
    shop = Shop(small)
    small.publish("bad", "after", key="sick")
    with running(shop.consumer):
        until(lambda: len(small.held) == 1, "one parked")
        assert held(small) == {}
        ParkingAdmin(small.engine).release("g", "orders", "sick", ADA)
        until(lambda: not small.held_keys, "the key went on")
    assert small.effects == ["after"]
    assert list(held(small)) == ["bad"]


def test_events_of_a_released_key_that_come_later_are_noticed_too(small: Bench) -> None:
    """The key is free, its dead letter still open: another process sees it in the store."""
    shop = Shop(small)
    small.publish("bad", key="sick")
    with running(shop.consumer):
        until(lambda: small.held_keys and small.lag == 0, "held")
        ParkingAdmin(small.engine).release("g", "orders", "sick", ADA)
        until(lambda: not small.held_keys, "the key went on")
    assert held(small) == {}
    small.publish("later", key="sick")
    Shop(small).consume()
    assert list(held(small)) == ["bad"]


def test_a_partition_in_order_notices_it_without_a_quarantine(small: Bench) -> None:
    """With order=LANE nothing is held; each key is still looked at for itself."""
    shop = Shop(small, order=Order.LANE)
    small.publish("bad-1", "after", key="sick")
    small.publish("bad-2", key="well")
    shop.consume()
    assert list(held(small)) == ["bad-1"]


def test_a_home_of_the_users_own_is_noticed(small: Bench) -> None:
    """The letter goes to the store by itself; what runs next still sees it."""
    consumer = small.consumer(quarantine=False)

    @consumer.on("orders")
    @dead_letter(DeadLetterStore(small.engine))
    @idempotent
    def handle(order: str, session: Session) -> None:
        if order == "bad":
            raise PoisonMessage("bad for ever")
        small.note(session, order)

    small.publish("bad", "after", key="sick")
    with running(consumer):
        until(lambda: small.lag == 0, "everything acknowledged")
    assert list(held(small)) == ["bad"]
    assert consumer.tally.dead_lettered == 1


def test_a_loop_of_ones_own_notices_it(small: Bench) -> None:
    """Without positions the one that is handled later counts as newer."""
    handler = Shop(small, quarantine=False).consumer.handler("orders")
    handler.handle(Message.new("orders", b"bad", key="sick"))
    handler.handle(Message.new("orders", b"after", key="sick"))
    assert list(held(small)) == ["bad"]


def test_an_effect_that_is_rolled_back_supersedes_nothing(small: Bench) -> None:
    """The note is part of the newer event's own transaction."""
    consumer = small.consumer(quarantine=False)

    @consumer.on("orders")
    @dead_letter()
    def handle(order: str) -> None:
        raise PoisonMessage(f"{order} is bad for ever")

    small.publish("bad-1", "bad-2", key="sick")
    with running(consumer):
        until(lambda: small.lag == 0, "everything acknowledged")
    assert held(small) == {}
    assert sendable(small) == 2


def letter(n: int, position: int | str, *, lane: int = 0, key: str = "k") -> Any:
    """Return a dead letter from *position*."""
    message = Message.new("orders", str(n).encode(), key=key, ids=lambda: f"m-{n}")
    place = Delivery(lane=Lane("orders", lane), position=position, key=key.encode(), body=b"")
    error = ValueError("bad")
    return capture(message, error, group="g", handler="shop.bill", delivery=place)


@pytest.mark.parametrize(
    ("older", "newer"),
    [(9, 10), ("1700000000000-9", "1700000000000-10"), ("name-b", "name-a")],
    ids=["offsets", "stream entries", "names"],
)
def test_a_confirmed_newer_letter_holds_the_older_ones(
    small: Bench, older: int | str, newer: int | str
) -> None:
    """By position where positions are numbers, else by the order of arrival."""
    letters = [letter(1, older), letter(2, newer), letter(3, newer, key="other")]
    for one in letters:
        DeadLetterStore(small.engine).put(one)
    with small.engine.begin() as db:
        close(db, [letters[1].dlq_id], "confirmed", actor="plan p", reason="replayed")
    assert list(held(small)) == ["1"]
    with small.engine.begin() as db:
        db.execute(update(stored).values(state="pending"))
        close(db, [letters[0].dlq_id], "confirmed", actor="plan p", reason="replayed")
    assert held(small) == {}


def test_what_is_known_of_a_letter_goes_with_it(small: Bench) -> None:
    """A pruned letter leaves nothing behind."""
    small.publish("bad", "after", key="sick")
    Shop(small, quarantine=False).consume()
    (dead,) = small.letters
    with small.engine.begin() as db:
        close(db, [dead.dlq_id], "discarded", actor="ada", reason="void")
    assert prune(small.engine, older_than=0, operator=ADA) == 1
    with small.engine.connect() as db:
        assert db.execute(select(overtaken)).all() == []
        assert superseded(db, []) == {}
