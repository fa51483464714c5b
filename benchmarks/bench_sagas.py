"""Sagas: transitions against DBOS, with a million finished ones, and how soon a command is out."""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import dbos_peer
import msgspec
from sqlalchemy import text
from sqlalchemy.orm import Session

from figures import Figure, Goal, compare
from holdfast import Message, new_id, outbox
from holdfast.brokers import connect
from holdfast.consumer import Consumer
from holdfast.consumer import create_tables as create_consumer_tables
from holdfast.db.engine import open_database
from holdfast.outbox import LeaseEngine, Outbox, Relay
from holdfast.sagas import Saga, Sagas, create_tables
from tests.servers import Postgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.engine import Engine

    from holdfast.ports import Broker

SAGAS, STEPS = 200, 10
FLOWS = 60
FINISHED = 1_000_000
EVENTS, WARM = 150, 20
_DBOS = (
    f"PostgreSQL, {SAGAS} sagas of {STEPS} steps; DBOS {{}} runs {FLOWS} workflows of {STEPS} "
    "empty steps side by side in a process of its own"
)


class Order(msgspec.Struct, frozen=True):
    """The state of the sagas."""

    order: str


class Do(msgspec.Struct):
    """A command."""

    order: str


def commanding() -> Saga[Order]:
    """Return a saga of commands, one after the other."""
    saga = Saga("commands", state=Order)
    for number in range(STEPS):

        def step(state: Order) -> Do:
            return Do(state.order)

        step.__name__ = f"step_{number}"
        saga.command("work", compensate=None)(step)
    return saga


def local() -> Saga[Order]:
    """Return a saga of local steps, one after the other."""
    saga = Saga("locals", state=Order)
    for number in range(STEPS):

        def step(state: Order, session: Session) -> Order:
            return state

        step.__name__ = f"step_{number}"
        saga.local(compensate=None)(step)
    return saga


COMMANDS, LOCALS = commanding(), local()


def figures() -> Iterator[Figure]:
    """Measure on a PostgreSQL of our own."""
    with Postgres() as postgres:
        peer = postgres.database("bench_dbos").replace("+psycopg", "")
        empty, full = (_opened(postgres, name) for name in ("bench_sagas", "bench_finished"))
        for name, transitions in (("command", commands_answered), ("local", locals_run)):
            yield compare(
                f"sagas: {name} steps / DBOS steps",
                ours=lambda transitions=transitions: transitions(empty),  # type: ignore[misc]
                peer=lambda: dbos_peer.measured(peer, workflows=FLOWS, steps=STEPS),
                unit="steps/s",
                goal=Goal(at_least=4.0),
                detail=_DBOS.format(_version()),
                rounds=3,
            )
        yield compare(
            "sagas: commit → command published / bare outbox event",
            ours=lambda: latency(empty, _replied),
            peer=lambda: latency(empty, _added),
            unit="ms (p50)",
            goal=Goal(at_most=1.5),
            detail=f"PostgreSQL, lease engine, memory broker, {EVENTS} one at a time, from the "
            "return of COMMIT",
            rounds=3,
        )
        finish_many(full)
        for name, transitions in (("command", commands_answered), ("local", locals_run)):
            yield compare(
                f"sagas: {name} steps with {FINISHED:,} finished sagas / none",
                ours=lambda transitions=transitions: transitions(full),  # type: ignore[misc]
                peer=lambda transitions=transitions: transitions(empty),  # type: ignore[misc]
                unit="steps/s",
                goal=Goal(at_least=0.9),
                detail="PostgreSQL, analysed; finished sagas have an attempt and a line of history",
                rounds=15,
            )
        for engine in (empty, full):
            engine.dispose()


def _version() -> str:
    from importlib.metadata import version

    return version("dbos")


def _opened(postgres: Postgres, name: str) -> Engine:
    engine = open_database(postgres.database(name))
    create_consumer_tables(engine)
    outbox.create_tables(engine)
    create_tables(engine)
    return engine


def started(engine: Engine, saga: Saga[Order], count: int = SAGAS) -> list[str]:
    """Start sagas, and return their ids."""
    with Session(engine) as session, session.begin():
        keys = [new_id() for _ in range(count)]
        return [saga.start(session, Order(key), key=key).id for key in keys]


def reply(saga_id: str, number: int) -> Message:
    """Return the participant's answer to a step."""
    headers = {
        "x-saga-id": saga_id, "x-saga-type": "commands", "x-saga-step": f"step_{number}",
        "x-saga-direction": "do", "x-saga-attempt": "1", "x-saga-answer": "done",
    }  # fmt: skip
    return Message.new(COMMANDS.replies, b"null", key=saga_id, headers=headers)


def commands_answered(engine: Engine) -> float:
    """Return the transitions per second of replies, the whole consumer included."""
    ids = started(engine, COMMANDS)
    broker = connect("memory:")
    broker.create_topic(COMMANDS.replies, partitions=4)
    consumer = Consumer(broker, group="sagas", database=engine, workers=2, batch=500, backlog=5000)
    Sagas(engine, COMMANDS).attach(consumer)
    replies = [[reply(saga_id, number) for saga_id in ids] for number in range(STEPS)]
    thread = threading.Thread(target=consumer.run)
    with closing(broker.sink()) as sink:
        thread.start()
        began = time.perf_counter()
        for number in range(STEPS):
            sink.publish(replies[number])
            while consumer.tally.handled < (number + 1) * SAGAS:
                time.sleep(0.001)
        took = time.perf_counter() - began
        consumer.stop()
        thread.join()
    _ended(engine, "commands")
    return SAGAS * STEPS / took


