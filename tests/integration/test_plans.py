"""The statements of the hot path are cheap on tables that nobody has analysed yet.

PostgreSQL knows nothing of a fresh table: it takes any `name = 'x'` for one row in two hundred.
Where all rows have the same group and owner, a plan that looks cheap compares each of them with
each element of a list. So the plans that really ran are looked at, on tables as a burst leaves
them, for every way in which the server may plan: for the values, or once for all.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, func, insert, literal, literal_column, select, text

from holdfast import Message, PoisonMessage, Transient
from holdfast.brokers import connect
from holdfast.consumer import Attempt, Consumer  # noqa: TC001 - handlers ask by annotation
from holdfast.consumer.parking.store import ParkedKey, ParkedMessages
from holdfast.consumer.schema import create_tables, held, held_key
from holdfast.db.engine import open_database
from holdfast.dlq import dead_letter
from holdfast.dlq.store.schema import message as letters
from holdfast.idempotency import idempotent
from holdfast.idempotency.schema import attempt as attempts
from holdfast.idempotency.schema import inbox, start
from holdfast.outbox import Event, LeaseEngine, Outbox, Relay
from holdfast.outbox import create_tables as create_outbox
from holdfast.outbox.schema import outbox as events
from holdfast.retry import Backoff, retry
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy import Table
    from sqlalchemy.engine import Connection, Engine

    from tests.servers import MariaDB, Postgres

ROWS = 20_000
_MOST_REMOVED = 1_000
_UNINDEXED = re.compile(r"ANY \(|dlq_id\)::text = ")
"""A filter that an index should have answered: one of a list, or the one row of a unique id."""
_SETUP = """
LOAD 'auto_explain';
SET auto_explain.log_min_duration = 0; SET auto_explain.log_analyze = on;
SET auto_explain.log_timing = off; SET auto_explain.log_format = json;
SET auto_explain.log_level = notice
"""


class Plans:
    """What a server really did for each statement, from its own words."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self.is_listening = False

    def watch(self, engine: Engine, mode: str) -> None:
        """Have every statement of *engine* explained from now on."""

        def connected(connection: Any, _record: object) -> None:
            connection.execute(_SETUP)
            connection.execute(f"SET plan_cache_mode = {mode}")
            connection.commit()
            connection.prepare_threshold = 0
            connection.add_notice_handler(self._noticed)

        event.listen(engine, "connect", connected)

    def _noticed(self, notice: Any) -> None:
        said = notice.message_primary or ""
        if self.is_listening and "plan:" in said:
            self.found.append(json.loads(said.partition("plan:")[2]))

    def seen(self) -> Counter[str]:
        """Return how often each table was asked, by the first word of the statement."""
        counted: Counter[str] = Counter()
        for plan in self.found:
            verb = plan["Query Text"].split()[0].upper()
            for table in set(re.findall(r"holdfast_\w+", plan["Query Text"])):
                counted[f"{verb} {table}"] += 1
        return counted

    def bad(self) -> list[str]:
        """Return what is compared row by row with a list, or row by row with other rows."""
        wrong: dict[tuple[str, str], str] = {}
        for plan in self.found:
            for node in _nodes(plan["Plan"]):
                loops = node.get("Actual Loops", 0)
                removed = loops * sum(
                    node.get(f"Rows Removed by {what}", 0) for what in ("Filter", "Join Filter")
                )
                condition = f"{node.get('Filter', '')} {node.get('Join Filter', '')}"
                touched = removed + loops * node.get("Actual Rows", 0)
                by_list = _UNINDEXED.search(condition) and removed > _MOST_REMOVED
                if by_list or touched > 3 * ROWS:
                    place = f"{node['Node Type']} on {node.get('Relation Name')}"
                    wrong[place, plan["Query Text"][:80]] = (
                        f"{place}: {touched} rows, {condition[:200]} in {plan['Query Text'][:300]}"
                    )
        return list(wrong.values())


