"""Order by version: nothing overtakes, nothing is lost, nothing takes effect twice."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from holdfast import Message
from holdfast.errors import ConfigurationError, PoisonMessage, Remedy
from holdfast.idempotency import (
    GapTooWide,
    LastWriteWins,
    VersionConflict,
    VersionDecision,
    VersionGate,
    idempotent,
)
from holdfast.idempotency.schema import ahead, version
from holdfast.stored_message import from_bytes, to_bytes
from tests.integration.idempotency.conftest import effects, persistently, together

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Engine

gate = VersionGate("orders")


def event(entity: str, number: int) -> Message:
    return Message.new("orders", f"{entity}:{number}".encode(), key=entity)


def read(message: Message) -> tuple[str, int]:
    entity, _, number = (message.payload or b"").decode().partition(":")
    return entity, int(number)


def apply(session: Session, message: Message) -> VersionDecision:
    entity, number = read(message)
    admission = gate.admit(session, message, entity=entity, version=number)
    for ready in admission:
        session.execute(insert(effects).values(name=(ready.payload or b"").decode()))
    return admission


def deliver(engine: Engine, message: Message) -> VersionDecision:
    with Session(engine) as session, session.begin():
        return apply(session, message)


def names(engine: Engine) -> list[str]:
    with engine.connect() as db:
        return list(db.execute(select(effects.c.name).order_by(effects.c.id)).scalars())


def test_events_in_order_take_effect_as_they_come(database: Engine) -> None:
    for number in (1, 2, 3):
        assert deliver(database, event("a", number)).ready
    assert names(database) == ["a:1", "a:2", "a:3"]


def test_what_comes_ahead_waits_for_the_gap_to_close(database: Engine) -> None:
    assert deliver(database, event("a", 3)).is_ahead
    assert deliver(database, event("a", 2)).is_ahead
    assert deliver(database, event("b", 1)).ready
    assert deliver(database, event("a", 5)).is_ahead
    assert names(database) == ["b:1"]
    assert len(deliver(database, event("a", 1)).ready) == 3
    assert names(database) == ["b:1", "a:1", "a:2", "a:3"]
    assert len(deliver(database, event("a", 4)).ready) == 2
    assert names(database)[-2:] == ["a:4", "a:5"]
    with database.connect() as db:
        assert db.execute(select(ahead.c.version)).all() == []


def test_what_comes_late_is_dropped_and_counted(database: Engine) -> None:
    for number in (1, 2):
        deliver(database, event("a", number))
    assert deliver(database, event("a", 1)).is_stale
    assert deliver(database, event("a", 2)).is_stale
    assert names(database) == ["a:1", "a:2"]
    with database.connect() as db:
        row = db.execute(select(version.c.version, version.c.stale, version.c.last_stale)).one()
    assert tuple(row) == (2, 2, 2)


def test_a_rolled_back_effect_leaves_the_version_where_it_was(database: Engine) -> None:
    deliver(database, event("a", 2))
    with Session(database) as session:
        assert len(apply(session, event("a", 1)).ready) == 2
        session.rollback()
    assert names(database) == []
    assert len(deliver(database, event("a", 1)).ready) == 2
    assert names(database) == ["a:1", "a:2"]


def test_a_kept_message_comes_out_as_it_went_in(database: Engine) -> None:
    late = Message.new(
        "orders", b"a:2", key=b"\xff", headers=[("x", "1"), ("x", b"\xff"), ("n", None)]
    )
    deliver(database, late)
    assert deliver(database, event("a", 1)).ready[1] == late
    assert from_bytes(to_bytes(late)) == late


def test_a_message_that_is_ahead_may_come_twice(database: Engine) -> None:
    early = event("a", 2)
    assert deliver(database, early).is_ahead
    assert deliver(database, early).is_ahead
    with pytest.raises(VersionConflict, match=early.id), Session(database) as session:
        gate.admit(session, event("a", 99), entity="a", version=2)
    deliver(database, event("a", 1))
    assert names(database) == ["a:1", "a:2"]


def test_the_number_of_those_that_wait_is_bounded(database: Engine) -> None:
    narrow = VersionGate("narrow", most_ahead=3)
    with Session(database) as session, session.begin():
        for number in (2, 3, 4):
            narrow.admit(session, event("a", number), entity="a", version=number)
    with Session(database) as session, pytest.raises(GapTooWide, match="version 1") as caught:
        narrow.admit(session, event("a", 5), entity="a", version=5)
    assert caught.value.remedy is Remedy.RETRY
    with Session(database) as session, session.begin():
        assert len(narrow.admit(session, event("a", 1), entity="a", version=1).ready) == 4


def test_without_a_first_version_whatever_comes_first_begins(database: Engine) -> None:
    open_gate = VersionGate("late joiner", first=None)
    with Session(database) as session, session.begin():
        assert open_gate.admit(session, event("a", 7), entity="a", version=7).ready
        assert open_gate.admit(session, event("a", 8), entity="a", version=8).ready
        assert open_gate.admit(session, event("a", 6), entity="a", version=6).is_stale


def test_a_forgotten_entity_begins_anew(database: Engine) -> None:
    deliver(database, event("a", 1))
    deliver(database, event("a", 3))
    with Session(database) as session, session.begin():
        gate.forget(session, "a")
    assert deliver(database, event("a", 1)).ready
    assert deliver(database, event("a", 2)).ready
    assert names(database) == ["a:1", "a:1", "a:2"]


def test_projections_do_not_share_versions(database: Engine) -> None:
    other = VersionGate("invoices")
    deliver(database, event("a", 1))
    with Session(database) as session, session.begin():
        assert other.admit(session, event("a", 1), entity="a", version=1).ready


@pytest.mark.parametrize("server", ["mariadb", "postgres"])
def test_a_transaction_that_began_before_its_successor_came_still_lets_it_out(
    engines: Callable[[str], Engine], server: str
) -> None:
    """Version 3 is kept after 2 has read something: 2 sees it all the same, whatever the level."""
    engine = engines(server)
    deliver(engine, event("a", 1))
    with Session(engine) as early, early.begin():
        early.execute(select(effects)).all()  # from here on MariaDB reads the past
        assert deliver(engine, event("a", 3)).is_ahead
        apply(early, event("a", 2))
    assert names(engine) == ["a:1", "a:2", "a:3"]


def test_what_was_left_waiting_by_mistake_comes_out_with_the_next(database: Engine) -> None:
    """A successor whose turn has come is let out by whatever message of the entity is next."""
    deliver(database, event("a", 1))
    deliver(database, event("a", 3))
    with database.begin() as db:
        db.execute(update(version).values(version=2))  # as if 2 had not looked
    assert [read(one)[1] for one in deliver(database, event("a", 5))] == [3]
    deliver(database, event("a", 4))
    assert names(database) == ["a:1", "a:3", "a:4", "a:5"]


@pytest.mark.programs
def test_a_gate_refuses_a_level_that_hides_the_commits_of_others(
    engines: Callable[[str], Engine],
) -> None:
    """At REPEATABLE READ a kept message would be overlooked for ever."""
    strict = engines("postgres").execution_options(isolation_level="REPEATABLE READ")
    with pytest.raises(ConfigurationError, match="READ COMMITTED"):
        deliver(strict, event("a", 1))


def test_workers_that_race_keep_the_order_of_each_entity(database: Engine) -> None:
    """Shuffled, doubled and handled by several workers: each event once, in its order."""
    shuffled = random.Random(7)
    events = [event(entity, number) for entity in "abc" for number in range(1, 9)]
    events += events[::3]
    shuffled.shuffle(events)
    lock = threading.Lock()

    @idempotent
    def handle(message: Message, session: Session) -> None:
        apply(session, message)

    def attempt(message: Message) -> None:
        with Session(database) as session, session.begin():
            handle(message, session)

    def worker() -> None:
        while True:
            with lock:
                if not events:
                    return
                message = events.pop()
            persistently(partial(attempt, message))

    together(worker, worker, worker, worker)
    done = names(database)
    for entity in "abc":
        mine = [name for name in done if name.startswith(entity)]
        assert mine == [f"{entity}:{number}" for number in range(1, 9)]


def test_the_last_write_wins(database: Engine) -> None:
    prices = LastWriteWins("prices")
    with Session(database) as session, session.begin():
        admitted = [
            prices.admit(session, entity="a", version=number) for number in (5, 3, 5, 9, 8, 10)
        ]
        assert admitted == [True, False, False, True, False, True]
        assert prices.admit(session, entity="b", version=-4)


def test_of_writes_that_race_the_newest_remains(database: Engine) -> None:
    prices = LastWriteWins("raced")

    def write(number: int) -> None:
        with Session(database) as session, session.begin():
            if prices.admit(session, entity="a", version=number):
                session.execute(insert(effects).values(name=str(number)))

    together(*(partial(persistently, partial(write, number)) for number in (4, 9, 2, 7)))
    assert names(database)[-1] == "9"


@pytest.mark.parametrize(
    ("entity", "number"),
    [("", 1), (None, 1), ("a", "1"), ("a", True), ("a", 1.5), ("a", 2**63), ("a", None)],
)
def test_nonsense_is_poison(database: Engine, entity: Any, number: Any) -> None:
    with Session(database) as session, pytest.raises(PoisonMessage):
        gate.admit(session, event("a", 1), entity=entity, version=number)


def test_a_gate_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="projection"):
        VersionGate("")
    with pytest.raises(ConfigurationError, match="projection"):
        LastWriteWins("")
    with pytest.raises(ConfigurationError, match="most_ahead"):
        VersionGate("a", most_ahead=0)
