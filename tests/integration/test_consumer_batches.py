"""Handlers in batches: one transaction for many messages, and every promise as without them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, insert
from sqlalchemy.ext.asyncio import AsyncSession  # noqa: TC002 - handlers ask for it
from sqlalchemy.orm import Session  # noqa: TC002 - handlers ask for it by annotation

from holdfast import ConfigurationError, Message, PoisonMessage, Transient, current_message
from holdfast.circuit import Breaker, CircuitPolicy, LastCalls, circuit
from holdfast.consumer import Attempt, Batches, Order
from holdfast.consumer.scheduling.scheduler import KeyScheduler
from holdfast.dlq import close, dead_letter
from holdfast.errors import DependencyDown
from holdfast.idempotency import idempotent
from holdfast.outbox import Outbox
from holdfast.outbox import create_tables as create_outbox
from holdfast.retry import Backoff, retry
from tests.consuming import Bench, effects, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers import Postgres

NEVER = 30.0


@pytest.fixture
def bench(tmp_path: Path, postgres: Postgres) -> Iterator[Bench]:
    """Offer a broker and a database that lets several handlers write at once."""
    bench = Bench(tmp_path, postgres.database("consumer_batches"))
    yield bench
    bench.close()


class Commits:
    """Counts the transactions that made an effect."""

    def __init__(self, bench: Bench) -> None:
        self.made = 0
        self._writers: set[int] = set()
        event.listen(bench.engine, "before_cursor_execute", self._statement)
        event.listen(bench.engine, "commit", self._commit)

    def _statement(self, connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "INSERT INTO effects" in statement:
            self._writers.add(id(connection.connection.driver_connection))

    def _commit(self, connection: Any) -> None:
        self.made += id(connection.connection.driver_connection) in self._writers
        self._writers.discard(id(connection.connection.driver_connection))


def spread(bench: Bench, count: int) -> list[str]:
    """Publish *count* orders under a few keys; return what they say."""
    what = [f"{n}" for n in range(count)]
    bench.send(
        *(Message.new("orders", text.encode(), key=f"k{n % 5}") for n, text in enumerate(what))
    )
    return what


def in_order(effects: list[str]) -> bool:
    """Whether every key of `spread` kept its order."""
    lanes = [[int(what) for what in effects if int(what) % 5 == n] for n in range(5)]
    return all(lane == sorted(lane) for lane in lanes)


@pytest.mark.parametrize("shape", ["each", "whole", "async", "async whole"])
def test_many_messages_share_one_transaction(bench: Bench, shape: str) -> None:
    """Forty messages take a few commits, each effect is there once and each key in order."""
    what = spread(bench, 40)
    commits, consumer = Commits(bench), bench.consumer()

    def each(order: int, session: Session) -> None:
        bench.note(session, str(order))

    def whole(orders: list[int], session: Session) -> None:
        session.execute(insert(effects), [{"what": str(order)} for order in orders])

    async def async_each(order: int, session: Session) -> None:
        bench.note(session, str(order))

    async def async_whole(orders: list[int], session: Session) -> None:
        whole(orders, session)

    handler = {"each": each, "whole": whole, "async": async_each, "async whole": async_whole}[shape]
    batch = Batches(size=20, wait=0.2, whole="whole" in shape)
    consumer.on("orders", batch=batch)(dead_letter()(idempotent(handler)))
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert sorted(bench.effects) == sorted(what)
    assert in_order(bench.effects)
    assert commits.made < 20
    assert (consumer.tally.handled, consumer.tally.failed, bench.marks) == (40, 0, [])


@pytest.mark.parametrize("whole", [False, True])
def test_the_start_marks_of_a_batch_end_with_its_commit(bench: Bench, *, whole: bool) -> None:
    """A process that dies right after the commit leaves none of its messages under suspicion."""
    spread(bench, 20)
    said: dict[int, str] = {}
    unmarked: list[bool] = []

    def statement(connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        driver = id(connection.connection.driver_connection)
        said[driver] = said.get(driver, "") + statement

    def commit(connection: Any) -> None:
        text = said.pop(id(connection.connection.driver_connection), "")
        if "INSERT INTO effects" in text:
            unmarked.append("DELETE FROM holdfast_start" in text)

    event.listen(bench.engine, "before_cursor_execute", statement)
    event.listen(bench.engine, "commit", commit)
    consumer = bench.consumer()

    def each(order: int, session: Session) -> None:
        bench.note(session, str(order))

    def all_at_once(orders: list[int], session: Session) -> None:
        session.execute(insert(effects), [{"what": str(order)} for order in orders])

    batch = Batches(size=20, wait=0.2, whole=whole)
    consumer.on("orders", batch=batch)(idempotent(all_at_once if whole else each))
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert unmarked
    assert all(unmarked)
    assert bench.marks == []


@pytest.mark.parametrize("whole", [False, True])
def test_a_poison_message_forfeits_nobody_and_holds_its_key(bench: Bench, *, whole: bool) -> None:
    """It is the one dead letter; the later ones of its key wait, all others have their effect."""
    consumer, bad = bench.consumer(), 12

    def each(order: int, session: Session) -> None:
        bench.note(session, str(order))
        if order == bad:
            raise PoisonMessage("bad for ever")

    def handle_all(orders: list[int], session: Session) -> None:
        for order in orders:
            each(order, session)

    consumer.on("orders", batch=Batches(size=40, wait=0.2, whole=whole))(
        dead_letter()(retry()(idempotent(handle_all if whole else each)))
    )
    what = spread(bench, 40)
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    behind = list(range(bad, 40, 5))
    assert sorted(map(int, bench.effects)) == sorted({*map(int, what)} - {*behind})
    assert in_order(bench.effects)
    assert [row.payload for row in bench.letters] == [b"12"]
    assert len(bench.held) == len(behind) - 1


def test_a_closed_letter_lets_the_rest_of_its_key_go_on_in_order(bench: Bench) -> None:
    """What was parked behind a poison of a batch runs once the operator has decided."""
    consumer = bench.consumer()

    @consumer.on("orders", batch=20)
    @dead_letter()
    @idempotent
    def handle(order: int, session: Session) -> None:
        if order == 0:
            raise PoisonMessage("bad")
        bench.note(session, str(order))

    spread(bench, 20)
    with running(consumer):
        until(lambda: bench.lag == 0 and bool(bench.letters), "the poison found")
        with bench.engine.begin() as db:
            ids = [row.dlq_id for row in bench.letters]
            close(db, ids, "discarded", actor="ada", reason="bad")
        until(lambda: len(bench.effects) == 19, "the rest handled")
    assert in_order(bench.effects)
    assert (bench.held, bench.held_keys) == ([], [])


def test_a_transient_failure_in_a_batch_is_retried_in_its_turn(bench: Bench) -> None:
    """The others commit without it, and the later ones of its key stay behind it."""
    consumer, failures = bench.consumer(), []

    @consumer.on("orders", batch=Batches(size=40, wait=0.2))
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.05, attempts=4))
    @idempotent
    def handle(order: int, session: Session, attempt: Attempt) -> None:
        bench.note(session, str(order))
        if order in (3, 7, 8) and attempt.number < 3:
            failures.append(order)
            raise Transient("not yet")

    what = spread(bench, 40)
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert sorted(bench.effects) == sorted(what)
    assert in_order(bench.effects)
    assert set(failures) == {3, 7, 8}
    assert (bench.letters, bench.attempts) == ([], [])


def test_duplicates_in_and_across_batches_have_no_effect(bench: Bench) -> None:
    """Also when both copies are in one batch."""
    consumer = bench.consumer()

    @consumer.on("orders", batch=Batches(size=10, wait=0.1))
    @idempotent
    def handle(order: str, session: Session) -> None:
        bench.note(session, order)

    messages = [Message.new("orders", f"m{n}".encode(), key="k") for n in range(8)]
    bench.send(*messages, *messages[:4], *messages)
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert bench.effects == [f"m{n}" for n in range(8)]
    assert consumer.tally.duplicates == 12


def test_nothing_of_a_batch_is_acknowledged_before_its_commit(bench: Bench) -> None:
    """While its handlers run the broker has heard nothing."""
    consumer, seen, go_on = bench.consumer(), [], threading.Event()

    @consumer.on("orders", batch=Batches(size=10, wait=NEVER))
    @idempotent
    def handle(order: int, session: Session) -> None:
        bench.note(session, str(order))
        if order == 9:
            seen.append(bench.lag)
            assert go_on.wait(NEVER)

    spread(bench, 10)
    with running(consumer):
        until(lambda: bool(seen), "the last handler of the batch running")
        assert (bench.lag, bench.effects) == (10, [])
        go_on.set()
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert len(bench.effects) == 10


def test_an_undecodable_payload_does_not_spoil_its_batch(bench: Bench) -> None:
    """It is dead without a run of the handler, and its key waits behind it."""
    consumer, called = bench.consumer(), []

    @consumer.on("orders", batch=Batches(size=10, wait=0.2))
    @dead_letter()
    @idempotent(key=lambda order: f"o{order}")
    def handle(order: int, session: Session) -> None:
        called.append(order)
        bench.note(session, str(order))

    bench.publish("1", key="a")
    bench.publish("{not JSON", "2", key="b")
    bench.publish("3", key="c")
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert (sorted(bench.effects), sorted(called)) == (["1", "3"], [1, 3])
    assert (len(bench.letters), len(bench.held)) == (1, 1)


def test_an_open_circuit_pauses_batches_and_blames_nobody(bench: Bench) -> None:
    """With the dependency down for many tries: no dead letter, no attempt, and it recovers."""
    policy = CircuitPolicy(
        failure_rate=0.5, minimum_calls=4, window=LastCalls(8), open_seconds=0.2, permits=2
    )
    breaker = Breaker("gateway of batches", policy)
    consumer, down, refused = bench.consumer(), threading.Event(), []
    down.set()

    @consumer.on("orders", batch=10)
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.02, attempts=3))
    @circuit("gateway of batches", breaker=breaker)
    @idempotent
    def handle(order: int, session: Session) -> None:
        bench.note(session, str(order))
        if down.is_set():
            refused.append(order)
            raise ConnectionError("refused")

    what = spread(bench, 40)
    with running(consumer):
        until(lambda: len(refused) > 12, "many refusals")
        assert (bench.letters, bench.attempts, bench.effects) == ([], [], [])
        down.clear()
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert sorted(bench.effects) == sorted(what)
    assert in_order(bench.effects)
    assert (bench.letters, bench.attempts) == ([], [])


def test_a_dependency_that_is_down_is_not_asked_for_every_message_of_a_batch(bench: Bench) -> None:
    """The first refusal ends the batch; what was in it waits, unblamed, and runs later."""
    consumer, down, asked = bench.consumer(), threading.Event(), []
    down.set()

    @consumer.on("orders", batch=Batches(size=40, wait=0.3))
    @dead_letter()
    @idempotent
    def handle(order: int, session: Session) -> None:
        if down.is_set():
            asked.append(order)
            raise DependencyDown("the ledger of the bank does not answer")
        bench.note(session, str(order))

    what = spread(bench, 40)
    with running(consumer):
        until(lambda: bool(asked), "a refusal")
        down.clear()
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert sorted(bench.effects) == sorted(what)
    assert in_order(bench.effects)
    assert (bench.letters, bench.attempts, consumer.tally.failed) == ([], [], 0)


def test_a_handler_that_ends_the_process_acknowledges_nothing_of_its_batch(bench: Bench) -> None:
    """`SystemExit` stops the consumer; everything comes again, and nobody is blamed."""
    consumer = bench.consumer()

    @consumer.on("orders", batch=Batches(size=10, wait=NEVER))
    @dead_letter()
    @idempotent
    def handle(order: int, session: Session) -> None:
        bench.note(session, str(order))
        if order == 7:
            raise SystemExit(3)

    spread(bench, 10)
    with pytest.raises(SystemExit):
        consumer.run()
    assert (bench.lag, bench.effects, bench.letters) == (10, [], [])
    again = bench.consumer()

    @again.on("orders", batch=Batches(size=10, wait=0.2))
    @idempotent
    def handle_again(order: int, session: Session) -> None:
        bench.note(session, str(order))

    with running(again):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert len(bench.effects) == 10


def test_a_stop_finishes_the_batch_that_runs_and_gives_the_rest_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs commits and is acknowledged; what waited for company is left, without blame."""
    consumer, started, go_on = bench.consumer(), threading.Event(), threading.Event()
    heard, stop = threading.Event(), KeyScheduler.stop

    def stopped(lanes: KeyScheduler) -> None:
        stop(lanes)
        heard.set()

    monkeypatch.setattr(KeyScheduler, "stop", stopped)

    @consumer.on("orders", batch=5)
    @idempotent
    def handle(order: int, session: Session) -> None:
        bench.note(session, str(order))
        started.set()
        assert go_on.wait(NEVER)

    bench.publish(*range(10))
    with running(consumer):
        assert started.wait(NEVER)
        consumer.stop()
        assert heard.wait(NEVER)  # the poll thread may be slow to hear of it
        go_on.set()
    done = len(bench.effects)
    assert 1 <= done <= 5
    assert bench.lag == 10 - done
    assert (bench.attempts, bench.marks) == ([], [])


