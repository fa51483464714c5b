"""A handler is known by group and topic: over renamed functions, upgrades and several sources."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import insert, select

from holdfast import Message
from holdfast.consumer import Attempt, Consumer
from holdfast.dlq import DeadLetterStore, capture, dead_letter
from holdfast.dlq.store.closing import close
from holdfast.dlq.store.schema import message as letters
from holdfast.errors import ConfigurationError, PoisonMessage
from holdfast.idempotency import Inbox, idempotent
from holdfast.idempotency.identity import consumer_key, content_digest, message_key
from holdfast.idempotency.schema import attempt, inbox, roster
from holdfast.ids import new_id
from tests.consuming import Bench, effects, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.orm import Session

MODULE = __name__


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, f"sqlite:///{tmp_path}/app.db")
    yield made
    made.close()


def event(id_: str, source: str = "shop", payload: bytes = b'"x"', key: str = "k") -> Message:
    return Message.new("orders", payload, source=source, key=key, ids=lambda: id_)


def charge(order: Any, session: Session) -> None:
    session.execute(insert(effects).values(what=str(order)))


def named(name: str, module: str = MODULE) -> Any:
    """Return the handler as it is called elsewhere."""

    def handler(order: Any, session: Session) -> None:
        charge(order, session)

    handler.__name__ = handler.__qualname__ = name
    handler.__module__ = module
    return handler


def run(consumer: Consumer) -> None:
    consumer.run(until_idle=True)


def remembered(bench: Bench) -> list[str]:
    with bench.engine.connect() as db:
        return list(db.execute(select(roster.c.name).order_by(roster.c.name)).scalars())


def earlier_version(bench: Bench, name: str, *messages: Message) -> None:
    """Leave behind what a version before this one wrote."""
    with bench.engine.begin() as db:
        number = consumer_key(name)
        db.execute(insert(roster).values(id=number, name=name, window_seconds=2592000.0))
        for one in messages:
            row = {"consumer": number, "message": message_key(one.id), "handled_at": 2e9,
                   "digest": content_digest(one.payload)}  # fmt: skip
            db.execute(insert(inbox), row)


def test_a_renamed_or_moved_function_remembers_what_it_handled(bench: Bench) -> None:
    order = event("m")
    for name, module in [("charge", "billing"), ("charge", "__main__"), ("bill", "shop.billing")]:
        consumer = bench.consumer()
        consumer.on("orders")(idempotent(named(name, module)))
        bench.send(order)
        run(consumer)
    assert bench.effects == ["x"]
    assert remembered(bench) == ["g/orders"]


def test_a_renamed_topic_keeps_its_memory_under_an_explicit_name(bench: Bench) -> None:
    order = event("m")
    for topic in ("orders", "orders-v2"):
        consumer = bench.consumer()
        consumer.on(topic, name="orders")(idempotent(charge))
        bench.send(order.with_(topic=topic))
        run(consumer)
    assert bench.effects == ["x"]


@pytest.mark.parametrize("batch", [None, 10])
def test_what_an_earlier_version_handled_is_not_handled_again_after_the_upgrade(
    bench: Bench, batch: int | None
) -> None:
    """Under the function's name, or that of a script, or both."""
    one, two, three = event("1"), event("2"), event("3", payload=b'"y"')
    earlier_version(bench, f"g/{MODULE}.charge", one)
    earlier_version(bench, "g/__main__.charge", two)
    consumer = bench.consumer()
    consumer.on("orders", batch=batch)(idempotent(charge))
    bench.send(one, two, three, one)
    run(consumer)
    assert bench.effects == ["y"]
    handler = consumer.handler("orders")
    assert handler.handle(two).acknowledge
    assert bench.effects == ["y"]


def test_attempts_that_an_earlier_version_counted_go_on(bench: Bench) -> None:
    numbers = []
    with bench.engine.begin() as db:
        db.execute(insert(attempt).values(
            consumer="g/__main__.note", message_id="m", failed=3, released=0, crashed=0,
            suspected=0, changed_at=2e9))  # fmt: skip
    consumer = bench.consumer()

    def note(order: Any, attempt: Attempt) -> None:
        numbers.append(attempt.number)

    note.__qualname__ = "note"
    consumer.on("orders")(note)
    bench.send(event("m", source="holdfast"))
    run(consumer)
    assert numbers == [4]
    assert bench.attempts == []


def test_a_dead_letter_of_an_earlier_version_is_recognised_when_its_message_comes_again(
    bench: Bench,
) -> None:
    """Its id had the function's name in it; the message must not run beside it."""
    order = event("m")
    old = order.with_(source="holdfast")  # an id without the source in it
    letter = capture(old, ValueError("bad"), group="g", handler="billing.charge")
    as_stored = letter.message.with_(source="shop")
    DeadLetterStore(bench.engine).put(msgspec.structs.replace(letter, message=as_stored))
    consumer = bench.consumer()
    fails = named("charge", "billing")

    def handler(order: Any, session: Session) -> None:
        raise PoisonMessage("bad")

    handler.__module__, handler.__qualname__ = fails.__module__, fails.__qualname__
    consumer.on("orders")(dead_letter()(handler))
    bench.send(order)
    run(consumer)
    [row] = bench.letters
    assert row.occurrences == 2
    assert row.handler == "orders"


