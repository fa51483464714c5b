"""An outage is not poison: with a circuit inside the handler, with none at all, and in batches."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.orm import Session  # noqa: TC002 - a handler asks for it by annotation

from holdfast import Message
from holdfast.brokers import connect
from holdfast.circuit import Breaker, CircuitPolicy, Closed, LastCalls, circuit
from holdfast.consumer.monitoring import HealthChecks
from holdfast.dlq import dead_letter
from holdfast.errors import DependencyDown
from holdfast.idempotency import idempotent
from holdfast.retry import Backoff, retry
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from holdfast.consumer import Consumer


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Return a bench on SQLite, with a broker in memory."""
    made = Bench(tmp_path, f"sqlite:///{tmp_path}/shop.db", broker=connect("memory:"))
    yield made
    made.close()


class Gateway:
    """A dependency that can be down."""

    def __init__(self, error: type[Exception] = ConnectionRefusedError) -> None:
        self.up = threading.Event()
        self.calls = 0
        self._error = error

    def call(self) -> None:
        """Answer, or fail as what is away does."""
        self.calls += 1
        if not self.up.is_set():
            raise self._error("nobody listens")


def paused(consumer: Consumer) -> float:
    """Return how many partitions are paused, as the metric tells."""
    return consumer.metrics.registry.get_sample_value("holdfast_consumer_paused") or 0.0


def detector_of(consumer: Consumer) -> Any:
    """Return the detector of the consumer's only handler."""
    (route,) = consumer._routes.values()
    return route.outage.detector


@pytest.mark.parametrize("database", [True, False], ids=["database", "no database"])
def test_a_circuit_inside_a_handler_pauses_the_intake(
    bench: Bench, caplog: pytest.LogCaptureFixture, *, database: bool
) -> None:
    """`CircuitOpen` says until when: no run in between, one word in the log, one when it ends."""
    bench._database = database
    policy = CircuitPolicy(minimum_calls=2, window=LastCalls(4), open_seconds=0.5, permits=1)
    gateway, breaker = Gateway(), Breaker("bank", policy)
    handled: list[str] = []
    runs: list[str] = []

    @circuit("bank", breaker=breaker)
    def charge() -> None:
        gateway.call()

    consumer = bench.consumer(patience=0.1, outage_seconds=0.3)

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.01, attempts=3))
    def handle(order: str) -> None:
        runs.append(order)
        charge()
        handled.append(order)

    for n in range(8):
        bench.publish(f"o{n}", key=f"k{n}")
    vitals = HealthChecks(consumer)
    with caplog.at_level(logging.WARNING, "holdfast"), running(consumer):
        until(lambda: paused(consumer) > 0, "the intake paused")
        assert not vitals.ready().good
        assert "bank" in vitals.ready().why
        probed, ran = gateway.calls, len(runs)
        until(lambda: gateway.calls >= probed + 3, "three more probes")
        # Two may come with a probe, and meet the circuit that it has opened again.
        assert len(runs) - ran <= 4 * (gateway.calls - probed + 1), "the circuit is no gate"
        gateway.up.set()
        until(lambda: len(handled) == 8, "everything handled")
        until(lambda: vitals.ready().good and paused(consumer) == 0, "the intake on again")
    assert consumer.tally.dead_lettered == 0
    said = [record.message for record in caplog.records if "waits" in record.message]
    assert len(said) <= 2, said
    assert [record for record in caplog.records if "orders goes on" in record.message]


@pytest.mark.parametrize("error", [ConnectionRefusedError, TimeoutError, DependencyDown])
@pytest.mark.parametrize("way", ["database", "no database", "batches", "no retry"])
def test_many_messages_that_fail_alike_are_an_outage_and_burn_no_attempts(
    bench: Bench, way: str, error: type[Exception]
) -> None:
    """No dead letter, no count; the topic pauses, one message at a time tries, all pass later."""
    bench._database = way != "no database"
    gateway = Gateway(error)
    attempts: list[int] = []
    consumer = bench.consumer(patience=0.1, outage_seconds=0.2, dead_letter_limit=None)

    def handle(order: str, session: Session) -> None:
        gateway.call()
        bench.note(session, order)

    def plain(order: str) -> None:
        gateway.call()
        attempts.append(1)

    wrapped: Any = handle if bench._database else plain
    if bench._database:
        wrapped = idempotent(wrapped)
    if way != "no retry":  # plenty: no message may use them up before others were tried at all
        wrapped = retry(Backoff(first=0.05, ceiling=0.05, attempts=40))(wrapped)
    batch = 20 if way == "batches" else None
    consumer.on("orders", batch=batch)(dead_letter()(wrapped))
    for n in range(100):
        bench.publish(f"o{n}", key=f"k{n}")
    vitals = HealthChecks(consumer)
    with running(consumer):
        until(lambda: paused(consumer) > 0 or consumer.tally.dead_lettered > 9, "a verdict")
        assert consumer.tally.dead_lettered < 3, "the outage was held against the messages"
        assert error.__name__ in vitals.ready().why
        assert not vitals.ready().good
        so_far = gateway.calls
        until(lambda: gateway.calls >= so_far + 5, "five probes more")
        died = consumer.tally.dead_lettered
        gateway.up.set()
        tally = consumer.tally
        until(lambda: tally.handled + tally.dead_lettered == 100, "everything handled")
        until(lambda: vitals.ready().good, "ready again")
    if way == "no retry":
        # Each of the first ones had one attempt, before anybody could know; as had one that
        # was refused while the other that tried was served.
        assert died < 3
        assert tally.dead_lettered <= died + 1
    else:
        assert tally.dead_lettered == 0
    if bench._database:
        assert not bench.attempts
        assert len(bench.effects) == tally.handled


