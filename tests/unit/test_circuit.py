"""Circuit: no call to a dependency that is down, and nobody blamed for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry

from holdfast import BrokerDown, ConfigurationError, DependencyDown, PoisonMessage, Remedy
from holdfast.call import Call, Done, Stage
from holdfast.circuit import (
    Breaker,
    Breakers,
    CallFailed,
    CallRefused,
    CircuitMetrics,
    CircuitOpen,
    CircuitPolicy,
    Closed,
    HalfOpen,
    LastCalls,
    MemorySharedState,
    Open,
    Sharing,
    StateChanged,
    circuit,
)
from holdfast.layer import Layer
from holdfast.retry import Backoff, Jitter, retry, timeout
from holdfast.testing import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Callable

QUICK = CircuitPolicy(minimum_calls=2, window=LastCalls(2), open_seconds=30, permits=2)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def breaker(clock: VirtualClock) -> Breaker:
    return Breaker("payments", QUICK, clock=clock)


def guarded(breaker: Breaker, function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    return circuit(breaker.name, breaker=breaker, **settings)(function)


def failing(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


def trip(breaker: Breaker) -> None:
    call = guarded(breaker, failing(ConnectionError()))
    for _ in range(2):
        with pytest.raises(ConnectionError):
            call()


def test_an_open_circuit_makes_no_call_and_says_when_to_ask_again(
    breaker: Breaker, clock: VirtualClock
) -> None:
    """CircuitOpen carries the name and the moment; its remedy is to pause."""
    trip(breaker)
    with pytest.raises(CircuitOpen) as caught:
        guarded(breaker, lambda: pytest.fail("must not be called"))()
    assert caught.value.name == "payments"
    assert caught.value.retry_after == 30
    assert caught.value.retry_at is not None
    assert (caught.value.retry_at - clock.now()).total_seconds() == 30
    assert isinstance(caught.value, DependencyDown)
    assert caught.value.remedy is Remedy.PAUSE


def test_an_open_circuit_is_no_attempt(breaker: Breaker) -> None:
    """The retry outside lets it out at once, and the count stays where it was."""
    breaker.open()
    waits = VirtualClock(auto=True)
    handler = retry(Backoff(attempts=5))(guarded(breaker, lambda: None)).with_clock(waits)
    call = Call((), {}, attempt=2)
    with pytest.raises(CircuitOpen):
        handler.plan.run(call)
    assert call.attempt == 2
    assert waits.monotonic() == VirtualClock().monotonic()


def test_after_the_pause_the_permits_probe_and_close(breaker: Breaker, clock: VirtualClock) -> None:
    """Two good probes, and everything flows again."""
    trip(breaker)
    clock.advance(30)
    call = guarded(breaker, lambda: "fine")
    assert call() == "fine"
    assert isinstance(breaker.state, HalfOpen)
    assert call() == "fine"
    assert isinstance(breaker.state, Closed)


def test_half_open_admits_as_many_as_permits(breaker: Breaker, clock: VirtualClock) -> None:
    """A third caller is refused while two are still out."""
    trip(breaker)
    clock.advance(30)
    permits = [breaker.admit(), breaker.admit()]
    with pytest.raises(CircuitOpen):
        breaker.admit()
    for permit in permits:
        breaker.succeeded(permit)
    assert isinstance(breaker.state, Closed)


def test_a_bad_probe_opens_again(breaker: Breaker, clock: VirtualClock) -> None:
    """One of two failed is half, and half is too many."""
    trip(breaker)
    clock.advance(30)
    breaker.failed(breaker.admit())
    assert isinstance(breaker.state, Open)


def test_probes_that_never_report_do_not_block_forever(
    breaker: Breaker, clock: VirtualClock
) -> None:
    """They count as failed after a while, and the next round begins."""
    trip(breaker)
    clock.advance(30)
    lost = [breaker.admit(), breaker.admit()]
    clock.advance(60)
    with pytest.raises(CircuitOpen):
        breaker.admit()
    assert isinstance(breaker.state, Open)
    clock.advance(30)
    breaker.succeeded(breaker.admit())
    for permit in lost:
        breaker.succeeded(permit)  # a straggler of the round before says nothing
    assert isinstance(breaker.state, HalfOpen)


def test_a_duplicate_returns_its_permit_unused(breaker: Breaker, clock: VirtualClock) -> None:
    """Or a run of duplicates would close a circuit that nobody has tested."""

    class Duplicate(Layer):
        stage = Stage.DEDUP
        label = "@idempotent"

        def enter(self, call: Call) -> Done:
            call.duplicate = True
            return Done("seen")

    trip(breaker)
    clock.advance(30)
    call = guarded(breaker, Duplicate()(lambda: pytest.fail("must not be called")))
    for _ in range(5):
        assert call() == "seen"
    assert isinstance(breaker.state, HalfOpen)
    assert breaker.state.permits == 2


@pytest.mark.parametrize(
    "error",
    [
        PoisonMessage("bad data"),
        ConfigurationError("wrong"),
        KeyError("bug"),
        ValueError("bad value"),
        CircuitOpen("another", None),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
    ],
)
def test_what_is_not_the_dependency_s_fault_says_nothing(
    breaker: Breaker, clock: VirtualClock, error: BaseException
) -> None:
    """Neither opens the circuit, nor uses up a probe."""
    call = guarded(breaker, failing(error))
    for _ in range(5):
        with pytest.raises(type(error)):
            call()
    assert isinstance(breaker.state, Closed)
    trip(breaker)
    clock.advance(30)
    with pytest.raises(type(error)):
        call()
    assert isinstance(breaker.state, HalfOpen)
    assert breaker.state.permits == 2


@pytest.mark.parametrize("error", [TimeoutError(), BrokerDown("x"), RuntimeError("who knows")])
def test_what_may_be_the_dependency_s_fault_counts(breaker: Breaker, error: Exception) -> None:
    """Passing faults, declared outages, and errors that nobody knows."""
    call = guarded(breaker, failing(error))
    for _ in range(2):
        with pytest.raises(type(error)):
            call()
    assert isinstance(breaker.state, Open)


def test_a_classification_of_one_s_own_decides(breaker: Breaker) -> None:
    """Here a KeyError is the dependency's."""
    call = guarded(breaker, failing(KeyError()), classify=lambda _: Remedy.RETRY)
    for _ in range(2):
        with pytest.raises(KeyError):
            call()
    assert isinstance(breaker.state, Open)


