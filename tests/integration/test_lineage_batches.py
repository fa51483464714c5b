"""Many rows of lineage at once are the same rows as one by one."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import delete, event, select

from holdfast import Message
from holdfast.db import open_database
from holdfast.ids import new_id
from holdfast.outbox import Event, Outbox, bulk
from holdfast.outbox import create_tables as create_outbox
from holdfast.outbox.schema import outbox
from holdfast.tracing import Lineage, create_tables
from holdfast.tracing import lineage as module
from holdfast.tracing.lineage import LineageOutcome, LineageRecord, record_of
from holdfast.tracing.schema import lineage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

WHEN = datetime(2026, 3, 3, 14, 22, 33, 250_000, tzinfo=UTC)
PLAIN = Message(
    id="evt-1", topic="orders", payload=b"{}", key=b"ada", type="OrderPlaced", source="shop",
    correlation_id="evt-1", time=WHEN,
)  # fmt: skip
ODD = [
    PLAIN,
    PLAIN.with_(id="evt-2", correlation_id="c", causation_id="evt-1"),
    PLAIN.with_(id="evt-3", correlation_id=None, key=None),
    PLAIN.with_(id="x" * 400, correlation_id="y" * 400, causation_id="z" * 400),
    PLAIN.with_(id="nul\0", type='a "quoted", \\ type\0', source="snow ☃", topic="t" * 300),
    PLAIN.with_(id="evt-6", key=b"\xff\xfe", correlation_id="line\nend"),
    PLAIN.with_(id="evt-7", type="lone \ud800", time=WHEN.replace(microsecond=1)),
    PLAIN.with_(id="evt-8", key=b""),
]
PARTING = [
    [PLAIN.with_(key=b"")],
    [PLAIN.with_(key=b"a\x1fb"), PLAIN.with_(id="evt-2", key=b"c")],
    [PLAIN.with_(key=b"\x1e"), PLAIN.with_(id="evt-2", key=None)],
    [PLAIN.with_(source="a\x1fb"), PLAIN.with_(id="evt-2", source="\x1e")],
]


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Open a database of each kind, with the table."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/lineage.db"
    else:
        url = request.getfixturevalue(request.param).database("batches")
    made = open_database(url)
    create_tables(made)
    yield made
    made.dispose()


def records(engine: Engine) -> list[LineageRecord]:
    """Take what is written, in its order, without when."""
    with engine.begin() as db:
        found = [record_of(row) for row in db.execute(lineage.select().order_by(lineage.c.seq))]
        db.execute(delete(lineage))
    assert all(one.at > WHEN.timestamp() for one in found)
    return [replace(one, at=0.0) for one in found]


@pytest.mark.parametrize("at_once", [3, 5000])
def test_a_batch_is_written_as_its_messages_one_by_one(
    engine: Engine, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, whatever stands in them, in as many statements as it takes."""
    monkeypatch.setattr(module, "WRITTEN_AT_ONCE", at_once)
    shop = Lineage("shop")
    with engine.begin() as db:
        for one in ODD:
            shop.handled(db, [one])
    singly = records(engine)
    with engine.begin() as db:
        shop.handled(db, ODD)
    assert records(engine) == singly
    assert [one.event_id for one in singly[:3]] == ["evt-1", "evt-2", "evt-3"]
    assert [one.correlation_id for one in singly[:3]] == ["evt-1", "c", "evt-3"]
    assert {one.service for one in singly} == {"shop"}


@pytest.mark.parametrize("messages", PARTING)
def test_texts_with_the_characters_that_part_texts_are_written_whole(
    engine: Engine, messages: list[Message]
) -> None:
    """By themselves, among others, and with the events that are staged."""
    create_outbox(engine)
    told = [(one.id, one.key_text, one.source) for one in messages]
    with engine.begin() as db:
        Lineage("shop").handled(db, messages)
    assert [(one.event_id, one.key, one.source) for one in records(engine)] == told
    staged = [one.with_(id=new_id()) for one in messages]
    with engine.begin() as db:
        Outbox(source="shop", lineage=Lineage("shop")).stage(db, staged)
    assert [(one.key, one.source) for one in records(engine)] == [one[1:] for one in told]
    with engine.begin() as db:
        assert db.execute(delete(outbox)).rowcount == len(messages)


