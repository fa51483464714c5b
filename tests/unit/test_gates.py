"""Gates: who may try a circuit that is not closed."""

from __future__ import annotations

import pytest

from holdfast import Message
from holdfast.circuit import Breaker, CircuitPolicy, Closed, HalfOpen, LastCalls, Open, circuit
from holdfast.consumer import Consumer
from holdfast.consumer.scheduling.circuit_gate import CircuitGate
from holdfast.consumer.scheduling.scheduler import KeyScheduler
from holdfast.consumer.scheduling.work import Work
from holdfast.idempotency import idempotent
from holdfast.testing import VirtualClock

POLICY = CircuitPolicy(
    minimum_calls=2, window=LastCalls(10), open_seconds=10, permits=2, probe_seconds=60
)


class Gate:
    """The gate of one handler, and the breaker that shuts it."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.breaker = Breaker("bank", POLICY, clock=self.clock)
        consumer = Consumer("memory:", group="g", clock=self.clock)
        consumer.on("orders")(circuit("bank", breaker=self.breaker)(lambda order: None))
        self._route = consumer._routes["orders"]
        self._gates = CircuitGate([self._route], self.clock)
        self.in_hand: list[Work] = []

    def enter(self) -> Work | None:
        """Have one more message run; None if it is not let in."""
        work = Work(route=self._route, message=Message.new("orders", b"1"), lane_key=())
        if not self._gates.enter(work):
            return None
        work.begin()
        self.in_hand.append(work)
        return work

    def left(self, *works: Work | None) -> None:
        """Have *works* end."""
        for work in works:
            assert work is not None
            self._gates.left(work)
            self.in_hand.remove(work)

    @property
    def is_shut(self) -> bool:
        """Whether the intake pauses."""
        return bool(self._gates.shut(lambda: self.in_hand))


@pytest.fixture
def gate() -> Gate:
    return Gate()


def test_handlers_that_hang_since_before_keep_nobody_from_trying(gate: Gate) -> None:
    """They were let in while all was well: the circuit is tried with others, and closes."""
    for _ in range(5):
        assert gate.enter()
    for permit in (gate.breaker.admit(), gate.breaker.admit()):
        gate.breaker.failed(permit)
    assert isinstance(gate.breaker.state, Open)
    assert gate.enter() is None
    assert gate.is_shut
    gate.clock.advance(10)
    assert not gate.is_shut
    probes = [gate.enter(), gate.enter()]
    assert all(probes)
    assert gate.enter() is None
    assert gate.is_shut
    for permit in (gate.breaker.admit(), gate.breaker.admit()):
        gate.breaker.succeeded(permit)
    gate.left(*probes)
    assert isinstance(gate.breaker.state, Closed)
    assert gate.enter()


def test_probes_that_hang_are_given_up_after_their_time(gate: Gate) -> None:
    """Others try the circuit again, however many hang."""
    gate.breaker.open(10)
    for _ in range(3):
        gate.clock.advance(10)
        assert gate.enter()
        assert gate.enter()
        permits = gate.breaker.admit(), gate.breaker.admit()
        assert isinstance(gate.breaker.state, HalfOpen)
        assert gate.enter() is None
        gate.clock.advance(POLICY.probe_seconds)
        assert not gate.is_shut
        asking = gate.enter()
        assert asking, "somebody asks, so that the breaker concludes"
        with pytest.raises(Exception, match="bank"):
            gate.breaker.admit()
        gate.left(asking)
        assert isinstance(gate.breaker.state, Open)
        assert permits


def test_one_probe_that_hangs_does_not_count_in_the_next_round(gate: Gate) -> None:
    """All permits of the next try are there."""
    gate.breaker.open(10)
    gate.clock.advance(10)
    hanging, failing = gate.enter(), gate.enter()
    assert hanging
    gate.breaker.admit()
    gate.breaker.failed(gate.breaker.admit())
    gate.left(failing)
    assert isinstance(gate.breaker.state, Open)
    gate.clock.advance(10)
    assert gate.enter()
    assert gate.enter()
    assert gate.enter() is None


def test_whoever_let_a_message_in_and_never_asked_is_given_up_too(gate: Gate) -> None:
    """One that hangs before it reaches the breaker keeps the gate no longer than a probe."""
    gate.breaker.open(10)
    gate.clock.advance(10)
    assert gate.enter()
    assert gate.enter()
    assert gate.enter() is None
    gate.clock.advance(POLICY.probe_seconds)
    assert gate.enter()


def test_a_batch_tries_a_circuit_with_no_more_messages_than_it_permits() -> None:
    """While it is closed a batch is whole; half-open, the others wait behind the gate."""
    clock = VirtualClock()
    breaker = Breaker("bank", POLICY, clock=clock)
    consumer = Consumer("memory:", group="g", database="sqlite:///:memory:", clock=clock)
    handler = circuit("bank", breaker=breaker)(idempotent(lambda order, session: None))
    consumer.on("orders", batch=5)(handler)
    route = consumer._routes["orders"]
    scheduler = KeyScheduler(consumer.context, CircuitGate([route], clock))
    works = [
        Work(route=route, message=Message.new("orders", b"1"), lane_key=(n,)) for n in range(10)
    ]
    scheduler.reserve(works)
    scheduler.admit(works)
    assert scheduler.begin_batch(route) == works[:5]
    for _ in range(2):
        breaker.failed(breaker.admit())
    clock.advance(11)
    assert scheduler.begin_batch(route) == works[5:7]