def test_an_attempt_cut_by_its_timeout_counts(breaker: Breaker) -> None:
    """A dependency that hangs is the very reason for a breaker."""

    async def hang() -> None:
        await asyncio.Event().wait()

    call = timeout(0.01)(guarded(breaker, hang))

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await call()

    asyncio.run(main())
    assert isinstance(breaker.state, Open)


def test_slow_calls_open_the_circuit(clock: VirtualClock) -> None:
    """Though every one of them succeeds."""
    policy = CircuitPolicy(minimum_calls=3, window=LastCalls(3), slow_seconds=2)
    breaker = Breaker("payments", policy, clock=clock)
    call = guarded(breaker, lambda: clock.advance(2))
    for _ in range(3):
        assert isinstance(breaker.state, Closed)
        call()
    assert isinstance(breaker.state, Open)


def test_every_attempt_is_seen_by_the_breaker_inside_the_retry(breaker: Breaker) -> None:
    """Two failed attempts open it, and the third is not made."""
    calls: list[int] = []

    def flaky() -> None:
        calls.append(1)
        raise ConnectionError

    policy = Backoff(first=1, ceiling=1, attempts=9, jitter=Jitter.NONE)
    handler = retry(policy)(guarded(breaker, flaky)).with_clock(VirtualClock(auto=True))
    with pytest.raises(CircuitOpen):
        handler()
    assert len(calls) == 2


def test_a_hand_can_open_probe_and_close(breaker: Breaker, clock: VirtualClock) -> None:
    """Held open until told, or for a while."""
    breaker.open()
    clock.advance(10_000)
    with pytest.raises(CircuitOpen) as caught:
        breaker.admit()
    assert caught.value.retry_at is None
    breaker.half_open()
    breaker.succeeded(breaker.admit())
    breaker.reset()
    assert breaker.state == Closed(3, QUICK.window)
    breaker.open(5)
    clock.advance(5)
    breaker.admit()
    assert isinstance(breaker.state, HalfOpen)


def test_no_lock_is_held_during_the_call(breaker: Breaker) -> None:
    """Eight calls are inside at the same moment; one that waits for the others proves it."""
    together = threading.Barrier(8, timeout=60)
    call = guarded(breaker, together.wait)
    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not together.broken


