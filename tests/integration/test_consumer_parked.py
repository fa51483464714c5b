"""Parked messages: nothing of their key overtakes them, whatever keeps them from running."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, func, select, text, update
from sqlalchemy.orm import Session  # noqa: TC002 - handlers ask for it by annotation

from holdfast import Message, PoisonMessage, Transient
from holdfast.circuit import Breaker, CircuitPolicy, LastCalls, circuit
from holdfast.consumer.monitoring import HealthChecks
from holdfast.consumer.parking.admin import ParkingAdmin
from holdfast.consumer.parking.store import ParkedKey, ParkedMessages, hash_of
from holdfast.consumer.schema import held_key
from holdfast.db.audit import Operator
from holdfast.db.clock import database_now
from holdfast.dlq import dead_letter
from holdfast.idempotency import InProgress, idempotent
from holdfast.idempotency.schema import inbox
from holdfast.ports import Delivery, Lane
from holdfast.retry import Backoff, Jitter, retry
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from holdfast.consumer import Attempt, Consumer

PATIENT = CircuitPolicy(minimum_calls=100, window=LastCalls(100))
LATER = Backoff(first=0.5, ceiling=0.5, jitter=Jitter.NONE)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a database in files."""
    bench = Bench(tmp_path, f"sqlite:///{tmp_path}/db.db")
    yield bench
    bench.close()


