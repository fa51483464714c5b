"""After a crash: who may have caused it runs apart, and not one by one."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, text

from holdfast import Message, PoisonMessage, Transient
from holdfast.consumer.monitoring import ConsumerMetrics, HealthChecks
from holdfast.dlq import dead_letter
from holdfast.idempotency import AttemptLog
from holdfast.ports import Lane
from holdfast.retry import Backoff, retry
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Connection

    from holdfast.consumer import Consumer
    from tests.servers import Postgres


@pytest.fixture
def bench(tmp_path: Path, postgres: Postgres) -> Iterator[Bench]:
    """Offer a broker, and a database that lets handlers run side by side."""
    bench = Bench(tmp_path, postgres.database("consumer_suspects"))
    yield bench
    bench.close()


def crash(bench: Bench, consumer: Consumer, ids: list[str], times: int) -> None:
    """Make it look as if a process had died, so many times, with *ids* in hand."""
    ledger = AttemptLog(bench.engine, owner_seconds=0.01)
    for n in range(times):
        ledger.starting(consumer._routes["orders"].consumer, ids, f"dead {n}")
        until(lambda: len(ledger.orphans()) == len(ids), "the dead owner found")


def test_suspects_of_one_crash_run_together_and_all_others_after_them(bench: Bench) -> None:
    """As many at once as there are workers; each leaves a mark of its own, until it is done."""
    consumer, together = bench.consumer(workers=4), threading.Barrier(4, timeout=120)
    beside, seen = list[int](), list[str]()

    @consumer.on("orders")
    def handle(order: str) -> None:
        if order.startswith("suspect"):
            together.wait()
            beside.append(sum(row.alone for row in bench.marks))
            together.wait()
        seen.append(order.split()[0])

    ids = [bench.publish(f"suspect {n}", key=f"k{n}")[0] for n in range(8)]
    bench.publish("fresh", key="f")
    crash(bench, consumer, ids, times=1)
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert beside == [4] * 8
    assert seen == ["suspect"] * 8 + ["fresh"]
    assert (bench.attempts, bench.marks) == ([], [])
    gauge = consumer.metrics.registry.get_sample_value("holdfast_consumer_suspects")
    assert gauge == 0


@contextmanager
def lost_while_unmarking(bench: Bench) -> Iterator[list[int]]:
    """End the server's side of the connection that removes a mark, once; yield which."""
    killed: list[int] = []

    def kill(db: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if not killed and statement.startswith("DELETE FROM holdfast_start"):
            killed.append(db.connection.dbapi_connection.info.backend_pid)  # type: ignore[union-attr]
            with bench.engine.connect() as other:
                other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": killed[0]})

    event.listen(bench.engine, "before_cursor_execute", kill)
    try:
        yield killed
    finally:
        event.remove(bench.engine, "before_cursor_execute", kill)


@pytest.mark.parametrize("own_loop", [False, True], ids=["runtime", "own loop"])
def test_a_mark_that_an_outage_left_behind_is_removed_when_it_is_over(
    bench: Bench, *, own_loop: bool
) -> None:
    """A process that lives on is not said to handle what it has handled long ago."""
    consumer, seen = bench.consumer(), list[str]()

    @consumer.on("orders")
    def handle(order: str) -> None:
        seen.append(order)

    with lost_while_unmarking(bench) as killed:
        if own_loop:
            handler = consumer.handler("orders")
            assert handler(Message.new("orders", b"first", key="a")).acknowledge
            assert len(bench.marks) == 1
            assert handler(Message.new("orders", b"second", key="b")).acknowledge
            assert bench.marks == []
        else:
            bench.publish("first", key="a")
            with running(consumer):
                until(lambda: killed, "the connection lost")
                until(lambda: bench.marks == [], "no mark left")
    assert killed
    assert seen[0] == "first"


def test_a_suspect_of_two_crashes_runs_alone(bench: Bench) -> None:
    """A further crash has one possible cause then."""
    consumer, inside, most = bench.consumer(workers=4), [0], [0]

    @consumer.on("orders")
    def handle(order: str) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0], sum(row.alone for row in bench.marks))
        inside[0] -= 1

    ids = [bench.publish(f"{n}", key=f"k{n}")[0] for n in range(6)]
    crash(bench, consumer, ids, times=2)
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    assert most == [1]


