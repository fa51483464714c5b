"""The relay's own loop: when it waits, and when it does not."""

from __future__ import annotations

from itertools import pairwise

import pytest

from holdfast.outbox import Relay
from holdfast.outbox.relay.relay import RelayStep
from holdfast.testing import VirtualClock


class Scripted:
    """An engine that says the same so many times, then has the relay stopped."""

    name = "scripted"

    def __init__(self, said: RelayStep, clock: VirtualClock, last: int = 10) -> None:
        self.said = said
        self.steps = 0
        self.last = last
        self.at: list[float] = []
        self._clock = clock
        self.relay: Relay | None = None

    def step(self) -> RelayStep:
        self.steps += 1
        self.at.append(self._clock.monotonic())
        if self.steps == self.last and self.relay is not None:
            self.relay.stop()
        return self.said

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("said", "waits"),
    [
        (RelayStep(idle=True), True),
        (RelayStep(idle=True, rested=True), False),
        (RelayStep(published=1), False),
    ],
)
def test_a_relay_waits_only_where_its_engine_had_nothing_to_do_and_did_not_wait(
    said: RelayStep, waits: bool
) -> None:
    """An engine that waits by itself is back with the first event; waiting on would delay it."""
    clock = VirtualClock(auto=True)
    engine = Scripted(said, clock)
    engine.relay = Relay(engine, clock=clock)
    began = clock.monotonic()
    engine.relay.run()
    assert engine.steps == 10
    assert (clock.monotonic() > began) is waits


def test_the_first_event_after_a_long_pause_waits_a_tenth_of_a_second_at_most() -> None:
    """So does each that follows it closely: a slower look would show in the latency of many."""
    clock = VirtualClock(auto=True)
    engine = Scripted(RelayStep(idle=True), clock, last=1000)
    engine.relay = Relay(engine, clock=clock)
    engine.relay.run()
    waits = [later - sooner for sooner, later in pairwise(engine.at)]
    assert 0.09 < max(waits) < 0.101
    assert waits[0] < 0.003
