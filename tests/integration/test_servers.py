"""The test servers keep their promises: real answers, durable data, faults, and no leftovers."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import nats
import pika
import psycopg
import pymysql
import pytest
import redis
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from sqlalchemy import Engine, create_engine, inspect, text

from tests.servers import (
    Fleet,
    Kafka,
    MariaDB,
    Nats,
    Postgres,
    RabbitMQ,
    Redis,
    Server,
    ServerFailed,
    wait_until,
)
from tests.servers.fixtures import PrivateServer
from tests.servers.install import debezium_plugin
from tests.servers.lending import Lender
from tests.servers.ports import free_port
from tests.servers.processes import Command
from tests.servers.supervisor import descendants

_ROOT = Path(__file__).parents[2]
_DURABLE = pika.BasicProperties(delivery_mode=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kind of server, how a client stores ``kept`` durably, and how another reads it back."""

    kind: type[Server]
    store: Callable[[Any], object]
    read: Callable[[Any], str]


def _postgres_store(server: Postgres) -> None:
    with psycopg.connect(server.dsn) as connection:
        connection.execute("CREATE TABLE note AS SELECT 'kept' AS text")


def _postgres_read(server: Postgres) -> str:
    with psycopg.connect(server.dsn) as connection:
        row = connection.execute("SELECT text FROM note").fetchone()
    return str(row[0] if row else None)


def _mariadb_run(server: MariaDB, statement: str) -> str:
    login = pymysql.connect(host=server.host, port=server.port, user="root", database="test")
    with closing(login) as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        row = cursor.fetchone()
        connection.commit()
    return str(row[0] if row else None)


@contextmanager
def _redis_client(server: Redis) -> Iterator[redis.Redis]:
    with closing(redis.Redis.from_url(server.url, decode_responses=True)) as client:
        yield client


def _redis_store(server: Redis) -> None:
    with _redis_client(server) as client:
        client.set("note", "kept")


def _redis_read(server: Redis) -> str:
    with _redis_client(server) as client:
        return str(client.get("note"))


@contextmanager
def _rabbitmq_channel(server: RabbitMQ) -> Iterator[Any]:
    with closing(pika.BlockingConnection(pika.URLParameters(server.url))) as connection:
        yield connection.channel()


def _rabbitmq_store(server: RabbitMQ) -> None:
    with _rabbitmq_channel(server) as channel:
        channel.queue_declare("notes", durable=True, arguments={"x-queue-type": "quorum"})
        channel.confirm_delivery()
        channel.basic_publish("", "notes", b"kept", _DURABLE, mandatory=True)
    server.wait_for_quorum_queue("notes")


def _rabbitmq_read(server: RabbitMQ) -> str:
    with _rabbitmq_channel(server) as channel:
        # Consuming waits until the quorum queue elected itself leader; a plain get would not.
        _method, _properties, body = next(channel.consume("notes"))
    return str(body.decode())


async def _nats_store(server: Nats) -> None:
    async with await nats.connect(server.url) as client:
        await client.jetstream().add_stream(name="notes", subjects=["notes"])
        await client.jetstream().publish("notes", b"kept")


async def _nats_read(server: Nats) -> str:
    async with await nats.connect(server.url) as client:
        message = await client.jetstream().get_msg("notes", 1)
    return (message.data or b"").decode()


def _kafka_store(server: Kafka) -> None:
    admin = AdminClient({"bootstrap.servers": server.address})
    admin.create_topics([NewTopic("notes", 1)])["notes"].result(30)
    producer = Producer({"bootstrap.servers": server.address})
    producer.produce("notes", b"kept")
    assert producer.flush(30) == 0


def _kafka_read(server: Kafka) -> str:
    settings = {"bootstrap.servers": server.address, "group.id": "readers"}
    with closing(Consumer(settings)) as consumer:
        consumer.assign([TopicPartition("notes", 0, 0)])
        record = consumer.poll(30)
    return (record.value() or b"").decode() if record else "nothing"


