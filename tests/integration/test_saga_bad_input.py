"""Bad input to sagas: each is refused or set right with a sentence, and no other saga notices."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import insert, text, update
from sqlalchemy.orm import Session  # noqa: TC002 - sagas look at the annotations

from holdfast.cli.migrations.history import VERSION_TABLE, Migrations
from holdfast.consumer import HandlerEnding
from holdfast.db import open_database
from holdfast.errors import ConfigurationError, NotFound
from holdfast.sagas import DuplicateSaga, Saga, Sagas
from holdfast.sagas.schema import timer
from holdfast.testing import VirtualClock
from tests.migrated import migrated
from tests.orchestrating import FAST, OrderState, Ship, Shop, StockReserved, effects, order_saga

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from holdfast import Message

order = order_saga()
MONTH = 30 * 24 * 3600


@pytest.fixture
def open_shop(tmp_path: Path) -> Iterator[Callable[..., Shop]]:
    """Open shops, each on a file of its own."""
    opened: list[Shop] = []

    def open_one(*sagas: Saga[Any]) -> Shop:
        opened.append(Shop(f"sqlite:///{tmp_path}/shop{len(opened)}.db", *sagas))
        return opened[-1]

    yield open_one
    for shop in opened:
        shop.close()


def answers(shop: Shop) -> list[Message]:
    """Start an order and return the participants' answers to it, which nobody has read yet."""
    shop.start(order, OrderState("o1"), "o1")
    shop.deliver(*shop.published())
    return shop.published()


def with_header(message: Message, name: str, value: str) -> Message:
    headers = message.headers.without([name]).with_({name: value})
    return message.with_(id=f"with {value}", headers=headers)


@pytest.mark.parametrize(
    ("header", "value", "sentence"),
    [
        ("x-saga-id", "nobody", "a reply to a saga that is not there: 'nobody'"),
        ("x-saga-step", "fly", "saga 'order' has no step 'fly'"),
        ("x-saga-answer", "perhaps", "'perhaps'; write done or failed or failed-for-now"),
        ("x-saga-direction", "sideways", "'sideways'; write do or undo"),
        ("x-saga-attempt", "-1", "'-1'; write the number that the command has"),
        ("x-saga-attempt", "٣", "write the number that the command has"),
        ("x-saga-attempt", "9" * 5000, "write the number that the command has"),
    ],
)
def test_a_reply_that_says_nonsense_is_a_dead_letter_and_the_rest_goes_on(
    open_shop: Callable[..., Shop], header: str, value: str, sentence: str
) -> None:
    """Its letter names the header and what is right."""
    shop = open_shop(order)
    replies = answers(shop)
    (outcome,) = shop.deliver(with_header(replies[0], header, value))
    assert outcome.ending is HandlerEnding.DEAD_LETTERED
    assert sentence in str(outcome.error)
    shop.deliver(*replies)
    shop.settle()
    assert shop.result("o1").status == "completed"


@pytest.mark.parametrize("answer", ["done", "failed", "failed-for-now"])
def test_a_reply_to_a_saga_that_has_ended_changes_nothing_and_is_told(
    open_shop: Callable[..., Shop], answer: str
) -> None:
    """In its history; also for a step that it does not have any more."""
    shop = open_shop(order)
    replies = answers(shop)
    shop.deliver(*replies)
    shop.settle()
    before = shop.result("o1"), shop.effects()
    (outcome,) = shop.deliver(with_header(replies[0], "x-saga-answer", answer))
    assert outcome.ending is HandlerEnding.HANDLED
    shop.settle()
    assert (shop.result("o1"), shop.effects()) == before
    last = shop.told(before[0].id)[-1]
    assert last["event"]["answer"] == answer
    assert last["effects"] == [{"type": "Ignore", "reason": "the saga is completed already"}]


def test_a_duplicate_start_with_another_state_names_saga_and_key(
    open_shop: Callable[..., Shop],
) -> None:
    """The one that runs is untouched; another saga may have the same key."""
    shop = open_shop(order)
    first = shop.start(order, OrderState("o1"), "o1")
    with pytest.raises(DuplicateSaga) as refused:
        shop.start(order, OrderState("o1", amount=11), "o1")
    assert (refused.value.saga, refused.value.key) == ("order", "o1")
    assert "use another key, or wait until it has ended" in str(refused.value)
    assert shop.start(order, OrderState("o1"), "o1").id == first.id
    shop.settle()
    assert shop.result("o1").state.amount == 10


