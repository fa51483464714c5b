"""A decorator that is used wrongly says so when the program starts, and names the fix."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

import pytest
import tenacity
from sqlalchemy.orm import Session

from holdfast import Message, PlanError
from holdfast.circuit import circuit
from holdfast.consumer import Consumer, HandlerEnding
from holdfast.db.engine import open_database
from holdfast.dlq import dead_letter
from holdfast.effects import effect
from holdfast.errors import ConfigurationError
from holdfast.idempotency import create_tables, idempotent
from holdfast.retry import retry, timeout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def plain(order: dict[str, Any]) -> None:
    """Do nothing."""


async def waiting(order: dict[str, Any]) -> None:
    """Do nothing, later."""


def consumer() -> Consumer:
    """Return a consumer that never runs."""
    return Consumer("memory:", group="g")


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        (lambda: timeout(plain), r"e.g. @timeout\(5\)"),
        (lambda: circuit(plain), r"e.g. @circuit\('payment-gateway'\)"),
        (lambda: dead_letter("orders.dlq"), "pass a DeadLetterStore"),
        (lambda: consumer().on(plain), r"e.g. @consumer.on\('orders'\)"),
        (lambda: consumer().on(["orders", "bills"]), "write it several times"),
        (lambda: Consumer("memory:", group=None), "name the consumer group"),
        (lambda: retry(3), r"@retry\(Backoff\(attempts=3\)\)"),
        (lambda: retry(tenacity.stop_after_attempt(3)), "tenacity wait_"),
        (lambda: retry(on=[KeyError, ValueError]), "a tuple of them"),
        (lambda: retry(deadline="60s"), "use seconds above 0"),
        (lambda: timeout("5s"), "use seconds above 0"),
        (lambda: retry(classify={KeyError: "retry"}), r"Rules\(\{ErrorType: Remedy.RETRY"),
        (lambda: circuit("bank", classify={}), r"Rules\("),
        (lambda: dead_letter(classify=KeyError), r"Rules\("),
        (lambda: circuit("bank", policy=0.5), r"CircuitPolicy\(failure_rate=0.5"),
        (lambda: effect("mail"), r"e.g. @effect\(on_replay=False\)"),
        (lambda: retry()(staticmethod(plain)), "above @staticmethod: put it below"),
        (lambda: retry()(classmethod(plain)), "above @classmethod: put it below"),
        (lambda: retry()(property(plain)), "above @property: put it below"),
        (lambda: retry()(Consumer), "put it on a def"),
        (lambda: timeout(5)(retry()(plain)), "cover all attempts together"),
    ],
)
def test_what_is_written_wrongly_is_refused_with_the_fix(
    wrong: Callable[[], Any], fix: str
) -> None:
    """None of these may wait for the first message, or do something else than was meant."""
    with pytest.raises(ConfigurationError, match=fix):
        wrong()


def test_a_decorator_above_the_registration_is_refused() -> None:
    """It would never run: the consumer has the function below it."""
    for layer in (retry(), idempotent(), dead_letter(), circuit("bank"), timeout(1)):

        def handle(order: dict[str, Any]) -> None:
            """Do nothing."""

        registered = consumer().on("orders")(handle)
        with pytest.raises(PlanError, match=r"below @consumer.on"):
            layer(registered)
        assert layer(handle).plan.layers  # the function itself is free for other uses


def test_a_handler_may_be_registered_for_several_topics() -> None:
    """Registering it again is no decoration."""
    one = consumer()
    one.on("orders")(one.on("returns")(retry()(plain)))
    assert one.topics == ["orders", "returns"]


def test_decorated_static_and_class_methods_are_called_as_such() -> None:
    """The layer stands next to the def."""

    class Shop:
        """Two methods that take no self."""

        @staticmethod
        @retry()
        def add(a: int, b: int) -> int:
            return a + b

        @classmethod
        @retry()
        def name(cls) -> str:
            return cls.__name__

    assert (Shop().add(1, 2), Shop.add(1, 2), Shop().name()) == (3, 3, "Shop")


def test_a_loop_of_ones_own_is_told_which_call_fits_its_handler() -> None:
    """A coroutine that nobody awaits, or a def that is awaited, is no failure of the message."""
    both = consumer()
    both.on("orders")(plain)
    both.on("async-orders")(waiting)
    message = Message.new("orders", b"{}")
    with pytest.raises(ConfigurationError, match="use handle_async"):
        both.handler("async-orders").handle(message)
    with pytest.raises(ConfigurationError, match=r"use handle\(message\)"):
        asyncio.run(both.handler("orders").handle_async(message))
    with pytest.raises(ConfigurationError, match="pass a Message"):
        both.handler("orders").handle({"who": "ada"})  # type: ignore[arg-type]


def test_a_handler_is_called_by_its_own_colour() -> None:
    """`plan(message)`: an outcome, or one to await."""
    both = consumer()
    both.on("orders")(plain)
    both.on("async-orders")(waiting)
    message = Message.new("orders", b"{}")
    assert both.handler("orders")(message).ending is HandlerEnding.HANDLED

    async def loop() -> HandlerEnding:
        outcome = await both.handler("async-orders")(message)
        ending: HandlerEnding = outcome.ending
        return ending

    assert asyncio.run(loop()) is HandlerEnding.HANDLED


def test_memory_is_not_kept_under_a_name_that_others_share() -> None:
    """Two partials of one function would take each other's work for done."""
    engine = open_database("sqlite://")
    create_tables(engine)

    def send(order: Message, session: Session, by: str) -> None:
        """Send it."""

    class Sender:
        """An object that is called."""

        def __call__(self, order: Message, session: Session) -> None:
            """Send it."""

    shared = functools.partial(send, by="mail"), Sender(), lambda order, session: None
    for function in shared:
        with (
            Session(engine) as session,
            session.begin(),
            pytest.raises(ConfigurationError, match="put it on a def"),
        ):
            idempotent(function)(Message.new("orders", b"{}"), session)


def test_handlers_of_one_name_do_not_share_keys(tmp_path: Path) -> None:
    """The order 17 of one topic is no duplicate of the return 17 of another."""
    engine = open_database(f"sqlite:///{tmp_path}/db.db")
    shop = Consumer("memory:", group="g", database=engine)

    def made() -> Callable[..., Any]:
        def handle(order: dict[str, Any]) -> None:
            """Do nothing."""

        return handle

    shop.on("orders")(idempotent(key=lambda order: order["id"])(made()))
    shop.on("returns")(idempotent(key=lambda order: order["id"])(made()))
    with pytest.raises(ConfigurationError, match="Give each a name of its own"):
        shop.on("sales", name="orders")(idempotent(key=lambda order: order["id"])(made()))
    both = idempotent(key=lambda order: order["id"])(made())
    other = Consumer("memory:", group="g", database=engine)
    other.on("orders")(other.on("returns")(both))
    assert other.topics == ["orders", "returns"]
