"""The consumer while what it stands on fails: database, broker, membership, leases."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session  # noqa: TC002 - handlers ask for it by annotation

from holdfast import Message, PoisonMessage, Transient, new_id
from holdfast.brokers import connect
from holdfast.clock import SYSTEM_CLOCK
from holdfast.consumer import Attempt, Consumer, HandlerEnding
from holdfast.dlq import close, dead_letter
from holdfast.errors import DependencyDown, StaleDelivery
from holdfast.idempotency import idempotent
from holdfast.retry import AskedToWait, Backoff, Budget, checkpoint, retry, timeout
from holdfast.testing import Fault, ScriptedBroker
from tests.consuming import Bench, running, until
from tests.effects.run import Run
from tests.servers import Kafka, MariaDB, Nats, Postgres, RabbitMQ, Redis

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.testing.faults import FaultStep
    from tests.servers.fixtures import PrivateServer

# kafka-python reads its own schemas in a way that Python 3.11 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning")

NEVER = 60.0
KEYS, EACH = 6, 8


@pytest.fixture
def bench(tmp_path: Path, postgres: Postgres) -> Iterator[Bench]:
    """Offer the embedded broker and a database that stays up."""
    bench = Bench(tmp_path, postgres.database("consumer_faults"))
    yield bench
    bench.close()


def orders() -> list[tuple[str, str]]:
    """Return the keys and payloads of a small run."""
    return [(f"k{key}", f"k{key}-{n}") for n in range(EACH) for key in range(KEYS)]


def payer(bench: Bench, gate: threading.Event, begun: threading.Event) -> Consumer:
    """Return a consumer that stops in the middle of one message until *gate* is set."""
    consumer = bench.consumer(backoff=Backoff(first=0.02, ceiling=0.5))

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.05, attempts=2))
    @idempotent
    def pay(order: str, session: Session) -> None:
        bench.note(session, order)
        if order == "k0-3":
            begun.set()
            assert gate.wait(NEVER)

    return consumer


def assert_once_and_in_order(bench: Bench) -> None:
    """Every order took effect once, each key in its order, and nobody was blamed."""
    assert Counter(bench.effects) == Counter(payload for _, payload in orders())
    for key in range(KEYS):
        mine = [what for what in bench.effects if what.startswith(f"k{key}-")]
        assert mine == sorted(mine)
    assert [row for row in bench.attempts if row.failed] == []
    assert bench.letters == []


# -- the database ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Postgres, MariaDB])
def test_a_database_that_dies_and_comes_back_costs_nothing(
    tmp_path: Path,
    private_server: PrivateServer,
    kind: type[Postgres | MariaDB],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Killed in the middle of handlers: nothing lost, nothing twice, nobody blamed, no help."""
    database = private_server(kind)
    bench = Bench(tmp_path, database.database("faults"))
    gate, begun = threading.Event(), threading.Event()
    consumer = payer(bench, gate, begun)
    for key, payload in orders():
        bench.publish(payload, key=key)
    with running(consumer):
        assert begun.wait(NEVER)
        database.kill()
        gate.set()  # its commit meets a dead database
        until(lambda: _is_down(consumer), "the outage is seen")
        assert bench.lag > 0
        database.start()
        until(lambda: bench.lag == 0 and not _is_down(consumer), "everything acknowledged")
    _awake(bench)
    assert_once_and_in_order(bench)
    assert consumer.tally.failed == 0
    assert "please report" not in caplog.text, "an outage is no mistake of the consumer"
    bench.close()


def _is_down(consumer: Consumer) -> bool:
    running = consumer.running
    return running is not None and running.poller.database_down is not None


def _awake(bench: Bench) -> None:
    """Let the pool notice that its connections of before are gone."""

    def answers() -> bool:
        try:
            return bench.effects is not None
        except OperationalError:
            return False

    until(answers, "the database answers")


# -- the broker ------------------------------------------------------------------------


