"""Probes: an outage is not a reason to restart, a hanging step is."""

from __future__ import annotations

import pytest

from holdfast.errors import BrokerDown, ConfigurationError
from holdfast.health import host_and_port
from holdfast.outbox import Relay, RelayStep
from holdfast.outbox.relay.monitoring import Probes
from holdfast.testing import VirtualClock


class Engine:
    """Does what it is told next, and looks at the probes while it does."""

    name = "told"

    def __init__(self) -> None:
        self.told: list[RelayStep | Exception] = []
        self.during = lambda: None

    def step(self) -> RelayStep:
        """Do the next thing."""
        self.during()
        match self.told.pop(0):
            case RelayStep() as step:
                return step
            case error:
                raise error

    def close(self) -> None:
        """End."""


class Watched:
    """A relay on a virtual clock, with its probes."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.engine = Engine()
        self.seconds: list[float] = []
        self.relay = Relay(self.engine, clock=self.clock, timer=self.seconds.append)
        self.probes = Probes(self.relay.health, stall_seconds=60, clock=self.clock)

    def do(self, *told: RelayStep | Exception) -> None:
        """Let the relay take these steps, then end."""
        self.engine.told = [*told]
        self.engine.during = lambda: self.relay.stop() if len(self.engine.told) == 1 else None
        self.relay.run()


def test_a_relay_is_not_ready_before_its_first_step() -> None:
    """Traffic of a rollout waits until the new relay works."""
    watched = Watched()
    assert watched.probes.ready().why == "starting"
    assert watched.probes.alive().good
    watched.do(RelayStep(published=1))
    assert watched.probes.ready().good


def test_an_outage_makes_a_relay_unready_but_not_dead() -> None:
    """A restart would not bring the broker back."""
    watched = Watched()
    watched.do(RelayStep(), BrokerDown("kafka is away"))
    assert not watched.probes.ready().good
    assert "kafka is away" in watched.probes.ready().why
    assert watched.probes.alive().good


def test_a_standby_is_ready() -> None:
    """It can take over any time."""
    watched = Watched()
    watched.do(RelayStep(idle=True, standby=True))
    assert watched.probes.ready().good
    assert watched.probes.ready().why == "standby"


def test_a_relay_that_is_kept_from_its_work_is_not_ready() -> None:
    """Somebody must end the stranger; a restart of the relay would not."""
    watched = Watched()
    watched.do(RelayStep(standby=True, hindered="the slot is active for PID 7"))
    assert not watched.probes.ready().good
    assert "PID 7" in watched.probes.ready().why
    assert watched.probes.alive().good
    watched.relay._stop.clear()
    watched.do(RelayStep())
    assert watched.probes.ready().good


def test_a_step_that_does_not_end_is_death() -> None:
    """A relay that hangs in a client library is to be restarted."""
    watched = Watched()
    watched.do(RelayStep(published=1))
    watched.clock.advance(59)
    assert watched.probes.alive().good
    watched.clock.advance(2)
    assert not watched.probes.alive().good


def test_every_step_is_timed_and_a_failed_one_is_a_sign_of_life() -> None:
    """A relay that waits for its broker is not restarted for it."""
    watched = Watched()
    watched.clock.advance(50)
    watched.do(RelayStep(), BrokerDown("kafka is away"))
    watched.clock.advance(50)
    assert watched.probes.alive().good
    assert len(watched.seconds) == 2


@pytest.mark.parametrize("address", ["", "9464", "host:", "host:x", "host:70000", "host:٣"])
def test_a_bad_address_is_refused(address: str) -> None:
    """The error shows the right form."""
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:9464"):
        host_and_port(address)


def test_addresses_are_taken_apart() -> None:
    """IPv4, IPv6 and every interface."""
    assert host_and_port("127.0.0.1:9464") == ("127.0.0.1", 9464)
    assert host_and_port("[::1]:0") == ("::1", 0)
    assert host_and_port(":80") == ("", 80)