class Listener(logging.Handler):
    """Asks something at the moment when an outage is told."""

    def __init__(self, ask: Callable[[], object]) -> None:
        super().__init__()
        self.answers: list[object] = []
        self._ask = ask

    def emit(self, record: logging.LogRecord) -> None:
        if "in a row failed alike" in record.getMessage():
            self.answers.append(self._ask())


def test_an_outage_is_on_before_it_is_told(bench: Bench) -> None:
    """A log takes its time; a message that fails meanwhile in another thread is excused, too."""
    gateway, consumer = Gateway(), bench.consumer(patience=0.1, outage_seconds=0.2)

    @consumer.on("orders")
    @dead_letter()
    def handle(order: str) -> None:
        gateway.call()

    for n in range(20):
        bench.publish(f"o{n}", key=f"k{n}")
    listener, log = Listener(lambda: detector_of(consumer).is_open), logging.getLogger("holdfast")
    log.addHandler(listener)
    try:
        with running(consumer):
            until(lambda: listener.answers, "the outage told")
            gateway.up.set()
            tally = consumer.tally
            until(lambda: tally.handled + tally.dead_lettered == 20, "everything handled")
    finally:
        log.removeHandler(listener)
    assert listener.answers[0] is True


@pytest.mark.parametrize("source", ["holdfast", "shop"], ids=["no source", "a source"])
def test_a_message_that_cannot_connect_while_others_can_is_dead_lettered(
    bench: Bench, source: str
) -> None:
    """Its fault is its own, also if it has company in that."""
    consumer = bench.consumer(patience=0.1, outage_seconds=0.05)
    seen: list[str] = []

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.02, ceiling=0.02, attempts=3))
    def handle(order: str) -> None:
        if order.startswith("bad"):
            raise ConnectionRefusedError("the host in this order does not exist")
        seen.append(order)

    for n in range(4):
        bench.send(Message.new("orders", f"bad {n}".encode(), key=f"b{n}", source=source))
    with running(consumer):
        sent = 0
        while consumer.tally.dead_lettered < 4:
            sent += 1
            good = Message.new("orders", f"good {sent}".encode(), key=f"g{sent}", source=source)
            bench.send(good)
            until(lambda sent=sent: len(seen) >= sent, f"good message {sent} handled")  # type: ignore[misc]
            assert sent < 3000, "the bad ones are excused for ever"
        assert isinstance(detector_of(consumer).breaker.state, Closed) or seen


def from_shop(shop: str, order: str) -> Message:
    """Return a message of *shop*, which numbers its messages as every other shop does."""
    return Message.new(
        "orders", order.encode(), key=shop, source=f"//shops/{shop}", ids=lambda: "1"
    )


def keep_serving(bench: Bench, seen: list[str], consumer: Consumer, *, dead: int) -> None:
    """Let message after message of other shops pass until *dead* messages are dead letters."""
    sent = 0
    while consumer.tally.dead_lettered < dead:
        sent += 1
        bench.send(from_shop(f"good {sent}", f"good {sent}"))
        until(lambda sent=sent: len(seen) >= sent, f"good message {sent} handled")  # type: ignore[misc]
        assert sent < 3000, "what fails alone is excused for ever"


def test_messages_of_several_producers_with_one_id_are_several_that_fail_alike(
    bench: Bench,
) -> None:
    """Source and id name a message: an outage that meets the first order of each shop is one."""
    gateway = Gateway()
    consumer = bench.consumer(patience=0.1, outage_seconds=0.1)

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.05, ceiling=0.05, attempts=40))
    def handle(order: str) -> None:
        gateway.call()

    bench.send(*(from_shop(f"shop {n}", "the first order") for n in range(4)))
    with running(consumer):
        until(lambda: paused(consumer) > 0 or consumer.tally.dead_lettered > 0, "a verdict")
        assert consumer.tally.dead_lettered == 0, "several messages counted as one"
        gateway.up.set()
        until(lambda: consumer.tally.handled == 4, "all handled")


def test_messages_with_the_id_of_one_that_fails_are_others_that_pass(bench: Bench) -> None:
    """A circuit's message waits until others are served, and is dead-lettered then."""
    breaker = Breaker("bank", CircuitPolicy(minimum_calls=900, window=LastCalls(1000)))
    consumer = bench.consumer(patience=0.1)
    seen: list[str] = []

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.02, ceiling=0.02, attempts=3))
    @circuit("bank", breaker=breaker)
    def handle(order: str) -> None:
        if order == "bad":
            raise ConnectionRefusedError("the host in this order does not exist")
        seen.append(order)

    bench.send(from_shop("bad shop", "bad"))
    with running(consumer):
        keep_serving(bench, seen, consumer, dead=1)


