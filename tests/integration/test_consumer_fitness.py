"""What may be a handler, and what a consumer makes of one that does not do its work."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.orm import Session  # noqa: TC002 - handlers ask for it by annotation

from holdfast import ConfigurationError, Message
from holdfast.consumer import Batches, Consumer, HandlerEnding
from holdfast.dlq import dead_letter
from holdfast.idempotency import idempotent
from holdfast.retry import Backoff, retry
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a database."""
    bench = Bench(tmp_path, f"sqlite:///{tmp_path}/database.db")
    yield bench
    bench.close()


async def real(order: str) -> None:
    """Stand for an `async def` handler under a decorator that knows only `def`."""
    raise AssertionError(f"nobody awaits {order}")


def wrapped(order: str) -> Any:
    """Return what such a decorator makes of it."""
    return real(order)


def promised(order: str) -> Any:
    """Return work that was not done: a generator."""
    return (one for one in order)


async def twice(order: str) -> Any:
    """Forget one await of two."""
    return real(order)


def by_the_message(bench: Bench, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return *function* with every layer."""
    return dead_letter()(retry(Backoff(first=0.01, ceiling=0.02, attempts=3))(idempotent(function)))


@pytest.mark.parametrize("function", [wrapped, promised, twice])
def test_a_handler_whose_body_did_not_run_is_not_acknowledged(
    bench: Bench, function: Callable[..., Any]
) -> None:
    """It fails with the fix, message by message; no dedup row, no dead letter, no loss."""
    consumer = bench.consumer()
    consumer.on("orders")(by_the_message(bench, function))
    (first,) = bench.publish("first")
    with running(consumer):
        until(lambda: consumer.tally.failed >= 1, "the mistake was seen")
    assert consumer.tally.handled == 0
    assert (bench.lag + len(bench.held), bench.letters) == (1, [])
    assert "which nobody runs" in bench.attempts[0].last_error
    repaired = bench.consumer()

    @repaired.on("orders")
    @idempotent
    def handle(order: str, session: Session) -> None:
        bench.note(session, order)

    with running(repaired):
        until(lambda: bench.effects == ["first"], f"{first} is handled once it can be")


def test_a_batch_whose_handler_did_not_run_is_not_acknowledged(bench: Bench) -> None:
    """In batches as well."""
    consumer = bench.consumer()
    consumer.on("orders", batch=Batches(size=5))(idempotent(wrapped))
    bench.publish("first", "second")
    with running(consumer):
        until(lambda: consumer.tally.failed >= 1, "the mistake was seen")
    assert consumer.tally.handled == 0
    assert bench.lag + len(bench.held) == 2


def test_a_loop_of_ones_own_hears_that_the_handler_did_not_run(bench: Bench) -> None:
    """The outcome is a failure that names the fix: there is nothing to acknowledge."""
    consumer = bench.consumer()
    consumer.on("orders")(wrapped)
    outcome = consumer.handler("orders").handle(Message.new("orders", b"first", key="k"))
    assert outcome.ending is HandlerEnding.FAILED
    assert "Make the handler an async def" in str(outcome.error)


def generator(order: str) -> Iterator[str]:
    """Run nothing when called."""
    yield order


async def async_generator(order: str) -> Any:
    """Run nothing when called."""
    yield order


def nothing() -> None:
    """Take nothing."""


def by_name(*, order: str) -> None:
    """Take the payload by name only."""


def by_position(order: str, session: Session, /) -> None:
    """Take the session by position only."""


class Thing:
    """Is no function."""


@pytest.mark.parametrize(
    ("function", "fix"),
    [
        (generator, "Take the yield out of it"),
        (async_generator, "Take the yield out of it"),
        (nothing, r"takes no payload.*def nothing\(order: dict\)"),
        (by_name, "takes no payload"),
        (by_position, "put the / right after the payload"),
        (Thing, "a handler is a function"),
        ("handle", "a handler is a function"),
    ],
)
def test_what_cannot_be_a_handler_is_refused_when_it_is_registered(
    bench: Bench, function: Any, fix: str
) -> None:
    """Not message by message, for ever."""
    consumer = bench.consumer()
    with pytest.raises(ConfigurationError, match=fix):
        consumer.on("orders")(function)
    assert consumer.topics == []


@pytest.mark.parametrize("layer", [idempotent, idempotent(lease="30s")])
def test_dedup_without_a_database_is_refused_when_it_is_registered(layer: Any) -> None:
    """There is nowhere to remember; each message would fail for ever."""
    consumer = Consumer("memory:", group="g")
    with pytest.raises(ConfigurationError, match="give the consumer a database"):
        consumer.on("orders")(layer(wrapped))


def test_a_decorated_method_keeps_its_layers(bench: Bench) -> None:
    """They join the one plan: its dead letters go to the consumer's home."""

    class Service:
        @dead_letter()
        def handle(self, order: str) -> None:
            raise ValueError(order)

    consumer = bench.consumer()
    consumer.on("orders")(Service().handle)
    bench.publish("first")
    with running(consumer):
        until(lambda: len(bench.letters) == 1, "dead-lettered")


async def awaits_what_was_cancelled(order: str) -> None:
    """Wait for a task that somebody else has cancelled."""
    task = asyncio.get_running_loop().create_future()
    task.cancel()
    await task


def asks_what_was_cancelled(order: str) -> None:
    """Wait for a job that somebody else has cancelled."""
    job: Future[None] = Future()
    job.cancel()
    job.result()


@pytest.mark.parametrize("function", [awaits_what_was_cancelled, asks_what_was_cancelled])
def test_a_handler_that_was_not_cancelled_cannot_say_so_for_ever(
    bench: Bench, function: Callable[..., Any]
) -> None:
    """Released each time, its message would be tried for ever and no error would tell."""
    consumer = bench.consumer()
    consumer.on("orders")(dead_letter()(retry(Backoff(first=0.01, attempts=3))(function)))
    bench.publish("first")
    with running(consumer):
        until(lambda: len(bench.letters) == 1, "dead-lettered")
    assert "nobody had cancelled it" in bench.letters[0].envelope
    assert bench.letters[0].attempts == 3
