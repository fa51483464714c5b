"""The consumer runtime: order, poison, retries, outages, crashes, and a clean stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import insert, text, update
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session  # noqa: TC002 - handlers ask for it by annotation

from holdfast import ConfigurationError, Message, PoisonMessage, Transient, current_message
from holdfast.brokers import connect
from holdfast.circuit import Breaker, CircuitPolicy, LastCalls, circuit
from holdfast.consumer import Attempt, Consumer, HandlerEnding, Order
from holdfast.consumer.schema import held_key
from holdfast.db.clock import database_now
from holdfast.dlq import close, dead_letter
from holdfast.headers import ReplayHeaders, replay_topic
from holdfast.idempotency import InProgress, idempotent
from holdfast.outbox import LeaseEngine, Outbox, Relay
from holdfast.outbox import create_tables as create_outbox
from holdfast.retry import Backoff, Jitter, retry, timeout
from tests.consuming import Bench, effects, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers import Postgres

NEVER = 120.0


@pytest.fixture
def bench(tmp_path: Path, postgres: Postgres) -> Iterator[Bench]:
    """Offer a broker and a database that lets several handlers write at once."""
    bench = Bench(tmp_path, postgres.database("consumer_runtime"))
    yield bench
    bench.close()


def discard(bench: Bench) -> None:
    """Close every dead letter, as an operator does."""
    with bench.engine.begin() as db:
        close(db, [row.dlq_id for row in bench.letters], "discarded", actor="ada", reason="bad")


def test_a_message_that_somebody_else_has_in_hand_keeps_its_turn(bench: Bench) -> None:
    """It is tried again in place, nobody is blamed, and its partition does not get stuck."""
    consumer, refused = bench.consumer(), [InProgress("g/other", "m", 0.05)] * 3

    @consumer.on("orders")
    def handle(order: str, session: Session) -> None:
        if order == "first" and refused:
            raise refused.pop()
        bench.note(session, order)

    bench.publish("first", "second")
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert bench.effects == ["first", "second"]
    assert (bench.attempts, bench.letters) == ([], [])


def test_a_leased_handler_takes_the_database_of_its_consumer(bench: Bench) -> None:
    """`@idempotent(lease=…)` works under a consumer, and a duplicate runs nothing."""
    consumer, calls = bench.consumer(), []

    @consumer.on("orders")
    @idempotent(lease="30s")
    def handle(order: str) -> None:
        calls.append(order)

    message = Message.new("orders", b"once", key="k")
    bench.send(message, message)
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert calls == ["once"]


def test_a_handler_of_two_topics_holds_the_keys_of_each(bench: Bench) -> None:
    """A key that is held in one topic stays held there after a restart, whatever comes first."""

    def handle(order: str, session: Session) -> None:
        if order.startswith("bad"):
            raise PoisonMessage("bad")
        bench.note(session, order)

    def both() -> Consumer:
        consumer = bench.consumer(batch=10)
        consumer.on("orders")(dead_letter()(handle))
        consumer.on("returns")(dead_letter()(handle))
        return consumer

    bench.broker.create_topic("returns")
    bench.publish("bad", key="sick", topic="returns")
    with running(both()):
        until(lambda: len(bench.held_keys) == 1, "the key is held")
    bench.publish("fine", key="well")
    bench.publish("behind", key="sick", topic="returns")
    with running(both()):
        until(lambda: bench.effects == ["fine"] and len(bench.held) == 1, "one ran, one is parked")
    assert bench.effects == ["fine"]


# -- order and poison ------------------------------------------------------------------


def test_each_key_keeps_its_order_and_keys_run_side_by_side(bench: Bench) -> None:
    """A slow key does not hold up another one, and never overtakes itself."""
    consumer, gate = bench.consumer(), threading.Event()

    @consumer.on("orders")
    def handle(order: str, session: Session) -> None:
        if order == "slow-0":
            assert gate.wait(NEVER)
        bench.note(session, order)

    bench.publish("slow-0", "slow-1", key="slow")
    bench.publish("quick-0", "quick-1", key="quick")
    with running(consumer):
        until(lambda: bench.effects == ["quick-0", "quick-1"], "the quick key")
        gate.set()
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert bench.effects == ["quick-0", "quick-1", "slow-0", "slow-1"]


def test_a_poison_message_holds_its_key_while_others_go_on(bench: Bench) -> None:
    """Later messages of the key are parked durably, and acknowledged, in order."""
    consumer = poisoned(bench)
    bench.publish("bad", "after-1", "after-2", key="sick")
    bench.publish("fine", key="well")
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert bench.effects == ["fine"]
    assert len(bench.letters) == 1
    assert [row.message_id for row in bench.held] == sorted(row.message_id for row in bench.held)
    assert [(row.key, row.parked) for row in bench.held_keys] == [(b"sick", 2)]


def test_a_closed_dead_letter_lets_its_key_go_on_in_order(bench: Bench) -> None:
    """What was parked runs before what comes later, each once."""
    consumer = poisoned(bench)
    bench.publish("bad", "after-1", "after-2", key="sick")
    with running(consumer):
        until(lambda: len(bench.held) == 2, "two parked")
        discard(bench)
        bench.publish("after-3", key="sick")
        until(lambda: len(bench.effects) == 3 and not bench.held_keys, "the key went on")
    assert bench.effects == ["after-1", "after-2", "after-3"]
    assert bench.held == []


def test_a_parked_message_that_is_poison_too_holds_the_key_again(bench: Bench) -> None:
    """Nothing overtakes the second dead letter either."""
    consumer = poisoned(bench)
    bench.publish("bad", "after-1", "bad-too", "after-2", key="sick")
    with running(consumer):
        until(lambda: len(bench.held) == 3, "three parked")
        discard(bench)
        until(lambda: len(bench.letters) == 2, "the second dead letter")
        assert bench.effects == ["after-1"]
        assert [row.parked for row in bench.held_keys] == [1]
        discard(bench)
        until(lambda: not bench.held_keys, "the key is free")
    assert bench.effects == ["after-1", "after-2"]


def test_without_quarantine_the_key_goes_on_at_once(bench: Bench) -> None:
    """`quarantine=False` trades the order behind a dead letter for progress."""
    consumer = poisoned(bench, quarantine=False)
    bench.publish("bad", "after-1", key="sick")
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert bench.effects == ["after-1"]
    assert bench.held_keys == []


def test_the_bound_of_parked_messages_stops_the_partition_not_the_order(bench: Bench) -> None:
    """Above most_held_per_key nothing is parked, nothing is skipped, nothing is lost."""
    consumer = poisoned(bench, most_held_per_key=1, patience=0.05)
    bench.publish("bad", "after-1", "after-2", key="sick")
    with running(consumer):
        until(lambda: len(bench.held) == 1, "one parked")
        until(lambda: consumer.tally.released > 2, "the next one waits")
        assert bench.lag == 1
        discard(bench)
        until(lambda: len(bench.effects) == 2, "the key went on")
    assert bench.effects == ["after-1", "after-2"]


def poisoned(bench: Bench, **options: Any) -> Consumer:
    """Return a consumer for which 'bad…' is poison."""
    consumer = bench.consumer(**options)

    @consumer.on("orders")
    @dead_letter()
    @idempotent
    def handle(order: str, session: Session) -> None:
        if order.startswith("bad"):
            raise PoisonMessage("bad for ever")
        bench.note(session, order)

    return consumer


# -- retries ---------------------------------------------------------------------------


def test_a_waiting_retry_blocks_its_key_and_no_thread(bench: Bench) -> None:
    """More messages wait for their retry than there are threads, and others still run."""
    consumer = bench.consumer(workers=1, patience=20.0)

    @consumer.on("orders")
    @retry(Backoff(first=15, ceiling=15, attempts=2))
    def handle(order: str, session: Session) -> None:
        if order.startswith("slow"):
            raise Transient("later")
        bench.note(session, order)

    for n in range(5):
        bench.publish(f"slow-{n}", key=f"slow-{n}")
    bench.publish("quick", key="quick")
    with running(consumer):
        until(lambda: bench.effects == ["quick"], "the quick one")
        until(lambda: len(bench.attempts) == 5, "five failed once")
    assert bench.lag == 5


def test_a_long_retry_is_parked_and_its_key_waits_behind_it(bench: Bench) -> None:
    """The row is committed and the broker told; another process takes it up when due."""
    first = flaky(bench, wait=600.0)
    bench.publish("flaky", "after", key="k")
    bench.publish("other", key="o")
    with running(first):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert bench.effects == ["other"]
    assert [row.attempt for row in bench.held] == [2, 1]
    with bench.engine.begin() as db:
        db.execute(update(held_key).where(held_key.c.due > 0).values(due=database_now() - 1))
    second = flaky(bench, wait=600.0)
    with running(second):
        until(lambda: not bench.held_keys, "nothing is held any more")
    assert bench.effects == ["other", "flaky 2", "after"]
    assert bench.attempts == []


def flaky(bench: Bench, wait: float) -> Consumer:
    consumer = bench.consumer()

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=wait, ceiling=wait, attempts=4, jitter=Jitter.NONE))
    @idempotent
    def handle(order: str, session: Session, attempt: Attempt) -> None:
        if order == "flaky" and attempt.number == 1:
            raise Transient("not yet")
        bench.note(session, f"{order} {attempt.number}" if order == "flaky" else order)

    return consumer


def test_attempts_go_on_counting_after_a_restart(bench: Bench) -> None:
    """In-process retries and restarts share one counter, so a limit is a limit."""
    bench.publish("bad", key="k")
    seen: list[int] = []

    def failing() -> Consumer:
        consumer = bench.consumer(patience=900.0)

        @consumer.on("orders")
        @dead_letter()
        @retry(Backoff(first=0.01, ceiling=600, factor=1e5, attempts=3, jitter=Jitter.NONE))
        def handle(order: str, attempt: Attempt) -> None:
            seen.append(attempt.number)
            raise Transient("again")

        return consumer

    with running(failing()):
        until(lambda: len(seen) == 2, "two attempts")
        until(lambda: [row.failed for row in bench.attempts] == [2], "both written down")
    with running(failing()):
        until(lambda: len(bench.letters) == 1, "dead at the third")
    assert seen == [1, 2, 3]
    assert bench.attempts == []


def test_a_handler_without_layers_is_tried_again_and_never_dropped(bench: Bench) -> None:
    """No decorator, no loss: the message comes again, its key waits."""
    consumer = bench.consumer(backoff=Backoff(first=0.01, ceiling=0.02))
    failures = iter([ValueError("once"), ValueError("twice")])

    @consumer.on("orders")
    def handle(order: str, session: Session) -> None:
        if order == "first" and (error := next(failures, None)):
            raise error
        bench.note(session, order)

    bench.publish("first", "second")
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert bench.effects == ["first", "second"]
    assert consumer.tally.failed == 2


def test_a_failed_attempt_is_not_remembered_as_done(bench: Bench) -> None:
    """The dedup row rolls back with the handler, so the retry has its effect."""
    consumer = flaky(bench, wait=0.01)
    bench.publish("flaky")
    with running(consumer):
        until(lambda: bench.lag == 0, "acknowledged")
    assert bench.effects == ["flaky 2"]


def test_nothing_is_acknowledged_before_its_commit(bench: Bench) -> None:
    """While the handler runs the broker still has the message."""
    consumer, started, gate = bench.consumer(), threading.Event(), threading.Event()

    @consumer.on("orders")
    @idempotent
    def handle(order: str, session: Session) -> None:
        bench.note(session, order)
        started.set()
        assert gate.wait(NEVER)

    bench.publish("x")
    with running(consumer):
        try:
            assert started.wait(NEVER)
            assert bench.lag == 1
        finally:
            gate.set()
        until(lambda: bench.lag == 0, "acknowledged")
    assert bench.effects == ["x"]


# -- outages ---------------------------------------------------------------------------


def test_an_outage_burns_no_attempt_and_kills_no_message(bench: Bench) -> None:
    """The dependency is down for many retries' length: 0 dead letters, 0 attempts, recovery."""
    down = threading.Event()
    down.set()
    breaker = Breaker(
        "bank", CircuitPolicy(minimum_calls=5, window=LastCalls(10), open_seconds=0.1, permits=2)
    )
    consumer = bench.consumer(backoff=Backoff(first=0.02, ceiling=0.1))
    calls: list[str] = []

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.02, attempts=3))
    @circuit("bank", breaker=breaker)
    @idempotent
    def handle(order: str, session: Session) -> None:
        calls.append(order)
        if down.is_set():
            raise ConnectionError("no bank")
        bench.note(session, order)

    @consumer.on("letters")
    def other(letter: str, session: Session) -> None:
        bench.note(session, letter)

    wanted = [f"o{n}" for n in range(30)]
    for order in wanted:
        bench.publish(order, key=order)
    with running(consumer):
        tally = consumer.tally
        until(lambda: tally.released + tally.failed > 30, "many retries' length")
        assert tally.failed == 0
        bench.publish("letter", topic="letters")
        until(lambda: bench.effects == ["letter"], "a topic without that dependency goes on")
        assert bench.letters == []
        assert [row for row in bench.attempts if row.failed] == []
        assert bench.lag == 30
        during = len(calls)
        down.clear()
        until(lambda: bench.lag == 0, "recovered")
    assert sorted(bench.effects) == sorted(["letter", *wanted])
    assert bench.letters == []
    assert [row for row in bench.attempts if row.failed] == []
    assert during < 30 * 3 + consumer.tally.released, "the circuit let everything through"