CASES = [
    Case(kind=Postgres, store=_postgres_store, read=_postgres_read),
    Case(
        kind=MariaDB,
        store=lambda server: _mariadb_run(server, "CREATE TABLE note SELECT 'kept'"),
        read=lambda server: _mariadb_run(server, "SELECT * FROM note"),
    ),
    Case(kind=Redis, store=_redis_store, read=_redis_read),
    Case(kind=RabbitMQ, store=_rabbitmq_store, read=_rabbitmq_read),
    Case(
        kind=Nats,
        store=lambda server: asyncio.run(_nats_store(server)),
        read=lambda server: asyncio.run(_nats_read(server)),
    ),
    Case(kind=Kafka, store=_kafka_store, read=_kafka_read),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind.name)
def test_what_a_server_accepted_survives_a_kill_and_a_pause_only_delays_it(
    case: Case, private_server: PrivateServer
) -> None:
    """One life of each server, since starting the big ones twice would take most of a minute."""
    server = private_server(case.kind)
    port, first_pid = server.port, server.pid
    case.store(server)

    server.kill()
    assert not _alive(first_pid)
    server.start()
    assert (server.port, case.read(server)) == (port, "kept")

    server.pause()
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(case.read, server)
        with pytest.raises(TimeoutError):
            reading.result(0.3)
        server.resume()
        assert reading.result(90) == "kept"


QUICK = [case for case in CASES if case.kind in (Postgres, MariaDB, Redis, Nats)]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.kind.name)
def test_an_orderly_restart_keeps_the_data(case: Case, private_server: PrivateServer) -> None:
    """Each stops by its own signal, well before the deadline that would fail the test."""
    server = private_server(case.kind)
    case.store(server)
    server.restart()
    assert case.read(server) == "kept"


def test_a_server_is_started_once_per_run_and_shared(servers: Fleet, redis: Redis) -> None:
    """Whoever asks again gets the same process."""
    assert servers.shared(Redis) is redis
    assert redis.answers()


def test_a_private_server_is_not_the_shared_one(
    redis: Redis, private_server: PrivateServer
) -> None:
    """Killing it hurts nobody else."""
    private_server(Redis).kill()
    assert redis.answers()


@contextmanager
def _engine(url: str) -> Iterator[Engine]:
    engine = create_engine(url)
    yield engine
    engine.dispose()


@pytest.mark.parametrize("kind", [Postgres, MariaDB], ids=lambda kind: kind.name)
def test_a_database_is_fresh_each_time_it_is_asked_for(
    kind: type[Postgres | MariaDB], servers: Fleet
) -> None:
    """Asking again drops what an earlier test left."""
    server = servers.shared(kind)
    with _engine(server.database("fresh")) as engine, engine.begin() as connection:
        connection.execute(text("CREATE TABLE leftover (id INTEGER)"))
    with _engine(server.database("fresh")) as engine:
        assert inspect(engine).get_table_names() == []


class _Misconfigured(Redis):
    def command(self) -> Command:
        """Return a command which the server refuses."""
        return Command(argv=(*super().command().argv, "--no-such-option", "x"))


def test_a_server_that_does_not_start_says_why_and_its_log_is_kept(tmp_path: Path) -> None:
    """The failure must be understood from the output of the run alone."""
    fleet = Fleet(tmp_path / "logs")
    with pytest.raises(ServerFailed, match="no-such-option"):
        fleet.open(_Misconfigured)
    logs = list(fleet.logs.iterdir())
    assert len(logs) == 2  # it was tried twice
    assert all("no-such-option" in log.read_text() for log in logs)


_OWNER = """
import os, sys, time
import tests.servers
server = getattr(tests.servers, sys.argv[1])()
heir = os.fork() if sys.argv[2:] else None
if heir != 0:
    print(server.log_path, heir or 0, flush=True)
    server.start()
time.sleep(600)  # pacing: until it is killed
"""