def test_what_nobody_knows_is_not_found(open_shop: Callable[..., Shop]) -> None:
    """A key that was never started, and the key of another saga."""
    shop = open_shop(order)
    shop.start(order, OrderState("o1"), "o1")
    for ask in (
        lambda: shop.sagas.result("nobody"),
        lambda: shop.sagas.result("o1", saga="trip"),
        lambda: shop.sagas.signal("nobody", "go"),
    ):
        with pytest.raises(NotFound):
            ask()
    shop.sagas.signal("o1", "fly")
    last = shop.told(shop.result("o1").id)[-1]
    assert last["effects"][0]["reason"] == "nothing waits for a signal 'fly'"


class Odd:
    """Something that no codec can write."""


def odd_saga(where: str) -> Saga[Any]:
    """Return a saga that goes wrong at *where*, behind a step that can be undone."""

    class AnyState(msgspec.Struct, frozen=True):
        order: str
        thing: Any = None

    saga: Saga[Any] = Saga("odd", state=AnyState)

    @saga.local(compensate="unbook", retry=None)
    def book(state: Any, session: Session) -> Any:
        session.execute(insert(effects).values(what="booked", owner=state.order, amount=1))
        return state

    @saga.local_compensation(retry=None)
    def unbook(state: Any, session: Session) -> Any:
        session.execute(insert(effects).values(what="unbooked", owner=state.order, amount=-1))
        return state

    @saga.local(compensate=None, retry=None)
    def compute(state: Any, session: Session) -> Any:
        if where == "a state of another type":
            return {"order": state.order}
        return msgspec.structs.replace(state, thing=Odd() if where == "a state" else None)

    @saga.command("shipping", compensate=None, retry=None)
    def ship(state: Any) -> Any:
        return Odd() if where == "a command" else Ship(state.order)

    return saga


@pytest.mark.parametrize(
    ("where", "step", "words"),
    [
        ("a state", "compute", "Odd"),
        ("a state of another type", "compute", "compute gave a dict: return the state, a AnyState"),
        ("a command", "ship", "Odd"),
    ],
)
def test_what_cannot_be_written_fails_its_own_step(
    open_shop: Callable[..., Shop], where: str, step: str, words: str
) -> None:
    """What was done before is undone, and the reason names step and type."""
    saga = odd_saga(where)
    shop = open_shop(saga)
    shop.start(saga, saga.state("o1"), "o1")
    shop.settle()
    result = shop.result("o1")
    assert result.status == "compensated"
    assert result.reason.startswith(f"{step}: ")
    assert words in result.reason
    assert [what for what, _, _ in shop.effects()] == ["booked", "unbooked"]
    assert shop.timers() == []


def test_a_reply_function_that_returns_something_else_makes_its_reply_poison(
    open_shop: Callable[..., Shop],
) -> None:
    """The letter names function and type; the step is asked again, and undone in the end."""
    saga: Saga[OrderState] = Saga("odd", state=OrderState)

    @saga.command("inventory", compensate=None, retry=None)
    def reserve_stock(state: OrderState) -> dict[str, str]:
        return {"order": state.order}

    @saga.reply(reserve_stock)
    def reserved(state: OrderState, reply: StockReserved) -> OrderState:
        return reply  # type: ignore[return-value]

    shop = open_shop(saga)
    shop.start(saga, OrderState("o1"), "o1")
    (command,) = shop.published()
    shop.deliver(command.with_(type="ReserveStock"))
    (outcome,) = shop.deliver(*shop.published())
    assert outcome.ending is HandlerEnding.DEAD_LETTERED
    assert "gave a StockReserved: return the state, a OrderState" in str(outcome.error)
    shop.let_fire("timeout")
    shop.settle()
    result = shop.result("o1")
    assert (result.status, result.reason) == (
        "compensated", "reserve_stock: it was not answered in time"
    )  # fmt: skip


def waiting_saga() -> Saga[OrderState]:
    """Return a saga that sleeps for an hour and then ships, within a day."""
    saga: Saga[OrderState] = Saga("waiting", state=OrderState, deadline="1d")

    @saga.timer()
    def cooling_off(state: OrderState) -> str:
        return "1h"

    @saga.local(compensate=None, retry=FAST)
    def note(state: OrderState, session: Session) -> OrderState:
        session.execute(insert(effects).values(what="noted", owner=state.order, amount=1))
        return state

    return saga