def test_a_dead_letter_store_that_is_down_acknowledges_nothing(bench: Bench) -> None:
    """The poison stays on the broker until its letter is safe."""
    consumer = poisoned(bench, backoff=Backoff(first=0.02, ceiling=0.05))
    with bench.engine.begin() as db:
        db.exec_driver_sql("ALTER TABLE holdfast_dlq_group RENAME TO hidden")
        db.exec_driver_sql("CREATE TABLE holdfast_dlq_group (group_id TEXT)")
    bench.publish("bad", key="sick")
    with running(consumer):
        until(lambda: consumer.tally.released > 2, "several tries")
        assert bench.lag == 1
        with bench.engine.begin() as db:
            db.exec_driver_sql("DROP TABLE holdfast_dlq_group")
            db.exec_driver_sql("ALTER TABLE hidden RENAME TO holdfast_dlq_group")
        until(lambda: bench.lag == 0, "the letter is stored")
    assert len(bench.letters) == 1


def test_too_many_dead_letters_pause_the_topic(bench: Bench) -> None:
    """The intake stops instead of emptying the topic into the dead letters."""
    limit = CircuitPolicy(
        failure_rate=0.5, minimum_calls=5, window=LastCalls(5), open_seconds=60, permits=1
    )
    consumer = poisoned(bench, dead_letter_limit=limit, batch=4, backlog=4, workers=1)
    for n in range(60):
        bench.publish(f"bad-{n}", key=f"k{n}")
    with running(consumer):
        until(lambda: len(bench.letters) >= 5, "the limit")
        until(lambda: consumer.metrics.registry.get_sample_value(
            "holdfast_consumer_paused") or 0 >= 2, "the topic is paused")  # fmt: skip
    assert len(bench.letters) < 15
    assert bench.lag > 40


