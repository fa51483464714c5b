"""A replay plan as a value: what was frozen, how it is to be sent, how far it is.

How fast a plan may send: a token bucket on an injected clock.

The states of a plan and of its items, and how one may follow another.

What a running plan does next: a pure decision over what has been counted.

Items are numbered in the order in which they are sent: the canary first, then the rest,
each key in the order of its source. So a stage is a number, the gate up to which it sends.

How long consumers remember what they handled: whether what is older was, nobody can tell.

How a run of a plan ended.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.replay.item_state import ItemState
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.dlq.replay.selection import LetterRef


_WRITTEN = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)(?:/(s|m|h))?")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Rate:
    """Messages per second; None is as fast as the broker takes them."""

    per_second: float | None = None

    def __post_init__(self) -> None:
        if self.per_second is not None and self.per_second <= 0:
            raise ConfigurationError(f"a rate of {self.per_second:g}/s sends nothing: use above 0")

    @classmethod
    def parse(cls, text: str | None) -> Rate:
        """Return the rate written as `500/s`, `30/m` or `1000/h`; None has no limit."""
        if text is None:
            return cls()
        found = _WRITTEN.fullmatch(text.strip())
        if found is None:
            raise ConfigurationError(
                f"rate {text!r}: write a number per second, e.g. 500/s or 30/m"
            )
        return cls(float(found[1]) / _SECONDS[found[2] or "s"])

    def __str__(self) -> str:
        return "no limit" if self.per_second is None else f"{self.per_second:g}/s"

    def seconds_for(self, count: int) -> float | None:
        """Return how long *count* messages take; None when only the broker decides."""
        return None if self.per_second is None else count / self.per_second


class Bucket:
    """Lets through what the rate allows; what was not used for a second is forfeited."""

    def __init__(self, rate: Rate, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.rate = rate
        self._rate = rate.per_second
        self._clock = clock
        self._most = 0.0 if self._rate is None else max(1.0, self._rate)
        self._tokens = min(1.0, self._most)
        self._at = clock.monotonic()

    def grant(self, wanted: int) -> tuple[int, float]:
        """Return how many may go now, at most *wanted*; and if none, the seconds to wait."""
        if self._rate is None:
            return wanted, 0.0
        now = self._clock.monotonic()
        self._tokens = min(self._most, self._tokens + (now - self._at) * self._rate)
        self._at = now
        # Not one by one: a tenth of a second's worth at least, or all that is wanted.
        least = min(float(wanted), max(1.0, self._rate / 10))
        if self._tokens < least:
            return 0, (least - self._tokens) / self._rate
        granted = min(wanted, int(self._tokens))
        self._tokens -= granted
        return granted, 0.0


class PlanState(StrEnum):
    """Where a plan is."""

    FREEZING = "freezing"
    """Its messages are still being claimed, by many at once; nothing is sent before all are."""
    DRAFT = "draft"
    """Frozen, nothing sent; perhaps waiting for a second pair of eyes."""
    CANARY = "canary"
    RAMPING = "ramping"
    RUNNING = "running"
    PAUSED = "paused"
    """By an operator."""
    STOPPED = "stopped"
    """By a stop condition; the reason is kept."""
    DONE = "done"
    ABORTED = "aborted"


ACTIVE = frozenset({PlanState.CANARY, PlanState.RAMPING, PlanState.RUNNING})
ENDED = frozenset({PlanState.DONE, PlanState.ABORTED})
_OPEN = frozenset(PlanState) - ENDED - {PlanState.FREEZING}
_MOVES: dict[PlanState, frozenset[PlanState]] = {
    # From → the states it may be entered from.
    PlanState.FREEZING: frozenset(),
    PlanState.DRAFT: frozenset({PlanState.FREEZING}),
    PlanState.CANARY: frozenset({PlanState.DRAFT, PlanState.PAUSED, PlanState.STOPPED}),
    PlanState.RAMPING: _OPEN - {PlanState.RUNNING},
    PlanState.RUNNING: _OPEN,
    PlanState.PAUSED: ACTIVE | {PlanState.DRAFT},
    PlanState.STOPPED: ACTIVE,
    PlanState.DONE: _OPEN,
    PlanState.ABORTED: _OPEN | {PlanState.FREEZING},
}


class NotNow(ConfigurationError):
    """The plan is in a state that does not allow this."""


def may_enter(state: PlanState) -> frozenset[PlanState]:
    """Return the states from which *state* may be entered."""
    return _MOVES[state]


def check_move(now: PlanState, wanted: PlanState) -> None:
    """Raise `NotNow` unless a plan in *now* may go to *wanted*."""
    if now not in _MOVES[wanted]:
        allowed = ", ".join(sorted(_MOVES[wanted])) or "no other state"
        raise NotNow(f"the plan is {now}: it becomes {wanted} only from {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPolicy:
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
class StopUnconfirmed:
    """Everything was sent and the patience with the rest of the outcomes is over."""

    waiting: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Every item has an outcome."""


