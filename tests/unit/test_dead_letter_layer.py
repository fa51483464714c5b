"""`@dead_letter` puts aside what is final, never an outage, and never loses a failure."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.brokers import connect
from holdfast.call import Call
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterStore, DeadLetterTopic, create_tables, dead_letter, dead_lettered
from holdfast.errors import (
    BrokerDown,
    CircuitOpen,
    ConfigurationError,
    DependencyDown,
    PoisonMessage,
    StaleDelivery,
    Transient,
)
from holdfast.message import Message
from holdfast.pipeline import Pipeline
from holdfast.ports import Delivery, Lane
from holdfast.retry import Backoff, retry
from holdfast.testing import VirtualClock

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.dlq import DeadLetter


class Shelf:
    """A home in memory."""

    def __init__(self, error: Exception | None = None) -> None:
        self.letters: list[DeadLetter] = []
        self._error = error

    def put(self, letter: DeadLetter, connection: Any = None) -> None:
        """Keep *letter*, or fail as told."""
        if self._error is not None:
            raise self._error
        self.letters.append(letter)


MESSAGE = Message.new("orders", b"{}", key="k", ids=lambda: "id-1")


def handler(error: BaseException, home: Any, *more: Any) -> Pipeline:
    """Return the plan of a handler that raises *error*."""

    def bill(message: Message) -> None:
        raise error

    function: Any = bill
    for layer in more:
        function = layer(function)
    return dead_letter(home)(function).plan


def run(plan: Pipeline, **more: Any) -> Call:
    """Run the plan on the message."""
    call = Call((MESSAGE,), {}, message=MESSAGE, consumer="billing/shop.bill", **more)
    plan.run(call)
    return call


@pytest.mark.parametrize("error", [PoisonMessage("bad"), ValueError("?"), NameError("x")])
def test_a_final_failure_is_put_aside_and_the_run_ends_well(error: Exception) -> None:
    """The message is settled; the letter says who failed on what."""
    shelf = Shelf()
    call = run(handler(error, shelf))
    (letter,) = shelf.letters
    assert dead_lettered(call) is letter
    assert letter.message is MESSAGE
    assert (letter.culprit.group, letter.culprit.handler) == ("billing", "shop.bill")


@pytest.mark.parametrize(
    "error",
    [
        DependencyDown("db"), BrokerDown("kafka"), CircuitOpen("pay", None), StaleDelivery("x"),
        KeyboardInterrupt(), SystemExit(1), asyncio.CancelledError(), ConfigurationError("no"),
    ],
)  # fmt: skip
def test_an_outage_a_shutdown_or_a_mistake_of_ours_is_no_poison(error: BaseException) -> None:
    """They go out as they are."""
    shelf = Shelf()
    with pytest.raises(type(error)):
        run(handler(error, shelf))
    assert shelf.letters == []


def test_retries_inside_come_first() -> None:
    """A passing error is put aside only when they have given up, with their count."""
    shelf = Shelf()
    backoff = Backoff(first=0.1, ceiling=1, attempts=3)
    plan = handler(Transient("busy"), shelf, retry(backoff))
    timed = Pipeline(plan.layers, plan.function, clock=VirtualClock(auto=True))
    run(timed)
    assert shelf.letters[0].history.attempts == 3


@pytest.mark.parametrize("broken", [DependencyDown("store"), OSError("disk")])
def test_a_letter_that_cannot_be_stored_goes_out_as_an_outage(broken: Exception) -> None:
    """Nothing may be acknowledged then."""
    with pytest.raises(DependencyDown):
        run(handler(ValueError(), Shelf(broken)))


def test_coordinates_come_from_the_runtimes_delivery() -> None:
    """The runtime gives the call the delivery."""
    shelf = Shelf()
    delivery = Delivery(lane=Lane("orders", 3), position=42, key=b"k", body=b"{}", count=2)
    run(handler(ValueError(), shelf), delivery=delivery)
    where = shelf.letters[0].coordinates
    assert (where.topic, where.lane, where.position, where.count) == ("orders", 3, 42, 2)


def test_without_a_home_it_says_what_to_do() -> None:
    """Alone it needs one; under a consumer it is filled in."""
    with pytest.raises(ConfigurationError, match="has no home"):
        run(handler(ValueError(), None))
    shelf = Shelf()
    plan = handler(ValueError(), None)
    filled = [layer.using(shelf) for layer in plan.layers]  # type: ignore[attr-defined]
    run(Pipeline(filled, plan.function))
    assert len(shelf.letters) == 1


def test_it_works_alone_on_any_function() -> None:
    """Arguments are written down as the message; the same call is the same letter."""
    shelf = Shelf()

    @dead_letter(shelf, group="cron")
    def charge(order: dict[str, object], amount: int) -> None:
        raise ValueError("no")

    for _ in range(2):
        assert charge({"id": 1, "odd": object}, amount=3) is None
    first, second = shelf.letters
    assert first.dlq_id == second.dlq_id
    assert first.culprit.group == "cron"
    assert first.culprit.handler.endswith("charge")
    assert b'"amount":3' in (first.message.payload or b"")


def test_an_async_handler_is_covered_alike(tmp_path: Path) -> None:
    """The store is written in a thread, so that the loop goes on."""
    engine = open_database(f"sqlite:///{tmp_path}/x.db")
    create_tables(engine)
    home = DeadLetterStore(engine)

    @dead_letter(home)
    async def bill(message: Message) -> None:
        raise ValueError("no")

    call = Call((MESSAGE,), {}, message=MESSAGE, consumer="billing/shop.bill")
    asyncio.run(bill.plan.run_async(call))
    letter = dead_lettered(call)
    assert letter is not None
    assert home.get(letter.dlq_id) is not None
    engine.dispose()


def test_a_topic_that_refuses_falls_back_on_the_quarantine() -> None:
    """With a database the letter is safe there; without one the error goes out."""
    broker = connect("memory:?max_message=100")
    sink = broker.sink()
    shelf = Shelf()
    run(handler(ValueError("x"), DeadLetterTopic(sink, quarantine=shelf)))
    assert shelf.letters[0].origin == "quarantine"
    with pytest.raises(DependencyDown, match="cannot be published"):
        run(handler(ValueError("x"), DeadLetterTopic(sink)))
    sink.close()
    broker.close()