# -- bad input -------------------------------------------------------------------------


class Order_(msgspec.Struct):  # noqa: N801 - a payload type of this test
    number: int


def test_an_undecodable_payload_is_poison_without_an_attempt(bench: Bench) -> None:
    """It is dead-lettered at the stage of decoding; the handler never sees it."""
    consumer, seen = bench.consumer(), []

    @consumer.on("orders")
    @dead_letter()
    def handle(order: Order_) -> None:
        seen.append(order.number)

    bench.publish(b"{not json", key="a")
    bench.publish({"number": "seven"}, key="b")
    bench.publish({"number": 7}, key="c")
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert seen == [7]
    assert sorted(row.stage for row in bench.letters) == ["deserialize", "validate"]


def test_a_missing_correlation_id_is_created_and_counted(bench: Bench) -> None:
    """A message without one is handled, under its own id."""
    consumer, seen = bench.consumer(), []

    @consumer.on("orders")
    def handle(order: str, message: Message) -> None:
        seen.append((message.correlation_id, message.id, current_message()))

    plain = Message.new("orders", b"x", key="k").with_(correlation_id=None)
    bench.send(plain)
    with running(consumer):
        until(lambda: bench.lag == 0, "acknowledged")
    ((correlation, own, current),) = seen
    assert correlation == own == plain.id
    assert current is not None
    assert consumer.tally.uncorrelated == 1


