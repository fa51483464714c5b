"""Handlers under test: what `Consumer.for_test` promises beyond its page."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import JSON, Column, Integer, MetaData, Table, delete, insert, select, update
from sqlalchemy.orm import Session  # noqa: TC002 - what the consumer looks for

from holdfast import (
    Backoff,
    Batches,
    ConfigurationError,
    Consumer,
    DeadLetterStore,
    HandlerEnding,
    Message,
    Outbox,
    PoisonMessage,
    RedisInbox,
    Transient,
    circuit,
    dead_letter,
    effect,
    idempotent,
    open_database,
    retry,
)
from holdfast.testing import ConsumerTest, assert_idempotent

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

tables = MetaData()
stock = Table(
    "stock", tables, Column("item", Integer), Column("left", Integer), Column("tags", JSON)
)
mails: list[str] = []


@dataclass
class Sold:
    item: int


@dataclass
class Returned:
    item: int


@effect
def mail(text: str) -> None:
    mails.append(text)


def shop(**options: Any) -> Consumer:
    """Return a consumer whose database must not be touched by a test."""
    return Consumer("memory:", group="shop", database="sqlite:////nowhere/at/all.db", **options)


def test_rows_that_change_or_go_are_told_apart() -> None:
    """Written is what is there now, removed what was there before."""
    consumer = shop()

    @consumer.on("sold")
    def sell(sold: Sold, session: Session) -> None:
        session.execute(
            update(stock).where(stock.c.item == sold.item).values(left=stock.c.left - 1)
        )
        session.execute(delete(stock).where(stock.c.left == 0))

    with consumer.for_test(tables=tables) as test:
        with test.session() as session, session.begin():
            session.execute(insert(stock), [{"item": 1, "left": 2, "tags": ["a"]}])
        first = test.send(Sold(1))
        assert first.removed == {"stock": [{"item": 1, "left": 2, "tags": ["a"]}]}
        assert first.written == {"stock": [{"item": 1, "left": 1, "tags": ["a"]}]}
        last = test.send(Sold(1))
        assert last.written == {}
        assert last.removed == {"stock": [{"item": 1, "left": 1, "tags": ["a"]}]}


def test_the_handler_is_found_by_the_class_of_the_payload() -> None:
    """Or it is asked for; nothing is guessed."""
    consumer = shop()
    seen = []

    @consumer.on("sold")
    def sell(sold: Sold) -> None:
        seen.append(sold)

    @consumer.on("returned")
    def take_back(returned: Returned) -> None:
        seen.append(returned)

    with consumer.for_test() as test:
        assert test.send(Returned(1)).message.topic == "returned"
        assert test.send({"item": 2}, topic="sold").message.topic == "sold"
        assert seen == [Returned(1), Sold(2)]
        with pytest.raises(ConfigurationError, match="returned or sold: say which"):
            test.send({"item": 3})


def test_async_handlers_are_tested_the_same_way() -> None:
    """From a plain test, and from one that has a loop of its own."""
    consumer = shop()
    answers = [Transient("busy")]

    @consumer.on("sold")
    @retry(Backoff(first=60, ceiling=60, attempts=2))
    async def sell(sold: Sold, session: Session, outbox: Outbox) -> None:
        await asyncio.sleep(0)
        if answers:
            raise answers.pop()
        session.execute(insert(stock).values(item=sold.item, left=1))
        outbox.add(session, Returned(sold.item), topic="returned")

    with consumer.for_test(tables=tables) as test:
        result = test.send(Sold(1))
        assert (result.attempts, len(result.waits)) == (2, 1)
        assert result.expect_event(Returned, item=1) == Returned(1)
        again = asyncio.run(test.send_async(Sold(2)))
        assert again.written == {"stock": [{"item": 2, "left": 1, "tags": None}]}


def test_a_consumer_without_a_database_puts_its_letters_on_a_topic() -> None:
    """They are seen all the same."""
    consumer = Consumer("memory:", group="shop")

    @consumer.on("sold")
    @dead_letter
    def sell(sold: Sold) -> None:
        raise PoisonMessage(f"no item {sold.item}")

    with consumer.for_test() as test:
        for item in (1, 2):
            result = test.send(Sold(item), key=str(item))
            assert result.ending is HandlerEnding.DEAD_LETTERED
            assert result.dead_letter is not None
            assert result.dead_letter.message.id == result.message.id


def test_nothing_outside_the_test_is_touched(tmp_path: Path) -> None:
    """Stores that the decorators name are left alone, and so are circuits of the process."""
    other = open_database(f"sqlite:///{tmp_path}/other.db")
    consumer = shop(quarantine=False)

    @consumer.on("sold")
    @dead_letter(DeadLetterStore(other))
    @idempotent(lease="30s", store=RedisInbox("redis://127.0.0.1:1"))
    @circuit("till")
    def sell(sold: Sold) -> None:
        raise PoisonMessage("no")

    with consumer.for_test() as test:
        assert test.send(Sold(1)).ending is HandlerEnding.DEAD_LETTERED
        test.circuit("till").open()
        assert test.send(Sold(2)).ending is HandlerEnding.RELEASED
    with consumer.for_test() as test:
        assert test.send(Sold(2)).ending is HandlerEnding.DEAD_LETTERED
        with pytest.raises(ConfigurationError, match="there are: till"):
            test.circuit("bank")
    assert not (tmp_path / "other.db").exists()


def test_effects_happen_only_where_asked() -> None:
    """A test sends no mail by itself."""
    consumer = shop()

    @consumer.on("sold")
    def sell(sold: Sold) -> None:
        mail(f"sold {sold.item}")

    mails.clear()
    with consumer.for_test() as test:
        assert test.send(Sold(1)).effects == ["mail"]
    assert mails == []
    with consumer.for_test(effects=True) as test:
        assert test.send(Sold(1)).effects == []
    assert mails == ["sold 1"]


def test_methods_and_batches_are_handlers_like_others() -> None:
    """As they are for the consumer."""
    consumer = shop()

    class Counter:
        def __init__(self) -> None:
            self.sold: list[Sold] = []

        @retry
        def sell(self, sold: Sold) -> None:
            self.sold.append(sold)

        @idempotent
        def take_back(self, returned: list[Returned]) -> None:
            self.sold = [one for one in self.sold if Returned(one.item) not in returned]

    counter = Counter()
    consumer.on("sold")(counter.sell)
    consumer.on("returned", batch=Batches(size=10, whole=True))(counter.take_back)
    with consumer.for_test() as test:
        assert test.send(Sold(1)).attempts == 1
        assert counter.sold == [Sold(1)]
        assert test.send(Returned(1), topic="returned").error is None
        assert counter.sold == []


def test_a_failed_message_can_be_delivered_again() -> None:
    """The same message, with the attempts that it has behind it."""
    consumer = shop()
    answers = [Transient("busy")]

    @consumer.on("sold")
    @idempotent
    def sell(sold: Sold) -> None:
        if answers:
            raise answers.pop()

    with consumer.for_test() as test:
        first = test.send(Sold(1))
        assert first.ending is HandlerEnding.FAILED
        assert test.send(first.message).ending is HandlerEnding.HANDLED
        assert test.send(first.message).ending is HandlerEnding.DUPLICATE


def test_an_expected_event_that_is_not_there_is_told_with_those_that_are() -> None:
    """So that the test's own output says what is wrong."""
    consumer = shop()

    @consumer.on("sold")
    def sell(sold: Sold, session: Session, outbox: Outbox) -> None:
        outbox.add(session, Returned(sold.item), topic="returned", key="k", delay=60)
        outbox.add(session, {"n": 1}, topic="raw", type="raw")

    with consumer.for_test() as test:
        result = test.send(Sold(1))
        assert result.expect_event("raw", n=1) == {"n": 1}
        assert result.expect_event(Returned, topic="returned", key="k", item=1)
        with pytest.raises(AssertionError, match=r"0 events are Returned\(item=2\).*Returned on"):
            result.expect_event(Returned, item=2)


def test_a_handler_that_acts_twice_is_not_idempotent() -> None:
    """Whatever it does twice is named."""
    consumer = shop()

    @consumer.on("sold")
    def sell(sold: Sold, session: Session) -> None:
        mail("sold")
        session.execute(insert(stock).values(item=sold.item, left=0))

    with consumer.for_test(tables=tables) as test:
        with pytest.raises(AssertionError, match=r"twice.*written.*effects.*@idempotent"):
            assert_idempotent(test, Sold(1))
        with test.session() as session:
            assert len(session.execute(select(stock)).all()) == 2


def test_the_fixture_closes_what_it_made(
    for_test: Callable[..., ConsumerTest], tmp_path: Path
) -> None:
    """And takes a database of one's own, which stays."""
    consumer = shop()

    @consumer.on("sold")
    @idempotent
    def sell(message: Message, session: Session) -> None:
        session.execute(insert(stock).values(item=1, left=1))

    engine = open_database(f"sqlite:///{tmp_path}/mine.db")
    test = for_test(consumer, database=engine, tables=tables)
    assert test.send(b"1").written["stock"]
    with engine.connect() as db:
        assert len(db.execute(select(stock)).all()) == 1
