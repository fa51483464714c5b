"""Handlers that misbehave: cut off in a claim, not run at all, ending the process, outliving it."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from holdfast import ConfigurationError, Message
from holdfast.consumer import Attempt, Consumer, HandlerEnding, Order, Settings
from holdfast.dlq import dead_letter
from holdfast.idempotency import Inbox, idempotent
from holdfast.retry import Backoff, retry, timeout
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers import Postgres

NEVER = 30.0


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a database in files."""
    bench = Bench(tmp_path, f"sqlite:///{tmp_path}/db.db")
    yield bench
    bench.close()


@pytest.fixture
def on_postgres(tmp_path: Path, postgres: Postgres) -> Iterator[Bench]:
    """Offer a database in which rivals wait for each other."""
    bench = Bench(tmp_path, postgres.database("consumer_handlers"))
    yield bench
    bench.close()


class Overlaps:
    """Sees a connection rolled back while a statement of it runs."""

    def __init__(self, bench: Bench) -> None:
        self.seen: list[str] = []
        self._busy: set[Any] = set()
        event.listen(bench.engine, "before_cursor_execute", self._before)
        event.listen(bench.engine, "after_cursor_execute", self._after)
        event.listen(bench.engine, "rollback", self._rollback)

    def _before(self, connection: Any, *_: Any) -> None:
        self._busy.add(connection.connection.driver_connection)

    def _after(self, connection: Any, *_: Any) -> None:
        self._busy.discard(connection.connection.driver_connection)

    def _rollback(self, connection: Any) -> None:
        if connection.connection.driver_connection in self._busy:
            self.seen.append("rolled back in the middle of a statement")


def is_waiting(bench: Bench) -> bool:
    """Whether a statement waits for a lock."""
    wanted = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    with bench.engine.connect() as db:
        return bool(db.exec_driver_sql(wanted).scalar())