def _url(server: Any) -> str:
    return f"kafka://{server.address}" if isinstance(server, Kafka) else str(server.url)


@pytest.mark.parametrize(
    ("kind", "native"),
    [
        pytest.param(Redis, {"session": 3.0}, id="redis"),
        pytest.param(Nats, {"session": 3.0, "lease": 3.0}, id="nats"),
        pytest.param(RabbitMQ, {}, id="rabbitmq", marks=pytest.mark.chaos),
        pytest.param(Kafka, {"session_timeout_ms": 6000}, id="kafka", marks=pytest.mark.chaos),
    ],
)
def test_a_broker_that_dies_and_comes_back_costs_nothing(
    tmp_path: Path,
    postgres: Postgres,
    private_server: PrivateServer,
    kind: type[Any],
    native: dict[str, Any],
) -> None:
    """Killed while handlers run: what they did counts once, the rest comes when it is back."""
    server = private_server(kind)
    broker = connect(_url(server), **native)
    bench = Bench(tmp_path, postgres.database(f"faults_{kind.name}"), broker=broker)
    broker.source(["orders"], group="g").close()  # queues keep only what follows
    gate, begun = threading.Event(), threading.Event()
    consumer = payer(bench, gate, begun)
    for key, payload in orders():
        bench.publish(payload, key=key)
    with running(consumer):
        assert begun.wait(NEVER)
        server.kill()
        gate.set()
        until(lambda: _broker_is_away(consumer), "the outage is seen")
        server.start()
        until(lambda: len(set(bench.effects)) == KEYS * EACH, "every order handled")
        until(lambda: not _broker_is_away(consumer) and bench.lag == 0, "everything acknowledged")
    assert_once_and_in_order(bench)
    bench.close()


def _broker_is_away(consumer: Consumer) -> bool:
    running = consumer.running
    return running is not None and running.poller.broker_down is not None


# -- membership and leases -----------------------------------------------------------------


def test_what_runs_when_its_partition_is_lost_is_neither_acknowledged_nor_done_twice(
    tmp_path: Path, postgres: Postgres
) -> None:
    """A process that stood still too long finds its partition gone: its commit stands once."""
    url = f"sqlite:///{tmp_path}/broker.db?session=1"
    stalled, awake = threading.Event(), threading.Event()

    def stall(step: FaultStep) -> Any:
        if stalled.is_set():
            assert awake.wait(NEVER)
        return step.go()

    process = ScriptedBroker(Fault(point="poll", effect=stall), broker=connect(url))
    bench = Bench(tmp_path, postgres.database("faults_lost"), broker=process)
    gate, begun = threading.Event(), threading.Event()
    consumer, calls = bench.consumer(), []

    @dead_letter()
    @idempotent
    def pay(order: str, session: Session) -> None:
        calls.append(order)
        bench.note(session, order)
        begun.set()
        assert gate.wait(NEVER)

    consumer.on("orders")(pay)
    bench.publish("x")
    with running(consumer):
        assert begun.wait(NEVER)
        stalled.set()
        other, patient = connect(url), connect(url.replace("session=1", "session=600"))
        with closing(other.source(["orders"], group="g")) as first:
            until(lambda: first.poll(10, 0.1), "the message goes to somebody else")
        # The next one is polled no more, and must not be taken for dead meanwhile.
        rival = patient.source(["orders"], group="g")
        until(lambda: rival.poll(10, 0.1), "the message goes to a third one")
        awake.set()
        until(lambda: process.history.of("lost"), "the loss")
        gate.set()
        until(lambda: bench.effects == ["x"], "its transaction commits")
    assert process.calls["accept"] == 0
    rival.close()
    assert bench.lag == 1
    second = bench.consumer()
    second.on("orders")(pay)
    with running(second):
        until(lambda: bench.lag == 0, "acknowledged by who owns it")
    assert bench.effects == calls == ["x"]
    assert second.tally.duplicates == 1
    assert (bench.attempts, bench.letters) == ([], [])
    other.close()
    patient.close()
    bench.close()


