"""Inserts of a batch's handlers go together, and nobody can tell but by the clock."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table, event, func, insert, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session  # noqa: TC002 - handlers ask for it by annotation

from holdfast import Message, current_message
from holdfast.consumer import Batches
from holdfast.consumer.attempt.inserts import can_wait
from holdfast.dlq import dead_letter
from holdfast.idempotency import idempotent
from tests.consuming import Bench, effects, running, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.servers import Postgres

COUNT = 20
_COUNT = "SELECT count(*) FROM effects"
own = MetaData()
once = Table("once", own, Column("what", String(100), primary_key=True))
told = Table(
    "told",
    own,
    Column("seq", Integer, primary_key=True),
    Column("who", String(100), default=lambda: current_message().id),  # type: ignore[union-attr]
    Column("what", String(100)),
)


@pytest.fixture(params=["postgres", "sqlite"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a database; on SQLite an error does not end a transaction."""
    if request.param == "postgres":
        server: Postgres = request.getfixturevalue("postgres")
        url = server.database("consumer_inserts")
    else:
        url = f"sqlite:///{tmp_path}/effects.db"
    bench = Bench(tmp_path, url)
    own.create_all(bench.engine)
    yield bench
    bench.close()


def handled(bench: Bench, handler: Callable[..., None], count: int = COUNT) -> list[str]:
    """Have *handler* handle so many messages in batches; return the inserts that were said."""
    said: list[str] = []

    def hear(_db: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO") and "holdfast" not in statement:
            said.append(statement)

    event.listen(bench.engine, "before_cursor_execute", hear)
    bench.send(*(Message.new("orders", str(n).encode(), key=f"k{n}") for n in range(count)))
    consumer = bench.consumer()
    batch = Batches(size=count, wait=0.3)
    consumer.on("orders", batch=batch)(dead_letter()(idempotent(handler)))
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    return said


def rows(bench: Bench, table: Table) -> list[Any]:
    """Return the rows of *table*."""
    with bench.engine.connect() as db:
        return list(db.execute(select(table)))


def test_the_inserts_of_a_batch_are_one_statement(bench: Bench) -> None:
    """Twenty handlers add a row each by far fewer statements; every row is there once."""

    def add(order: int, session: Session) -> None:
        session.execute(insert(effects), {"what": str(order)})

    assert len(handled(bench, add)) <= COUNT / 4
    assert sorted(map(int, bench.effects)) == list(range(COUNT))


def test_whatever_is_asked_sees_the_inserts_before_it(bench: Bench) -> None:
    """A query, a scalar, a statement on the connection, a savepoint: each finds what was added."""
    wrong: list[tuple[str, int, int]] = []
    count = select(func.count()).select_from(effects)
    ways: list[Callable[[Session], Any]] = [
        lambda session: session.execute(count).scalar_one(),
        lambda session: session.scalar(count),
        lambda session: session.scalars(count).one(),
        lambda session: session.query(func.count(effects.c.seq)).scalar(),
    ]
    last: list[Callable[[Session], Any]] = [
        lambda session: session.connection().execute(count).scalar_one(),
        lambda session: session.connection().exec_driver_sql(_COUNT).scalar(),
    ]

    def add(order: int, session: Session) -> None:
        before = ways[order % 4](session)
        session.execute(insert(effects), {"what": str(order)})
        session.execute(insert(effects), {"what": str(order)})
        way = (last if order == COUNT - 1 else ways)[order % len(last)]
        if (after := way(session)) != before + 2:
            wrong.append((str(order), before, after))

    handled(bench, add)
    assert wrong == []
    assert len(bench.effects) == 2 * COUNT


def test_what_a_savepoint_takes_back_is_gone(bench: Bench) -> None:
    """Of an insert before a savepoint, in it, and after it, only the one inside is undone."""

    def add(order: int, session: Session) -> None:
        session.execute(insert(effects), {"what": f"before {order}"})
        with suppress(ValueError), session.begin_nested():
            session.execute(insert(effects), {"what": f"inside {order}"})
            raise ValueError
        session.execute(insert(effects), {"what": f"after {order}"})

    handled(bench, add)
    assert len(bench.effects) == 2 * COUNT
    assert not any(what.startswith("inside") for what in bench.effects)


def test_what_a_savepoint_takes_back_on_the_connection_is_gone(bench: Bench) -> None:
    """Whoever asks for the connection inside a savepoint gets it with the savepoint begun."""

    def add(order: int, session: Session) -> None:
        session.connection()
        savepoint = session.begin_nested()
        session.connection().execute(insert(effects), {"what": "gone"})
        savepoint.rollback()
        session.connection().execute(insert(effects), {"what": str(order)})

    handled(bench, add)
    assert sorted(map(int, bench.effects)) == list(range(COUNT))


def test_the_order_of_statements_is_kept(bench: Bench) -> None:
    """Inserts of two tables and a deletion in turn end as if each had been sent at once."""

    def add(order: int, session: Session) -> None:
        session.execute(insert(effects), {"what": f"a {order}"})
        session.execute(insert(once), {"what": f"b {order}"})
        session.execute(effects.delete().where(effects.c.what == f"a {order}"))
        session.execute(insert(effects), {"what": f"c {order}"})

    handled(bench, add)
    assert sorted(bench.effects) == sorted(f"c {n}" for n in range(COUNT))
    assert len(rows(bench, once)) == COUNT


def test_an_insert_that_fails_takes_only_its_own_message_along(bench: Bench) -> None:
    """The one that the database refuses becomes a dead letter, the others take effect."""

    def add(order: int, session: Session) -> None:
        session.execute(insert(once), {"what": "same" if order in (7, 8) else str(order)})

    handled(bench, add)
    assert len(rows(bench, once)) == COUNT - 1
    assert len(bench.letters) == 1


def test_an_error_that_another_handler_swallows_loses_nobody_s_effect(bench: Bench) -> None:
    """What was kept fails in the next handler, which forgives errors: nothing may commit then."""

    def add(order: int, session: Session) -> None:
        name = "same" if order in (3, 11) else str(order)
        session.execute(insert(once), {"what": name})
        with suppress(IntegrityError):
            session.execute(text("SELECT 1"))
        session.execute(insert(effects), {"what": str(order)})

    handled(bench, add)
    kept = {row.what for row in rows(bench, once)}
    dead = {letter.message_id for letter in bench.letters}
    assert len(kept) + len(dead) == COUNT
    assert len(bench.effects) == len(kept)


def test_a_result_that_is_looked_at_is_the_real_one(bench: Bench) -> None:
    """A handler may ask for the key of the row that it has added, at once or at its end."""
    keys: dict[int, str] = {}

    def add(order: int, session: Session) -> None:
        session.execute(insert(effects), {"what": f"a {order}"})
        found: Any = session.execute(insert(effects), {"what": f"b {order}"})
        session.execute(insert(effects), {"what": f"c {order}"})
        keys[found.inserted_primary_key[0]] = f"b {order}"

    handled(bench, add)
    assert {row.seq: row.what for row in rows(bench, effects) if row.what[0] == "b"} == keys
    assert len(bench.effects) == 3 * COUNT


def test_a_result_that_is_looked_at_too_late_runs_the_batch_again(bench: Bench) -> None:
    """It cannot be told any more: nothing is committed, and the handlers run without this."""
    seen: dict[int, str] = {}

    def add(order: int, session: Session) -> None:
        found: Any = session.execute(insert(effects), {"what": str(order)})
        session.execute(text("SELECT 1"))
        with suppress(Exception):
            seen[found.inserted_primary_key[0]] = str(order)

    handled(bench, add)
    assert {row.seq: row.what for row in rows(bench, effects)} == seen
    assert sorted(map(int, bench.effects)) == list(range(COUNT))
    assert bench.letters == []


def test_a_row_may_be_used_again_by_its_handler(bench: Bench) -> None:
    """What is kept is the row as it was when it was said."""

    def add(order: int, session: Session) -> None:
        row = {"what": f"a {order}"}
        session.execute(insert(effects), row)
        row["what"] = f"b {order}"
        session.execute(insert(effects), row)

    handled(bench, add)
    assert sorted(bench.effects) == sorted(f"{x} {n}" for n in range(COUNT) for x in "ab")


def test_a_default_that_looks_at_the_message_sees_its_own(bench: Bench) -> None:
    """Such a row cannot wait for others."""
    assert not can_wait(told, ("what",))
    assert can_wait(told, ("what", "who"))
    ids: dict[str, str] = {}

    def add(order: int, session: Session, message: Message) -> None:
        ids[str(order)] = message.id
        session.execute(insert(told), {"what": str(order)})

    handled(bench, add)
    assert {row.what: row.who for row in rows(bench, told)} == ids
