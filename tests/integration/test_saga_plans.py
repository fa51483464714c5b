"""No statement of the engine looks at the sagas that have ended, however many there are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import event, insert, text
from sqlalchemy.orm import Session  # noqa: TC002 - steps are looked at by annotation

from holdfast.db import open_database
from holdfast.sagas import Saga
from holdfast.sagas.alerts import SagaAlerts
from holdfast.sagas.operations import SagaOperations
from holdfast.sagas.schema import saga as saga_table
from tests.orchestrating import FAST, OrderState, ReserveStock, Shop, effects

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Postgres

FINISHED = 100_000
LARGE = {"holdfast_saga", "holdfast_saga_step", "holdfast_saga_history", "holdfast_saga_timer"}
_SETUP = """
LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; SET auto_explain.log_format = json;
SET auto_explain.log_level = notice
"""
_FILL = (
    """
    INSERT INTO holdfast_saga (id, type, version, hash, business_key, active_key, status, progress,
        data, start_digest, revision, started_at, changed_at, ended_at)
    SELECT 'done-' || n, CASE n % 2 WHEN 0 THEN 'full' ELSE 'other' END, 1, 'hash', 'key-' || n,
        NULL, CASE n % 5 WHEN 0 THEN 'compensated' ELSE 'completed' END, '{}', '{}', 'digest', 9,
        n, n, n
    FROM generate_series(1, :count) n
    """,
    """
    INSERT INTO holdfast_saga_step (saga_id, step, direction, attempt, status, began_at, ended_at)
    SELECT 'done-' || n, 'reserve', 'do', 1, 'done', n, n FROM generate_series(1, :count) n
    """,
    """
    INSERT INTO holdfast_saga_history (saga_id, seq, at, event, effects)
    SELECT 'done-' || n, 1000, n, '{}', '[]' FROM generate_series(1, :count) n
    """,
    """
    INSERT INTO holdfast_saga_timer (saga_id, step, direction, attempt, kind, type, version, due,
        tries, until, epoch)
    SELECT 'far-' || n, 'reserve', 'do', 1, 'timeout', 'full', 1, 1e11 + n, 0, 0, 0
    FROM generate_series(1, :count) n
    """,
)


def full() -> Saga[OrderState]:
    """Return a saga with a step of each kind."""
    saga = Saga("full", state=OrderState, deadline="1h")

    @saga.local(compensate=None)
    def note(state: OrderState, session: Session) -> OrderState:
        session.execute(insert(effects).values(what="noted", owner=state.order, amount=1))
        return msgspec.structs.replace(state, notes=("noted",))

    @saga.signal(timeout="1d")
    def approved(state: OrderState, by: str) -> OrderState:
        return state

    @saga.command("inventory", compensate=None, timeout="30s", retry=FAST)
    def reserve(state: OrderState) -> ReserveStock:
        return ReserveStock(state.order)

    return saga


@pytest.fixture(scope="module")
def filled(postgres: Postgres) -> str:
    """Return a database in which many sagas have ended."""
    url = postgres.database("saga_plans")
    shop = Shop(url, full())
    with shop.engine.begin() as db:
        for statement in _FILL:
            db.execute(text(statement), {"count": FINISHED})
    with shop.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        db.exec_driver_sql("VACUUM ANALYZE")
    shop.close()
    return url


class Plans:
    """What PostgreSQL says that it did."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def watch(self, engine: Any, mode: str) -> None:
        """Have every statement of *engine* explained."""

        def connected(connection: Any, _record: object) -> None:
            connection.execute(_SETUP)
            connection.execute(f"SET plan_cache_mode = {mode}")
            connection.commit()
            connection.prepare_threshold = 0
            connection.add_notice_handler(self._noticed)

        event.listen(engine, "connect", connected)
        engine.dispose()

    def _noticed(self, notice: Any) -> None:
        said = notice.message_primary or ""
        if "plan:" in said:
            self.found.append(json.loads(said.partition("plan:")[2]))

    def scanned(self) -> set[str]:
        """Return which large tables were read from end to end, and by what."""
        return {
            f"{node['Relation Name']}: {plan['Query Text'][:200]}"
            for plan in self.found
            for node in _nodes(plan["Plan"])
            if node["Node Type"] == "Seq Scan" and node.get("Relation Name") in LARGE
        }

    def sorted(self) -> set[str]:
        """Return what was put in order after it was read, instead of read in order."""
        return {
            plan["Query Text"][:200]
            for plan in self.found
            for node in _nodes(plan["Plan"])
            if "Sort" in node["Node Type"]
        }

    def tables(self) -> set[str]:
        """Return which of the large tables were asked at all."""
        asked = {
            node.get("Relation Name", "") for plan in self.found for node in _nodes(plan["Plan"])
        }
        return asked & LARGE


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for inner in node.get("Plans", ()):
        yield from _nodes(inner)