class Reads:
    """How many rows MariaDB read for each statement, by its own count."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self.is_listening = False

    def watch(self, engine: Engine) -> None:
        """Have the rows of every statement of *engine* counted from now on."""

        def before(
            db: Any, _cursor: object, _sql: str, _args: object, context: Any, _: bool
        ) -> None:
            context.rows_read = _rows_read(db)

        def after(db: Any, _cursor: object, sql: str, _args: object, context: Any, _: bool) -> None:
            if self.is_listening:
                self.found.append((_rows_read(db) - context.rows_read, sql))

        event.listen(engine, "before_cursor_execute", before)
        event.listen(engine, "after_cursor_execute", after)

    def bad(self) -> list[str]:
        """Return the statements that read far more rows than there are."""
        return [f"{rows} rows in {sql[:300]}" for rows, sql in self.found if rows > 5 * ROWS]


def _rows_read(db: Any) -> int:
    with db.connection.driver_connection.cursor() as cursor:
        cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
        return sum(int(count) for _, count in cursor.fetchall())


def _most(plan: dict[str, Any]) -> int:
    """Return the most rows that one step of *plan* looked at."""
    counts = ("Actual Rows", "Rows Removed by Filter")
    return max(sum(node.get(count, 0) for count in counts) for node in _nodes(plan["Plan"]))


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


@pytest.fixture(params=["force_custom_plan", "force_generic_plan"])
def mode(request: pytest.FixtureRequest) -> str:
    """How the server plans a prepared statement: for the values, or once for all of them."""
    return str(request.param)


def fill(engine: Engine, table: Table, **values: Any) -> None:
    """Fill *table* as a burst does, with *values* of the number n and those of its first row."""
    numbers: Any = func.generate_series(1, ROWS).table_valued("n").render_derived()
    if engine.dialect.name == "mysql":
        numbers = select(literal_column("seq").label("n")).select_from(text(f"seq_1_to_{ROWS}"))
        numbers = numbers.subquery()
    with engine.begin() as db:
        first = db.execute(select(table).limit(1)).first()
        given: dict[str, Any] = {} if first is None else dict(first._mapping)
        given.pop("seq", None)
        given.update(values)
        wanted = [
            (value(numbers.c.n) if callable(value) else literal(value, table.c[name].type)).label(
                name
            )
            for name, value in given.items()
        ]
        rows = select(*wanted).select_from(numbers)
        db.execute(insert(table).from_select(list(given), rows))


def never_analysed(engine: Engine) -> None:
    """Keep the server from getting to know the tables by itself."""
    names = select(text("tablename")).select_from(text("pg_tables")).where(
        text("tablename LIKE 'holdfast%'")
    )  # fmt: skip
    with engine.begin() as db:
        for name in db.execute(names).scalars().all():
            db.execute(text(f'ALTER TABLE "{name}" SET (autovacuum_enabled = false)'))


def _text(prefix: str) -> Any:
    return lambda n: func.concat(prefix, n)


def _hash(prefix: str) -> Any:
    return lambda n: func.md5(func.concat(prefix, n))


def burst(engine: Engine, consumer: Consumer) -> None:
    """Leave every table of the consumer as a burst would, all of it of this very process."""
    mysql = engine.dialect.name == "mysql"
    binary = func.unhex if mysql else lambda text: func.decode(text, "hex")
    mine = {"consumer": f"{consumer.group}/{name_of(consumer)}"}
    key = {"grp": consumer.group, "topic": "orders", "key_hash": _hash("k")}
    fill(engine, inbox, message=lambda n: binary(func.md5(func.concat(n))))
    fill(engine, letters, dlq_id=_hash("d"), message_id=_text("m"), key_hash=_hash("k"))
    fill(engine, letters, dlq_id=_hash("c"), message_id=_text("c"), key_hash=_hash("c"),
         state="confirmed")  # fmt: skip
    fill(engine, held_key, **key, dlq_id=_hash("d"), parked=1, since=0.0, until=0.0)
    fill(engine, held, **key, message_id=_text("h"), partition=0, position="1", headers=b"\x90",
         attempt=1, parked_at=0.0)  # fmt: skip
    fill(engine, start, **mine, owner=consumer.owner, message_id=_text("s"), alone=0, at=0.0)
    fill(engine, attempts, **mine, message_id=_text("a"), failed=1, released=0, crashed=0,
         suspected=0, changed_at=4e9)  # fmt: skip


def name_of(consumer: Consumer) -> str:
    """Return the name of the consumer's handler."""
    (route,) = consumer._routes.values()
    return route.name


def strain(bench: Bench, batch: int | None, plans: Plans | Reads) -> None:
    """Have a consumer work among the leavings of a burst, and *plans* listen to it."""

    def made(patience: float) -> Consumer:
        consumer = bench.consumer(patience=patience, workers=2, dead_letter_limit=None)

        @consumer.on("orders", batch=batch)
        @dead_letter()
        @retry(Backoff(first=0.2, ceiling=0.2, attempts=3))
        @idempotent
        def handle(order: str, attempt: Attempt) -> None:
            if order == "poison":
                raise PoisonMessage("bad")
            if order == "flaky" and attempt.number == 1:
                raise Transient("not yet")

        return consumer

    bench.publish("poison", key="x")
    bench.publish("good", key="a")
    with running(made(patience=5.0)) as first:
        until(lambda: first.tally.dead_lettered and first.tally.handled, "one row of each")
    consumer = made(patience=0.01)
    burst(bench.engine, consumer)
    kinds = ["poison" if n % 100 == 99 else "flaky" if n % 20 == 7 else "good" for n in range(300)]
    messages = [
        Message.new("orders", kind.encode(), key=f"key {n % 90}") for n, kind in enumerate(kinds)
    ]
    bench.send(*messages, *messages[:20])
    plans.is_listening = True
    with running(consumer):
        until(lambda: bench.lag == 0, "everything settled")
        until(lambda: consumer.tally.dead_lettered >= 3, "the poison dead")
        until(lambda: consumer.tally.handled >= 250, "the rest handled")
    plans.is_listening = False


