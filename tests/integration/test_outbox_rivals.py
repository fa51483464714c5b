"""Relays, operators and writers at each other's throats: nobody fails, nothing is lost."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pymysql
import pytest
from sqlalchemy import event, func, select

from holdfast import Message, MessageTooLarge
from holdfast.brokers import connect
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.db.transactions import transact
from holdfast.outbox import Event, LeaseEngine, LeaseTerms, Outbox, create_tables
from holdfast.outbox.parked import EventEdit, EventNotParked, ParkedKeys, ParkedSelection
from holdfast.outbox.relay.leases import ShardLeaseLost
from holdfast.outbox.relay.monitoring import Backlog
from holdfast.outbox.schema import audit, delayed, outbox, parked
from holdfast.ports import Published
from holdfast.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from sqlalchemy.engine import Connection, Engine

SECONDS = 3.0
BAD = {b"bad-0", b"bad-1"}
WHY = Operator(actor="rival", reason="hammering")


class Picky:
    """Refuses the events of bad keys while told to, and remembers the rest."""

    def __init__(self) -> None:
        self.caps = connect("memory:").caps
        self.taken: list[Message] = []
        self.refuses = True

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        refused = Published(MessageTooLarge(2, 1))
        bad = [self.refuses and message.key in BAD for message in messages]
        self.taken += [m for m, is_bad in zip(messages, bad, strict=True) if not is_bad]
        return [refused if is_bad else Published() for is_bad in bad]

    def close(self) -> None: ...


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Open a fresh database with the outbox tables."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        name = f"rivals_{zlib.crc32(request.node.name.encode())}"
        url = request.getfixturevalue(request.param).database(name)
    engine = open_database(url)
    create_tables(engine)
    yield engine
    engine.dispose()


class Arena:
    """Runs everybody at once and keeps what they failed with."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.over = threading.Event()
        self.failures: list[BaseException] = []
        self.staged: list[int] = []
        self._threads: list[threading.Thread] = []

    def enter(self, act: Callable[[], None]) -> None:
        def run() -> None:
            try:
                while not self.over.is_set():
                    act()
            except BaseException as error:  # noqa: BLE001 - the test shows it
                self.failures.append(error)

        self._threads.append(threading.Thread(target=run))

    def go(self) -> None:
        for thread in self._threads:
            thread.start()
        self.over.wait(SECONDS)
        self.over.set()
        for thread in self._threads:
            thread.join(60)

    def write(self) -> None:
        def work(db: Connection) -> None:
            keys = ["bad-0", "bad-1", *(f"good-{n}" for n in range(6))]
            events = [Event(body={"n": n}, topic="t", key=key) for n, key in enumerate(keys)]
            Outbox().add_all(db, [*events, Event(body=b"", topic="t", key="late", delay=0.01)])

        transact(self.engine, work)
        self.staged.append(9)


class Relaying:
    """The steps of one relay; its leases may be lost, its writes may not fail."""

    def __init__(self, engine: Engine, sink: Picky, lease: float = 0.2) -> None:
        self._moving = LeaseEngine(engine, sink, terms=LeaseTerms(seconds=lease), batch=10)

    def step(self) -> None:
        with suppress(ShardLeaseLost):
            self._moving.step()

    def close(self) -> None:
        with suppress(ShardLeaseLost):
            self._moving.close()


def operator(engine: Engine, seed: int) -> Callable[[], None]:
    """Return the acts of one operator, on whatever is parked."""
    parked_keys, chance = ParkedKeys(engine), random.Random(seed)

    def act() -> None:
        topic = ParkedSelection(topic="t", key=chance.choice(["bad-0", "bad-1"]))
        with suppress(EventNotParked):
            found = parked_keys.events(topic, limit=3)
            if found:
                event = str(chance.choice(found).seq)
                match chance.randrange(3):
                    case 0:
                        parked_keys.release(topic, WHY)
                    case 1:
                        parked_keys.edit(event, EventEdit(payload=b'{"n": 0}'), WHY)
                    case _:
                        parked_keys.skip(event, WHY)
        time.sleep(0.002)  # pacing: operators are people

    return act