@pytest.fixture(params=["postgres", "mariadb"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker in a file, and a database on a server."""
    bench = Bench(tmp_path, request.getfixturevalue(request.param).database("consumer_parked"))
    yield bench
    bench.close()


def failing_once(
    bench: Bench, again: Callable[[str, int], None] = lambda *_: None, **options: Any
) -> Consumer:
    """Return a consumer whose handler fails 'one' at first, then does what *again* says."""
    consumer = bench.consumer(patience=0.05, **options)

    @consumer.on("orders")
    @dead_letter()
    @retry(LATER)
    @idempotent
    def handle(order: str, session: Session, attempt: Attempt, message: Message) -> None:
        if order == "one" and attempt.number == 1:
            raise Transient("not yet")
        again(order, attempt.number)
        bench.note(session, f"{order} {message.correlation_id}")

    return consumer


def done(bench: Bench) -> Callable[[], bool]:
    """Return whether everything has gone through."""
    return lambda: bench.lag == 0 and not bench.held_keys


def names(bench: Bench) -> list[str]:
    """Return the payloads of the effects, in order."""
    return [what.split()[0] for what in bench.effects]


def test_a_parked_message_in_the_hands_of_another_keeps_its_turn(bench: Bench) -> None:
    """Its lease is held elsewhere for a while: what is parked behind it waits with it."""
    refused = [InProgress("g/other", "m", 0.05)] * 3

    def again(order: str, _: int) -> None:
        if order == "one" and refused:
            raise refused.pop()

    bench.publish("one", "two", "three")
    with running(failing_once(bench, again)):
        until(done(bench), "everything handled")
    assert names(bench) == ["one", "two", "three"]


def test_an_error_text_that_no_database_takes_is_stored_as_far_as_it_can_be(bench: Bench) -> None:
    """A lone surrogate in an error is no reason to lose the turn of a message."""
    consumer, seen = bench.consumer(patience=0.05), threading.Event()

    @consumer.on("orders")
    @retry(LATER)
    def handle(order: str, session: Session) -> None:
        if order == "one" and not seen.is_set():
            raise Transient("bad name \ud800 \0")
        bench.note(session, order)

    bench.publish("one", "two")
    with running(consumer):
        until(lambda: len(bench.held) == 2, "both parked")
        seen.set()
        until(done(bench), "everything handled")
    assert bench.effects == ["one", "two"]


def test_a_failure_of_the_consumer_itself_costs_no_message_its_turn(bench: Bench) -> None:
    """An error that cannot be told breaks the thread's own work; the key waits for it."""
    consumer, broken = bench.consumer(), ["once", "twice"]

    class Untold(Exception):
        """Cannot be written down."""

        def __str__(self) -> str:
            raise RuntimeError(broken.pop())

    @consumer.on("orders")
    def handle(order: str, session: Session) -> None:
        if order == "one" and broken:
            raise Untold
        bench.note(session, order)

    bench.publish("one", "two")
    with running(consumer):
        until(done(bench), "everything handled")
    assert bench.effects == ["one", "two"]


def test_a_failure_of_the_intake_itself_is_seen_and_loses_nothing(bench: Bench) -> None:
    """Nothing is admitted: whoever looks at the consumer must be told."""
    consumer = failing_once(bench)

    def broken(*_: Any) -> None:
        raise ValueError("nobody thought of this")

    try:
        with running(consumer):
            until(lambda: HealthChecks(consumer).ready().good, "it is ready")
            event.listen(bench.engine, "before_cursor_execute", broken)
            bench.publish("one", "two")
            until(lambda: not HealthChecks(consumer).ready().good, "it is not ready")
            until(lambda: "failed in itself" in HealthChecks(consumer).ready().why, "and says why")
            down = {"what": "database"}
            registry = consumer.metrics.registry
            assert registry.get_sample_value("holdfast_consumer_down", down) == 1
            event.remove(bench.engine, "before_cursor_execute", broken)
            until(done(bench), "everything handled")
            until(lambda: HealthChecks(consumer).ready().good, "it is ready again")
    finally:
        if event.contains(bench.engine, "before_cursor_execute", broken):
            event.remove(bench.engine, "before_cursor_execute", broken)
    assert [effect.split()[0] for effect in bench.effects] == ["one", "two"]


def test_another_message_with_the_id_of_a_parked_one_is_not_lost(bench: Bench) -> None:
    """It has no effect and no place in the key, but somebody must hear of it: a dead letter."""
    consumer = bench.consumer()

    @consumer.on("orders")
    @dead_letter()
    @idempotent
    def handle(order: str, session: Session) -> None:
        if order == "bad":
            raise PoisonMessage("bad for ever")
        bench.note(session, order)

    bench.publish("bad")
    same = Message.new("orders", b"two", key="k")
    bench.send(same, same, same.with_(payload=b"another"))
    with running(consumer):
        until(lambda: len(bench.letters) == 1 and bench.lag == 0, "the rest is parked")
        assert [row.body for row in bench.held] == [b"two", b"another"]
        assert [key.parked for key in bench.held_keys] == [2]
        ada = Operator(actor="ada", reason="fixed")
        ParkingAdmin(bench.engine).release("g", "orders", "k", ada)
        until(lambda: len(bench.letters) == 2, "the conflict is a dead letter")
    assert bench.effects == ["two"]
    assert {letter.error_type.rpartition(".")[2] for letter in bench.letters} == {
        "PoisonMessage",
        "IdempotencyConflict",
    }


def test_a_created_correlation_survives_the_wait_in_the_database(bench: Bench) -> None:
    """The retry runs under the same correlation id as the first attempt would have."""
    plain = Message.new("orders", b"one", key="k").with_(correlation_id=None)
    bench.send(plain)
    with running(failing_once(bench)) as consumer:
        until(done(bench), "handled")
    assert bench.effects == [f"one {plain.id}"]
    assert consumer.tally.uncorrelated == 1


def test_keys_that_wait_for_a_circuit_keep_no_other_topic_waiting(bench: Bench) -> None:
    """A retry of another topic is taken up while many keys of the first stand before a gate."""
    consumer, breaker = bench.consumer(patience=0.05), Breaker("bank of the parked", PATIENT)
    bench.broker.create_topic("bills")
    opened = threading.Event()

    def handle(order: str, session: Session, attempt: Attempt) -> None:
        if attempt.number == 1:
            raise Transient("not yet")
        bench.note(session, order)

    def guarded(order: str, session: Session, attempt: Attempt) -> None:
        if not opened.is_set():
            raise Transient("not yet")
        handle(order, session, attempt)

    stack = circuit(breaker.name, breaker=breaker)(idempotent(guarded))
    consumer.on("orders")(dead_letter()(retry(LATER)(stack)))
    consumer.on("bills")(dead_letter()(retry(LATER)(idempotent(handle))))
    for n in range(25):
        bench.publish(f"gated {n}", key=f"k{n}")
    with running(consumer):
        until(lambda: len(bench.held) == 25, "all parked")
        breaker.open()
        owned = lambda: sum(row.owner is not None for row in bench.held_keys)  # noqa: E731
        until(lambda: owned() >= 20, "keys taken up")
        bench.publish("bill", topic="bills")
        until(lambda: bench.effects == ["bill"], "the other topic's retry")
        opened.set()  # not before: one that passed the gate as it was shut would have an effect
        breaker.close()
        until(done(bench), "everything handled")
    assert len(bench.effects) == 26


def test_a_retry_parked_on_a_quarantined_key_leaves_it_quarantined(bench: Bench) -> None:
    """It waits with the others until the dead letter is closed."""
    mine = ParkedMessages("g")
    key = ParkedKey("orders", hash_of(b"k", ""), b"k")
    origin = Delivery(lane=Lane("orders", 0), position=7, key=b"k", body=b"late")
    with bench.engine.begin() as db:
        mine.hold(db, key, dlq_id="letter", note="dead letter")
        mine.postpone(db, key, origin, attempt=2, delay=0.0, note="retry")
        assert mine.claim_due(db, "me", 5.0, 10, ["orders"]) == []
        assert mine.totals(db, ["orders"]) == (1, 1, 0)
        db.execute(update(held_key).values(due=database_now() - 1))  # by an older version
        assert mine.claim_due(db, "me", 5.0, 10, ["orders"]) == []
        assert mine.release(db, key)
        (claimed,) = mine.claim_due(db, "me", 5.0, 10, ["orders"])
        mine.hold(db, key, dlq_id="letter", note="another process buried one")
        (row,) = mine.rows(db, claimed, 10)
        mine.postpone_again(db, row, attempt=3, delay=0.0)
        assert mine.claim_due(db, "me", 5.0, 10, ["orders"]) == []


@pytest.mark.parametrize("own", ["x" * 300, "nul\0in it"])
def test_messages_are_parked_whatever_their_id(server: Bench, own: str) -> None:
    """A retry and what stands behind it wait in the database, once each, and then run."""
    one = Message.new("orders", b"one", key="k").with_(id=own)
    two = Message.new("orders", b"two", key="k").with_(id=own + "2")
    server.send(one, two, one)
    seen = threading.Event()

    def again(order: str, _: int) -> None:
        if order == "one" and not seen.is_set():
            raise Transient("not yet")

    with running(failing_once(server, again)):
        until(lambda: len(server.held) == 2, "both parked")
        seen.set()
        until(done(server), "everything handled")
    assert names(server) == ["one", "two"]
    assert server.letters == []


def test_a_message_keeps_its_id_though_its_position_is_long(server: Bench) -> None:
    """Without an id of its own it is known by its coordinates, which a row need not hold."""
    origin = Delivery(lane=Lane("orders", 0), position="p" * 100, key=b"k", body=b"x")
    key = ParkedKey("orders", hash_of(b"k", ""), b"k")
    with server.engine.begin() as db:
        ParkedMessages("g").postpone(db, key, origin, attempt=1, delay=0.0, note="retry")
        ParkedMessages("g").postpone(db, key, origin, attempt=1, delay=0.0, note="retry")
        (row,) = ParkedMessages("g").rows(db, key, 10)
    assert row.origin.message.id == origin.message.id


def test_a_large_inbox_is_pruned_while_messages_are_handled(bench: Bench) -> None:
    """The thread that admits messages prunes for a moment at a time, however much there is."""
    consumer, forgotten = failing_once(bench), 150_000
    assert consumer.context.store is not None
    consumer.context.store.introduce(consumer._routes.values())
    old = text(
        "WITH RECURSIVE n(v) AS (SELECT 1 UNION ALL SELECT v + 1 FROM n WHERE v < :most) "
        "INSERT INTO holdfast_inbox (consumer, message, handled_at, digest) "
        "SELECT id, randomblob(16), 1.0, zeroblob(8) FROM n, holdfast_inbox_consumer"
    )
    with bench.engine.begin() as db:
        db.execute(old, {"most": forgotten})

    def left() -> int:
        with bench.engine.connect() as db:
            return db.execute(select(func.count()).select_from(inbox)).scalar_one()

    with running(consumer):
        until(lambda: left() < forgotten, "the first pruned")
        bench.publish("next")
        until(lambda: names(bench) == ["next"], "a message handled")
        assert left() > 1, "it waited until everything was pruned"