@contextmanager
def _owner(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], Path, int]]:
    """Run a process that starts a server; yield it, the server's log and the owner's fork."""
    argv = [sys.executable, "-c", _OWNER, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            log, heir = process.stdout.readline().split()
            yield process, Path(log), int(heir)
        finally:
            process.kill()


def _wait_for_line(log: Path, line: str) -> None:
    wait_until(lambda: log.exists() and line in log.read_text(errors="replace"), line, 90)


def _alive(pid: int) -> bool:
    return Path("/proc", str(pid)).exists()


@pytest.mark.parametrize(
    ("kind", "line"),
    [("Postgres", "ready to accept connections"), ("RabbitMQ", "Starting RabbitMQ")],
    ids=["postgres", "rabbitmq"],
)
def test_nothing_survives_the_sigkill_of_the_owner(kind: str, line: str) -> None:
    """Not even what left the server's process group: backends, ports, the Erlang port mapper."""
    with _owner(kind) as (owner, log, _):
        _wait_for_line(log, line)
        pids = list(descendants(owner.pid))
        assert len(pids) > 2
        owner.kill()
        wait_until(lambda: not any(map(_alive, pids)), f"the end of {pids}")
        wait_until(lambda: not log.parent.exists(), f"the removal of {log.parent}")


def test_a_forked_child_that_outlives_the_owner_does_not_keep_the_server_alive() -> None:
    """It holds the owner's pipe open, so the end of the pipe alone would not do."""
    with _owner("Redis", "fork") as (owner, log, heir):
        try:
            _wait_for_line(log, "Ready to accept connections")
            owner.kill()
            wait_until(lambda: not log.parent.exists(), f"the removal of {log.parent}")
            assert _alive(heir)
        finally:
            os.kill(heir, signal.SIGKILL)


def test_the_workers_of_a_run_share_one_server(tmp_path: Path) -> None:
    """Each gets the same process on demand, and none may hurt it or close it."""
    owner = Fleet(tmp_path / "logs")
    lender = Lender([Redis], owner.shared)
    workers = [Fleet(tmp_path / "logs", lender.address, [Redis]) for _ in range(3)]
    try:
        with ThreadPoolExecutor() as pool:
            lent = list(pool.map(lambda worker: worker.shared(Redis), workers))
        assert {server.pid for server in lent} == {owner.shared(Redis).pid}
        assert owner.report == [owner.report[0]]
        with pytest.raises(RuntimeError, match="use private_server"):
            lent[0].kill()
        workers[0].close_shared()
        assert lent[1].answers()
    finally:
        lender.close()
        owner.close_shared()


class _Moody(Redis):
    moods: ClassVar[list[str]] = []

    def command(self) -> Command:
        """Return a command that fails as often as there are moods left."""
        argv = super().command().argv
        return Command(argv=(*argv, "--no-such-option", "x") if self.moods.pop() else argv)


def test_a_server_that_fails_at_its_first_start_gets_a_second_chance(tmp_path: Path) -> None:
    """Its port may have been taken meanwhile; the log of the failure is kept and told."""
    fleet = Fleet(tmp_path / "logs")
    _Moody.moods[:] = ["", "bad"]
    server = fleet.open(_Moody)
    assert server.answers()
    assert "did not start at first" in fleet.report[0]
    assert len(list(fleet.logs.iterdir())) == 1
    _Moody.moods[:] = ["", "bad"]
    server.restart()
    assert server.answers()
    fleet.close(server)


def test_a_port_is_claimed_for_as_long_as_its_process_lives() -> None:
    """Neither another run nor another worker chooses the port of a server that is down."""
    script = "from tests.servers import ports; ports.free_port(); print(ports._is_claimed({}))"
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script.format(free_port())],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "False\n", done.stderr


def test_what_maven_leaves_where_it_runs_is_not_left_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a project, Maven writes its marks to a folder named `${project.basedir}`."""
    maven = tmp_path / "bin" / "mvn"
    maven.parent.mkdir()
    maven.write_text(
        "#!/bin/sh\nmkdir '${project.basedir}'\n"
        'for word; do case "$word" in -DoutputDirectory=*) mkdir "${word#*=}";; esac; done\n'
    )
    maven.chmod(0o755)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("PATH", f"{maven.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    assert debezium_plugin().is_dir()
    assert list(here.iterdir()) == []
