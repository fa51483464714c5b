"""A step of the wall clock is neither a crash nor a longer wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast import Message
from holdfast.brokers.memory import MemoryBroker
from holdfast.testing import VirtualClock
from holdfast.urls import BrokerUrl

if TYPE_CHECKING:
    from holdfast.ports import Broker


@pytest.fixture
def clock() -> VirtualClock:
    """Return a clock that moves when it is waited on."""
    return VirtualClock(auto=True)


@pytest.fixture
def broker(clock: VirtualClock) -> Broker:
    """Return a broker with one lane and a session of ten seconds."""
    broker = MemoryBroker(
        BrokerUrl.parse("memory:?partitions=1&session=10&lease=1000"), clock=clock
    )
    broker.sink().publish([Message.new("orders", b"1", key="k")])
    return broker


@pytest.mark.parametrize("step", [60.0, -7200.0])
def test_a_clock_step_takes_no_lane_from_a_living_member(
    broker: Broker, clock: VirtualClock, step: float
) -> None:
    """Members that keep polling keep their lanes, and no message is blamed."""
    owner, rival = (broker.source(["orders"], group="g") for _ in range(2))
    held = owner.poll(10, 1.0)
    assert len(held) == 1
    assert rival.poll(10, 1.0) == []
    clock.jump_wall(step)
    clock.advance(5)  # both must renew by now, and the rival looks first
    for _ in range(40):
        assert rival.poll(10, 1.0) == []
        assert owner.poll(10, 1.0) == []
    owner.accept(held)
    assert not any(owner.lag().values())


@pytest.mark.parametrize("step", [3600.0, -7200.0])
def test_a_clock_step_neither_shortens_nor_lengthens_a_delay(
    broker: Broker, clock: VirtualClock, step: float
) -> None:
    """A delay is measured by the monotonic clock of the lane's owner."""
    source = broker.source(["orders"], group="g")
    (held,) = source.poll(10, 1.0)
    source.release(held, blame=False, delay=20.0)
    released = clock.monotonic()
    clock.jump_wall(step)
    while not (batch := source.poll(10, 1.0)):
        assert clock.monotonic() < released + 60
    assert clock.monotonic() >= released + 20
    assert batch[0].count == 1


def test_a_wake_before_the_poll_is_not_lost(broker: Broker, clock: VirtualClock) -> None:
    """Whoever wakes the source need not know whether it waits already."""
    source = broker.source(["orders"], group="g")
    source.accept(source.poll(10, 1.0))
    before = clock.monotonic()
    source.wake()
    assert source.poll(10, 100.0) == []
    assert clock.monotonic() < before + 1


def test_what_waits_behind_a_delayed_message_does_not_keep_the_poll_awake(
    broker: Broker, clock: VirtualClock
) -> None:
    """An idle poll sleeps until the first of a key is due."""
    broker.sink().publish([Message.new("orders", b"2", key="k")])
    source = broker.source(["orders"], group="g")
    first, second = source.poll(10, 1.0)
    source.release(first, blame=False, delay=3.0)
    source.release(second, blame=False)
    assert source._patience() > 2  # type: ignore[attr-defined]
    assert [d.body for d in source.poll(10, 10.0)] == [b"1", b"2"]
