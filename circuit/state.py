"""The breaker's state machine: values, and pure functions from one to the next.

    Closed ──too many failed or slow──► Open ──open_seconds──► HalfOpen ──probes good──► Closed
                                          ▲                        │
                                          └───────probes bad───────┘

Every move to another state raises the generation. An outcome counts only in the generation
that admitted its call, so a straggler of the last outage neither closes nor opens anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from holdfast.circuit.window import LastCalls, Window

if TYPE_CHECKING:
    from holdfast.circuit.policy import CircuitPolicy


class Closed(msgspec.Struct, frozen=True):
    """Calls go through and are watched."""

    generation: int
    window: Window


class Open(msgspec.Struct, frozen=True):
    """No call goes through until *until*, on the monotonic clock; None: until told."""

    generation: int
    until: float | None


class HalfOpen(msgspec.Struct, frozen=True):
    """*permits* more calls may go through to find out; the *probes* tell how those went."""

    generation: int
    permits: int
    probes: LastCalls
    until: float
    """When probes that have not reported count as failed."""


State: TypeAlias = Closed | Open | HalfOpen


def closed(generation: int, policy: CircuitPolicy) -> Closed:
    """Return a fresh closed state."""
    return Closed(generation, policy.window)


def opened(state: State, seconds: float | None, now: float) -> Open:
    """Return the open state that follows *state*."""
    return Open(state.generation + 1, None if seconds is None else now + seconds)


def half_open(state: State, policy: CircuitPolicy, now: float) -> HalfOpen:
    """Return the half-open state that follows *state*, no permit given out yet."""
    return HalfOpen(
        state.generation + 1, policy.permits, LastCalls(policy.permits), now + policy.probe_seconds
    )


def admit(state: State, policy: CircuitPolicy, now: float) -> tuple[State, bool]:
    """Return what asking to make a call makes of *state*, and whether it may be made."""
    match state:
        case Closed():
            return state, True
        case Open(until=None):
            return state, False
        case Open(until=until) if until is not None and now < until:
            return state, False
        case Open():
            return admit(half_open(state, policy, now), policy, now)
        case HalfOpen(permits=permits) if permits > 0:
            until = now + policy.probe_seconds
            return HalfOpen(state.generation, permits - 1, state.probes, until), True
        case HalfOpen() if now >= state.until:
            return admit(_concluded(state, policy, now), policy, now)
        case HalfOpen():
            return state, False


def record(
    state: State, policy: CircuitPolicy, generation: int, *, failed: bool, slow: bool, now: float
) -> State:
    """Return what the outcome of a call admitted in *generation* makes of *state*."""
    if state.generation != generation:
        return state
    match state:
        case Closed(window=window):
            window = window.record(failed=failed, slow=slow, now=now)
            # A circuit opens on a bad call, never on a good one, so those need no counting.
            if (failed or slow) and policy.trips(window, now):
                return opened(state, policy.open_seconds, now)
            return Closed(generation, window)
        case HalfOpen(probes=probes):
            probes = probes.record(failed=failed, slow=slow, now=now)
            after = HalfOpen(generation, state.permits, probes, state.until)
            counts = probes.count(now)
            if policy.is_bad(counts.failed, counts.slow, policy.permits):
                return opened(state, policy.open_seconds, now)
            return after if counts.calls < policy.permits else _closed_after(after, policy)
        case Open():
            return state


def give_back(state: State, generation: int) -> State:
    """Return *state* after a call ended without saying anything about the dependency."""
    if isinstance(state, HalfOpen) and state.generation == generation:
        return HalfOpen(generation, state.permits + 1, state.probes, state.until)
    return state


def _concluded(state: HalfOpen, policy: CircuitPolicy, now: float) -> State:
    """Return what follows when the missing probes are taken as failed."""
    counts = state.probes.count(now)
    missing = policy.permits - state.permits - counts.calls
    if policy.is_bad(counts.failed + missing, counts.slow, policy.permits):
        return opened(state, policy.open_seconds, now)
    return _closed_after(state, policy)


def _closed_after(state: State, policy: CircuitPolicy) -> Closed:
    return closed(state.generation + 1, policy)