Step = Send | Await | Stop | StopUnconfirmed | Finish


def gates(total: int, policy: StopPolicy) -> tuple[int, ...]:
    """Return the numbers at which confirmations are waited for, the last being *total*."""
    canary = min(policy.canary, total)
    shares = (math.ceil(share * total) for share in policy.ramp)
    found = {gate for gate in (canary, *shares) if 0 < gate < total and gate >= canary}
    return (*sorted(found), total)


def stage(sent: int, total: int, policy: StopPolicy) -> PlanState:
    """Return the stage in which number *sent* goes out."""
    if sent < min(policy.canary, total):
        return PlanState.CANARY
    before_last = gates(total, policy)[:-1]
    return PlanState.RAMPING if before_last and sent < before_last[-1] else PlanState.RUNNING


def next_step(counted: Counted, policy: StopPolicy) -> Step:
    """Return what to do now."""
    total, sent = counted.total, counted.sent
    if (reason := trouble(counted, policy)) is not None:
        return Stop(reason)
    here = stage(max(sent - 1, 0), total, policy)
    if counted.waiting_below_sent and sent in gates(total, policy):
        if counted.idle < policy.patience:
            return Await(here)
        if sent == total:
            return StopUnconfirmed(counted.waiting_below_sent)
        return Stop(
            f"{counted.waiting_below_sent} of the {sent} sent were not confirmed within "
            f"{policy.patience:g} s: is the consumer of the group running? If it does not use this "
            "database, its confirmations come by  holdfast dlq collect: run that as well"
        )
    if sent < total:
        gate = next(gate for gate in gates(total, policy) if gate > sent)
        return Send(gate, stage(sent, total, policy))
    return Finish()


def trouble(counted: Counted, policy: StopPolicy) -> str | None:
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


