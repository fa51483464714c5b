"""How dead letters were closed: replayed, discarded or fixed by hand, counted for good."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

from holdfast.db.audit import Operator, entries
from holdfast.db.transactions import committed
from holdfast.dlq import DeadLetterStore, close
from holdfast.dlq.gauges import StoreGauges
from holdfast.dlq.metrics import MOST_ERRORS, DlqMetrics
from holdfast.dlq.operations import DeadLetterAdmin
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.store.retention import prune
from holdfast.dlq.store.rows import CONFIRMED, DISCARDED, PARKED
from holdfast.dlq.store.stats import stats
from holdfast.testing import VirtualClock
from tests.dead_letters import KINDS, emptied, failed, letter, opened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

ADA = Operator(actor="ada", reason="booked by hand")
ALL = Selection(consumer_group="billing")


@pytest.fixture(scope="module", params=KINDS)
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Open a database of each kind."""
    made = opened(request, tmp_path_factory.mktemp("closings"))
    yield made
    made.dispose()


@pytest.fixture
def engine(database: Engine) -> Engine:
    """Return the database, empty."""
    return emptied(database)


def closings(engine: Engine) -> dict[str, float]:
    """Return what is exported, by kind."""
    found = [
        family
        for family in StoreGauges(engine, every=0).collect()
        if family.name == "holdfast_dlq_closed"
    ]
    return {sample.labels["kind"]: sample.value for family in found for sample in family.samples}


def test_closings_are_counted_by_kind_whoever_made_them(engine: Engine) -> None:
    """By the store, so that what a command did counts; what is pruned stays counted."""
    clock = VirtualClock()
    made = [letter(number) for number in range(8)]
    DeadLetterStore(engine).put_all(made)
    ids = [one.dlq_id for one in made]
    assert closings(engine) == {"replayed": 0, "discarded": 0, "fixed": 0}
    admin = DeadLetterAdmin(engine, clock=clock)
    assert admin.close(ids[:1], DISCARDED, ADA, selection=ALL).count == 1
    assert admin.close(ids[:3], CONFIRMED, ADA, selection=ALL).count == 2  # one was closed before
    assert admin.close(ids[3:4], CONFIRMED, ADA, selection=ALL).count == 1
    assert admin.close(ids[7:], PARKED, ADA, selection=ALL).count == 1
    committed(
        engine,
        lambda db: close(db, ids[4:6], CONFIRMED, actor="plan 1", reason="handled", clock=clock),
        clock=clock,
    )
    assert closings(engine) == {"replayed": 2, "discarded": 1, "fixed": 3}
    assert stats(engine).resolved_by == {"replay": 2, "discard": 1, "park": 1, "fix": 3}
    assert stats(engine).pending == 1
    clock.advance(10)
    assert prune(engine, older_than=0, operator=ADA, clock=clock) == 7
    assert closings(engine) == {"replayed": 2, "discarded": 1, "fixed": 3}
    with engine.connect() as db:
        actions = [entry.action for entry in entries(db)]
    assert actions.count("fix") == 2


def test_two_who_fix_at_once_are_both_counted(engine: Engine) -> None:
    """The first of all among them."""
    made = [letter(number) for number in range(12)]
    DeadLetterStore(engine).put_all(made)
    ids = [one.dlq_id for one in made]
    together = threading.Barrier(3)

    def fix(some: list[str]) -> None:
        together.wait(60)
        DeadLetterAdmin(engine).close(some, CONFIRMED, ADA, selection=ALL)

    threads = [threading.Thread(target=fix, args=(ids[n::3],)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert closings(engine)["fixed"] == 12
    assert stats(engine).pending == 0


def test_errors_are_counted_by_type_and_no_more_of_them_than_a_server_can_keep() -> None:
    """The root of a failure; types that come too late are others."""
    registry = CollectorRegistry()
    metrics = DlqMetrics(registry)
    for number in range(MOST_ERRORS + 5):
        kind = type(f"Error{number}", (ValueError,), {"__module__": "shop"})
        for _ in range(2):
            metrics.put(letter(number, failed(kind("no"))))

    def counted(kind: str) -> float | None:
        labels = {"group": "billing", "topic": "orders", "error_type": kind}
        return registry.get_sample_value("holdfast_dlq_errors_total", labels)

    assert counted("shop.Error0") == 2
    assert counted(f"shop.Error{MOST_ERRORS}") is None
    assert counted("other") == 10
