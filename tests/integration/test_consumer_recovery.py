"""After trouble the consumer goes on: circuits that few can try, copies of the dead, lost lanes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session  # noqa: TC002 - handlers ask for it by annotation

from holdfast import Message, PoisonMessage
from holdfast.circuit import Breaker, CircuitPolicy, HalfOpen, LastCalls, Open, circuit
from holdfast.clock import SYSTEM_CLOCK
from holdfast.consumer import Batches, Consumer, HandlerEnding
from holdfast.consumer.intake.admission import Admission
from holdfast.consumer.intake.decode import BodyReader
from holdfast.consumer.scheduling.circuit_gate import CircuitGate
from holdfast.consumer.scheduling.scheduler import KeyScheduler
from holdfast.consumer.scheduling.work import RetryIn, Work, WorkState
from holdfast.dlq import close, dead_letter
from holdfast.idempotency import idempotent
from holdfast.retry import Backoff, retry
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.ports import Delivery

POLICY = CircuitPolicy(
    failure_rate=0.5, minimum_calls=3, window=LastCalls(6), open_seconds=0.2, permits=3
)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a database in files."""
    bench = Bench(tmp_path, f"sqlite:///{tmp_path}/db.db")
    yield bench
    bench.close()


def guarded(bench: Bench, breaker: Breaker, down: threading.Event) -> Consumer:
    """Return a consumer whose handler needs a gateway."""
    consumer = bench.consumer()

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.02, attempts=50))
    @circuit(breaker.name, breaker=breaker)
    def handle(order: str, session: Session) -> None:
        if down.is_set():
            raise ConnectionError("refused")
        bench.note(session, order)

    return consumer


def test_a_circuit_recovers_with_fewer_messages_in_hand_than_permits(bench: Bench) -> None:
    """The one message of the outage probes once; those that come later make up the rest."""
    breaker, down = Breaker("gateway of few", POLICY), threading.Event()
    down.set()
    bench.publish("first", key="a")
    with running(guarded(bench, breaker, down)):
        until(lambda: isinstance(breaker.state, Open), "the circuit open")
        down.clear()
        until(lambda: bench.effects == ["first"], "the first message handled")
        for n in range(5):
            bench.publish(f"later {n}", key=f"k{n}")
        until(lambda: len(bench.effects) == 6, "the later messages handled")
    assert bench.letters == []


@pytest.mark.parametrize("state", ["open", "half-open"])
def test_a_circuit_recovers_with_nothing_in_hand(bench: Bench, state: str) -> None:
    """Opened while no message was here, it is tried by those that come once its time is up."""
    breaker = Breaker(f"gateway of nobody, {state}", POLICY)
    with running(guarded(bench, breaker, threading.Event())):
        if state == "open":
            breaker.open(0.1)
        else:
            breaker.half_open()
        assert isinstance(breaker.state, Open | HalfOpen)
        for n in range(5):
            bench.publish(f"{n}", key=f"k{n}")
        until(lambda: len(bench.effects) == 5, "the messages handled")


def test_an_open_circuit_takes_in_nothing_until_it_may_be_tried(bench: Bench) -> None:
    """Opened by hand without an end, its topic stays where it is."""
    breaker = Breaker("gateway held open", POLICY)
    breaker.open()
    bench.publish("waits", key="k")
    consumer = guarded(bench, breaker, threading.Event())
    with running(consumer):
        until(lambda: consumer.metrics.registry.get_sample_value("holdfast_consumer_paused") == 2,
              "both partitions paused")  # fmt: skip
        assert bench.lag == 1
        breaker.close()
        until(lambda: bench.effects == ["waits"], "the message handled")


def poisoned(bench: Bench) -> Consumer:
    """Return a consumer to which 'bad' is poison."""
    consumer, seen = bench.consumer(), []

    @consumer.on("orders")
    @dead_letter()
    @idempotent
    def handle(order: str, session: Session) -> None:
        bench.note(session, order)
        if order == "bad" and not seen:
            seen.append(order)
            raise PoisonMessage("bad")  # the first time: a second run would have an effect

    return consumer


def discard(bench: Bench) -> None:
    """Close every dead letter, as an operator does."""
    ids = [row.dlq_id for row in bench.letters]
    with bench.engine.begin() as db:
        close(db, ids, "discarded", actor="ada", reason="bad")


