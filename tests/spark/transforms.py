"""Transforms that the tests of the `transform` job name on the command line."""

from __future__ import annotations

from typing import Any

from holdfast.upcast import Upcasters

upcasters = Upcasters()


@upcasters.upcast("order", 1)
def with_currency(event: dict[str, Any]) -> dict[str, Any]:
    """Return version 2: amounts have a currency."""
    return {**event, "currency": "EUR"}


def cents(order: dict[str, Any]) -> dict[str, Any]:
    """Return *order* with its amount in cents; one without an amount is refused."""
    return {**order, "amount": order["amount"] * 100}


def lenient_cents(order: dict[str, Any]) -> dict[str, Any]:
    """Return the same, with nothing for an order without an amount."""
    return {**order, "amount": order.get("amount", 0) * 100}


def talkative(_order: dict[str, Any]) -> None:
    """Quote what it should keep to itself."""
    raise ValueError("no charge with password=hunter2 for \ud800")


def forgetful(order: dict[str, Any]) -> None:
    """Forget to return what it has made."""
    order["amount"] = 0


def absurd(_order: dict[str, Any]) -> int:
    """Return something else than an order."""
    return 42


def unwritable(order: dict[str, Any]) -> dict[str, Any]:
    """Return what no JSON can be made of."""
    return {**order, "amount": object()}