def test_a_message_is_no_other_than_itself_whatever_its_source(bench: Bench) -> None:
    """One that comes again and again, is failed and then served, has overtaken nobody."""
    gateway = Gateway()
    breaker = Breaker("bank", CircuitPolicy(minimum_calls=900, window=LastCalls(1000)))
    consumer = bench.consumer(patience=0.1)
    seen: list[str] = []

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.02, ceiling=0.02, attempts=3))
    @circuit("bank", breaker=breaker)
    def handle(order: str) -> None:
        gateway.call()
        seen.append(order)

    with running(consumer):
        for served in (1, 2, 3, 4):
            gateway.up.clear()
            before = gateway.calls
            bench.send(from_shop("shop", "order"))
            # The fourth call: all its attempts were spent, and it was not blamed for them.
            until(lambda before=before: gateway.calls > before + 3  # type: ignore[misc]
                  or consumer.tally.dead_lettered, "a verdict")  # fmt: skip
            assert consumer.tally.dead_lettered == 0, "it was taken for another one"
            gateway.up.set()
            until(lambda served=served: len(seen) == served, "it is served")  # type: ignore[misc]


def test_what_one_message_did_is_not_held_against_its_namesakes(bench: Bench) -> None:
    """A shop's bad first order is its own fault; other shops' first orders meet an outage."""
    gateway = Gateway()
    gateway.up.set()
    consumer = bench.consumer(patience=0.1, outage_seconds=0.1)
    seen: list[str] = []

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.02, ceiling=0.02, attempts=20))
    def handle(order: str) -> None:
        if order == "bad":
            raise ConnectionRefusedError("the host in this order does not exist")
        gateway.call()
        seen.append(order)

    bench.send(from_shop("bad shop", "bad"))
    with running(consumer):
        keep_serving(bench, seen, consumer, dead=1)
        gateway.up.clear()
        before = len(seen)
        bench.send(*(from_shop(f"shop {n}", "the first order") for n in range(4)))
        until(lambda: paused(consumer) > 0 or consumer.tally.dead_lettered > 1, "a verdict")
        assert consumer.tally.dead_lettered == 1, "the namesakes were blamed"
        gateway.up.set()
        until(lambda: len(seen) == before + 4, "all handled")


def test_a_message_that_was_served_is_not_blamed_for_a_later_outage(bench: Bench) -> None:
    """It failed now and then, and was served in the end: an outage excuses it like the others."""
    gateway = Gateway()
    consumer = bench.consumer(patience=0.1, outage_seconds=0.05)
    runs: list[str] = []

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.02, ceiling=0.02, attempts=3))
    def handle(order: str) -> None:
        runs.append(order)
        if order == "stumbles" and runs.count(order) % 2:
            raise ConnectionRefusedError("once")
        if order != "stumbles":
            gateway.call()

    with running(consumer):
        for served in (1, 2, 3, 4):
            bench.send(from_shop("shop", "stumbles"))
            until(lambda served=served: consumer.tally.handled == served, "it is served")  # type: ignore[misc]
        bench.send(*(from_shop(f"other {n}", f"other {n}") for n in range(3)))
        until(lambda: paused(consumer) > 0, "an outage")
        bench.send(from_shop("shop", "meets it"))
        until(lambda: runs.count("meets it") > 3 or consumer.tally.dead_lettered, "a verdict")
        assert consumer.tally.dead_lettered == 0, "it was blamed"
        gateway.up.set()
        until(lambda: consumer.tally.handled == 8, "all are handled")


def test_a_lone_message_that_cannot_connect_is_dead_lettered(bench: Bench) -> None:
    """One alone proves no outage, however often it fails."""
    consumer = bench.consumer(patience=0.1)

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.01, attempts=4))
    def handle(order: str) -> None:
        raise ConnectionRefusedError(order)

    bench.publish("only")
    with running(consumer):
        until(lambda: consumer.tally.dead_lettered == 1, "it dead")
    (letter,) = bench.letters
    assert letter.attempts == 4


def test_a_handler_with_a_circuit_of_its_own_is_not_watched_besides(bench: Bench) -> None:
    """The policy of the circuit decides when the dependency is down."""
    policy = CircuitPolicy(minimum_calls=90, window=LastCalls(100))
    gateway, breaker = Gateway(), Breaker("bank", policy)
    consumer = bench.consumer(patience=0.1)

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.01, attempts=50))
    @circuit("bank", breaker=breaker)
    def handle(order: str) -> None:
        gateway.call()

    for n in range(6):
        bench.publish(f"o{n}", key=f"k{n}")
    with running(consumer):
        until(lambda: gateway.calls > 30, "many calls")
        assert isinstance(detector_of(consumer).breaker.state, Closed)
        gateway.up.set()
        until(lambda: consumer.tally.handled == 6, "all handled")