def test_a_strict_consumer_refuses_a_missing_correlation_id(bench: Bench) -> None:
    """`strict=True` makes it poison."""
    consumer = poisoned(bench, strict=True)
    bench.send(Message.new("orders", b"x", key="k").with_(correlation_id=None))
    with running(consumer):
        until(lambda: bench.lag == 0, "acknowledged")
    assert bench.effects == []
    assert (
        "correlation" in bench.letters[0].error_text
        if hasattr(bench.letters[0], "error_text")
        else len(bench.letters) == 1
    )


@pytest.mark.parametrize("verb", ["commit", "rollback", "close"])
def test_a_handler_cannot_end_the_transaction_itself(bench: Bench, verb: str) -> None:
    """It is told so, nothing is committed, and the message is not acknowledged."""
    consumer = bench.consumer(backoff=Backoff(first=0.02, ceiling=0.05))

    @consumer.on("orders")
    @idempotent
    def handle(order: str, session: Session) -> None:
        bench.note(session, order)
        getattr(session, verb)()

    bench.publish("x")
    with running(consumer):
        until(lambda: consumer.tally.failed > 1, "it fails")
        assert bench.effects == []
        assert bench.lag == 1
    assert "begin_nested" in bench.attempts[0].last_error


def test_a_handler_that_ends_the_process_is_not_acknowledged(bench: Bench) -> None:
    """SystemExit stops the consumer cleanly: others finish, this message stays, and is blamed."""
    consumer = bench.consumer()

    @consumer.on("orders")
    def handle(order: str, session: Session) -> None:
        if order == "exit":
            raise SystemExit(3)
        bench.note(session, order)

    bench.publish("exit", key="e")
    with pytest.raises(SystemExit):
        consumer.run()
    assert bench.lag == 1
    assert [(row.failed, row.crashed) for row in bench.attempts] == [(0, 1)]
    assert bench.marks == []


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_message_whose_handler_ends_the_process_each_time_is_dead_lettered(
    bench: Bench, ending: type[BaseException]
) -> None:
    """After `crash_limit` starts it is put aside, and the group goes on."""
    bench.publish("exit", key="e")
    bench.publish("good", key="f")
    ended = 0
    while not bench.letters and ended < 10:
        consumer = bench.consumer(crash_limit=3)

        @consumer.on("orders")
        @dead_letter()
        @retry(Backoff(first=0.01, ceiling=0.02, attempts=3))
        @idempotent
        def handle(order: str, session: Session) -> None:
            if order == "exit":
                raise ending
            bench.note(session, order)

        try:
            consumer.run(until_idle=True)
        except ending:
            ended += 1
    assert ended == 3
    assert [row.stage for row in bench.letters] == ["crash"]
    assert (bench.effects, bench.lag) == (["good"], 0)