@pytest.mark.parametrize("engine", ["mariadb"], indirect=True)
def test_rivals_never_fail_each_other_and_lose_nothing(engine: Engine) -> None:
    """Three relays that keep losing leases, two operators, two writers, a monitor."""
    arena, sink = Arena(engine), Picky()
    relays = [Relaying(engine, sink) for _ in range(3)]
    for relay in relays:
        arena.enter(relay.step)
    for seed in range(2):
        arena.enter(operator(engine, seed))
    for _ in range(2):
        arena.enter(arena.write)
    backlog = Backlog(engine)
    arena.enter(lambda: bool(backlog.measure()) and None)
    arena.go()
    for relay in relays:
        relay.close()
    assert not arena.failures, [repr(error) for error in arena.failures]
    sink.refuses = False
    last = Relaying(engine, sink, lease=30)

    def drained() -> bool:
        with suppress(EventNotParked):
            ParkedKeys(engine).release(ParkedSelection(topic="t"), WHY)
        last.step()
        with engine.connect() as db:
            return not any(
                db.execute(select(func.count()).select_from(table)).scalar()
                for table in (outbox, delayed, parked)
            )

    wait_until(drained, deadline=60, what="everything left the tables")
    last.close()
    with engine.connect() as db:
        acts = select(func.count()).where(audit.c.action == "outbox.skip")
        skipped = db.execute(acts).scalar_one()
    assert len({message.id for message in sink.taken}) + skipped == sum(arena.staged)


class Victims:
    """Makes the database choose every writing statement as a deadlock's victim, once."""

    def __init__(self, engine: Engine) -> None:
        self.chosen: set[str] = set()
        for moment in ("do_execute", "do_executemany"):
            event.listen(engine, moment, self._choose)

    def _choose(self, _cursor: object, statement: str, _values: object, context: Any) -> None:
        words = statement.upper()
        writes = words.startswith(("INSERT", "UPDATE", "DELETE")) or " FOR " in words
        if writes and statement not in self.chosen:
            self.chosen.add(statement)
            raise _deadlock(context.dialect.name)


def _deadlock(dialect: str) -> Exception:
    if dialect == "postgresql":
        return psycopg.errors.DeadlockDetected("deadlock detected")
    if dialect == "sqlite":
        busy = sqlite3.OperationalError("database is locked")
        busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
        return busy
    return pymysql.err.OperationalError(1213, "Deadlock found when trying to get lock")


def test_every_write_survives_being_the_victim_of_a_deadlock(engine: Engine) -> None:
    """Leases, deletion, parking, promotion and the operators' acts are each begun again."""
    with engine.begin() as db:
        listed = [Event(body={"n": n}, topic="t", key=f"bad-{n % 2}") for n in range(4)]
        Outbox().add_all(db, [*listed, Event(body=b"", topic="t", key="late", delay=0.0)])
    victims, sink, operators = Victims(engine), Picky(), ParkedKeys(engine)
    moving = LeaseEngine(engine, sink, terms=LeaseTerms(seconds=60))
    wait_until(lambda: moving.step() and len(sink.taken) == 1, what="the delayed event is out")
    first, second = (operators.waiting()[n].first for n in range(2))
    operators.edit(str(first), EventEdit(payload=b'{"n": 7}'), WHY)
    operators.skip(str(second), WHY)
    operators.release(ParkedSelection(topic="t"), WHY)
    sink.refuses = False
    wait_until(lambda: moving.step() and len(sink.taken) == 4, what="the released ones are out")
    moving.close()
    assert [m.payload for m in sink.taken if m.key == b"bad-0"] == [b'{"n": 7}', b'{"n":2}']
    assert [m.payload for m in sink.taken if m.key == b"bad-1"] == [b'{"n":3}']
    assert len(victims.chosen) >= 12, victims.chosen
    with engine.connect() as db:
        assert db.execute(select(func.count()).select_from(audit)).scalar() == 3