@pytest.mark.parametrize("kind", ["sqlite", "nats"])
def test_a_handler_longer_than_the_lease_keeps_its_message(
    tmp_path: Path, postgres: Postgres, request: pytest.FixtureRequest, kind: str
) -> None:
    """The lease is prolonged while the handler runs, so nobody gets the message again."""
    lease = 4.0  # a machine that stands still for a second or two does not lose it
    if kind == "nats":
        broker = connect(request.getfixturevalue("nats").url, lease=lease)
    else:
        broker = connect(f"sqlite:///{tmp_path}/broker.db", lease=lease)
    bench = Bench(tmp_path, postgres.database(f"faults_lease_{kind}"), broker=broker)
    topic = f"leased-{new_id()}"
    broker.create_topic(topic)
    broker.source([topic], group="g").close()
    gate, begun = threading.Event(), threading.Event()
    consumer, calls = bench.consumer(), []

    @consumer.on(topic)
    def slow(order: str) -> None:
        calls.append(order)
        begun.set()
        assert gate.wait(NEVER)

    bench.publish("x", topic=topic)
    with running(consumer):
        assert begun.wait(NEVER)
        assert consumer.running is not None
        poller = consumer.running.poller
        first = poller.last_poll
        until(lambda: poller.last_poll > first + 1.5 * lease, "polls for longer than a lease")
        gate.set()
        until(lambda: not any(broker.lag("g", [topic]).values()), "acknowledged")
    assert calls == ["x"]
    bench.close()


@pytest.mark.parametrize(
    ("kind", "backlog"),
    [("memory", 500), ("sqlite", 500), ("nats", 500), ("memory", 2), ("sqlite", 2)],
)
def test_a_lease_that_runs_out_on_a_message_never_lets_its_successors_run(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, backlog: int
) -> None:
    """Lost while it waits or runs, a message comes again in its place, before what follows it."""
    lease = 1.0
    address = request.getfixturevalue("nats").url if kind == "nats" else f"{tmp_path}/broker.db"
    url = {"memory": "memory:", "sqlite": f"sqlite:///{address}", "nats": address}[kind]
    topic = f"leased-{new_id()}"
    doomed = []

    def drop(step: FaultStep) -> Any:
        """Keep the word that prolongs the first message from the broker, until it is lost."""
        [delivery] = step.call.deliveries
        if delivery.body == b"1" and (not doomed or doomed[0] is delivery):
            doomed[:] = [delivery]
            if SYSTEM_CLOCK.monotonic() < (delivery.lease_until or 0.0) + lease:
                return None
        return step.go()

    process = ScriptedBroker(Fault(point="extend", effect=drop), broker=connect(url, lease=lease))
    process.create_topic(topic, partitions=1)
    consumer = Consumer(process, group="g", backlog=backlog, workers=4)
    handled: list[str] = []
    first, gone = threading.Event(), threading.Event()

    @consumer.on(topic)
    @retry(Backoff(first=0.01, ceiling=0.01, attempts=3))
    def handle(order: str, message: Message) -> None:
        if order == "1" and not first.is_set():
            first.set()
            assert gone.wait(NEVER)
            raise Transient("lost by now")
        handled.append(order)

    sink = process.sink()
    sent = [Message.new(topic, b"%d" % n, key=b"k") for n in (1, 2, 3)]
    assert not [result.error for result in sink.publish(sent) if result.error]
    with running(consumer):
        assert first.wait(NEVER)
        assert consumer.running is not None
        lanes = consumer.running.lanes

        def is_lost() -> bool:
            again = [e for e in process.history.of("handed out") if e.id == sent[0].id]
            return len(again) > 1 or any(work.is_revoked for work in lanes.in_hand())

        until(is_lost, "the lease over")
        gone.set()
        until(lambda: not any(process.lag("g", [topic]).values()), "everything acknowledged")
    # A machine that stands still may lose the lease of what was handled, which comes again then.
    assert list(dict.fromkeys(handled)) == ["1", "2", "3"]