def test_threads_never_get_more_permits_than_there_are(
    breaker: Breaker, clock: VirtualClock
) -> None:
    """Sixteen threads ask at once, two are let through, round after round."""
    for _ in range(20):
        trip(breaker)
        clock.advance(30)
        start, admitted = threading.Barrier(16), []

        def ask(start: threading.Barrier = start, admitted: list[Any] = admitted) -> None:
            start.wait()
            with contextlib.suppress(CircuitOpen):
                admitted.append(breaker.admit())

        threads = [threading.Thread(target=ask) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(admitted) == 2
        for permit in admitted:
            breaker.succeeded(permit)
        assert isinstance(breaker.state, Closed)


def test_no_failure_is_lost_between_threads(clock: VirtualClock) -> None:
    """4 × 250 failures of a window of 2000: all of them are counted."""
    policy = CircuitPolicy(failure_rate=1, minimum_calls=2_000, window=LastCalls(2_000))
    breaker = Breaker("payments", policy, clock=clock)

    def fail() -> None:
        for _ in range(250):
            breaker.failed(breaker.admit())

    threads = [threading.Thread(target=fail) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert isinstance(breaker.state, Closed)
    assert breaker.state.window.count(0).failed == 1_000


def test_listeners_get_frozen_events_and_cannot_break_a_call(
    breaker: Breaker, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """What happened, in order; a listener that raises is logged."""
    events: list[Any] = []
    breaker.listen(events.append)
    end = breaker.listen(lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    trip(breaker)
    end()
    with pytest.raises(CircuitOpen):
        breaker.admit()
    assert [type(event) for event in events] == [CallFailed, CallFailed, StateChanged, CallRefused]
    change = events[2]
    assert (type(change.before), type(change.after), change.told) == (Closed, Open, False)
    assert change.at == clock.now()
    with pytest.raises(AttributeError):
        change.name = "other"
    assert "ZeroDivisionError" in caplog.text


def test_metrics_start_at_zero_and_follow(breaker: Breaker) -> None:
    """Every series exists before anything happens, so that an alert can compare."""
    registry = CollectorRegistry()
    CircuitMetrics(registry).add(breaker)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(
            f"holdfast_circuit_{name}", {"circuit": "payments"} | labels
        )

    assert value("state", state="closed") == 1
    assert value("state", state="open") == 0
    assert value("changes_total", state="open") == 0
    assert value("refused_total") == 0
    assert value("failed_total", reason="error") == 0
    trip(breaker)
    with pytest.raises(CircuitOpen):
        breaker.admit()
    assert value("state", state="open") == 1
    assert value("changes_total", state="open") == 1
    assert value("refused_total") == 1
    assert value("failed_total", reason="error") == 2


def test_one_name_is_one_breaker() -> None:
    """The policy may be stated by any one user of it, whichever comes first."""
    breakers, watched = Breakers(), []
    breakers.watch(lambda one: watched.append(one.name))
    plain = breakers.get("gateway")
    assert breakers.get("gateway", QUICK) is plain
    assert plain.policy == QUICK
    assert breakers.get("gateway", QUICK) is plain
    with pytest.raises(ConfigurationError, match="one place"):
        breakers.get("gateway", CircuitPolicy(permits=9))
    assert watched == [one.name for one in breakers] == ["gateway"]
    assert circuit("of-this-test").breaker is circuit("of-this-test").breaker


@pytest.mark.parametrize(
    "write",
    [
        lambda: circuit(lambda: None),  # type: ignore[arg-type]
        lambda: circuit(""),
        lambda: circuit("a", breaker=Breaker("b")),
        lambda: circuit("a", breaker=Breaker("a"), policy=QUICK),
    ],
)
def test_a_circuit_needs_a_name_and_one_breaker(write: Callable[[], object]) -> None:
    """Nonsense is refused when it is written."""
    with pytest.raises(ConfigurationError, match="@circuit"):
        write()


def test_explain_names_the_dependency(breaker: Breaker) -> None:
    """So does the layer, for the runtime that pauses its lanes."""
    layer = circuit("payments", breaker=breaker)
    assert layer.dependency == "payments"
    assert "@circuit payments" in layer(lambda: None).explain()


class Fleet:
    """Two processes, as far as the shared state can tell."""

    def __init__(self, clock: VirtualClock) -> None:
        self.store = MemorySharedState(clock=clock)
        self.a, self.b = (Breaker("payments", QUICK, clock=clock) for _ in range(2))
        self.sharing = [Sharing(breaker, self.store) for breaker in (self.a, self.b)]

    def refresh(self) -> None:
        for sharing in self.sharing:
            sharing.refresh()


def test_what_one_process_finds_out_the_others_follow(clock: VirtualClock) -> None:
    """Open here, open there; closed by one probe, closed there too."""
    fleet = Fleet(clock)
    fleet.refresh()
    trip(fleet.a)
    fleet.refresh()
    assert isinstance(fleet.b.state, Open)
    clock.advance(30)
    fleet.refresh()
    fleet.refresh()
    assert isinstance(fleet.a.state, HalfOpen)
    assert isinstance(fleet.b.state, Open)  # one process at a time probes
    for permit in (fleet.a.admit(), fleet.a.admit()):
        fleet.a.succeeded(permit)
    fleet.refresh()
    assert isinstance(fleet.a.state, Closed)
    assert isinstance(fleet.b.state, Closed)


def test_calls_never_wait_for_the_shared_store(clock: VirtualClock) -> None:
    """What they find out is said by the next refresh, and again until the store has heard it."""
    fleet = Fleet(clock)
    fleet.refresh()
    trip(fleet.a)
    assert fleet.store.read("payments") is None
    assert isinstance(fleet.a.state, Open)
    say, fleet.store.say_open = fleet.store.say_open, None  # type: ignore[method-assign,assignment]
    with pytest.raises(TypeError):
        fleet.sharing[0].refresh()
    fleet.store.say_open = say  # type: ignore[method-assign]
    fleet.sharing[0].refresh()
    word = fleet.store.read("payments")
    assert word is not None
    assert word.is_open


def test_a_probing_process_that_dies_is_replaced(clock: VirtualClock) -> None:
    """The claim comes back after the time of a probe."""
    fleet = Fleet(clock)
    trip(fleet.a)
    fleet.refresh()
    clock.advance(30)
    fleet.sharing[0].refresh()  # claims, and is never heard of again
    clock.advance(60)
    fleet.sharing[1].refresh()
    assert isinstance(fleet.b.state, HalfOpen)


def test_a_process_that_probes_in_vain_follows_the_others(clock: VirtualClock) -> None:
    """It has no message to try: what another one finds out ends its probe too."""
    fleet = Fleet(clock)
    trip(fleet.a)
    fleet.refresh()
    clock.advance(30)
    fleet.sharing[1].refresh()  # b claims the probe, and has nothing to do
    assert isinstance(fleet.b.state, HalfOpen)
    fleet.store.say_closed("payments")
    fleet.refresh()
    assert isinstance(fleet.b.state, Closed)


def test_a_probe_in_vain_is_left_to_those_who_have_a_message(clock: VirtualClock) -> None:
    """Once its time is over the idle one steps back, and a busy one gets its turn."""
    fleet = Fleet(clock)
    trip(fleet.a)
    fleet.refresh()
    clock.advance(30)
    fleet.sharing[1].refresh()
    clock.advance(QUICK.probe_seconds)
    fleet.sharing[1].refresh()
    assert isinstance(fleet.b.state, Open)
    fleet.sharing[1].refresh()  # it does not claim it again at once
    fleet.sharing[0].refresh()
    assert isinstance(fleet.a.state, HalfOpen)


def test_without_refreshes_a_shared_circuit_still_recovers(clock: VirtualClock) -> None:
    """If the store or the refresher is gone, it probes by itself after twice its time."""
    fleet = Fleet(clock)
    trip(fleet.a)
    clock.advance(59)
    with pytest.raises(CircuitOpen):
        fleet.a.admit()
    clock.advance(1)
    fleet.a.admit()
    assert isinstance(fleet.a.state, HalfOpen)


def test_a_circuit_held_open_by_hand_is_left_alone(clock: VirtualClock) -> None:
    """What a person decided is not undone by another process."""
    fleet = Fleet(clock)
    fleet.a.open()
    fleet.store.say_closed("payments")
    fleet.refresh()
    assert fleet.a.state == Open(1, None)