def test_an_async_handler_cut_off_in_its_claim_leaves_the_session_to_one_thread(
    on_postgres: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The claim waits for a rival, the time is up: the rollback waits for the claim's thread."""
    bench, consumer = on_postgres, on_postgres.consumer()

    @consumer.on("orders")
    @retry(Backoff(first=0.01, ceiling=0.05, attempts=50))
    @timeout(0.5)  # enough for an attempt without a rival, on a busy machine
    @idempotent
    async def handle(order: str, session: Session) -> None:
        bench.note(session, order)

    overlaps = Overlaps(bench)
    message = Message.new("orders", b"once", key="k")
    handler = consumer._routes["orders"].consumer
    with Session(bench.engine) as rival:
        Inbox().enter(rival, handler)
        rival.commit()  # so that what waits below is the claim
        Inbox().claim_many(rival, handler, [message])
        bench.send(message)
        with running(consumer):
            until(lambda: is_waiting(bench), "the claim waiting for the rival")
            up = time.monotonic() + 0.7  # the attempt's time is up, by its own clock
            until(lambda: time.monotonic() > up, "the attempt cut off")
            rival.rollback()
            until(lambda: bench.lag == 0, "the message acknowledged")
    assert bench.effects == ["once"]
    assert overlaps.seen == []
    assert not [record for record in caplog.records if "IllegalState" in record.getMessage()]


def test_a_handler_whose_body_does_not_run_is_not_acknowledged(bench: Bench) -> None:
    """A `def` that returns a coroutine has done nothing: that is an error, not a success."""
    consumer = bench.consumer()

    async def real(order: str) -> None: ...

    @consumer.on("orders")
    @dead_letter()
    @idempotent
    def handle(order: str, session: Session) -> Any:
        bench.note(session, order)
        return real(order)

    bench.publish("x")
    with running(consumer):
        until(lambda: consumer.tally.failed > 1, "tried again")
    assert (bench.lag, bench.effects, bench.letters) == (1, [], [])
    outcome = consumer.handler("orders").handle(Message.new("orders", b"y", key="o"))
    assert outcome.ending is HandlerEnding.FAILED
    assert "async def" in str(outcome.error)


def test_a_handler_that_exits_again_and_again_is_quarantined(bench: Bench) -> None:
    """`SystemExit` ends the consumer each time, and is counted as the crash that it is."""
    ends = 0
    bench.publish("bad", key="k")
    bench.publish("good", key="o")
    for _ in range(10):
        consumer = bench.consumer(crash_limit=3)

        @consumer.on("orders")
        @dead_letter()
        @idempotent
        def handle(order: str, session: Session) -> None:
            if order == "bad":
                raise SystemExit(3)
            bench.note(session, order)

        try:
            consumer.run(until_idle=True)
        except SystemExit:
            ends += 1
        else:
            break
    assert ends == 3
    assert [row.payload for row in bench.letters] == [b"bad"]
    assert bench.effects == ["good"]


def test_what_was_lost_to_another_member_is_not_dead_lettered_here(bench: Bench) -> None:
    """Its new owner may handle it well; here the run ends without a letter or a held key."""
    consumer, begun, go_on = bench.consumer(), threading.Event(), threading.Event()

    @consumer.on("orders")
    @dead_letter()
    def handle(order: str) -> None:
        begun.set()
        assert go_on.wait(NEVER)
        raise ValueError("too late")

    bench.publish("x")
    with running(consumer):
        assert begun.wait(NEVER)
        assembly = consumer.running
        assert assembly is not None
        assembly.poller.lost(assembly.poller.source.assignment())
        go_on.set()
        until(lambda: not assembly.lanes.running(), "the handler ended")
    assert (bench.letters, bench.held_keys, bench.attempts) == ([], [], [])
    assert bench.lag == 1


def test_what_cannot_be_a_handler_is_refused_when_registered(bench: Bench) -> None:
    """Each refusal says what to change; a partial and an object with `__call__` are handlers."""

    def generator(order: str) -> Any:
        yield order

    async def stream(order: str) -> Any:
        yield order

    def bare() -> None: ...

    def two(prefix: str, order: str) -> None: ...

    class Billing:
        def __call__(self, order: str) -> None: ...

    @idempotent
    def remembered(order: str) -> None: ...

    for wrong, fix in ((generator, "a generator"), (stream, "a generator"), (bare, "no payload")):
        with pytest.raises(ConfigurationError, match=fix):
            bench.consumer().on("orders")(wrong)
    with pytest.raises(ConfigurationError, match="give the consumer a database"):
        Consumer(bench.broker, group="g").on("orders")(remembered)
    for fine in (functools.partial(two, "a"), Billing()):
        consumer = bench.consumer()
        consumer.on("orders")(fine)
        assert "orders →" in consumer.explain()


def test_settings_are_read_by_value_and_nonsense_is_refused() -> None:
    """The value of the order is as good as its name; a number given as text is refused."""
    assert Settings.read({"order": "lane"}).order is Order.LANE
    for wrong in ({"order": "partition"}, {"workers": "3"}, {"batch": 2.5}, {"patience": True},
                  {"drain_seconds": "5"}):  # fmt: skip
        (name,) = wrong
        with pytest.raises(ConfigurationError, match=name):
            Settings.read(wrong)


SLOW = """
import asyncio, sys, time
from holdfast.consumer import Consumer
consumer = Consumer(sys.argv[1], group="g", drain_seconds=0.5)

@consumer.on("orders")
async def handle(order: str) -> None:
    print("begun", flush=True)
    await asyncio.to_thread(time.sleep, 600)

consumer.run()
"""


@pytest.mark.programs
def test_a_stop_is_bounded_though_an_async_handler_waits_for_a_thread(bench: Bench) -> None:
    """Threads that cannot be stopped do not keep the process: it ends after the drain."""
    bench.publish("x")
    url = f"sqlite:///{bench.broker_file}?session=5"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    asked = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert time.monotonic() - asked < 100
    assert "Traceback" not in err
    assert bench.lag == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_an_attempt_knows_why_the_one_before_failed(bench: Bench, is_async: bool) -> None:
    """The error itself, without the frames that would keep a session alive."""
    consumer, seen = bench.consumer(), []

    def note(attempt: Attempt) -> None:
        seen.append(attempt.error)
        if attempt.number < 3:
            raise ConnectionError(f"no answer to {attempt.number}")

    async def handle_async(order: str, attempt: Attempt) -> None:
        note(attempt)

    def handle(order: str, attempt: Attempt) -> None:
        note(attempt)

    chosen = handle_async if is_async else handle
    consumer.on("orders")(retry(Backoff(first=0.01, ceiling=0.01, attempts=5))(chosen))
    bench.publish("one")
    with running(consumer):
        until(lambda: bench.lag == 0, "handled")
    assert [str(error) for error in seen] == ["None", "no answer to 1", "no answer to 2"]
    assert seen[1].__traceback__ is None
