# pyright: strict
"""Uses of Holdfast that both type checkers must accept, with the types that they must see."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_type

from tenacity import retry_if_exception_type, stop_after_attempt, wait_random_exponential

from holdfast import (
    Backoff,
    Batches,
    CircuitPolicy,
    Consumer,
    Handler,
    Message,
    Order,
    Outbox,
    circuit,
    dead_letter,
    effect,
    idempotent,
    retry,
    timeout,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session


@dataclass
class OrderPlaced:
    id: str
    total: int


consumer = Consumer(
    "memory:", group="billing", database="sqlite://", workers=4, order=Order.LANE, strict=True
)
outbox = Outbox(source="shop", ordered=True)


@consumer.on("orders", name="bill", batch=Batches(size=10), ordered=False)
@dead_letter(commutative=True)
@retry(Backoff(attempts=5), deadline=30, budget="gateway")
@circuit("gateway", policy=CircuitPolicy(minimum_calls=5))
@idempotent(window="14d")
@timeout(5)
def bill(order: OrderPlaced, session: Session, *, rush: bool = False) -> int:
    assert_type(outbox.add(session, order, topic="bills", key=order.id, delay=1.5), Message)
    return order.total if rush else 0


@dead_letter
@retry
@idempotent
async def fetch(url: str) -> bytes:
    return url.encode()


@retry(wait=wait_random_exponential(max=30), stop=stop_after_attempt(5))
def from_tenacity(number: int) -> str:
    return str(number)


@retry(wait_random_exponential(), on=retry_if_exception_type(OSError))
def with_a_wait_in_place(number: int) -> str:
    return str(number)


@retry(on=(OSError, TimeoutError))
def some_errors() -> None: ...


@retry(on=lambda error: "busy" in str(error))
def by_a_predicate() -> None: ...


@effect(on_replay=False)
def mail(address: str) -> bool:
    return bool(address)


@effect
async def call(url: str) -> int:
    return len(url)


class Shop:
    @retry(Backoff())
    def sell(self, item: str, count: int = 1) -> float:
        return len(item) * float(count)

    @circuit("stock")
    async def stock(self, item: str) -> int:
        return len(item)


def takes_a_function(work: Callable[[int], str]) -> str:
    return work(1)


def takes_a_handler(handler: Handler[[int], str]) -> str:
    return handler.explain() + handler(1)


async def everything_keeps_its_type(session: Session, other: AsyncSession) -> None:
    order = OrderPlaced("a", 1)
    assert_type(bill(order, session), int)
    assert_type(bill(order, session=session, rush=True), int)
    assert_type(await fetch("x"), bytes)
    assert_type(from_tenacity(1), str)
    assert_type(with_a_wait_in_place(number=1), str)
    assert_type(mail("a@b"), bool)
    assert_type(await call("x"), int)
    assert_type(Shop().sell("x", count=2), float)
    assert_type(await Shop().stock("x"), int)
    assert_type(takes_a_function(from_tenacity), str)
    assert_type(takes_a_handler(from_tenacity), str)
    assert_type(outbox.add(other, order, topic="bills"), Awaitable[Message])
    assert_type(from_tenacity.__name__, str)
    some_errors()
    by_a_predicate()