def test_timers_long_overdue_fire_once_each_and_nobody_starves(
    open_shop: Callable[..., Shop],
) -> None:
    """After a month of downtime: every saga ends, the oldest first, though some timers are bad."""
    saga = waiting_saga()
    shop = open_shop(saga)
    for number in range(110):
        shop.start(saga, OrderState(f"o{number}"), f"o{number}")
    with shop.engine.begin() as db:
        db.execute(update(timer).values(due=timer.c.due - MONTH))
        db.execute(  # of a saga that is not there any more: it can never be worked off
            insert(timer).values(
                saga_id="gone", step="cooling_off", direction="do", attempt=1, kind="sleep",
                type="waiting", version=1, due=0.0, tries=0, owner=None, until=0.0, epoch=0,
            )
        )  # fmt: skip
    shop.settle()
    ended = [shop.result(f"o{number}") for number in range(110)]
    assert {one.status for one in ended} <= {"completed", "compensated"}
    noted = [owner for what, owner, _ in shop.effects() if what == "noted"]
    assert len(noted) == len(set(noted)) == sum(one.status == "completed" for one in ended)
    assert {step for step, _ in shop.timers()} <= {"cooling_off"}
    with shop.engine.connect() as db:
        (left,) = db.execute(timer.select()).all()
    assert (left.saga_id, left.tries > 0) == ("gone", True)


def test_workers_with_skewed_clocks_fire_by_the_databases_clock(
    open_shop: Callable[..., Shop],
) -> None:
    """One is a day ahead, one a day behind: nothing fires early, nothing twice, nothing never."""
    saga = waiting_saga()
    shop = open_shop(saga)
    now = datetime.now(UTC)
    workers = [
        Sagas(shop.engine, saga, clock=VirtualClock(now + timedelta(days=days), auto=True)).worker()
        for days in (-1, 1)
    ]
    for number in range(20):
        shop.start(saga, OrderState(f"o{number}"), f"o{number}")
    assert [worker.step() for worker in workers] == [0, 0]
    with shop.engine.begin() as db:
        db.execute(update(timer).where(timer.c.kind == "sleep").values(due=0))
    while sum(worker.step() for worker in workers):
        pass
    assert sorted(owner for _, owner, _ in shop.effects()) == sorted(
        f"o{number}" for number in range(20)
    )
    assert {shop.result(f"o{number}").status for number in range(20)} == {"completed"}
    assert shop.timers() == []


def test_a_participant_that_never_answers_costs_its_attempts_and_no_more(
    open_shop: Callable[..., Shop],
) -> None:
    """The saga is undone with a reason; beside it others go on."""
    shop = open_shop(order)
    shop.start(order, OrderState("deaf"), "deaf")
    shop.published()  # and lost, all of it
    shop.start(order, OrderState("fine"), "fine")
    shop.settle()
    assert shop.result("fine").status == "completed"
    for _ in range(20):
        shop.let_fire("timeout")
        shop.let_fire("retry")
        for message in shop.published():
            if message.headers.text("x-saga-direction") == "undo":
                shop.deliver(message)
                shop.settle()
    result = shop.result("deaf")
    assert result.status == "compensated"
    assert result.reason.endswith("it was not answered in time")
    assert shop.effects("deaf") == []


def test_tables_of_a_newer_version_are_not_touched(tmp_path: Path) -> None:
    """The migrations say what to install; what an older program can still read, it reads."""
    engine = open_database(f"sqlite:///{tmp_path}/newer.db")
    migrated(engine)
    with engine.begin() as db:
        newer = "SET version_num = 'sagas_9999' WHERE version_num LIKE 'sagas%'"
        assert db.execute(text(f"UPDATE {VERSION_TABLE} {newer}")).rowcount == 1
        db.execute(text("ALTER TABLE holdfast_saga ADD COLUMN colour VARCHAR(10)"))
    for act in (Migrations(engine).upgrade, Migrations(engine).branches):
        with pytest.raises(ConfigurationError, match="install the Holdfast version that made it"):
            act()
    shop = Shop(f"sqlite:///{tmp_path}/newer.db", order)
    shop.start(order, OrderState("o1"), "o1")
    shop.settle()
    assert shop.result("o1").status == "completed"
    shop.close()
    engine.dispose()