def test_a_lease_that_runs_out_as_its_handler_ends_stops_nobody() -> None:
    """Between the look at what is in hand and the broker's answer a message may be done with."""
    handled: list[str] = []
    begun, go, lost, after = (threading.Event() for _ in range(4))

    def late(step: FaultStep) -> Any:
        """Let the first message end while its lease is prolonged in vain."""
        assert consumer.running is not None
        lanes = consumer.running.lanes
        is_first = step.call.deliveries[0].body == b"1"
        if not is_first or not begun.is_set() or len(lanes.in_hand()) < 2:
            return step.go()  # the second waits behind the first, or there is no queue to be in
        go.set()
        until(lambda: len(lanes.in_hand()) == 1, "the first message done with")
        lost.set()
        raise StaleDelivery("its lease is over")

    broker = ScriptedBroker(
        Fault(point="extend", effect=late), broker=connect("memory:", lease=1.0)
    )
    broker.create_topic("orders")
    consumer = Consumer(broker, group="g")

    @consumer.on("orders")
    def handle(order: str) -> None:
        begun.set()
        assert (go if order == "1" else after).wait(NEVER)
        handled.append(order)

    sent = [Message.new("orders", b"%d" % n, key="k") for n in (1, 2)]
    assert not [result.error for result in broker.sink().publish(sent) if result.error]
    with running(consumer):
        assert lost.wait(NEVER)
        after.set()
        until(lambda: not any(broker.lag("g", ["orders"]).values()), "everything acknowledged")
    assert list(dict.fromkeys(handled)) == ["1", "2"]


class Losing:
    """A broker that takes back the first message alone, and says so when it is prolonged."""

    def __init__(self, url: str) -> None:
        self.broker = connect(url, lease=2.0)
        self._sources: list[Any] = []
        self._is_done = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.broker, name)

    def source(self, *args: Any, **options: Any) -> Any:
        """Return a source of the broker, which is asked to take the message back."""
        self._sources.append(self.broker.source(*args, **options))
        return self._sources[-1]

    def lose(self, step: FaultStep) -> Any:
        """Take the first message back when its lease is to be prolonged, once."""
        [delivery] = step.call.deliveries
        if delivery.body != b"1" or self._is_done:
            return step.go()
        self._is_done = True
        self._sources[-1].release(delivery, blame=False)
        raise StaleDelivery("its lease has run out")


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_message_that_is_lost_takes_along_what_waits_behind_it(tmp_path: Path, kind: str) -> None:
    """Also where the broker leaves the successors in hand: the consumer gives them back."""
    losing = Losing({"memory": "memory:", "sqlite": f"sqlite:///{tmp_path}/broker.db"}[kind])
    process = ScriptedBroker(Fault(point="extend", effect=losing.lose), broker=cast("Any", losing))
    process.create_topic("orders", partitions=1)
    consumer = Consumer(process, group="g", workers=4)
    handled: list[str] = []
    first, gone = threading.Event(), threading.Event()

    @consumer.on("orders")
    @retry(Backoff(first=0.01, ceiling=0.01, attempts=3))
    def handle(order: str) -> None:
        if order == "1" and not first.is_set():
            first.set()
            assert gone.wait(NEVER)
            raise Transient("lost by now")
        handled.append(order)

    sink = process.sink()
    sent = [Message.new("orders", b"%d" % n, key=b"k") for n in (1, 2, 3)]
    assert not [result.error for result in sink.publish(sent) if result.error]
    with running(consumer):
        assert first.wait(NEVER)
        assert consumer.running is not None
        lanes = consumer.running.lanes
        until(lambda: any(work.is_revoked for work in lanes.in_hand()), "the message lost")
        gone.set()
        until(lambda: not any(process.lag("g", ["orders"]).values()), "everything acknowledged")
    assert list(dict.fromkeys(handled)) == ["1", "2", "3"]