def test_events_staged_in_a_batch_commit_with_it_and_name_their_cause(bench: Bench) -> None:
    """Each event carries the correlation of the message that caused it."""
    create_outbox(bench.engine)
    consumer, causes = bench.consumer(), []

    @consumer.on("orders", batch=Batches(size=10, wait=0.1))
    @idempotent
    def handle(order: int, session: Session, outbox: Outbox, message: Message) -> None:
        outbox.add(session, {"billed": order}, topic="bills", key=str(order))
        current = current_message()
        assert current is not None
        causes.append((current.id, message.id))

    ids = bench.publish(1, 2, 3)
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert causes == [(one, one) for one in ids]


def test_a_replay_in_a_batch_is_confirmed_and_frees_its_key(bench: Bench) -> None:
    """The letter is closed by the transaction of the effect."""
    consumer, broken = bench.consumer(), threading.Event()
    broken.set()

    @consumer.on("orders", batch=10)
    @dead_letter()
    @idempotent
    def handle(order: int, session: Session) -> None:
        if order == 1 and broken.is_set():
            raise PoisonMessage("a bug")
        bench.note(session, str(order))

    bench.publish(1, 2)
    with running(consumer):
        until(lambda: bench.lag == 0 and len(bench.held) == 1, "the poison found")
        broken.clear()
        bench.replay(bench.letters[0], b"1")
        until(lambda: bench.effects == ["1", "2"], "the key goes on")
    assert [row.state for row in bench.letters] == ["confirmed"]


