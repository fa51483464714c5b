"""What a running plan does next: a pure decision over what has been counted.

Items are numbered in the order in which they are sent: the canary first, then the rest,
each key in the order of its source. So a stage is a number, the gate up to which it sends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.dlq.replay.state import PlanState
from holdfast.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When to go on and when to stop."""

    canary: int = 20
    """So many go first, and every one of them must be confirmed."""
    ramp: tuple[float, ...] = (0.1, 0.5)
    """Shares of the whole after which confirmations are waited for."""
    failure_ratio: float = 0.05
    """Stop when more than this share of the recent outcomes failed again."""
    least_outcomes: int = 20
    """Outcomes over which the ratio is taken at least; the failures among fewer stop the plan
    once they are too many whatever the others will be."""
    patience: float = 60.0
    """Seconds without any outcome after which waiting at a gate ends in a stop."""
    replay_cap: int = 3
    """A message replayed so many times is parked."""
    commutative: bool = False
    """Whether the handler declares that order does not matter: nothing is superseded."""

    def __post_init__(self) -> None:
        if self.canary < 0:
            raise ConfigurationError(f"canary of {self.canary}: use 0 for none")
        if any(not 0 < share <= 1 for share in self.ramp) or list(self.ramp) != sorted(self.ramp):
            raise ConfigurationError(f"ramp {self.ramp}: use rising shares, e.g. 10%,50%")
        if not 0 <= self.failure_ratio < 1:
            raise ConfigurationError(f"failure ratio {self.failure_ratio}: use 0 to below 1")
        if self.patience <= 0 or self.replay_cap < 1 or self.least_outcomes < 1:
            raise ConfigurationError("patience, replay cap and least outcomes must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What is known of a plan at one moment."""

    total: int
    sent: int
    """Everything below this number has been published."""
    confirmed: int = 0
    failed: int = 0
    aside: int = 0
    """Held, parked or skipped: they have no outcome to wait for."""
    recent_confirmed: int = 0
    recent_failed: int = 0
    new_fingerprints: tuple[str, ...] = ()
    """Of failures that no message of the plan had before."""
    waiting_below_sent: int = 0
    """Sent and without an outcome."""
    idle: float = 0.0
    """Seconds since the last outcome, or since there was something to wait for."""


@dataclass(frozen=True, slots=True)
class Send:
    """Publish up to number *until*, as *state*."""

    until: int
    state: PlanState


@dataclass(frozen=True, slots=True)
class Await:
    """Let the consumer confirm what was sent; *state* says in which stage."""

    state: PlanState


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop condition holds."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """Everything was sent and the patience with the rest of the outcomes is over."""

    waiting: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Every item has an outcome."""


Step = Send | Await | Stop | Unconfirmed | Finish


def gates(total: int, policy: Policy) -> tuple[int, ...]:
    """Return the numbers at which confirmations are waited for, the last being *total*."""
    canary = min(policy.canary, total)
    shares = (math.ceil(share * total) for share in policy.ramp)
    found = {gate for gate in (canary, *shares) if 0 < gate < total and gate >= canary}
    return (*sorted(found), total)


def stage(sent: int, total: int, policy: Policy) -> PlanState:
    """Return the stage in which number *sent* goes out."""
    if sent < min(policy.canary, total):
        return PlanState.CANARY
    before_last = gates(total, policy)[:-1]
    return PlanState.RAMPING if before_last and sent < before_last[-1] else PlanState.RUNNING


def next_step(counted: Counted, policy: Policy) -> Step:
    """Return what to do now."""
    total, sent = counted.total, counted.sent
    if (reason := trouble(counted, policy)) is not None:
        return Stop(reason)
    here = stage(max(sent - 1, 0), total, policy)
    if counted.waiting_below_sent and sent in gates(total, policy):
        if counted.idle < policy.patience:
            return Await(here)
        if sent == total:
            return Unconfirmed(counted.waiting_below_sent)
        return Stop(
            f"{counted.waiting_below_sent} of the {sent} sent were not confirmed within "
            f"{policy.patience:g} s: is the consumer of the group running? If it does not use this "
            "database, its confirmations come by  holdfast dlq collect: run that as well"
        )
    if sent < total:
        gate = next(gate for gate in gates(total, policy) if gate > sent)
        return Send(gate, stage(sent, total, policy))
    return Finish()


def trouble(counted: Counted, policy: Policy) -> str | None:
    """Return why the plan must stop; None when all is well."""
    if counted.failed and counted.sent <= min(policy.canary, counted.total):
        return f"{counted.failed} of the canary failed again: the handler is not fixed"
    if counted.new_fingerprints:
        return (
            f"a new kind of failure appeared ({', '.join(counted.new_fingerprints)}): "
            "the new handler breaks in another way"
        )
    outcomes = counted.recent_confirmed + counted.recent_failed
    if counted.recent_failed > policy.failure_ratio * max(outcomes, policy.least_outcomes):
        return (
            f"{counted.recent_failed} of the last {outcomes} failed again "
            f"({counted.recent_failed / outcomes:.0%}, at most {policy.failure_ratio:.0%} may)"
        )
    return None