def test_a_hanging_handler_is_reported_and_blocks_only_its_key(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Others go on; the drain does not wait for it longer than its bound."""
    consumer, gate = bench.consumer(hang_seconds=0.1, drain_seconds=0.2), threading.Event()

    @consumer.on("orders")
    def handle(order: str, session: Session) -> None:
        if order == "hang":
            assert gate.wait(NEVER)
        bench.note(session, order)

    bench.publish("hang", "behind", key="h")
    bench.publish("other", key="o")
    with caplog.at_level(logging.ERROR), running(consumer):
        until(lambda: bench.effects == ["other"], "the other key")
        until(lambda: "has been running" in caplog.text, "the report")
        until(lambda: bench.lag == 2, "the other key acknowledged, before the short drain")
    assert bench.lag == 2
    gate.set()


# -- asynchronous handlers -------------------------------------------------------------


def test_async_handlers_run_side_by_side_with_a_session(bench: Bench) -> None:
    """Many wait at once in one loop; each has its transaction; retries and timeouts work."""
    consumer = bench.consumer(workers=2)
    together: list[int] = []
    inside = 0

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.02, attempts=3))
    @timeout(NEVER)
    @idempotent
    async def handle(order: str, session: Session, attempt: Attempt) -> None:
        nonlocal inside
        inside += 1
        together.append(inside)
        try:
            for _ in range(2000):
                if max(together) >= 4:
                    break
                await asyncio.sleep(0.02)  # pacing: lets the others begin
        finally:
            inside -= 1
        if order == "o1" and attempt.number == 1:
            raise Transient("again")
        if order == "o2":
            raise PoisonMessage("never")
        await asyncio.to_thread(bench.note, session, order)

    for n in range(8):
        bench.publish(f"o{n}", key=f"k{n}")
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert sorted(bench.effects) == [f"o{n}" for n in range(8) if n != 2]
    assert len(bench.letters) == 1
    assert max(together) >= 4


def test_an_async_handler_may_ask_for_an_async_session(bench: Bench) -> None:
    """Its writes and its dedup row are one transaction; twice is once, also after a restart."""

    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.02, attempts=3))
    @idempotent
    async def handle(order: str, session: AsyncSession, attempt: Attempt) -> None:
        await session.execute(insert(effects).values(what=order))
        if attempt.number == 1:
            raise Transient("rolled back")

    message = Message.new("orders", b"once", key="k")
    for _ in range(2):
        consumer = bench.consumer()
        consumer.on("orders")(handle)
        bench.send(message)
        with running(consumer):
            until(lambda: bench.lag == 0, "everything acknowledged")
    assert bench.effects == ["once"]
    assert bench.letters == []


def test_an_async_session_uses_the_engine_that_was_given(bench: Bench) -> None:
    """Its pool, connect arguments and listeners are the user's; another database is refused."""
    given = create_async_engine(bench.engine.url, connect_args={"application_name": "the shop"})
    consumer = Consumer(bench.broker, group="g", database=bench.engine, async_database=given)
    names: list[Any] = []

    @consumer.on("orders")
    @idempotent
    async def handle(order: str, session: AsyncSession) -> None:
        names.append((await session.execute(text("SHOW application_name"))).scalar())
        await session.execute(insert(effects).values(what=order))

    bench.publish("one")
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert (names, bench.effects) == (["the shop"], ["one"])
    elsewhere = create_async_engine(bench.engine.url.set(database="other"))
    with pytest.raises(ConfigurationError, match="name the same database twice"):
        Consumer(bench.broker, group="g", database=bench.engine, async_database=elsewhere)


def test_an_async_handler_that_overruns_is_cancelled_and_retried(bench: Bench) -> None:
    """@timeout interrupts it; the retry counts."""
    consumer, seen, cancelled = bench.consumer(), list[int](), list[int]()

    @consumer.on("orders")
    @retry(Backoff(first=0.01, ceiling=0.02, attempts=50))
    @timeout(1.0)
    async def handle(order: str, attempt: Attempt) -> None:
        seen.append(attempt.number)
        if attempt.number == 1:
            try:
                await asyncio.sleep(NEVER)
            except asyncio.CancelledError:
                cancelled.append(1)
                raise

    bench.publish("x")
    with running(consumer):
        until(lambda: bench.lag == 0, "acknowledged")
    assert cancelled == [1]
    # A machine that stands still for a second may cost a further attempt.
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) > 1