def test_a_suspect_is_marked_at_each_of_its_attempts(bench: Bench) -> None:
    """One that kills its process at the second attempt would never be found out otherwise."""
    consumer, marked = bench.consumer(), list[int]()

    @consumer.on("orders")
    @retry(Backoff(first=0.01, ceiling=0.01, attempts=3))
    def handle(order: str) -> None:
        marked.append(sum(row.alone for row in bench.marks))
        if len(marked) < 3:
            raise Transient("not yet")

    ids = bench.publish("suspect")
    crash(bench, consumer, ids, times=1)
    with running(consumer):
        until(lambda: bench.lag == 0, "acknowledged")
    assert marked == [1, 1, 1]


def test_a_dead_letter_is_not_suspected_of_the_crash_of_another_process(bench: Bench) -> None:
    """One that had it in hand is found dead only after the message was dead-lettered here."""
    consumer = bench.consumer()
    name = f"{bench.group}/orders"
    ledger = AttemptLog(bench.engine, owner_seconds=0.01)

    @consumer.on("orders")
    @dead_letter()
    def handle(order: str, message: Message) -> None:
        ledger.starting(name, [message.identity, "other"], "dead")
        raise PoisonMessage("bad")

    bench.publish("bad")
    with running(consumer):
        until(lambda: bench.letters and bench.lag == 0, "it is a dead letter")
        until(lambda: not any(row.owner == "dead" for row in bench.marks), "the dead one is found")
    assert [row.message_id for row in bench.attempts] == ["other"]


def test_a_consumer_whose_threads_all_hang_is_not_ready(bench: Bench) -> None:
    """It polls, and handles nothing: an orchestrator should see that."""
    consumer, gate = bench.consumer(workers=2, hang_seconds=0.05), threading.Event()

    @consumer.on("orders")
    def handle(order: str) -> None:
        gate.wait(60)

    vitals = HealthChecks(consumer)
    with running(consumer):
        bench.publish("one", key="a")
        until(lambda: consumer.running and consumer.running.poller.hanging_threads == 1, "one")
        assert vitals.ready().good
        bench.publish("two", key="b")
        until(lambda: "all 2 handler threads hang" in vitals.ready().why, "not ready")
        assert vitals.alive().good
        gate.set()
        until(lambda: vitals.ready().good, "ready again")


def test_a_consumer_shows_how_old_its_lag_is(bench: Bench) -> None:
    """A message that is in hand grows old by partition and topic; once it is done, nothing is."""
    consumer, gate = bench.consumer(standstill_seconds=0.4), threading.Event()

    @consumer.on("orders")
    def handle(order: str) -> None:
        gate.wait(60)

    def oldest() -> float:
        shown = consumer.metrics.registry.collect()
        found = [one for metric in shown for one in metric.samples]
        ages = [one.value for one in found if one.name.endswith("_partition_lag_seconds")]
        by_topic = consumer.metrics.registry.get_sample_value(
            "holdfast_consumer_lag_seconds", {"topic": "orders"}
        )
        return max(ages, default=0.0) if by_topic else 0.0

    with running(consumer):
        bench.publish("one", key="a")
        until(lambda: oldest() > 1.0, "it is a second old")
        gate.set()
        until(lambda: bench.lag == 0 and oldest() == 0.0, "nothing is behind")


def test_the_lag_of_retry_tiers_and_replays_is_shown_by_name() -> None:
    """What waits there is waited for; once it has gone, so has the figure."""
    metrics = ConsumerMetrics()
    tier = "orders.g.retry.5s"
    lag = {Lane("orders", 0): 2, Lane("orders", 1): 3, Lane(tier, 0): 7}
    metrics.show_lag(lag, dict.fromkeys(lag, 0.0), ["orders"])

    def shown(topic: str) -> float | None:
        return metrics.registry.get_sample_value("holdfast_consumer_lag", {"topic": topic})

    assert (shown("orders"), shown(tier)) == (5, 7)
    metrics.show_lag({}, {}, ["orders"])
    assert (shown("orders"), shown(tier)) == (0, 0)
