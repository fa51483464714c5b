"""The relay's own loop: when it waits, and when it does not."""

from __future__ import annotations

import pytest

from holdfast.outbox import Relay
from holdfast.outbox.relay.relay import RelayStep
from holdfast.testing import VirtualClock


class Scripted:
    """An engine that says the same ten times, then has the relay stopped."""

    name = "scripted"

    def __init__(self, said: RelayStep) -> None:
        self.said = said
        self.steps = 0
        self.relay: Relay | None = None

    def step(self) -> RelayStep:
        self.steps += 1
        if self.steps == 10 and self.relay is not None:
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
    clock, engine = VirtualClock(auto=True), Scripted(said)
    engine.relay = Relay(engine, clock=clock)
    began = clock.monotonic()
    engine.relay.run()
    assert engine.steps == 10
    assert (clock.monotonic() > began) is waits
