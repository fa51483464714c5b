"""`holdfast consume`: what its probes say, and how it ends."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.orm import Session  # noqa: TC002 - a handler asks for it by annotation

from holdfast import Message, PoisonMessage
from holdfast.brokers import connect
from holdfast.circuit import CircuitPolicy, LastCalls
from holdfast.cli.supervisor import Worker
from holdfast.consumer import create_tables
from holdfast.consumer.monitoring import HealthChecks
from holdfast.db.engine import open_database
from holdfast.dlq import dead_letter
from holdfast.retry import Backoff
from holdfast.testing import Fault, ScriptedBroker, wait_until
from tests.consuming import Bench, running, until
from tests.servers import Postgres as PostgresServer
from tests.servers.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.testing.faults import FaultStep
    from tests.servers import Postgres
    from tests.servers.fixtures import PrivateServer

HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
SHOP = """
import os, pathlib, threading
from holdfast.consumer import Consumer
from holdfast.dlq import dead_letter

consumer = Consumer("sqlite:///broker.db?session=2", group="billing", database="sqlite:///app.db",
                    due_seconds=0.1, takeover_seconds=2.0, drain_seconds=200)

@consumer.on("orders")
@dead_letter()
def bill(order: str) -> None:
    pathlib.Path(f"began-{order}-{os.getpid()}").touch()
    while order == "hang" and not pathlib.Path("go").exists():
        threading.Event().wait(0.05)
    with open("handled.txt", "a") as file:
        file.write(order + "\\n")
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Offer a folder with a consumer, its broker and its database."""
    engine = open_database(f"sqlite:///{tmp_path}/app.db")
    create_tables(engine)
    engine.dispose()
    (tmp_path / "shop.py").write_text(SHOP)
    publish(tmp_path)
    return tmp_path


def publish(folder: Path, *orders: str) -> None:
    broker = connect(f"sqlite:///{folder}/broker.db")
    broker.create_topic("orders")
    sink = broker.sink()
    sink.publish([Message.new("orders", order.encode(), key=order) for order in orders])
    sink.close()
    broker.close()


def lag(folder: Path) -> int:
    broker = connect(f"sqlite:///{folder}/broker.db")
    try:
        return sum(broker.lag("billing", ["orders"]).values())
    finally:
        broker.close()


def handled(folder: Path) -> list[str]:
    file = folder / "handled.txt"
    return sorted(file.read_text().split()) if file.exists() else []


def get(port: int, path: str) -> tuple[int, str]:
    """Return status and text of a page; status 0 while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