def test_a_copy_of_a_dead_letter_is_not_run_when_the_letter_is_discarded(bench: Bench) -> None:
    """Its second delivery is done with as the letter is; what stands behind it goes on."""
    bad = Message.new("orders", b"bad", key="k")
    bench.send(bad, bad, Message.new("orders", b"next", key="k"))
    with running(poisoned(bench)):
        until(lambda: bench.lag == 0 and len(bench.held) == 1, "the key held")
        discard(bench)
        until(lambda: not bench.held_keys, "the key let go")
    assert bench.effects == ["next"]
    assert len(bench.letters) == 1


def test_a_loop_of_ones_own_never_overtakes_a_held_key(bench: Bench) -> None:
    """The later message is given back until the letter is closed; other keys are handled."""
    handler = poisoned(bench).handler("orders")
    bad, later = (Message.new("orders", body, key="k") for body in (b"bad", b"later"))
    assert handler.handle(bad).ending is HandlerEnding.DEAD_LETTERED
    refused = handler.handle(later)
    assert (refused.ending, refused.acknowledge) == (HandlerEnding.RELEASED, False)
    assert "keys release" in str(refused.error)
    assert handler.handle(bad).ending is HandlerEnding.DEAD_LETTERED
    assert handler.handle(Message.new("orders", b"other", key="o")).ending is HandlerEnding.HANDLED
    discard(bench)
    assert handler.handle(later).ending is HandlerEnding.HANDLED
    assert (bench.effects, bench.held_keys) == (["other", "later"], [])


def test_a_loop_of_ones_own_hears_of_an_outage_as_an_outcome(bench: Bench) -> None:
    """With its tables away, the message is given back without blame and nothing is raised."""
    handler = poisoned(bench).handler("orders")
    with bench.engine.begin() as db:
        db.exec_driver_sql("ALTER TABLE holdfast_attempt RENAME TO away")
    outcome = handler.handle(Message.new("orders", b"x", key="k"))
    with bench.engine.begin() as db:
        db.exec_driver_sql("ALTER TABLE away RENAME TO holdfast_attempt")
    assert (outcome.ending, outcome.blame) == (HandlerEnding.RELEASED, False)


def test_work_lost_before_it_was_admitted_is_forgotten(bench: Bench) -> None:
    """A rebalance leaves nothing behind in the admission, which is idle again."""
    consumer = poisoned(bench)
    route = consumer._routes["orders"]
    books = consumer.context.store
    assert books is not None
    context = consumer.context
    lanes = KeyScheduler(context, CircuitGate([route], SYSTEM_CLOCK))
    admission = Admission(context, books, lanes, BodyReader(context), lambda _admit: None)
    works = [
        Work(route=route, message=Message.new("orders", b"x", key="k"), lane_key=("k",),
             state=WorkState.REVOKED)
        for _ in range(3)
    ]  # fmt: skip
    admission.admit(works)
    admission.start()
    until(lambda: admission.is_idle, "nothing waiting for admission")
    admission.stop()
    assert admission.is_idle


def test_what_was_lost_while_it_ran_leaves_no_mark_when_it_is_to_be_tried_again(
    bench: Bench,
) -> None:
    """It does not run again here, so nobody else would remove the mark of its start."""
    consumer = poisoned(bench)
    route = consumer._routes["orders"]
    lanes = KeyScheduler(consumer.context, CircuitGate([route], SYSTEM_CLOCK))
    bench.publish("x", key="k")
    source = consumer.broker.source(["orders"], group="g")
    found: list[Delivery] = []
    until(lambda: found.extend(source.poll(1, 0.1)) or found, "the message")
    work = Work(route=route, message=found[0].message, delivery=found[0], lane_key=("k",))
    lanes.reserve([work])
    lanes.admit([work])
    assert lanes.begin(work)
    lanes.drop([found[0].lane])
    lanes.finish(work, RetryIn(delay=1.0))
    assert lanes.finished.get_nowait() is work
    assert lanes.is_empty()
    source.close()


@pytest.mark.parametrize("whole", [False, True])
def test_a_handler_may_take_the_message_in_the_place_of_its_payload(
    bench: Bench, *, whole: bool
) -> None:
    """Annotated `Message`, the first parameter is the message, undecoded; also in a list."""
    consumer = bench.consumer()

    def each(message: Message, session: Session) -> None:
        bench.note(session, f"{message.key_text}: {message.payload!r}")

    def every(messages: list[Message], session: Session) -> None:
        for message in messages:
            each(message, session)

    batch = Batches(size=10, whole=True) if whole else None
    consumer.on("orders", batch=batch)(idempotent(every if whole else each))
    bench.publish(b"\xff no JSON", key="k")
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert bench.effects == ["k: b'\\xff no JSON'"]


