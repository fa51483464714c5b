"""The order saga of the shop: its state, its commands, and its versions."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy.orm import Session  # noqa: TC002 - the saga looks at the annotations

from holdfast.backoff import Backoff
from holdfast.sagas import Saga, lock_resource

if TYPE_CHECKING:
    from holdfast.durations import Duration

SHARE = 30
"""Percent of the orders that fail at each step."""
AMOUNT = 10


class OrderState(msgspec.Struct, frozen=True):
    order: str
    customer: str
    amount: int = AMOUNT
    reservation: str = ""


class LabelledState(OrderState, frozen=True):
    label: str = ""


class ReserveStock(msgspec.Struct):
    order: str


class StockReserved(msgspec.Struct):
    reservation: str


class ReleaseStock(msgspec.Struct):
    order: str


class Charge(msgspec.Struct):
    order: str
    customer: str
    amount: int


class Refund(msgspec.Struct):
    order: str
    customer: str
    amount: int


class Ship(msgspec.Struct):
    order: str


class CancelShipment(msgspec.Struct):
    order: str


def share(what: str, order: str) -> int:
    """Return where *order* stands in a hundred when it comes to *what*: always the same."""
    return zlib.crc32(f"{what}/{order}".encode()) % 100


def fails(what: str, order: str) -> bool:
    """Whether *what* fails for good for this order."""
    return share(what, order) < SHARE


def topic(prefix: str, name: str) -> str:
    """Return the topic of a command, or of the replies."""
    return f"{prefix}.{name}"


TOPICS = ("reserve", "release", "charge", "refund", "ship", "cancel", "replies")


def order_saga(prefix: str, version: int = 1, *, timeout: Duration = "5s") -> Saga[OrderState]:
    """Return the saga: the customer is locked, stock and money side by side, then the parcel.

    Version 2 also writes a label.
    """
    state_type = OrderState if version == 1 else LabelledState
    saga: Saga[OrderState] = Saga(
        "order", state=state_type, version=version, replies=topic(prefix, "replies")
    )
    retry = Backoff(first=0.1, ceiling=1.0, attempts=40)

    @saga.local(compensate=None, retry=Backoff(first=0.05, ceiling=0.5))
    def hold_customer(state: OrderState, session: Session) -> OrderState:
        # One that will be parked keeps its lock: nobody else is to wait for that.
        who = state.order if state.order.startswith("stubborn") else state.customer
        lock_resource(session, f"{prefix} {who}", expires="1h")
        return state

    with saga.parallel():

        @saga.command(topic(prefix, "reserve"), compensate="release", timeout=timeout, retry=retry)
        def reserve(state: OrderState) -> ReserveStock:
            return ReserveStock(state.order)

        @saga.command(topic(prefix, "charge"), compensate="refund", timeout=timeout, retry=retry)
        def charge(state: OrderState) -> Charge:
            return Charge(state.order, state.customer, state.amount)

    @saga.reply(reserve)
    def reserved(state: OrderState, reply: StockReserved) -> OrderState:
        return msgspec.structs.replace(state, reservation=reply.reservation)

    @saga.compensation(topic(prefix, "release"), timeout=timeout, retry=retry)
    def release(state: OrderState) -> ReleaseStock:
        return ReleaseStock(state.order)

    @saga.compensation(topic(prefix, "refund"), timeout=timeout, retry=retry)
    def refund(state: OrderState) -> Refund:
        return Refund(state.order, state.customer, state.amount)

    if version > 1:

        @saga.local(compensate=None)
        def label(state: LabelledState, session: Session) -> LabelledState:
            return msgspec.structs.replace(state, label=f"for {state.customer}")

    @saga.command(topic(prefix, "ship"), compensate="cancel", timeout=timeout, retry=retry)
    def ship(state: OrderState) -> Ship:
        return Ship(state.order)

    @saga.compensation(topic(prefix, "cancel"), timeout=timeout, retry=retry)
    def cancel(state: OrderState) -> CancelShipment:
        return CancelShipment(state.order)

    return saga


def moving(saga: Saga[OrderState]) -> Saga[OrderState]:
    """Return version 2 with the way from version 1."""

    @saga.migrate(from_version=1, skip=["label"])
    def labelled(old: OrderState) -> LabelledState:
        return LabelledState(old.order, old.customer, old.amount, old.reservation)

    return saga
