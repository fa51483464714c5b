"""A dead letter among its relatives: what led to it, what came of it, what went well beside it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from sqlalchemy.orm import Session  # noqa: TC002 - the handler's annotation is resolved

from holdfast import Message, Outbox, dead_letter, handling, outbox
from holdfast.backoff import Backoff
from holdfast.brokers import connect
from holdfast.db import open_database
from holdfast.retry import retry
from holdfast.tracing import Lineage, create_tables, disable, enable, trace
from holdfast.tracing import related as module
from holdfast.tracing.related import related
from tests.choreographing import Dance
from tests.consuming import Bench, running, until
from tests.shell import shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

BEGAN = datetime(2026, 3, 3, 14, 22, 33, tzinfo=UTC).timestamp()


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Open a database of each kind, with the table."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/lineage.db"
    else:
        url = request.getfixturevalue(request.param).database("relatives")
    made = open_database(url)
    create_tables(made)
    yield made
    made.dispose()


def event(name: str, type_: str, cause: str | None = None, correlation: str = "c") -> Message:
    """Return an event that happened at its number in milliseconds."""
    return Message(
        id=name, topic="events", payload=b"{}", type=type_, source="shop",
        correlation_id=correlation, causation_id=cause,
        time=datetime.fromtimestamp(BEGAN + int(name.rsplit("-", 1)[1]) / 1000, UTC),
    )  # fmt: skip


def written(engine: Engine, *acts: tuple[str, str, Message]) -> None:
    """Write what services did, each in its transaction, in this order."""
    for service, act, message in acts:
        with engine.begin() as db:
            if act == "dead":
                Lineage(service).dead_lettered(db, message, "KeyError: 'customerEmail'")
            else:
                getattr(Lineage(service), act)(db, [message])


def test_a_failed_event_has_causes_effects_and_successes(engine: Engine) -> None:
    """Its own success elsewhere among them; its own failure is none."""
    one, two = event("evt-101", "OrderCreated"), event("evt-250", "Paid", "evt-101")
    three, four = event("evt-400", "Reserved", "evt-250"), event("evt-900", "Sent", "evt-400")
    written(
        engine, ("shop", "published", one), ("payment", "handled", one),
        ("payment", "published", two), ("mail", "dead", two), ("stock", "handled", two),
        ("stock", "published", three), ("shipping", "handled", three),
        ("shipping", "published", four),
    )  # fmt: skip
    found = related([engine], "evt-250", correlation_id="c", group="mail")
    assert found is not None
    assert [one.id for one in found.causes] == ["evt-101"]
    assert [one.id for one in found.effects] == ["evt-400", "evt-900"]
    assert [(one.event.id, one.service) for one in found.successes] == [
        ("evt-101", "payment"), ("evt-250", "stock"), ("evt-400", "shipping"),
    ]  # fmt: skip
    assert (found.service, found.before, found.after) == ("mail", (), ())
    assert not found.is_cut


def test_what_the_same_service_handled_of_the_same_type_around_the_failure(engine: Engine) -> None:
    """The three nearest on either side; of other types and by other services nothing."""
    others = [event(f"other-{n}", "Paid", correlation=f"o{n}") for n in range(10)]
    bad = event("evt-5", "Paid")
    written(
        engine,
        *(("mail", "handled", one) for one in others[:5]),
        ("stock", "handled", others[4]), ("mail", "handled", event("odd-1", "Refunded")),
        ("mail", "dead", bad), ("stock", "dead", bad), ("stock", "handled", others[5]),
        *(("mail", "handled", one) for one in others[5:]),
    )  # fmt: skip
    found = related([engine], "evt-5", correlation_id="c", group="mail")
    assert found is not None
    assert [one.event_id for one in found.before] == ["other-4", "other-3", "other-2"]
    assert [one.event_id for one in found.after] == ["other-5", "other-6", "other-7"]
    assert found.before[0].correlation_id == "o4"
    in_stock = related([engine], "evt-5", correlation_id="c", group="stock")
    assert in_stock is not None
    assert (in_stock.service, [one.event_id for one in in_stock.before]) == ("stock", ["other-4"])


def test_a_correlation_of_any_size_is_read_in_bounds(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event itself is always read."""
    monkeypatch.setattr(module, "MOST_RECORDS", 10)
    many = [event(f"evt-{n}", "Line", None if n == 0 else "evt-0") for n in range(30)]
    with engine.begin() as db:
        Lineage("shop").published(db, many)
    written(engine, ("mail", "dead", many[-1]))
    found = related([engine], "evt-29", correlation_id="c", group="mail")
    assert found is not None
    assert found.is_cut
    assert (found.event.id, found.service) == ("evt-29", "mail")
    assert [one.id for one in found.causes] == ["evt-0"]
    assert len(found.chain.events) == 11