def test_dead_letters_name_the_handler_by_its_topic_and_the_function_for_people(
    bench: Bench,
) -> None:
    consumer = bench.consumer()

    def fails(order: Any) -> None:
        raise PoisonMessage("bad")

    consumer.on("orders")(dead_letter()(fails))
    bench.send(event("m"))
    run(consumer)
    [row] = bench.letters
    assert row.handler == "orders"
    letter = DeadLetterStore(bench.engine).get(row.dlq_id)
    assert letter is not None
    assert letter.culprit.function.endswith("fails")


def test_a_scope_that_vanished_is_told_at_the_start_with_the_command_that_moves_it(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with bench.engine.begin() as db:
        Inbox().claim(db, "g/sales", "m")  # type: ignore[arg-type]
        Inbox().claim(db, "other/sales", "m")  # type: ignore[arg-type]
    consumer = bench.consumer()
    consumer.on("orders")(idempotent(charge))
    with caplog.at_level(logging.INFO, logger="holdfast.consumer"):
        run(consumer)
    told = [record for record in caplog.records if "inbox rename" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING"]
    assert "holdfast inbox rename g/sales g/orders" in told[0].getMessage()
    assert "g/orders is new in group g" in caplog.text
    assert "other/sales" not in caplog.text


def test_a_group_of_several_programs_is_warned_once_and_not_at_each_start(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """A scope of the other program is no name that changed: nothing is new to this one."""

    def start(topic: str) -> int:
        consumer = bench.consumer()
        consumer.on(topic)(idempotent(charge))
        bench.send(event(new_id(), payload=b'"x"').with_(topic=topic))
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="holdfast.consumer"):
            run(consumer)
        return caplog.text.count("inbox rename")

    assert start("orders") == 0
    assert start("sales") == 1, "it may be what orders is called now"
    assert [start("orders"), start("sales"), start("orders")] == [0, 0, 0]
    assert len(bench.effects) == 5


def test_an_unchanged_group_is_told_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    earlier_version(bench, f"g/{MODULE}.charge", event("m"))
    for _ in range(2):
        consumer = bench.consumer()
        consumer.on("orders")(idempotent(charge))
        with caplog.at_level(logging.INFO, logger="holdfast.consumer"):
            run(consumer)
    assert "inbox rename" not in caplog.text
    assert "is new in group" not in caplog.text


# Source and id


@pytest.mark.parametrize("batch", [None, 10])
def test_events_of_two_sources_with_one_id_both_take_effect(
    bench: Bench, batch: int | None
) -> None:
    consumer = bench.consumer()
    consumer.on("orders", batch=batch)(dead_letter()(idempotent(charge)))
    one, two = event("1", "shop", b'"a"'), event("1", "mail", b'"b"')
    same = event("1", "stock", b'"a"')
    bench.send(one, two, same, one, two, same)
    run(consumer)
    assert sorted(bench.effects) == ["a", "a", "b"]
    assert bench.letters == []


def test_events_of_two_sources_with_one_id_are_parked_as_two(bench: Bench) -> None:
    """A copy of one of them is not parked again."""
    consumer = bench.consumer()

    @consumer.on("orders")
    @dead_letter()
    def handle(order: Any) -> None:
        raise PoisonMessage("bad")

    bench.send(event("0"), event("1", "mail"), event("1", "stock"), event("1", "mail"))
    run(consumer)
    assert [row.message_id for row in bench.held] == ["1", "1"]


def test_dead_letters_of_two_sources_are_two(bench: Bench) -> None:
    home = DeadLetterStore(bench.engine)
    for source in ("shop", "mail", "shop"):
        home.put(capture(event("1", source), ValueError("bad"), group="g", handler="orders"))
    with bench.engine.connect() as db:
        assert len(db.execute(select(letters.c.source).distinct()).all()) == 2
    assert len(bench.letters) == 2


def test_outside_effects_of_two_sources_have_two_keys(bench: Bench) -> None:
    keys = []
    consumer = bench.consumer()

    @consumer.on("orders")
    def handle(order: Any, attempt: Attempt) -> None:
        keys.append(attempt.idempotency_key)

    bench.send(event("1"), event("1", "mail"), event("1"))
    run(consumer)
    assert len(keys) == 3
    assert len(set(keys)) == 2


@pytest.mark.parametrize("wrong", ["", 5, "x" * 256, "a\0b", "a\nb"])
def test_a_name_or_group_that_is_none_is_refused(bench: Bench, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="name"):
        bench.consumer().on("orders", name=wrong)
    with pytest.raises(ConfigurationError, match="group"):
        Consumer(bench.broker, group=wrong)


def test_what_waits_behind_a_dead_letter_runs_whatever_the_function_is_called_by_then(
    bench: Bench,
) -> None:
    """What was parked behind a dead letter runs once that is closed."""
    consumer = bench.consumer()

    @consumer.on("orders")
    @dead_letter()
    @idempotent
    def handle(order: Any, session: Session, message: Message) -> None:
        if message.id == "0":
            raise PoisonMessage("bad")
        charge(message.source, session)

    bench.send(event("0"), event("1", "mail"), event("1", "stock"))
    run(consumer)
    [letter] = bench.letters
    with bench.engine.begin() as db:
        close(db, [letter.dlq_id], "discarded", actor="ada", reason="seen")
    with running(renamed(bench)):
        until(lambda: bench.effects == ["mail", "stock"], "both run, in order")


def renamed(bench: Bench) -> Consumer:
    """Return the consumer with its function under another name."""
    consumer = bench.consumer()

    @consumer.on("orders")
    @dead_letter()
    @idempotent
    def other(order: Any, session: Session, message: Message) -> None:
        charge(message.source, session)

    return consumer
