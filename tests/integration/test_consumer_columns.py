"""Many rows that go as one text for each column are the rows that they would be anyhow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Enum,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    event,
    insert,
    select,
)
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from holdfast import Message
from holdfast.consumer import Batches
from holdfast.consumer.attempt.columns import inserted_by_columns
from holdfast.db.engine import open_database
from holdfast.dlq import dead_letter
from holdfast.idempotency import idempotent
from tests.consuming import Bench, effects, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Connection, Engine

    from tests.servers import Postgres


class Loud(TypeDecorator[str]):
    """Changes what it stores."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: object) -> str | None:
        """Return it in capitals."""
        return None if value is None else value.upper()


class Base(DeclarativeBase):
    """What is mapped here."""


class Order(Base):
    """A mapped table, one attribute of which has another name than its column."""

    __tablename__ = "mapped"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]
    said: Mapped[str] = mapped_column("what")


own = MetaData()
plain = Table(
    "plain", own,
    Column("seq", Integer, primary_key=True),
    Column("Odd name", Integer),
    Column("big", BigInteger),
    Column("what", String(40)),
    Column("text", Text, unique=True),
    Column("ratio", Double),
    Column("done", Boolean),
)  # fmt: skip
special = Table(
    "special", own,
    Column("seq", Integer, primary_key=True),
    Column("loud", Loud),
    Column("kind", Enum("a", "b", name="kind")),
    Column("what", String),
    Column("also", String),
)  # fmt: skip
filled = Table(
    "filled", own,
    Column("seq", Integer, primary_key=True),
    Column("what", String),
    Column("by", String, default="us"),
)  # fmt: skip
TEXTS = [
    "", "plain", "a\nb\tc\r", "\\N \\ \\\\", "{1,2}", "it's \"so\"", "NULL", "null", "%s %(x)s :y",
    "ü€😀", " blank ", "\x01\x7f",
]  # fmt: skip


@pytest.fixture
def engine(postgres: Postgres) -> Iterator[Engine]:
    """Offer a database with the tables."""
    engine = open_database(postgres.database("consumer_columns"))
    own.create_all(engine)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def rows_of_all_kinds() -> list[dict[str, Any]]:
    """Return rows with whatever may go so."""
    numbers = [0, -1, 1, 2**31 - 1, -(2**31), 7]
    ratios = [0.1, -0.0, 1e300, 5e-324, math.inf, 1 / 3]
    return [
        {
            "Odd name": numbers[n % 6], "big": n * 2**55, "what": one, "text": f"{n}{one}",
            "ratio": ratios[n % 6], "done": n % 2 == 0,
        }
        for n, one in enumerate(TEXTS)
    ]  # fmt: skip


def stored(db: Connection, table: Table = plain) -> list[dict[str, Any]]:
    """Return the rows of *table* in the order in which they were numbered."""
    found = db.execute(select(table).order_by(table.c.seq)).mappings()
    return [{name: value for name, value in row.items() if name != "seq"} for row in found]


def test_rows_are_stored_in_order_as_they_were_given(engine: Engine) -> None:
    """Whatever a text holds, and however large a number is."""
    rows = rows_of_all_kinds()
    with engine.begin() as db:
        assert inserted_by_columns(db, insert(plain), rows)
        assert stored(db) == rows


def test_a_mapped_class_may_name_its_columns_otherwise(engine: Engine) -> None:
    """Its rows are left to the ORM; those of a class that does not go by columns."""
    with engine.begin() as db:
        assert not inserted_by_columns(db, insert(Order), [{"number": 1, "said": "a"}] * 2)
        assert not inserted_by_columns(db, insert(Order), [{"number": 1, "what": "a"}] * 2)
        assert inserted_by_columns(db, insert(Order.__table__), [{"number": 1, "what": "a"}] * 2)


@pytest.mark.parametrize(
    ("table", "row"),
    [
        (plain, {"what": None}),
        (plain, {"what": "a\x1fb"}),
        (plain, {"what": "\x1e"}),
        (plain, {"what": 1}),
        (plain, {"big": "1"}),
        (plain, {"big": True}),
        (plain, {"nothing": "x"}),
        (plain, {"what": "x" * (5 << 20)}),
        (special, {"loud": "x"}),
        (special, {"kind": "a"}),
        (filled, {"what": "x"}),
    ],
)
def test_what_would_be_more_than_it_says_is_refused(
    engine: Engine, table: Table, row: dict[str, Any]
) -> None:
    """Nulls, values that the column changes, defaults of Python's: they go as they always did."""
    with engine.begin() as db:
        assert not inserted_by_columns(db, insert(table), [row, row])
        assert stored(db, table) == []