def test_where_nothing_is_written_there_are_no_relatives(engine: Engine) -> None:
    """Neither without the table."""
    written(engine, ("shop", "published", event("evt-1", "Paid")))
    assert related([engine], "evt-2", correlation_id="c", group="mail") is None
    assert related([engine], "evt-2", correlation_id=None, group="mail") is None
    with engine.begin() as db:
        module.metadata.drop_all(db)
    assert related([engine], "evt-1", correlation_id="c", group="mail") is None


def test_what_sampling_drops_the_lineage_keeps(tmp_path: Path) -> None:
    """Not one span is exported, and the chain is whole."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    dance = Dance(f"sqlite:///{tmp_path}/dance.db")
    enable(provider)
    try:
        placed = dance.place("ann")
        dance.settle()
        found = trace([dance.engine], placed.id)
    finally:
        disable()
        dance.close()
    types = [one.type for one in found.chain.events]
    assert types == ["OrderPlaced", "PaymentProcessed", "ParcelSent"]
    assert found.chain.depth == 3
    assert exporter.get_finished_spans() == ()


class MailShop:
    """A consumer that sends mails, with a lineage or without, and the command beside it."""

    def __init__(self, folder: Path, lineage: Lineage | None) -> None:
        self.folder = folder
        self.bench = Bench(folder, f"sqlite:///{folder}/mail.db", broker=connect("memory:"))
        for create in (outbox.create_tables, create_tables):
            create(self.bench.engine)
        self.consumer = self.bench.consumer(lineage=lineage)
        box = Outbox(source="mail", lineage=lineage)

        @self.consumer.on("orders")
        @dead_letter()
        @retry(Backoff(first=0.001, ceiling=0.002, attempts=2))
        def send(order: dict[str, str], session: Session) -> None:
            box.add(session, {"to": order["email"]}, topic="mails", type="Mailed")

    def handle(self, *messages: Message) -> None:
        """Let the consumer handle *messages*."""
        self.bench.send(*messages)
        tally = self.consumer.tally
        with running(self.consumer):
            until(lambda: tally.handled + tally.dead_lettered == len(messages), "all are through")

    def show(self, *words: str) -> str:
        """Return what `holdfast dlq show` says of the letter of correlation c."""
        done = shell(
            "dlq", "show", "--correlation", "c", *words, cwd=self.folder,
            HOLDFAST_DATABASE="sqlite:///mail.db",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def shops(tmp_path: Path) -> Iterator[Any]:
    """Open shops, and close them."""
    opened: list[MailShop] = []

    def make(lineage: Lineage | None) -> MailShop:
        opened.append(MailShop(tmp_path, lineage))
        return opened[-1]

    yield make
    for one in opened:
        one.bench.close()


def orders() -> list[Message]:
    """Return a good order and a bad one after it, of one key: they are handled in this order."""
    good = Message.new("orders", b'{"email": "a@b"}', key="k", type="Paid")
    with handling(event("evt-1", "OrderCreated")):
        bad = Message.new("orders", b'{"card": "4111"}', key="k", type="Paid")
    return [good, bad]


def test_show_prints_the_lineage_of_a_letter_and_its_related_successes(shops: Any) -> None:
    """What other services know comes from their databases; a script gets the same."""
    shop = shops(Lineage("mail"))
    good, bad = orders()
    shop.handle(good, bad)
    other = open_database(f"sqlite:///{shop.folder}/shop.db")
    create_tables(other)
    root = event("evt-1", "OrderCreated")
    written(other, ("shop", "published", root), ("payment", "handled", root))
    other.dispose()
    alone = shop.show()
    assert f"this one: Paid {bad.id} at " in alone
    assert "related successes: none in this correlation" in alone
    assert f"other Paid that mail handled around it:\n    before: {good.id} at " in alone
    assert "root cause" not in alone
    also = ("--also", "sqlite:///shop.db")
    whole = shop.show(*also)
    assert "lineage: 2 events of c in " in whole
    assert "holdfast lineage show c" in whole
    assert "root cause: OrderCreated evt-1 at 2026-03-03T14:22:33.001000Z from shop" in whole
    assert "OrderCreated evt-1 by payment at " in whole
    found = json.loads(shop.show(*also, "--json"))["lineage"]
    assert [one["id"] for one in found["causes"]] == ["evt-1"]
    assert (found["event"]["id"], found["effects"], found["service"]) == (bad.id, [], "mail")
    assert [(one["id"], one["service"]) for one in found["successes"]] == [("evt-1", "payment")]
    assert [one["event_id"] for one in found["before"]] == [good.id]
    assert found["after"] == []
    assert set(found) == {
        "correlation_id", "event", "causes", "effects", "successes", "service", "before", "after",
        "is_cut",
    }  # fmt: skip


def test_show_says_so_where_lineage_is_off(shops: Any) -> None:
    """In a line, and as null to a script."""
    shop = shops(None)
    shop.handle(*orders())
    assert shop.show().count("lineage: off, or older than its retention") == 1
    assert json.loads(shop.show("--json"))["lineage"] is None
