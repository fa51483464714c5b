"""A batch that waits behind another goes at once, and only if nothing speaks against it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.brokers import connect
from holdfast.dlq.replay.outgoing import ReplayRows
from holdfast.dlq.replay.publisher import PlanPublisher
from holdfast.dlq.replay.reading import ReplayBatch
from holdfast.errors import BrokerDown, HoldfastError, InvalidMessage
from holdfast.headers import ReplayStamp
from holdfast.ports import Published
from holdfast.testing import VirtualClock, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.message import Message

LATE = float("inf")
STAMP = ReplayStamp(group="billing", plan="p-1", topic="orders")


class Gate:
    """A sink that takes a batch when it is told to, and says of each what the script says."""

    caps = connect("memory:").caps

    def __init__(self) -> None:
        self.begun: list[list[str]] = []
        self.script: dict[str, HoldfastError] = {}
        self.opened = threading.Semaphore(0)

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Note the batch, and wait."""
        self.begun.append([message.id for message in messages])
        assert self.opened.acquire(timeout=60)
        return [Published(error=self.script.pop(message.id, None)) for message in messages]

    def close(self) -> None:
        """Nothing is left open."""


def batch(*numbers: int) -> ReplayBatch:
    """Return messages with these numbers."""
    rows = [
        (n, f"d-{n}", "orders", "billing", f"m-{n}", "Placed", b"k", None, b"{}", "[]",
         0.0, "/shop", *[None] * 5, 0)
        for n in numbers
    ]  # fmt: skip
    messages = ReplayRows(rows, {("orders", "billing"): ("orders.billing.replay", STAMP)})
    return ReplayBatch(start=numbers[0], end=numbers[-1] + 1, messages=messages)


@pytest.fixture
def gate() -> Gate:
    """Return a sink that waits."""
    return Gate()


@pytest.fixture
def clock() -> VirtualClock:
    """Return a clock that stands."""
    return VirtualClock()


@pytest.fixture
def publisher(gate: Gate, clock: VirtualClock) -> Iterator[PlanPublisher]:
    """Return a publisher of that sink."""
    with closing(PlanPublisher(gate, clock, meanwhile=60)) as made:
        yield made


def landed(publisher: PlanPublisher, *, goes_on: bool = True) -> Any:
    """Return what `land` returns, with nothing held or confirmed since."""
    return publisher.land(
        patience=60, pause=lambda _: None, current=lambda it: it, goes_on=lambda: goes_on
    )


def test_what_follows_goes_without_being_told_again(publisher: PlanPublisher, gate: Gate) -> None:
    """Nobody has asked yet what became of the first."""
    publisher.send(batch(1, 2))
    publisher.follow(batch(3), LATE)
    gate.opened.release(2)
    wait_until(lambda: len(gate.begun) == 2)
    assert gate.begun == [["m-1", "m-2"], ["m-3"]]
    first, second = landed(publisher), landed(publisher)
    assert (first[0].start, first[1], second[0].start, second[1]) == (1, [], 3, [])
    assert not publisher.is_busy


@pytest.mark.parametrize("error", [InvalidMessage("bad"), None])
def test_nothing_follows_a_refusal(
    publisher: PlanPublisher, gate: Gate, error: HoldfastError | None
) -> None:
    """What follows may be of the same key: it must wait until that is set aside."""
    if error is not None:
        gate.script["m-1"] = error
    publisher.send(batch(1, 2))
    publisher.follow(batch(3), LATE)
    gate.opened.release(2)
    _, failed = landed(publisher)
    assert failed == ([] if error is None else [(0, error)])
    assert publisher.is_busy == (error is None)
    publisher.close()
    assert len(gate.begun) == (2 if error is None else 1)


def test_nothing_follows_an_outage_until_it_is_over(publisher: PlanPublisher, gate: Gate) -> None:
    """What the broker did not take goes again, and what would follow it is its owner's to send."""
    gate.script["m-1"] = BrokerDown("restarting")
    publisher.send(batch(1))
    publisher.follow(batch(2), LATE)
    gate.opened.release(9)
    found, failed = landed(publisher)
    assert (found.start, failed, publisher.is_busy) == (1, [], False)
    publisher.close()
    assert gate.begun == [["m-1"], ["m-1"]]


def test_nothing_follows_once_the_right_to_send_may_be_over(
    publisher: PlanPublisher, gate: Gate, clock: VirtualClock
) -> None:
    """It goes when its owner has renewed that, which `pause` does; not if the plan has ended."""
    for goes_on in (True, False):
        publisher.send(batch(1))
        publisher.follow(batch(2), clock.monotonic() + 5.0)
        wait_until(lambda: gate.begun[-1:] == [["m-1"]])
        clock.advance(6.0)
        gate.opened.release(1)
        assert landed(publisher)[0].start == 1
        assert gate.begun[-1] == ["m-1"]
        gate.opened.release(1)
        found = landed(publisher, goes_on=goes_on)
        assert (found is not None, publisher.is_busy) == (goes_on, False)
    assert gate.begun == [["m-1"], ["m-2"], ["m-1"]]


def test_what_waits_can_be_taken_back(publisher: PlanPublisher, gate: Gate) -> None:
    """The plan was paused meanwhile; what is on its way stays so."""
    publisher.send(batch(1))
    wait_until(lambda: gate.begun)
    publisher.follow(batch(2), LATE)
    publisher.withdraw()
    gate.opened.release(2)
    assert landed(publisher)[0].start == 1
    assert not publisher.is_busy
    publisher.close()
    assert gate.begun == [["m-1"]]


def test_what_waits_is_not_begun_by_one_who_ends(publisher: PlanPublisher, gate: Gate) -> None:
    """It is the next sender's; the batch on its way is marked if the broker takes it."""
    publisher.send(batch(1))
    wait_until(lambda: gate.begun)
    publisher.follow(batch(2), LATE)
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(publisher.abandon, 60)
        wait_until(lambda: not publisher.is_busy)
        gate.opened.release(2)
    assert taken.result().end == 2
    publisher.close()
    assert gate.begun == [["m-1"]]