def test_an_outage_after_many_good_calls_kills_no_message(bench: Bench) -> None:
    """The circuit takes longer to open than a message has retries; nobody dies meanwhile."""
    consumer = bench.consumer(backoff=Backoff(first=0.02, ceiling=0.1))
    breaker = Breaker("gateway of many", CircuitPolicy(open_seconds=0.1))
    down = threading.Event()

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.02, attempts=3))
    @circuit(breaker.name, breaker=breaker)
    @idempotent
    def handle(order: str, session: Session) -> None:
        if down.is_set():
            raise ConnectionError("no gateway")
        bench.note(session, order)

    good, late = [f"good {n}" for n in range(120)], [f"late {n}" for n in range(5)]
    for order in good:
        bench.publish(order, key=order)
    with running(consumer):
        until(lambda: len(bench.effects) == len(good), "a window full of successes")
        down.set()
        for order in late:
            bench.publish(order, key=order)
        until(lambda: isinstance(breaker.state, Open), "the circuit open at last")
        assert bench.letters == []
        assert [row for row in bench.attempts if row.failed] == []
        down.clear()
        until(lambda: bench.lag == 0, "recovered")
    assert bench.letters == []
    assert consumer.tally.failed == 0
    assert sorted(bench.effects) == sorted([*good, *late])


def test_an_error_that_nobody_knows_is_no_outage(bench: Bench) -> None:
    """In a topic of one key no other message can show whose fault it is: retries decide."""
    consumer = bench.consumer()
    breaker = Breaker("gateway of the unknown", CircuitPolicy(open_seconds=0.1))

    class OutOfStock(Exception):
        """Of the user's own; no rule knows it."""

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.02, attempts=5))
    @circuit(breaker.name, breaker=breaker)
    def handle(order: str, session: Session) -> None:
        if order == "bad":
            raise OutOfStock(order)
        bench.note(session, order)

    bench.publish(*(f"good {n}" for n in range(20)), "bad")
    with running(consumer):
        until(lambda: len(bench.letters) == 1, "dead-lettered")
    assert len(bench.effects) == 20
    assert bench.letters[0].attempts == 3


def test_one_message_that_makes_a_dependency_fail_does_not_stop_its_topic(bench: Bench) -> None:
    """While others pass, its failures are its own: it is dead-lettered, and the circuit closes."""
    consumer, breaker = bench.consumer(), Breaker("gateway of one", POLICY)

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.02, attempts=5))
    @circuit(breaker.name, breaker=breaker)
    def handle(order: str, session: Session) -> None:
        if order == "bad":
            raise ConnectionError("500 for this one")
        bench.note(session, order)

    sent = []

    def some_more() -> bool:
        """Send another good message, as a quiet topic would."""
        sent.append(f"good {len(sent)}")
        bench.publish(sent[-1], key=f"g{len(sent)}")
        return bool(bench.letters)

    bench.publish("bad", key="b")
    with running(consumer):
        until(lambda: isinstance(breaker.state, Open), "the circuit open")
        assert bench.letters == []
        until(some_more, "the bad message dead")
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert sorted(bench.effects) == sorted(sent)
    assert [row.payload for row in bench.letters] == [b"bad"]


def test_a_service_leaves_the_parked_keys_of_another_topic_to_others(bench: Bench) -> None:
    """Two services of one group with a topic each: both finish their own retries."""
    bench.broker.create_topic("payments")
    busy = bench.consumer(patience=0.01, outage_seconds=0.05)  # they all fail alike
    idle, failed = bench.consumer(), set()

    @idle.on("orders")
    def wait(order: str) -> None: ...

    @busy.on("payments")
    @retry(Backoff(first=0.05, ceiling=0.1, attempts=5))
    @idempotent
    def pay(order: str, session: Session) -> None:
        if order not in failed:
            failed.add(order)
            raise ConnectionError("not now")
        bench.note(session, order)

    with running(idle), running(busy):
        for n in range(20):
            bench.publish(f"p{n}", key=f"k{n}", topic="payments")
        until(lambda: len(bench.effects) == 20, "every retry run")
        until(lambda: not bench.held_keys, "nothing held")


def test_a_database_that_is_down_at_the_start_is_waited_for(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """As a broker is: the consumer says so, and goes on when it answers."""
    refused = [OperationalError("connect", {}, ConnectionRefusedError("refused"))] * 2
    consumer = poisoned(bench)
    books = consumer.context.store
    assert books is not None

    @event.listens_for(books.engine, "do_connect")
    def refuse(*_: object) -> None:
        if refused:
            raise refused.pop()

    books.engine.dispose()
    bench.publish("x")
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert refused == []
    assert "the database is down, the consumer waits for it" in caplog.text
