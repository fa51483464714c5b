"""Two chains of events, and what the commands tell about them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import Message
from holdfast.db import open_database
from holdfast.tracing import Lineage, create_tables, trace
from holdfast.tracing.learned import learn
from holdfast.tracing.system_map import system_map
from tests.shell import shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

BEGAN = datetime(2026, 3, 3, 14, 22, 33, tzinfo=UTC).timestamp()
STORY = [  # event, type, cause, seconds, service, and who handles it
    ("evt-101", "OrderCreated", None, 0.1, "orders", ["payment"]),
    ("evt-102", "PaymentProcessed", "evt-101", 0.25, "payment", ["inventory", "notification"]),
    ("evt-103", "InventoryReserved", "evt-102", 0.4, "inventory", ["shipping"]),
    ("evt-104", "ShipmentCreated", "evt-103", 1.1, "shipping", ["orders"]),
    ("evt-105", "CustomerNotified", "evt-102", 1.3, "notification", []),
]
HEALTHY = [
    ("evt-001", "OrderCreated", None, 0.0, "orders", ["payment"]),
    ("evt-002", "PaymentProcessed", "evt-001", 0.1, "payment", ["inventory", "notification"]),
    ("evt-003", "InventoryReserved", "evt-002", 0.2, "inventory", ["shipping"]),
    ("evt-004", "ShipmentCreated", "evt-003", 0.3, "shipping", []),
    ("evt-005", "CustomerNotified", "evt-002", 0.4, "notification", []),
]


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/lineage.db"
    return str(request.getfixturevalue(request.param).database("lineage"))


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """Open it, with the table."""
    made = open_database(url)
    create_tables(made)
    yield made
    made.dispose()


def write(
    engine: Engine, correlation: str, story: list[Any], *, prefix: str = "", dead: str | None = None
) -> None:
    """Write down *story* as its services would; *dead* is a dead letter of notification."""
    for event, type_, cause, seconds, service, handlers in story:
        made = Message(
            id=f"{prefix}{event}", topic=f"{service}.events", payload=b"{}", type=type_,
            source=service, correlation_id=correlation,
            causation_id=None if cause is None else f"{prefix}{cause}",
            time=datetime.fromtimestamp(BEGAN + seconds, UTC),
        )  # fmt: skip
        with engine.begin() as db:
            Lineage(service).published(db, [made])
            for handler in handlers:
                if event == dead and handler == "notification":
                    Lineage(handler).dead_lettered(db, made, "KeyError: 'customerEmail'")
                else:
                    Lineage(handler).handled(db, [made])


def others(engine: Engine, count: int) -> None:
    """Write whole chains of other customers."""
    for number in range(count):
        write(engine, f"corr-{number}", STORY, prefix=f"{number}-")


def holdfast(url: str, *argv: str) -> tuple[int, Any]:
    done = shell("lineage", *argv, "--database", url, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_what_is_missing_is_named_with_the_dead_letter_that_keeps_it(
    engine: Engine, url: str
) -> None:
    """Learned from the others: nobody declared a flow."""
    others(engine, 6)
    write(engine, "corr-def-456", STORY[:-1], dead="evt-102")
    code, found = holdfast(url, "show", "corr-def-456")
    assert code == 1
    assert [one["id"] for one in found["events"]] == ["evt-101", "evt-102", "evt-103", "evt-104"]
    assert found["learned_from"] == 6
    (missing,) = found["missing"]
    assert (missing["any_of"], missing["after"]) == (["CustomerNotified"], "evt-102")
    assert "KeyError: 'customerEmail'" in missing["why"]
    assert "dead letter of notification" in missing["why"]
    assert found["is_overdue"]


def test_a_chain_that_is_whole_misses_nothing(engine: Engine, url: str) -> None:
    """And the relations of its events are told."""
    others(engine, 6)
    write(engine, "corr-abc-123", HEALTHY)
    code, found = holdfast(url, "show", "corr-abc-123", "--event", "evt-005", "--other", "evt-004")
    assert code == 0
    assert found["missing"] == []
    assert found["root_cause"] == "evt-001"
    assert found["causes"] == ["evt-002", "evt-001"]
    assert found["common_ancestor"] == "evt-002"
    assert found["descendants"] == []
    words = ("lineage", "show", "corr-abc-123", "--event", "evt-002", "--database", url)
    assert json.loads(shell(*words, "--json").stdout)["descendants"] == [
        "evt-003", "evt-004", "evt-005",
    ]  # fmt: skip
    assert "  it led to ShipmentCreated evt-004 at " in shell(*words).stdout


def test_too_few_others_teach_nothing(engine: Engine) -> None:
    """Four may all be odd."""
    others(engine, 4)
    write(engine, "corr-x", STORY[:2])
    found = trace([engine], "corr-x")
    learned = learn([engine], found.chain)
    assert (learned.looked_at, learned.events) == (4, ())
    others(engine, 5)
    assert {one.type for one in learn([engine], found.chain).events} == {
        "PaymentProcessed", "InventoryReserved", "ShipmentCreated", "CustomerNotified",
    }  # fmt: skip


def test_an_event_that_some_have_is_not_expected(engine: Engine) -> None:
    """Half of the orders are gifts: nobody is told."""
    for number in range(10):
        write(engine, f"c{number}", STORY if number % 2 else STORY[:-1], prefix=f"{number}-")
    write(engine, "corr-x", STORY[:-1])
    found = trace([engine], "corr-x")
    assert learn([engine], found.chain).missing(found.chain, now=found.now) == []


def test_the_map_shows_who_publishes_what_to_whom(engine: Engine, url: str) -> None:
    """With what nobody handles, dead letters, what leads to what, and how deep."""
    others(engine, 3)
    write(engine, "corr-def-456", STORY[:-1], dead="evt-102")
    found = system_map([engine])
    assert found.published["OrderCreated"] == 4
    told = {(one.type, one.publisher, one.handler): one for one in found.routes}
    mail = told["PaymentProcessed", "payment", "notification"]
    assert (mail.handled, mail.dead_letters) == (3, 1)
    assert ("CustomerNotified", "notification", None) in told
    leads = {(one.cause, one.effect): one.count for one in found.leads}
    assert leads["PaymentProcessed", "CustomerNotified"] == 3
    assert leads["PaymentProcessed", "InventoryReserved"] == 4
    assert found.depth == 4
    assert '-->|"OrderCreated 4"|' in found.mermaid()
    jobs = {job["job"]["name"]: job for job in found.openlineage()}
    assert jobs["shipping"]["inputs"] == [{"namespace": "holdfast", "name": "inventory.events"}]
    for job in jobs.values():
        assert job["schemaURL"].endswith("#/$defs/JobEvent")
        assert job["producer"].startswith("urn:")
        assert datetime.fromisoformat(job["eventTime"]).tzinfo is not None
    (order,) = found.actions
    assert (order.type, order.looked_at, order.mean_events) == ("OrderCreated", 4, 19 / 4)
    assert (order.most_events, order.deepest) == (5, 4)
    code, shown = holdfast(url, "map")
    assert (code, shown["depth"]) == (0, 4)
    assert shown["actions"][0]["most_events"] == 5