_DAY = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The windows of the consumers' dedup, by their names there: the group and the handler."""

    windows: Mapping[str, float | None] = field(default_factory=dict)
    """Seconds; None: for ever."""
    otherwise: float | None = None
    """For consumers that are not among them, as their memory is elsewhere; None: nothing is known,
    or they have none."""
    clock: Clock = SYSTEM_CLOCK

    def window(self, letter: LetterRef) -> float | None:
        """Return for how long the consumer of *letter* remembers; None: for ever, or unknown."""
        return self.windows.get(f"{letter.group}/{letter.handler}", self.otherwise)

    def shortest(self, letters: Iterable[LetterRef]) -> float | None:
        """Return the shortest window of the consumers of *letters*."""
        known = (self.window(letter) for letter in letters)
        return min((one for one in known if one is not None), default=None)

    def forgotten(self, letters: Iterable[LetterRef]) -> dict[str, str]:
        """Return which of *letters* are older than that, and what it means.

        A row of dedup is not older than its message: within the window it is there.
        """
        now = self.clock.now().timestamp()
        found = {}
        for letter in letters:
            window, at = self.window(letter), letter.event_at
            if window is not None and at is not None and now - at.timestamp() > window:
                found[letter.dlq_id] = (
                    f"its event is {(now - at.timestamp()) / _DAY:.1f} days old, its consumer "
                    f"remembers {window / _DAY:g} days: whether it was handled cannot be told "
                    "(--beyond-window sends it all the same)"
                )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How a plan is to be sent, decided when it is made."""

    policy: StopPolicy = StopPolicy()
    rate: Rate = Rate()
    to_topic: str | None = None
    """None: the private topic of the group; `shared`: back to the original topic, where
    other groups skip it; else a topic of this name."""
    approve_above: int = 10_000
    """Larger plans wait for the approval of somebody else."""
    transform: str | None = None
    """`module:function@version` that made the revisions to send."""
    memory: Memory | None = None
    """How long consumers remember what they handled; None: nobody asked."""
    beyond_window: bool = False
    """Whether also what is older than that is sent; else it is held."""

    def __post_init__(self) -> None:
        if self.to_topic is not None and not self.to_topic.strip():
            raise ConfigurationError("--to-topic is empty: name a topic, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """One row of the plans."""

    id: str
    state: PlanState
    created_at: float
    created_by: str
    reason: str
    total: int
    hash: str
    high_water: int
    selection: dict[str, Any]
    policy: StopPolicy
    rate: Rate
    target: str | None
    fingerprints: tuple[str, ...]
    transform: str | None
    approval: int
    approved_by: str | None
    approved_at: float | None
    sent: int
    forgiven: int
    stopped_because: str | None
    owner: str | None
    epoch: int
    until: float
    ended_at: float | None
    lanes: int | None = None
    """Into how many lanes it is divided, each with a sender of its own; None: one sends all."""

    @classmethod
    def of(cls, row: Any) -> ReplayPlan:
        """Return the plan in *row*."""
        return cls(
            **{
                **row,
                "state": PlanState(row["state"]),
                "selection": msgspec.json.decode(row["selection"]),
                "policy": msgspec.json.decode(row["policy"], type=StopPolicy),
                "rate": Rate(row["rate"]),
                "fingerprints": tuple(msgspec.json.decode(row["fingerprints"])),
            }
        )

    @property
    def short(self) -> str:
        """The end of the id, by which people name it: its start is only the time."""
        return self.id[-8:]

    @property
    def waits_for_approval(self) -> bool:
        """Whether somebody else must look at it first."""
        return bool(self.approval) and self.approved_by is None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCounts:
    """The items of a plan by what became of them."""

    total: int
    counts: Mapping[ItemState, int]
    published: int = 0
    """How many were given to the broker, with or without an outcome."""

    def __getitem__(self, state: ItemState) -> int:
        return self.counts.get(state, 0)

    @property
    def aside(self) -> int:
        """Items that are not to be sent."""
        return sum(self[s] for s in (ItemState.HELD, ItemState.PARKED, ItemState.SKIPPED))

    @property
    def settled(self) -> int:
        """Items with an outcome, or without need of one."""
        return self[ItemState.CONFIRMED] + self[ItemState.FAILED_AGAIN] + self.aside


class EndingKind(StrEnum):
    """What an operator must know first."""

    CONFIRMED = "confirmed"
    """Every message of the plan."""
    PARTLY = "partly"
    """Done; some failed again or were set aside."""
    STOPPED = "stopped"
    """By a stop condition."""
    UNCONFIRMED = "unconfirmed"
    """All were sent, and the consumer has not spoken for some."""
    PAUSED = "paused"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class RunResult:
    """How it ended, and why."""

    kind: EndingKind
    plan_id: str
    reason: str = ""

    @classmethod
    def finished(cls, plan: ReplayPlan, counts: PlanCounts) -> RunResult:
        """Return the ending of a plan of which every item is settled."""
        confirmed = counts[ItemState.CONFIRMED]
        if confirmed == plan.total and not counts.aside:
            return cls(EndingKind.CONFIRMED, plan.id, f"all {confirmed:,} confirmed")
        rest = ", ".join(
            f"{counts[state]:,} {state.value.replace('_', ' ')}"
            for state in (
                ItemState.FAILED_AGAIN, ItemState.HELD, ItemState.PARKED, ItemState.SKIPPED,
            )
            if counts[state]
        )  # fmt: skip
        return cls(EndingKind.PARTLY, plan.id, f"{confirmed:,} confirmed, {rest}")

    @classmethod
    def interrupted(cls, plan: ReplayPlan) -> RunResult:
        """Return the ending of a plan that somebody paused, stopped or aborted."""
        match plan.state:
            case PlanState.ABORTED:
                return cls(EndingKind.ABORTED, plan.id, "aborted by an operator")
            case PlanState.STOPPED:
                return cls(EndingKind.STOPPED, plan.id, plan.stopped_because or "stopped")
            case _:
                return cls(EndingKind.PAUSED, plan.id, "paused by an operator")