def locals_run(engine: Engine) -> float:
    """Return the transitions per second of local steps."""
    started(engine, LOCALS)
    worker = Sagas(engine, LOCALS).worker()
    began = time.perf_counter()
    while worker.step():
        pass
    took = time.perf_counter() - began
    _ended(engine, "locals")
    return SAGAS * STEPS / took


def _ended(engine: Engine, name: str) -> None:
    """Make sure that everything was done, and leave the tables as they were."""
    with engine.begin() as db:
        open_ = text(
            "SELECT count(*) FROM holdfast_saga WHERE type = :t AND active_key IS NOT NULL"
        )
        assert db.execute(open_, {"t": name}).scalar_one() == 0
        for table in ("step", "history"):
            db.execute(
                text(
                    f"DELETE FROM holdfast_saga_{table} s USING holdfast_saga a "  # noqa: S608
                    "WHERE a.id = s.saga_id AND a.type = :t"
                ),
                {"t": name},
            )
        db.execute(text("DELETE FROM holdfast_saga WHERE type = :t"), {"t": name})
        db.execute(text("DELETE FROM holdfast_outbox"))


_FINISHED = (
    """
    INSERT INTO holdfast_saga (id, type, version, hash, business_key, status, progress, data,
        start_digest, revision, started_at, changed_at, ended_at)
    SELECT '00000000-0000-7000-8000-' || lpad(n::text, 12, '0'),
        CASE n % 2 WHEN 0 THEN 'commands' ELSE 'locals' END || '_done', 1, 'hash', 'key-' || n,
        CASE n % 5 WHEN 0 THEN 'compensated' ELSE 'completed' END, :progress, '{"order":"x"}',
        'digest', 11, n, n, n
    FROM generate_series(1, :count) n
    """,
    """
    INSERT INTO holdfast_saga_step (saga_id, step, direction, attempt, status, began_at, ended_at)
    SELECT id, 'step_0', 'do', 1, 'done', started_at, ended_at FROM holdfast_saga
    """,
    """
    INSERT INTO holdfast_saga_history (saga_id, seq, at, event, effects)
    SELECT id, 1000, ended_at, '{"type":"Started"}', '[]' FROM holdfast_saga
    """,
)


def finish_many(engine: Engine, count: int = FINISHED) -> None:
    """Fill the tables with sagas that have ended."""
    steps = {f"step_{number}": {"status": "done", "attempt": 1} for number in range(STEPS)}
    progress = msgspec.json.encode({"steps": steps, "phase": "completed"})
    with engine.begin() as db:
        for statement in _FINISHED:
            parameters: dict[str, Any] = {"count": count, "progress": progress}
            names = [name for name in parameters if f":{name}" in statement]
            db.execute(text(statement), {name: parameters[name] for name in names})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        db.exec_driver_sql("VACUUM ANALYZE")
        db.exec_driver_sql("CHECKPOINT")  # or the server writes the rows while it is measured


class Published:
    """A relay and a reader: says when a message of a key was out."""

    def __init__(self, engine: Engine) -> None:
        self.broker: Broker = connect("memory:")
        self.broker.create_topic("work", partitions=1)
        self._relay = Relay(LeaseEngine(engine, self.broker.sink()))
        self._source = self.broker.source(["work"], group="reader")
        self.seen: dict[bytes, float] = {}
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._relay.run, self._read)]

    def _read(self) -> None:
        while not self._stopped.is_set():
            for delivery in self._source.poll(100, 0.2):
                self.seen[delivery.message.key or b""] = time.perf_counter()
                self._source.accept([delivery])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Publish and read while this is open."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._relay.stop()
            self._stopped.set()
            for thread in self._threads:
                thread.join()
            self._source.close()
            self.broker.close()


def latency(engine: Engine, commit: Callable[[Engine, str], None]) -> float:
    """Return the median of the milliseconds from the end of *commit* until its message is out."""
    ids = started(engine, COMMANDS, EVENTS + WARM)
    with engine.begin() as db:
        db.execute(text("DELETE FROM holdfast_outbox"))
    published = Published(engine)
    found: list[float] = []
    with published.running():
        for saga_id in ids:
            commit(engine, saga_id)
            done, key = time.perf_counter(), saga_id.encode()
            while key not in published.seen:
                time.sleep(0.0002)
            found.append((published.seen[key] - done) * 1000)
            time.sleep(0.004)
    with engine.begin() as db:
        for table in ("timer", "step", "history"):
            db.execute(text(f"DELETE FROM holdfast_saga_{table}"))  # noqa: S608
        db.execute(text("DELETE FROM holdfast_saga"))
    return statistics.median(found[WARM:])


def _replied(engine: Engine, saga_id: str) -> None:
    with Session(engine) as session, session.begin():
        _sagas(engine).take_replies(session, [reply(saga_id, 0)])


def _added(engine: Engine, saga_id: str) -> None:
    with Session(engine) as session, session.begin():
        _OUTBOX.add(session, Do(saga_id), topic="work", key=saga_id)


_OUTBOX = Outbox(source="bench")
_KEPT: dict[Engine, Sagas] = {}


def _sagas(engine: Engine) -> Sagas:
    return _KEPT.setdefault(engine, Sagas(engine, COMMANDS))
