# pyright: strict
"""Uses of Holdfast that are wrong: each error that a type checker must find stands beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tenacity import stop_after_attempt, wait_fixed

from holdfast import (
    Backoff,
    Consumer,
    Outbox,
    circuit,
    dead_letter,
    idempotent,
    retry,
    timeout,
)

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

Consumer("memory:", group="billing", wokers=4)  # call-arg | reportCallIssue
Consumer("memory:", group="billing", workers="four")  # arg-type | reportArgumentType
Consumer("memory:")  # call-arg | reportCallIssue
Outbox(sauce="shop")  # call-arg | reportCallIssue

consumer = Consumer("memory:", group="billing")


@consumer.on("orders", bach=10)  # call-arg | reportCallIssue
def batched(order: str) -> None: ...


@consumer.on("refunds")
@dead_letter(comutative=True)  # call-overload | reportCallIssue
def refund(order: str) -> None: ...


@retry(Backoff(attemps=5))  # call-arg | reportCallIssue
def tried(number: int) -> str:
    return str(number)


@retry(Backoff(), dedline=30)  # call-overload | reportCallIssue
def late(number: int) -> str:
    return str(number)


@retry(wait=stop_after_attempt(5))  # call-overload | reportArgumentType
def swapped(number: int) -> str:
    return str(number)


@retry(wait=wait_fixed(1), stop=5)  # call-overload | reportArgumentType
def number_as_stop(number: int) -> str:
    return str(number)


@circuit("gateway", polcy=None)  # call-arg | reportCallIssue
def guarded(number: int) -> str:
    return str(number)


@circuit  # arg-type | reportArgumentType
def nameless(number: int) -> str:
    return str(number)


@idempotent(windw="14d")  # call-overload | reportCallIssue
def remembered(number: int) -> str:
    return str(number)


@timeout("5s")  # arg-type | reportArgumentType
def limited(number: int) -> str:
    return str(number)


@dead_letter
@retry
@idempotent
def plain(number: int) -> str:
    return str(number)


@retry
async def fetch(url: str) -> bytes:
    return url.encode()


class Shop:
    @retry(Backoff())
    def sell(self, item: str) -> float:
        return float(len(item))


async def uses(session: Session) -> None:
    plain("1")  # arg-type | reportArgumentType
    plain(1, 2)  # call-arg | reportCallIssue
    plain(numer=1)  # call-arg | reportCallIssue
    size: int = plain(1)  # assignment | reportAssignmentType
    text: str = fetch("x")  # assignment | reportAssignmentType
    Shop().sell(1)  # arg-type | reportArgumentType
    Outbox().add(session, b"", topic="bills", kee="a")  # call-overload | reportCallIssue
    Outbox().add(session, b"")  # call-overload | reportCallIssue
    del size, text