@pytest.mark.parametrize("batch", [None, 200], ids=["one by one", "in batches"])
def test_a_consumer_compares_no_list_with_every_row_of_a_fresh_table(
    postgres: Postgres, tmp_path: Path, mode: str, batch: int | None
) -> None:
    """Also while it fails, retries, dead-letters and parks."""
    bench = Bench(tmp_path, postgres.database(f"plans_{mode}_{batch}"), broker=connect("memory:"))
    never_analysed(bench.engine)
    plans = Plans()
    plans.watch(bench.engine, mode)
    bench.engine.dispose()
    strain(bench, batch, plans)
    seen = plans.seen()
    bench.close()
    assert not plans.bad(), "\n".join(plans.bad())
    for what in (
        "DELETE holdfast_start", "SELECT holdfast_attempt", "DELETE holdfast_attempt",
        "SELECT holdfast_held_key", "SELECT holdfast_dlq_message", "SELECT holdfast_inbox",
    ):  # fmt: skip
        assert seen[what], f"{what} was not among {sorted(seen)}"


@pytest.mark.parametrize("batch", [None, 200], ids=["one by one", "in batches"])
def test_a_consumer_reads_no_table_of_mariadb_again_for_each_element_of_a_list(
    mariadb: MariaDB, tmp_path: Path, batch: int | None
) -> None:
    """The same where the server guesses by looking into the index."""
    bench = Bench(tmp_path, mariadb.database(f"plans_{batch}"), broker=connect("memory:"))
    reads = Reads()
    reads.watch(bench.engine)
    strain(bench, batch, reads)
    bench.close()
    assert reads.found
    assert not reads.bad(), "\n".join(reads.bad())


def test_a_relay_compares_no_list_with_every_row_of_a_fresh_outbox(
    postgres: Postgres, mode: str
) -> None:
    """It reads and deletes a backlog that came at once, by its shards and by its numbers."""
    engine = open_database(postgres.database(f"plans_outbox_{mode}"))
    create_outbox(engine)
    never_analysed(engine)
    plans = Plans()
    plans.watch(engine, mode)
    engine.dispose()
    outbox = Outbox()
    with engine.begin() as db:
        outbox.add_all(db, [Event(body={}, topic="orders", key=f"k{n}") for n in range(ROWS)])
    sink = connect("memory:").sink()
    plans.is_listening = True
    assert Relay(LeaseEngine(engine, sink, batch=500)).run_once() == ROWS
    plans.is_listening = False
    engine.dispose()
    assert not plans.bad(), "\n".join(plans.bad())
    assert plans.seen()[f"DELETE {events.name}"]
    assert plans.seen()[f"SELECT {events.name}"]


def test_a_look_at_one_held_key_reads_no_other_key_of_the_group(
    postgres: Postgres, mode: str
) -> None:
    """Also by a plan that was made when nothing was held; the index of what is due tempts to it."""
    engine = open_database(postgres.database(f"plans_held_{mode}"))
    create_tables(engine)
    never_analysed(engine)
    plans = Plans()
    plans.watch(engine, mode)
    engine.dispose()
    parked, key = ParkedMessages("g"), ParkedKey("orders", "0" * 64)

    def look(db: Connection) -> None:
        parked.among(db, "orders", [key.key_hash])
        parked.held_by(db, key)
        parked.hold(db, key, dlq_id="d", note="")
        parked.release(db, key)
        parked.let_go(db, key)

    with engine.connect() as db:
        look(db)
        db.commit()
        fill(engine, held_key, grp="g", topic="orders", key_hash=_hash("k"), due=0.0, parked=1,
             since=0.0, until=0.0)  # fmt: skip
        plans.is_listening = True
        look(db)
        db.commit()
        plans.is_listening = False
    engine.dispose()
    asked = [plan for plan in plans.found if "holdfast_held_key" in plan["Query Text"]]
    assert len(asked) >= 5
    assert [plan["Query Text"] for plan in asked if _most(plan) > 10] == []