def test_one_value_of_another_kind_is_enough(engine: Engine) -> None:
    """A column is looked at as a whole."""
    rows = [{"what": "a", "also": "b"}, {"what": "a", "also": None}]
    with engine.begin() as db:
        assert not inserted_by_columns(db, insert(special), rows)
        assert stored(db, special) == []


def test_whoever_listens_to_statements_hears_those_that_were_said(engine: Engine) -> None:
    """A listener of `before_execute` may change them."""
    event.listen(engine, "before_execute", lambda *_: None)
    with engine.begin() as db:
        assert not inserted_by_columns(db, insert(special), [{"what": "a"}] * 2)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"what": "x" * 41}, DataError),
        ({"Odd name": 2**31}, DataError),
        ({"text": "same"}, IntegrityError),
        ({"what": "a\0b"}, DataError),
    ],
)
def test_what_the_database_refuses_is_the_error_that_it_always_was(
    engine: Engine, row: dict[str, Any], kind: type[DBAPIError]
) -> None:
    """Its class says what is to be done about the message."""
    for send in (inserted_by_columns, lambda db, statement, rows: db.execute(statement, rows)):
        with pytest.raises(kind), engine.begin() as db:
            send(db, insert(plain), [row, row])


# -- under a consumer ------------------------------------------------------------------


@pytest.fixture(params=["postgres", "sqlite"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a database."""
    url = f"sqlite:///{tmp_path}/effects.db"
    if request.param == "postgres":
        server: Postgres = request.getfixturevalue("postgres")
        url = server.database("consumer_columns_run")
    bench = Bench(tmp_path, url)
    own.create_all(bench.engine)
    yield bench
    bench.close()


def run(bench: Bench, handler: Any, count: int) -> list[str]:
    """Have *handler* handle lists of messages; return the inserts that were said."""
    said: list[str] = []

    def hear(_db: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO") and "holdfast" not in statement:
            said.append(statement)

    event.listen(bench.engine, "before_cursor_execute", hear)
    bench.send(*(Message.new("orders", str(n).encode(), key=f"k{n}") for n in range(count)))
    consumer = bench.consumer()
    consumer.on("orders", batch=Batches(size=count, wait=0.3, whole=True))(
        dead_letter()(idempotent(handler))
    )
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    return said


def test_a_handler_of_lists_may_look_at_what_came_of_its_rows(bench: Bench) -> None:
    """The result is the real one, asked for at once or after other inserts."""
    found: list[bool] = []

    def add(orders: list[int], session: Session) -> None:
        result: Any = session.execute(insert(effects), [{"what": str(n)} for n in orders])
        session.execute(insert(effects), [{"what": f"more {n}"} for n in orders])
        found.append(result.is_insert)

    run(bench, add, 20)
    assert found
    assert all(found)
    assert sorted(bench.effects) == sorted([f"{x}{n}" for n in range(20) for x in ("", "more ")])


def test_rows_of_lists_are_those_that_were_said_whatever_becomes_of_them(bench: Bench) -> None:
    """A handler may use its list again, and add to it."""

    def add(orders: list[int], session: Session) -> None:
        rows = [{"what": f"a {n}"} for n in orders]
        session.execute(insert(effects), rows)
        for row in rows:
            row["what"] = row["what"].replace("a", "b")
        session.execute(insert(effects), rows)
        rows.clear()

    said = run(bench, add, 20)
    assert len(said) <= 20 / 4
    assert sorted(bench.effects) == sorted(f"{x} {n}" for n in range(20) for x in "ab")


def test_a_row_that_is_refused_takes_only_its_own_message_along(bench: Bench) -> None:
    """The others of its list take effect, each once."""

    def add(orders: list[int], session: Session) -> None:
        rows = [{"text": "same" if n in (7, 8) else str(n)} for n in orders]
        session.execute(insert(plain), rows)

    run(bench, add, 20)
    with bench.engine.connect() as db:
        assert len(stored(db)) == 19
    assert len(bench.letters) == 1