# -- MariaDB as a whole ----------------------------------------------------------------


def test_effects_happen_once_on_mariadb(tmp_path: Path, mariadb: MariaDB) -> None:
    """Duplicates, poison, transient failures, a kill -9 and a rebalance, with MariaDB below."""
    url = f"sqlite:///{tmp_path}/b.db?session=2"
    run = Run(broker=url, database=mariadb.database("effects_mariadb"), count=150, keys=20)
    verdict = run.go()
    assert verdict.clean, verdict
    assert verdict.handled_by > 1, "no second process took part"


def test_held_keys_retries_and_dead_letters_work_on_mariadb(
    tmp_path: Path, mariadb: MariaDB
) -> None:
    """A parked retry goes on after a restart, a dead letter holds its key until it is closed."""
    bench = Bench(tmp_path, mariadb.database("consumer_mariadb"))
    restarted = threading.Event()

    def made() -> Consumer:
        consumer = bench.consumer(patience=0.05)

        @consumer.on("orders")
        @dead_letter()
        @retry(Backoff(first=0.2, ceiling=0.2, attempts=1000))
        @idempotent
        def handle(order: str, session: Session) -> None:
            if order == "bad":
                raise PoisonMessage("bad for ever")
            if order == "flaky" and not restarted.is_set():
                raise Transient("not yet")
            bench.note(session, order)

        return consumer

    bench.publish("flaky", "after-flaky", key="f")
    bench.publish("bad", "after-bad", key="b")
    with running(made()):
        until(lambda: bench.lag == 0, "everything is acknowledged")
    assert sorted(row.key for row in bench.held_keys) == [b"b", b"f"]
    restarted.set()
    with running(made()):
        until(lambda: bench.effects == ["flaky", "after-flaky"], "the retry, then the next")
        with bench.engine.begin() as db:
            ids = [row.dlq_id for row in bench.letters]
            close(db, ids, "discarded", actor="ada", reason="bad")
        until(lambda: not bench.held_keys, "nothing is held")
    assert bench.effects == ["flaky", "after-flaky", "after-bad"]
    assert (bench.attempts, bench.held, len(bench.letters)) == ([], [], 1)
    bench.close()


# -- dead letters without a home -------------------------------------------------------------


