"""Questions about lineage read what they need of a large table that nobody has analysed yet.

Each index is paid for by every event, so there are few: by number, by correlation, and by the id of
events that did not begin their correlation. What has no index is looked for near a number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import String, case, cast, func, literal, select
from sqlalchemy.schema import CreateIndex

from holdfast.db.engine import open_database
from holdfast.tracing import Lineage, create_tables, trace
from holdfast.tracing import lineage as module
from holdfast.tracing.learned import learn
from holdfast.tracing.related import related
from holdfast.tracing.schema import lineage
from tests.integration.test_plans import ROWS, Plans, fill, mode, never_analysed  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from sqlalchemy.engine import Engine

    from tests.servers import Postgres

CHAIN = 4
"""Rows of a correlation: its first event published and handled, the one that came of it, too."""
DEAD = ROWS // 2 // CHAIN * CHAIN + 4
_NEAR = 2_000


@pytest.fixture
def plans() -> Plans:
    """Listen to what a server really does."""
    return Plans()


@pytest.fixture
def engine(postgres: Postgres, mode: str, plans: Plans) -> Iterator[Engine]:  # noqa: F811
    """Fill a table with chains of two events, one of which is a dead letter in the end."""
    made = open_database(postgres.database(f"plans_lineage_{mode}"))
    create_tables(made)
    never_analysed(made)
    plans.watch(made, mode)
    made.dispose()

    def text(prefix: str, number: Any) -> Any:
        return func.concat(prefix, cast(number, String))

    def own(number: Any, first: Any, then: Any) -> Any:
        return case(((number - 1) % CHAIN < 2, first), else_=then)

    def chain(number: Any) -> Any:
        return func.div(number - 1, CHAIN)

    fill(
        made, lineage, source="shop", topic="orders", service="shop", time=1e9,
        event_id=lambda n: own(n, text("c", chain(n)), text("e", chain(n))),
        type=lambda n: own(n, literal("OrderPlaced"), literal("OrderPaid")),
        correlation_id=lambda n: text("c", chain(n)),
        causation_id=lambda n: own(n, None, text("c", chain(n))),
        message_key=lambda n: text("k", chain(n)),
        outcome=lambda n: case(
            (n == DEAD, "dead-lettered"), (n % 2 == 1, "published"), else_="handled"
        ),
        at=lambda n: cast(n, lineage.c.at.type),
    )  # fmt: skip
    yield made
    made.dispose()


def looked_at(plans: Plans) -> int:
    """Return the most rows of the table that one step of a plan read."""
    most = 0
    for plan in plans.found:
        nodes = [plan["Plan"]]
        while nodes:
            node = nodes.pop()
            nodes += node.get("Plans", ())
            if node.get("Relation Name") == lineage.name:
                counts = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
                most = max(most, node["Actual Loops"] * sum(node.get(one, 0) for one in counts))
    return most


def test_a_chain_is_read_without_the_others(engine: Engine, plans: Plans) -> None:
    """By its correlation, its first event and any other one."""
    plans.is_listening = True
    found = [len(trace([engine], name).chain.events) for name in ("c77", "e77")]
    plans.is_listening = False
    assert found == [2, 2]
    assert len(plans.found) >= 4
    assert looked_at(plans) <= CHAIN


def test_what_is_expected_is_learned_from_near_chains(
    engine: Engine, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest ones of the type; the rest of the table is not read."""
    monkeypatch.setattr(module, "_SPANS", (_NEAR, 2 * _NEAR))
    chain = trace([engine], "c77").chain
    plans.is_listening = True
    learned = learn([engine], chain)
    plans.is_listening = False
    assert learned.looked_at == 200
    assert [one.type for one in learned.events] == ["OrderPaid"]
    assert looked_at(plans) <= _NEAR


def test_the_relatives_of_a_dead_letter_are_read_without_the_others(
    engine: Engine, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own chain, and the nearest successes on both sides."""
    monkeypatch.setattr(module, "_SPANS", (_NEAR, 2 * _NEAR))
    number = (DEAD - 1) // CHAIN
    plans.is_listening = True
    found = related([engine], f"e{number}", correlation_id=f"c{number}", group="shop")
    plans.is_listening = False
    assert found is not None
    assert [one.event_id for one in found.before] == [f"e{number - n}" for n in (1, 2, 3)]
    assert [one.event_id for one in found.after] == [f"e{number + n}" for n in (1, 2, 3)]
    assert looked_at(plans) <= _NEAR


def test_retention_reads_and_deletes_by_number(engine: Engine, plans: Plans) -> None:
    """A thousand rows at a time, the oldest first."""
    shop = Lineage("shop")
    plans.is_listening = True
    with engine.begin() as db:
        assert shop._prune_some(db) == 1000
    plans.is_listening = False
    assert looked_at(plans) <= 1000
    with engine.begin() as db:
        assert db.execute(select(func.min(lineage.c.seq))).scalar() == 1001


def test_an_event_pays_for_few_indexes(engine: Engine) -> None:
    """Three at most, and the first of a correlation for two."""
    made = [str(CreateIndex(one).compile(engine)) for one in lineage.indexes]
    assert len(made) == 2
    assert sum("WHERE event_id != correlation_id" in one for one in made) == 1