@contextmanager
def consuming(folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "log.txt").open("wb") as errors:
        process = subprocess.Popen(
            [HOLDFAST, "consume", "shop:consumer", "--log-format", "text", *options],
            cwd=folder,
            env={k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"},
            stderr=errors,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def log_of(folder: Path) -> str:
    return (folder / "log.txt").read_text()


def pids(folder: Path) -> list[int]:
    return [int(found) for found in re.findall(r"worker \d+ is process (\d+)", log_of(folder))]


def test_one_endpoint_speaks_for_all_workers(shop: Path) -> None:
    """Probes and metrics name each worker; one that is killed shows, and is started again."""
    port = free_port()
    with consuming(shop, "--workers", "2", "--http", f"127.0.0.1:{port}") as process:
        for path, said in (("/readyz", "consumes"), ("/healthz", "polls")):
            both = (200, f"worker 0: {said}\nworker 1: {said}\n")
            wait_until(lambda: get(port, path) == both, deadline=180, what=f"both {path}")  # noqa: B023
        publish(shop, *(f"o{n}" for n in range(8)))
        wait_until(lambda: len(set(handled(shop))) == 8, deadline=180, what="all handled")

        def counted() -> bool:  # a worker that is too busy to answer has no samples this time
            text = get(port, "/metrics")[1]
            return (
                sum(samples(text, "handled")) == 8
                and {
                    "holdfast_consumer_workers 2.0",
                    "holdfast_consumer_workers_up 2.0",
                }
                <= set(text.splitlines())
                and 'consumed_total{group="billing",worker="1"}' in text
            )

        wait_until(counted, deadline=180, what="the metrics of both add up")
        os.kill(pids(shop)[0], signal.SIGKILL)
        wait_until(lambda: "ended with -9" in get(port, "/readyz")[1] or len(pids(shop)) == 3,
                   deadline=180, what="the death is seen")  # fmt: skip
        wait_until(lambda: restarts(get(port, "/metrics")[1]) == 1, deadline=180, what="counted")
        wait_until(lambda: get(port, "/readyz")[0] == 200, deadline=180, what="ready again")
        process.send_signal(signal.SIGTERM)
        assert process.wait(150) == 0
    assert "ended with -9, started again" in log_of(shop)
    for pid in pids(shop):
        assert not alive(pid)


def samples(text: str, outcome: str) -> list[float]:
    pattern = rf'holdfast_consumer_messages_total{{outcome="{outcome}",topic="orders",worker="\d"}}'
    return [float(value) for value in re.findall(rf"{pattern} (\S+)", text)]


def restarts(text: str) -> float:
    values = re.findall(r'holdfast_consumer_worker_restarts_total{worker="\d"} (\S+)', text)
    return sum(float(value) for value in values)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_workers_whose_parent_is_killed_end_by_themselves(shop: Path) -> None:
    """Nothing runs on unsupervised: they finish what is in hand and leave."""
    with consuming(shop, "--workers", "2") as process:
        publish(shop, "x")
        wait_until(lambda: set(handled(shop)) == {"x"}, deadline=180, what="it works")
        process.kill()
        wait_until(lambda: not any(alive(pid) for pid in pids(shop)), deadline=180, what="all gone")
    assert lag(shop) == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_signal_drains_and_the_second_ends_at_once(shop: Path, workers: int) -> None:
    """A handler that hangs is waited for until somebody insists; its message is not lost."""
    publish(shop, "hang")
    with consuming(shop, "--workers", str(workers)) as process:
        wait_until(lambda: list(shop.glob("began-hang-*")), deadline=180, what="it hangs")
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: "finishing what is in hand" in log_of(shop), deadline=180, what="drain")
        assert process.poll() is None
        insist(process)  # ends far below the 200 s of the drain
    assert lag(shop) == 1
    assert handled(shop) == []
    (shop / "go").touch()
    with consuming(shop, "--workers", str(workers)) as process:
        wait_until(lambda: lag(shop) == 0, deadline=180, what="the next one handles it")
        process.send_signal(signal.SIGINT)
        assert process.wait(150) == 0
    assert handled(shop) == ["hang"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_signal_that_is_sent_twice_at_once_still_drains(shop: Path, workers: int) -> None:
    """As `timeout`, terminals and some supervisors do it: nobody has insisted."""
    publish(shop, "hang")
    with consuming(shop, "--workers", str(workers)) as process:
        wait_until(lambda: list(shop.glob("began-hang-*")), deadline=180, what="it hangs")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: "finishing what is in hand" in log_of(shop), deadline=180, what="drain")
        (shop / "go").touch()
        assert process.wait(150) == 0
    assert "ending at once" not in log_of(shop)
    assert handled(shop) == ["hang"]
    assert lag(shop) == 0


def insist(process: subprocess.Popen[Any]) -> None:
    """Send SIGTERM again and again, as somebody does who does not want to wait any longer."""

    def ended() -> bool:
        process.send_signal(signal.SIGTERM)
        return process.poll() is not None

    wait_until(ended, deadline=100, what="its end")


SPINNING = """
import pathlib, sys
from holdfast.consumer import Consumer
from holdfast.testing import Fault, ScriptedBroker

def spin(step):
    pathlib.Path("spins").touch()
    while True:
        pass

broker = ScriptedBroker(Fault(point="poll", effect=spin))
broker.create_topic("orders")
consumer = Consumer(broker, group="billing")

@consumer.on("orders")
def bill(order: str) -> None: ...

consumer.run()
"""


def test_a_client_that_never_comes_back_does_not_keep_a_program_from_ending(tmp_path: Path) -> None:
    """Also where a program calls `run` itself; the log says where the client was."""
    process = subprocess.Popen(
        [sys.executable, "-c", SPINNING], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until((tmp_path / "spins").exists, deadline=60, what="the client spins")
        process.send_signal(signal.SIGTERM)
        insist(process)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 4
    assert "in spin" in said


def test_a_wrong_address_is_one_clear_sentence(shop: Path) -> None:
    """It shows before anything is consumed."""
    with consuming(shop, "--workers", "2", "--http", "nowhere") as process:
        assert process.wait(150) == 2
    assert "write host:port" in log_of(shop)
    assert "Traceback" not in log_of(shop)


def test_a_worker_that_cannot_even_be_started_is_tried_again_and_shown(tmp_path: Path) -> None:
    """The supervisor does not lose sight of it."""
    stopping = threading.Event()
    worker = Worker(0, [str(tmp_path / "nowhere")], stopping)
    keeper = threading.Thread(target=worker.keep)
    keeper.start()
    try:
        until(lambda: worker.restarts >= 2, "tried again")
        assert not worker.is_up
        assert "could not be started" in worker.report(60).why_ready
        assert not worker.report(60).ready
    finally:
        stopping.set()
        keeper.join(60)


# -- the verdicts themselves -------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path, postgres: Postgres) -> Iterator[Bench]:
    """Offer a broker and a database."""
    bench = Bench(tmp_path, postgres.database("consumer_vitals"))
    yield bench
    bench.close()


def test_a_consumer_whose_poll_thread_stands_still_is_not_alive(
    tmp_path: Path, postgres: Postgres
) -> None:
    """Alive while it polls; not, once it has not for stall_seconds, though the process is up."""
    stuck, gate = threading.Event(), threading.Event()

    def stall(step: FaultStep) -> Any:
        if stuck.is_set():
            assert gate.wait(180)
        return step.go()

    broker = connect(f"sqlite:///{tmp_path}/broker.db")
    scripted = ScriptedBroker(Fault(point="poll", effect=stall), broker=broker)
    bench = Bench(tmp_path, postgres.database("consumer_stall"), broker=scripted)
    consumer = bench.consumer()

    @consumer.on("orders")
    def handle(order: str) -> None: ...

    vitals = HealthChecks(consumer, stall_seconds=2)
    assert (vitals.alive().why, vitals.ready().why) == ("starting", "starting")
    with running(consumer):
        until(lambda: vitals.ready().good and vitals.alive().why == "polls", "alive and ready")
        stuck.set()
        until(lambda: "has not polled" in vitals.alive().why, "the stall is seen")
        assert not vitals.alive().good
        stuck.clear()
        gate.set()
        until(lambda: vitals.alive().good, "alive again")
    assert not vitals.ready().good
    bench.close()


@pytest.mark.parametrize("database", [True, False])
def test_a_partition_that_brings_nothing_though_nothing_keeps_it_is_told(
    tmp_path: Path, postgres: Postgres, caplog: pytest.LogCaptureFixture, *, database: bool
) -> None:
    """Its messages would wait for ever: not ready, a metric and one line, until it goes on.

    Without a database a broker that delays messages is believed: they are lag, and not due.
    """
    mute, is_mute = threading.Event(), threading.Event()

    def poll(step: FaultStep) -> Any:
        running = consumer.running
        assert running is not None
        source = running.poller.source
        if mute.is_set():
            source.pause(source.assignment())
            is_mute.set()
        else:
            source.resume(source.assignment())
        return step.go()

    broker = connect(f"sqlite:///{tmp_path}/broker.db", lease=2.0)
    scripted = ScriptedBroker(Fault(point="poll", effect=poll), broker=broker)
    url = postgres.database(f"consumer_standstill_{database}")
    bench = Bench(tmp_path, url, broker=scripted, database=database)
    consumer = bench.consumer(standstill_seconds=0.4)
    handled: list[str] = []

    @consumer.on("orders")
    def handle(order: str) -> None:
        handled.append(order)

    def stalled() -> float | None:
        name = "holdfast_consumer_stalled_partitions"
        return consumer.metrics.registry.get_sample_value(name)

    vitals = HealthChecks(consumer)
    with running(consumer), caplog.at_level(logging.WARNING):
        until(lambda: vitals.ready().good, "ready")
        bench.publish("one")
        until(lambda: bool(handled), "handled")
        mute.set()
        until(lambda: is_mute.is_set() and bench.lag == 0, "at rest, and mute")
        bench.publish("two")
        if database:
            words = "messages wait and none comes: orders/"
            until(lambda: words in vitals.ready().why, "not ready")
            until(lambda: stalled() == 1, "the metric tells it, too")
            assert vitals.alive().good
            words = "stands still: 1 messages wait"
            until(lambda: words in caplog.text, "so does the log")
            assert caplog.text.count(words) == 1
        else:
            assert consumer.running is not None
            poller = consumer.running.poller
            first = poller.last_poll
            until(lambda: poller.last_poll > first + 2, "several looks")
            assert (stalled(), vitals.ready().good) == (0, True)
        mute.clear()
        until(lambda: set(handled) == {"one", "two"} and vitals.ready().good, "it goes on")
        until(lambda: stalled() == 0, "nothing stands still")
    bench.close()


def test_what_is_in_hand_or_paused_does_not_stand_still(bench: Bench) -> None:
    """A slow handler and a full backlog keep their own partition, and are told in other ways."""
    consumer, gate = bench.consumer(standstill_seconds=0.2, backlog=2, workers=1), threading.Event()

    @consumer.on("orders")
    def handle(order: str) -> None:
        assert gate.wait(180)

    bench.publish(*(str(n) for n in range(10)))
    with running(consumer):
        until(lambda: consumer.running and consumer.running.lanes.running(), "it runs")
        assert consumer.running is not None
        poller = consumer.running.poller
        first = poller.last_poll
        until(lambda: poller.last_poll > first + 2, "many looks at the lag")
        assert (poller.stalls.now, bench.lag) == ({}, 10)
        gate.set()
        until(lambda: bench.lag == 0, "all is handled")


def test_a_consumer_that_waits_for_its_database_at_the_start_is_alive_and_not_ready(
    tmp_path: Path, private_server: PrivateServer
) -> None:
    """An outage is no reason to restart it, however long; it goes on by itself."""
    postgres = private_server(PostgresServer)
    bench = Bench(tmp_path, postgres.database("consumer_start"))
    consumer = bench.consumer(backoff=Backoff(first=0.02, ceiling=0.1))

    @consumer.on("orders")
    def handle(order: str) -> None: ...

    vitals = HealthChecks(consumer, stall_seconds=1)
    postgres.kill()
    with running(consumer):
        until(lambda: "the database is down" in vitals.ready().why, "not ready")
        assert consumer.running is not None
        poller = consumer.running.poller
        first = poller.pulse
        until(lambda: poller.pulse > first + 3 and vitals.alive().good, "alive for long")
        postgres.start()
        until(lambda: vitals.ready().good, "ready")
    bench.close()


def test_readiness_tells_of_dead_letters_that_cannot_be_written(bench: Bench) -> None:
    """Not ready while a letter waits for its store; ready again by itself."""
    consumer = bench.consumer(backoff=Backoff(first=0.02, ceiling=0.05))

    @consumer.on("orders")
    @dead_letter()
    def handle(order: str) -> None:
        raise PoisonMessage("bad")

    vitals = HealthChecks(consumer)
    with bench.engine.begin() as db:
        db.exec_driver_sql("ALTER TABLE holdfast_dlq_group RENAME TO hidden")
        db.exec_driver_sql("CREATE TABLE holdfast_dlq_group (fingerprint TEXT)")
    bench.publish("bad")
    with running(consumer):
        until(lambda: "dead letters cannot be written" in vitals.ready().why, "not ready")
        assert vitals.alive().good
        with bench.engine.begin() as db:
            db.exec_driver_sql("DROP TABLE holdfast_dlq_group")
            db.exec_driver_sql("ALTER TABLE hidden RENAME TO holdfast_dlq_group")
        until(lambda: vitals.ready().good, "ready again")
    assert len(bench.letters) == 1


def test_readiness_tells_of_the_kill_switch(bench: Bench) -> None:
    """A topic that is paused because too many of its messages die is not handled."""
    limit = CircuitPolicy(
        failure_rate=0.5, minimum_calls=3, window=LastCalls(5), open_seconds=600, permits=1
    )
    consumer = bench.consumer(dead_letter_limit=limit)

    @consumer.on("orders")
    @dead_letter()
    def handle(order: str, session: Session) -> None:
        raise PoisonMessage("bad")

    vitals = HealthChecks(consumer)
    for n in range(6):
        bench.publish("bad", key=f"k{n}")
    with running(consumer):
        until(lambda: "too many of its messages die" in vitals.ready().why, "not ready")
        assert vitals.alive().good