class Shelf:
    """A home of dead letters that may be closed."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.letters: list[Any] = []
        self.refused = 0

    def put(self, letter: Any, connection: Any = None) -> None:
        """Take *letter*, if open."""
        if not self.open.is_set():
            self.refused += 1
            raise DependencyDown("the shelf is closed")
        self.letters.append(letter)


def test_a_home_of_dead_letters_that_is_away_is_waited_for(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """No acknowledgement, an alarm, no blame; once it is back everything goes on by itself."""
    shelf = Shelf()
    consumer = bench.consumer(backoff=Backoff(first=0.02, ceiling=0.05), quarantine=False)

    @consumer.on("orders")
    @dead_letter(home=shelf)
    @idempotent
    def handle(order: str, session: Session) -> None:
        if order == "bad":
            raise PoisonMessage("bad")
        bench.note(session, order)

    bench.publish("bad", key="sick")
    bench.publish("fine", key="well")
    with running(consumer):
        until(lambda: shelf.refused > 3 and bench.effects == ["fine"], "several tries, others run")
        assert bench.lag == 1
        assert "nothing is acknowledged" in caplog.text
        assert bench.attempts == []
        shelf.open.set()
        until(lambda: bench.lag == 0, "acknowledged")
    assert len(shelf.letters) == 1


# -- handlers that misbehave -----------------------------------------------------------------


class Doom(BaseException):
    """Not an Exception."""


def test_a_handler_that_raises_a_base_exception_stops_the_consumer_and_counts_as_a_crash(
    bench: Bench,
) -> None:
    """Nothing is committed or acknowledged by it, and the next consumer handles the message."""
    doomed, calls = bench.consumer(), []

    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.02, attempts=3))
    @idempotent
    def handle(order: str, session: Session) -> None:
        calls.append(order)
        bench.note(session, order)
        if len(calls) == 1:
            raise Doom("the end")

    doomed.on("orders")(handle)
    bench.publish("x")
    with pytest.raises(Doom):
        doomed.run()
    assert (bench.effects, bench.lag) == ([], 1)
    assert [(row.failed, row.crashed) for row in bench.attempts] == [(0, 1)]
    assert (bench.letters, bench.marks) == ([], [])
    healthy = bench.consumer()
    healthy.on("orders")(handle)
    with running(healthy):
        until(lambda: bench.lag == 0, "acknowledged")
    assert bench.effects == ["x"]


def test_a_handler_that_hangs_ends_itself_at_a_checkpoint_and_is_retried(bench: Bench) -> None:
    """`@timeout` bounds each attempt; what was written in the one that overran is rolled back."""
    consumer, seen = bench.consumer(), []

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.02, attempts=50))
    @timeout(0.5)
    @idempotent
    def handle(order: str, session: Session, attempt: Attempt) -> None:
        seen.append(attempt.number)
        bench.note(session, f"{order} {attempt.number}")
        pause = threading.Event()
        while attempt.number == 1:
            pause.wait(0.01)  # pacing: hangs until its time is over
            checkpoint()

    bench.publish("x")
    with running(consumer):
        until(lambda: bench.lag == 0, "acknowledged")
    # A machine that stands still for half a second may cost a further attempt.
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) > 1
    assert bench.effects == [f"x {seen[-1]}"]


def test_an_event_of_an_unknown_version_is_a_dead_letter_that_says_what_to_deploy(
    bench: Bench,
) -> None:
    """It is never handled by code that does not know it, and holds its key until then."""
    from holdfast import upcast

    kind = f"order.{new_id()}"
    upcast.default.declare_latest(kind, 2)
    consumer, seen = bench.consumer(), []

    @consumer.on("orders")
    @dead_letter()
    def handle(order: dict[str, Any]) -> None:
        seen.append(order)

    for key, version in (("a", "3"), ("b", "2")):
        body = b'{"n": %s}' % version.encode()
        headers = {"ce_schemaversion": version}
        bench.send(Message.new("orders", body, key=key, type=kind, headers=headers))
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert seen == [{"n": 2}]
    assert "newer than 2" in bench.letters[0].error_text


# -- an outage is not poison ------------------------------------------------------------------


def test_a_spent_retry_budget_makes_no_dead_letters(bench: Bench) -> None:
    """The budget spares a dependency that is down; its messages wait, and go on after it."""
    down = threading.Event()
    down.set()
    consumer = bench.consumer(backoff=Backoff(first=0.02, ceiling=0.2), outage_seconds=0.05)

    @consumer.on("orders")
    @dead_letter()
    @retry(
        Backoff(first=0.01, ceiling=0.02, attempts=3),
        budget=Budget(ratio=0, per_second=0),
    )
    @idempotent
    def handle(order: str, session: Session) -> None:
        if down.is_set():
            raise ConnectionError("no bank")
        bench.note(session, order)

    wanted = [f"o{n}" for n in range(8)]
    for order in wanted:
        bench.publish(order, key=order)
    with running(consumer):
        until(lambda: consumer.tally.released > 30, "many tries without a budget")
        assert (bench.letters, bench.lag) == ([], 8)
        down.clear()
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert sorted(bench.effects) == wanted
    assert bench.letters == []


class Busy(ConnectionError):
    """As a gateway answers 429 with Retry-After: 900."""

    retry_after = 900


def test_a_long_retry_after_is_waited_for_in_the_database(bench: Bench) -> None:
    """What the other side asks for is a floor, however long: parked, and nobody is dead."""
    consumer, seen = bench.consumer(), []

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.02, attempts=5))
    def handle(order: str) -> None:
        seen.append(order)
        raise Busy("quota")

    bench.publish("x")
    with running(consumer):
        until(lambda: bench.lag == 0, "acknowledged")
    assert (seen, bench.letters) == (["x"], [])
    (row,), (key,) = bench.held, bench.held_keys
    assert row.attempt == 2
    assert key.due - row.parked_at >= 890


def test_a_loop_of_ones_own_hears_when_to_come_again(bench: Bench) -> None:
    """Without the runtime nothing sleeps for a quarter of an hour, and nothing is dead."""
    consumer = bench.consumer()

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.02, attempts=5))
    def handle(order: str) -> None:
        raise Busy("quota")

    outcome = consumer.handler("orders").handle(Message.new("orders", b"x", key="k"))
    assert (outcome.ending, outcome.acknowledge) == (HandlerEnding.RELEASED, False)
    assert isinstance(outcome.error, AskedToWait)
    assert outcome.error.retry_after == 900
    assert bench.letters == []


# -- an error that the handler swallows --------------------------------------------------------


@pytest.mark.parametrize("server", ["mariadb", "postgres"])
def test_a_deadlock_that_the_handler_swallows_is_no_half_effect(
    tmp_path: Path, request: pytest.FixtureRequest, server: str
) -> None:
    """The database undid the first half and the dedup row: nothing is committed, it runs again."""
    bench = Bench(tmp_path, request.getfixturevalue(server).database("faults_swallowed"))
    with bench.engine.begin() as db:
        db.exec_driver_sql("CREATE TABLE account (id INT PRIMARY KEY, cents INT)")
        db.exec_driver_sql("CREATE TABLE heavy (id INT PRIMARY KEY)")
        db.exec_driver_sql("INSERT INTO account VALUES (1, 0), (2, 0)")
    consumer = bench.consumer(backoff=Backoff(first=0.02, ceiling=0.05))
    swallowed: list[str] = []
    runs: list[int] = []

    @consumer.on("orders")
    @retry(Backoff(first=0.01, ceiling=0.05, attempts=5))
    @idempotent
    def transfer(order: str, session: Session) -> None:
        runs.append(1)
        bench.note(session, "debit")
        session.execute(text("UPDATE account SET cents = cents - 1 WHERE id = 1"))
        if len(runs) == 1:
            rival = threading.Thread(target=rivalry, daemon=True)
            rival.start()
            assert locked.wait(NEVER)
            try:
                session.execute(text("UPDATE account SET cents = cents + 1 WHERE id = 2"))
            except DBAPIError as error:
                swallowed.append(str(error))
            rival.join(NEVER)
        try:
            bench.note(session, "credit")
        except DBAPIError as error:
            swallowed.append(str(error))

    locked = threading.Event()

    def rivalry() -> None:
        with bench.engine.connect() as db:
            if server == "mariadb":  # the one who wrote less is the one that is undone
                for number in range(50):
                    db.execute(text("INSERT INTO heavy VALUES (:n)"), {"n": number})
            else:
                db.exec_driver_sql("SET LOCAL deadlock_timeout = '60s'")
            db.exec_driver_sql("UPDATE account SET cents = cents + 10 WHERE id = 2")
            locked.set()
            db.exec_driver_sql("UPDATE account SET cents = cents + 10 WHERE id = 1")
            db.commit()

    message = Message.new("orders", b"x", key="k")
    bench.send(message)
    with running(consumer):
        until(lambda: bench.lag == 0, "acknowledged")
    assert swallowed, "there was no deadlock"
    assert len(runs) == 2
    assert bench.effects == ["debit", "credit"]
    bench.close()