# -- stopping --------------------------------------------------------------------------


def test_a_stop_finishes_what_runs_and_gives_the_rest_back_without_blame(bench: Bench) -> None:
    """The drain settles what was in hand; the next consumer handles the rest, once each."""
    first, started, gate = bench.consumer(), threading.Event(), threading.Event()

    @first.on("orders")
    @idempotent
    def handle(order: str, session: Session) -> None:
        started.set()
        assert gate.wait(NEVER)
        bench.note(session, order)

    bench.publish("a", "b", "c")
    with running(first):
        assert started.wait(NEVER)
        first.stop()
        gate.set()
    assert bench.effects == ["a"]
    assert bench.lag == 2
    assert bench.attempts == []
    assert bench.marks == []
    second = poisoned(bench)
    with running(second):
        until(lambda: bench.lag == 0, "the rest")
    assert bench.effects == ["a", "b", "c"]


def test_stopping_again_abandons_nothing(bench: Bench) -> None:
    """The handler that runs is finished and acknowledged, however often `stop` is called."""
    consumer, started, gate = bench.consumer(), threading.Event(), threading.Event()

    @consumer.on("orders")
    @idempotent
    def handle(order: str, session: Session) -> None:
        started.set()
        assert gate.wait(NEVER)
        bench.note(session, order)

    bench.publish("a")
    with running(consumer):
        assert started.wait(NEVER)
        assembly = consumer.running
        assert assembly is not None
        for _ in range(3):
            consumer.stop()
        assert not assembly.poller.hurry.is_set()
        gate.set()
    assert bench.effects == ["a"]
    assert bench.lag == 0