class Pager:
    """A hook."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def tell(self, alert: dict[str, Any]) -> None:
        self.heard.append(alert)


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_no_statement_reads_what_has_ended(
    request: pytest.FixtureRequest, filled: str, mode: str
) -> None:
    """From the start of sagas to their end: replies, local steps, timers, alerts, metrics."""
    saga = full()
    shop = Shop(filled, saga)
    request.addfinalizer(shop.close)
    plans = Plans()
    plans.watch(shop.engine, mode)
    names = [f"{mode}-{number}" for number in range(5)]
    for name in names:
        shop.start(saga, OrderState(name), name)
    assert shop.worker.step() >= len(names)  # what another mode has left is due as well
    for name in names:
        shop.sagas.signal(name, "approved", "eve")
    commands = [one for one in shop.published() if mode.encode() in (one.payload or b"")]
    assert len(commands) == len(names)
    shop.deliver(*commands[:-1])
    shop.deliver(*shop.published())
    with shop.engine.begin() as db:
        db.execute(text("UPDATE holdfast_saga SET deadline_at = 1 WHERE business_key = :key"),
                   {"key": names[-1]})  # fmt: skip
    pager = Pager()
    SagaAlerts(shop.engine, [pager]).run_once()
    assert SagaOperations(shop.engine).backlog().overdue_by_saga["full"] >= len(pager.heard)
    with shop.engine.begin() as db:
        db.execute(text("UPDATE holdfast_saga_timer SET due = 1 WHERE saga_id = :saga "
                        "AND kind = 'timeout'"),
                   {"saga": commands[-1].headers.text("x-saga-id")})  # fmt: skip
    assert shop.worker.step() >= 1
    statuses = [shop.result(name).status for name in names]
    assert statuses.count("completed") == len(names) - 1
    assert plans.tables() == LARGE
    assert plans.scanned() == set()


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("status", [None, "completed", "parked"])
def test_a_page_of_the_list_is_read_by_an_index(
    request: pytest.FixtureRequest, filled: str, status: str | None, mode: str
) -> None:
    """Of a hundred thousand sagas no more is read than is shown."""
    shop = Shop(filled, full())
    request.addfinalizer(shop.close)
    plans = Plans()
    plans.watch(shop.engine, mode)
    operations = SagaOperations(shop.engine)
    page = operations.list(status=status, limit=10)
    if page:
        operations.list(status=status, after=page[-1].id, limit=10)
    assert bool(page) == (status != "parked")
    assert "holdfast_saga" in plans.tables()
    assert (plans.scanned(), plans.sorted()) == (set(), set())


def test_no_index_holds_what_changes_with_every_transition(filled: str) -> None:
    """So PostgreSQL leaves the indexes alone, and pages have room for the new version of a row."""
    changing = {"progress", "data", "revision", "changed_at", "reason", "version", "hash"}
    for index in saga_table.indexes:
        assert not changing.intersection(index.columns.keys()), index.name
    engine = open_database(filled)
    with engine.connect() as db:
        options = db.execute(
            text("SELECT reloptions FROM pg_class WHERE relname = 'holdfast_saga'")
        ).scalar_one()
    engine.dispose()
    assert options == ["fillfactor=70"]