def test_partition_order_is_kept_in_batches(bench: Bench) -> None:
    """A whole partition is one lane: batches are its stretches."""
    consumer = bench.consumer(order=Order.LANE)

    @consumer.on("orders", batch=7)
    @idempotent
    def handle(order: int, session: Session) -> None:
        bench.note(session, str(order))

    bench.publish(*range(30))
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert bench.effects == [str(n) for n in range(30)]


def test_what_cannot_run_in_batches_is_refused_with_the_fix(bench: Bench) -> None:
    """Each refusal names what to change."""

    def plain(order: int, session: Session) -> None: ...

    async def modern(order: int, session: AsyncSession) -> None: ...

    def listed(orders: list[int], session: Session, attempt: Attempt) -> None: ...

    consumer = bench.consumer()
    refusals: list[tuple[Any, Any, str]] = [
        (plain, 10, "decorate it with @idempotent"),
        (idempotent(lease="30s")(plain), 10, "without a lease"),
        (idempotent(keep_result=True)(plain), 10, "leave out keep_result=True"),
        (idempotent(modern), 10, "annotate it as Session"),
        (idempotent(plain), Batches(whole=True), "annotate its first parameter as a list"),
        (idempotent(listed), Batches(whole=True), "belongs to one message"),
    ]
    for handler, batch, fix in refusals:
        with pytest.raises(ConfigurationError, match=fix):
            consumer.on("orders", batch=batch)(handler)
    for wrong in (0, -1, True, 2.5):
        with pytest.raises(ConfigurationError, match="from 1 up"):
            consumer.on("orders", batch=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="seconds from 0 up"):
        Batches(wait=-1)


def test_a_plan_says_how_its_batches_are_made(bench: Bench) -> None:
    """`explain()` names the size, the wait and the shape."""
    consumer = bench.consumer()

    @consumer.on("orders", batch=Batches(size=50, wait=0.5))
    @idempotent
    def handle(order: int, session: Session) -> None: ...

    assert "up to 50 messages, up to 0.5 s of waiting for company" in consumer.explain()