def test_a_stop_at_once_leaves_what_runs_to_the_next_one(bench: Bench) -> None:
    """Its message is not acknowledged and comes again."""
    consumer = bench.consumer(drain_seconds=600)
    started, gate = threading.Event(), threading.Event()

    @consumer.on("orders")
    @idempotent
    def handle(order: str, session: Session) -> None:
        started.set()
        gate.wait()
        bench.note(session, order)

    bench.publish("a")
    with running(consumer):
        assert started.wait(NEVER)
        consumer.stop(at_once=True)
        try:
            until(lambda: consumer.running is None, "its end")
            assert bench.lag == 1
        finally:
            gate.set()


# -- replays and other groups ------------------------------------------------------------


def test_a_replay_for_this_group_runs_and_frees_its_key(bench: Bench) -> None:
    """The replayed message keeps its id and topic; its closed letter lets the key go on."""
    fixed = threading.Event()
    consumer, seen = bench.consumer(), []

    @consumer.on("orders")
    @dead_letter()
    @idempotent
    def handle(order: str, session: Session, message: Message) -> None:
        seen.append((message.topic, message.is_replay))
        if order == "bad" and not fixed.is_set():
            raise PoisonMessage("a bug")
        bench.note(session, order)

    bench.publish("bad", "after", key="k")
    with running(consumer):
        until(lambda: len(bench.held) == 1, "one parked")
        fixed.set()
        bench.replay(bench.letters[0], b"bad")
        until(lambda: not bench.held_keys, "the key went on")
    assert bench.effects == ["bad", "after"]
    assert seen[-2] == ("orders", True)
    assert [row.state for row in bench.letters] == ["confirmed"]


# -- a loop of one's own, and settings ---------------------------------------------------


def test_a_handler_can_be_driven_by_a_loop_of_ones_own(bench: Bench) -> None:
    """One call per message; the outcome says what to tell the broker."""
    consumer = poisoned(bench)
    handler = consumer.handler("orders")
    good, bad = (Message.new("orders", body, key="k") for body in (b"x", b"bad"))
    assert handler.handle(good).ending is HandlerEnding.HANDLED
    assert handler.handle(good).ending is HandlerEnding.DUPLICATE
    outcome = handler.handle(bad)
    assert outcome.ending is HandlerEnding.DEAD_LETTERED
    assert outcome.acknowledge
    assert bench.effects == ["x"]


def test_an_event_staged_by_a_handler_commits_with_it(bench: Bench) -> None:
    """The outbox row carries the cause, and is not there when the handler fails."""
    create_outbox(bench.engine)
    consumer = bench.consumer()

    @consumer.on("orders")
    @dead_letter()
    @idempotent
    def handle(order: str, session: Session, outbox: Outbox) -> None:
        outbox.add(session, {"order": order}, topic="bills", key="k")
        if order == "bad":
            raise PoisonMessage("no bill")

    bench.publish("good", key="a")
    bench.publish("bad", key="b")
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    with bench.engine.connect() as db:
        rows = db.exec_driver_sql("SELECT payload FROM holdfast_outbox").all()
    assert rows == [(b'{"order":"good"}',)]


