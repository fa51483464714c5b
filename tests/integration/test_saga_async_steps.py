"""`async def` steps keep the promise of the others: one transaction with the word that they ran."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import func, insert, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from holdfast.db.engine import reading
from holdfast.outbox import Outbox
from holdfast.sagas import InvalidSaga, Saga, StepFailed, current_step
from tests.orchestrating import FAST, OrderState, ReserveStock, Ship, Shop, StockReserved, effects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return each kind of database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shop.db"
    found: str = request.getfixturevalue(request.param).database("saga_async")
    return found


class Night:
    """What the steps run into, and what they saw."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.seen: list[Any] = []
        self.shop: Shop | None = None

    async def meet(self) -> None:
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop(0)


def noted(state: OrderState, *notes: str) -> OrderState:
    return msgspec.structs.replace(state, notes=(*state.notes, *notes))


def booking(night: Night) -> Saga[OrderState]:
    saga = Saga("booking", state=OrderState)
    outbox = Outbox(source="booking")

    @saga.local(compensate="unbook", retry=FAST)
    async def book(state: OrderState, session: AsyncSession) -> OrderState:
        await session.execute(insert(effects).values(what="booked", owner=state.order, amount=1))
        async with session.begin_nested():
            many = await session.scalar(select(func.count()).select_from(effects))
        await outbox.add(session, {"order": state.order}, topic="shipping", key=state.order)
        night.seen.append((type(session), many, current_step().step))  # type: ignore[union-attr]
        if night.shop is not None:
            with reading(night.shop.engine).connect() as other:
                night.seen.append(other.execute(select(effects)).all())
        await night.meet()
        return noted(state, "booked")

    @saga.local_compensation(retry=FAST)
    async def unbook(state: OrderState, session: AsyncSession) -> OrderState:
        await session.execute(insert(effects).values(what="unbooked", owner=state.order, amount=-1))
        return noted(state, "unbooked")

    @saga.command("inventory", compensate=None, retry=FAST)
    def pack(state: OrderState) -> ReserveStock:
        return ReserveStock(state.order)

    @saga.reply(pack)
    async def packed(state: OrderState, reply: StockReserved) -> OrderState:
        await asyncio.sleep(0)
        return noted(state, f"packed as {reply.reservation}")

    @saga.signal(timeout="1d")
    async def approved(state: OrderState, by: str) -> OrderState:
        await asyncio.sleep(0)
        return noted(state, f"by {by}")

    @saga.local(compensate=None, retry=FAST)
    async def close(state: OrderState, session: Session) -> OrderState:
        night.seen.append(type(session))
        await asyncio.sleep(0)
        if "by nobody" in state.notes:
            raise StepFailed("nobody may")
        session.execute(insert(effects).values(what="closed", owner=state.order, amount=0))
        return noted(state, "closed")

    return saga


@pytest.fixture
def opened(url: str) -> Iterator[tuple[Shop, Night, Saga[OrderState]]]:
    """Open a shop whose saga has steps of both colours."""
    night = Night()
    saga = booking(night)
    shop = Shop(url, saga)
    yield shop, night, saga
    shop.close()


def settled(shop: Shop) -> list[str]:
    """Let everything run; the inventory answers with a reservation. Return what was published."""
    topics: list[str] = []
    for _ in range(30):
        messages = shop.published()
        topics += [one.topic for one in messages]
        shop.deliver(*(one for one in messages if "x-saga-id" in one.headers))
        if not messages and not shop.worker.step():
            break
    return topics


def test_steps_replies_and_signals_that_are_awaited_end_a_saga(
    opened: tuple[Shop, Night, Saga[OrderState]],
) -> None:
    """With the session that each asks for, and the context of its step."""
    shop, night, saga = opened
    shop.start(saga, OrderState("ann"), "ann")
    settled(shop)
    shop.sagas.signal("ann", "approved", "ada")
    settled(shop)
    result = shop.result("ann")
    assert result.status == "completed", result
    assert result.state.notes == ("booked", "packed as r-ann", "by ada", "closed")
    assert night.seen == [(AsyncSession, 1, "book"), Session]
    assert [what for what, _, _ in shop.effects("ann") if what != "stock"] == ["booked", "closed"]


def test_what_an_awaited_step_wrote_is_gone_when_it_fails_and_there_once_when_it_is_done(
    opened: tuple[Shop, Night, Saga[OrderState]],
) -> None:
    """Its rows and its events belong to the transaction of the engine, and to no other."""
    shop, night, saga = opened
    night.errors = [RuntimeError("a passing trouble")]
    night.shop = shop
    shop.start(saga, OrderState("ann"), "ann")
    assert shop.worker.step() == 1
    assert shop.effects() == []
    assert shop.published() == []
    shop.let_fire("retry")
    topics = settled(shop)
    assert night.seen[1] == night.seen[3] == []  # nobody sees it before the engine commits
    assert [what for what, _, _ in shop.effects()].count("booked") == 1
    assert topics.count("shipping") == 1


def test_a_saga_that_turns_back_undoes_by_awaited_compensations(
    opened: tuple[Shop, Night, Saga[OrderState]],
) -> None:
    """In the reverse order, as any other."""
    shop, _, saga = opened
    shop.start(saga, OrderState("bob"), "bob")
    settled(shop)
    shop.sagas.signal("bob", "approved", "nobody")
    settled(shop)
    assert shop.result("bob").status == "compensated"
    found = [what for what, _, _ in shop.effects("bob") if what != "stock"]
    assert found == ["booked", "unbooked"]


def test_a_program_that_is_asynchronous_itself_may_signal_an_awaited_step(
    opened: tuple[Shop, Night, Saga[OrderState]],
) -> None:
    """Its loop runs already; the function gets one of its own."""
    shop, _, saga = opened
    shop.start(saga, OrderState("ann"), "ann")
    settled(shop)

    async def approve() -> None:
        shop.sagas.signal("ann", "approved", "ada")

    asyncio.run(approve())
    settled(shop)
    assert shop.result("ann").status == "completed"


def _async_command(saga: Saga[OrderState]) -> None:
    @saga.command("t")
    async def send(state: OrderState) -> Ship:
        return Ship(state.order)


def _async_timer(saga: Saga[OrderState]) -> None:
    @saga.timer()
    async def sleep(state: OrderState) -> str:
        return "1s"


def _blocking_with_an_async_session(saga: Saga[OrderState]) -> None:
    @saga.local()  # type: ignore[call-overload]
    def book(state: OrderState, session: AsyncSession) -> OrderState:
        return state


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (_async_command, "'send' is async: write it with def"),
        (_async_timer, "belongs into a local step before it"),
        (_blocking_with_an_async_session, "'book' asks for an AsyncSession: write it with async"),
    ],
)
def test_what_could_never_be_awaited_is_refused_when_it_is_written(
    wrong: Callable[[Saga[OrderState]], None], told: str
) -> None:
    """With the fix."""
    with pytest.raises(InvalidSaga, match=told):
        wrong(Saga("s", state=OrderState))