@pytest.mark.parametrize("at_once", [2, 5000])
def test_events_are_staged_with_their_lineage(
    engine: Engine, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same order, by one statement where PostgreSQL takes all of them at once."""
    monkeypatch.setattr(bulk, "_MOST_ROWS", at_once)
    create_outbox(engine)
    shop = Outbox(source="shop", lineage=Lineage("shop"))
    events = [
        Event(body={"number": number}, topic="orders", key=f"k{number}", type="OrderPlaced")
        for number in range(5)
    ]
    sent: list[str] = []
    with engine.begin() as db:
        event.listen(db, "before_cursor_execute", lambda *about: sent.append(about[2]))
        staged = shop.add_all(db, events)
    with engine.begin() as db:
        ids = [str(one) for one in db.scalars(select(outbox.c.id).order_by(outbox.c.seq))]
        db.execute(delete(outbox))
    assert ids == [one.id for one in staged]
    found = records(engine)
    assert [(one.event_id, one.correlation_id, one.key, one.outcome) for one in found] == [
        (one.id, one.id, one.key_text, LineageOutcome.PUBLISHED) for one in staged
    ]
    if engine.dialect.name == "postgresql" and at_once > len(events):
        assert len(sent) == 1


def test_a_batch_that_rolls_back_leaves_nothing(engine: Engine) -> None:
    """It commits with the events, or not at all."""
    with engine.connect() as db:
        Lineage("shop").published(db, ODD)
        db.rollback()
    assert records(engine) == []


@pytest.mark.parametrize("number", [1, 4])
def test_staged_events_have_the_lineage_that_is_written_by_itself(
    engine: Engine, number: int
) -> None:
    """Whatever came before them, and in whatever form their ids are; PostgreSQL is asked once."""
    create_outbox(engine)
    shop = Lineage("shop")
    ids = [new_id() for _ in range(4)]
    messages = [
        PLAIN.with_(id=ids[0], correlation_id=ids[0], source="snow ☃"),
        PLAIN.with_(id=ids[1], correlation_id="y" * 400, causation_id="z" * 400, key=None),
        PLAIN.with_(id=ids[2].upper(), correlation_id=ids[2].upper(), type="t" * 255),
        PLAIN.with_(id=ids[3], correlation_id=None, causation_id=ids[0], source="s" * 300),
    ][-number:]
    with engine.begin() as db:
        shop.published(db, messages)
    singly = records(engine)
    sent: list[str] = []
    with engine.begin() as db:
        event.listen(db, "before_cursor_execute", lambda *about: sent.append(about[2]))
        Outbox(source="shop", lineage=shop).stage(db, messages)
    assert records(engine) == singly
    assert len(singly) == number
    if engine.dialect.name == "postgresql":
        assert len(sent) == 1
    with engine.begin() as db:
        db.execute(delete(outbox))


def test_an_id_in_a_form_of_its_own_is_kept_by_the_lineage(engine: Engine) -> None:
    """The outbox has a column for UUIDs, which knows one form; the lineage keeps the text."""
    create_outbox(engine)
    own = new_id()
    odd = [PLAIN.with_(id=f"urn:uuid:{own}"), PLAIN.with_(id=new_id())]
    with engine.begin() as db:
        Outbox(source="shop", lineage=Lineage("shop")).stage(db, odd)
        ids = [str(one) for one in db.scalars(select(outbox.c.id).order_by(outbox.c.seq))]
        db.execute(delete(outbox))
    assert ids == [own, odd[1].id]
    assert [one.event_id for one in records(engine)] == [one.id for one in odd]