def test_partition_order_runs_one_message_of_a_partition_at_a_time(bench: Bench) -> None:
    """`order=Order.LANE` keeps even different keys in the broker's order."""
    consumer, running_now, most = bench.consumer(order=Order.LANE), [0], [0]
    bench.broker.create_topic("single", partitions=1)

    @consumer.on("single")
    def handle(order: str, session: Session) -> None:
        running_now[0] += 1
        most[0] = max(most[0], running_now[0])
        bench.note(session, order)
        running_now[0] -= 1

    for n in range(20):
        bench.publish(f"o{n:02}", key=f"k{n}", topic="single")
    with running(consumer):
        until(lambda: len(bench.effects) == 20, "all handled")
    assert bench.effects == [f"o{n:02}" for n in range(20)]
    assert most == [1]


def test_nonsense_is_refused_with_the_fix(bench: Bench) -> None:
    """Unknown settings, parameters and missing tables name what to do."""
    with pytest.raises(ConfigurationError, match="no setting 'worker'"):
        bench.consumer(worker=3)
    with pytest.raises(ConfigurationError, match="workers=0: use more than 0"):
        bench.consumer(workers=0)
    consumer = bench.consumer()
    with pytest.raises(ConfigurationError, match="asks for 'wallet'"):

        @consumer.on("orders")
        def handle(order: str, wallet: object) -> None: ...

    with bench.engine.begin() as db:
        db.exec_driver_sql("DROP TABLE holdfast_held")

    @consumer.on("orders")
    def fine(order: str) -> None: ...

    with pytest.raises(ConfigurationError, match="lacks holdfast_held: run  holdfast db upgrade"):
        consumer.run()
    assert "decode str" in consumer.explain()


def test_what_a_handler_sends_on_during_a_replay_is_for_everybody(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The marks of the replay stay behind, in whatever way the headers are passed on."""
    create_outbox(bench.engine)
    bench.broker.create_topic("invoices")
    consumer, seen, sink = bench.consumer(), [], bench.broker.sink()

    @consumer.on("orders")
    def handle(order: str, session: Session, message: Message, outbox: Outbox) -> None:
        seen.append((message.is_replay, message.headers.text("tenant")))
        current = current_message()
        assert current is not None
        outbox.add(session, "staged", topic="invoices", key="k", headers=message.headers)
        made = Message.new("invoices", b"made", headers=current.headers)
        assert not [
            result.error
            for result in sink.publish([made, message.with_(topic="invoices", payload=b"sent")])
            if result.error
        ]

    marks = ReplayHeaders(group="g", plan="p", dlq_id="d", topic="orders")
    order = Message.new(replay_topic("orders", "g"), b"x", key="k", headers={"tenant": "acme"})
    bench.send(order.with_(headers=marks.stamped(order.headers)))
    shipping = Consumer(bench.broker, group="shipping", database=bench.engine)

    @shipping.on("invoices")
    def ship(invoice: str, session: Session, message: Message) -> None:
        bench.note(session, f"{invoice} {message.headers.text('tenant')} {message.is_replay}")

    with running(consumer):
        until(lambda: len(seen) == 1 and consumer.tally.handled == 1, "the replay was handled")
    Relay(LeaseEngine(bench.engine, sink)).run_once()
    with running(shipping):
        until(lambda: shipping.tally.handled + shipping.tally.skipped == 3, "all three came")
    assert sorted(bench.effects) == ["made acme False", "sent acme False", "staged acme False"]
    assert seen == [(True, "acme")]
    assert "passes them over" not in caplog.text


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """Undo what the suite does for itself, as in a program that has just begun."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
@pytest.mark.parametrize("until_idle", [True, False])
def test_garbage_of_a_former_run_is_collected(until_idle: bool) -> None:
    """Only a run that goes on leaves the imports out, and it leaves nothing behind."""
    frozen: list[int] = []
    broker = connect("memory:")
    broker.create_topic("orders")
    consumer = Consumer(broker, group="g")

    @consumer.on("orders")
    def handle(_order: str) -> None:
        frozen.append(gc.get_freeze_count())
        consumer.stop()

    broker.sink().publish([Message.new("orders", b"1", key="k")])
    consumer.run(until_idle=until_idle)
    assert [count > 0 for count in frozen] == [not until_idle]
    assert gc.get_freeze_count() == 0
