"""What can be set about a consumer; every bound has a number here.

Micro-batches: how many messages share one transaction, and how long one waits for company.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, TypedDict

from holdfast.backoff import Backoff
from holdfast.circuit import CircuitPolicy, LastCalls
from holdfast.errors import ConfigurationError
from holdfast.tracing.lineage import Lineage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.clock import Clock
    from holdfast.consumer.monitoring import ConsumerMetrics, Counters
    from holdfast.consumer.store import ConsumerStore


class Order(Enum):
    """Within what messages are handled one after the other."""

    KEY = "key"
    """Per key; messages without a key run freely."""
    LANE = "lane"
    """Per partition of the broker, whatever the keys."""


def _dead_letter_limit() -> CircuitPolicy:
    return CircuitPolicy(
        failure_rate=0.8, minimum_calls=100, window=LastCalls(100), open_seconds=60, permits=3
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The bounds of one consumer process."""

    workers: int = 16
    """Threads for `def` handlers."""
    tasks: int = 100
    """`async def` handlers that run at once."""
    order: Order = Order.KEY
    batch: int = 100
    """Messages polled at a time, also how many start marks one write covers. Where a handler takes
    batches, at least two of them, as far as `backlog` goes."""
    backlog: int = 500
    """Messages of one partition in memory; at this many it is paused."""
    patience: float = 5.0
    """The longest wait for a retry in memory; longer ones are parked in the database."""
    drain_seconds: float = 25.0
    """After a stop, how long the messages in hand may take to finish."""
    revoke_seconds: float = 10.0
    """The same, for partitions that go to another member."""
    hang_seconds: float = 60.0
    """A handler that runs longer is reported, again and again."""
    standstill_seconds: float = 60.0
    """A partition that holds messages and brings none for so long is reported, unless something
    here keeps it: the consumer is not ready then."""
    crash_limit: int = 3
    """A message that was alone in hand at so many crashes is dead-lettered."""
    quarantine: bool = True
    """Whether later messages of a dead letter's key wait for it to be closed."""
    most_held_per_key: int = 1_000
    most_held: int = 100_000
    """At these bounds nothing more is parked: the partition waits, with an alarm."""
    due_seconds: float = 1.0
    """How often parked messages are looked after."""
    takeover_seconds: float = 15.0
    """After this without a sign of life a process is taken for dead: what it had begun is a
    crash, and its parked keys go to others."""
    outage_after: int | None = 3
    """When so many different messages of a topic fail for want of a dependency, and none passes
    in between, its intake pauses and nobody is blamed; None: only circuits do that. Not asked
    where the handler itself has a `@circuit`."""
    outage_seconds: float = 5.0
    """How long such a pause lasts until two messages try again."""
    share_circuits: bool = False
    """Whether an open circuit pauses every process of the group's database, and one probes."""
    strict: bool = False
    """Whether a message without a correlation id is poison."""
    backoff: Backoff = field(default_factory=lambda: Backoff(first=0.1, ceiling=60))
    """The waits of a handler without `@retry`, and of an outage."""
    dead_letter_limit: CircuitPolicy | None = field(default_factory=_dead_letter_limit)
    """When so many messages of a topic die, its intake pauses; None: never."""
    lineage: Lineage | None = None
    """Writes down, in the transaction of its effect, that an event was handled; None: nothing."""

    def __post_init__(self) -> None:
        positive = (
            "workers", "tasks", "batch", "backlog", "patience", "revoke_seconds", "hang_seconds",
            "standstill_seconds", "crash_limit", "due_seconds", "takeover_seconds",
            "most_held_per_key", "most_held", "outage_seconds",
        )  # fmt: skip
        for name in positive:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigurationError(f"{name}={value!r}: use more than 0")
        after = self.outage_after
        if after is not None and (
            isinstance(after, bool) or not isinstance(after, int) or after < 2
        ):
            raise ConfigurationError(
                f"outage_after={after!r}: use 2 or more messages, or None; one alone is no outage"
            )
        for name in ("workers", "tasks", "batch", "backlog"):
            if not isinstance(getattr(self, name), int):
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: use a whole number")
        seconds = self.drain_seconds
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not 0 <= seconds < math.inf:
            raise ConfigurationError(f"drain_seconds={seconds!r}: use 0 or more, and finite")
        if self.lineage is not None and not isinstance(self.lineage, Lineage):
            raise ConfigurationError(
                f"lineage={self.lineage!r}: pass a holdfast.tracing.Lineage, or None"
            )
        try:
            object.__setattr__(self, "order", Order(self.order))
        except ValueError:
            known = ", ".join(f"{one.value!r}" for one in Order)
            raise ConfigurationError(f"order={self.order!r}: use one of {known}") from None

    @property
    def parks(self) -> bool:
        """Whether messages may wait in the database: not where a whole partition is in order."""
        return self.order is Order.KEY

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Settings:
        """Return the settings in *options*; an unknown name is refused."""
        known = [one.name for one in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigurationError(
                    f"a consumer has no setting {name!r}; it has {', '.join(known)}"
                )
        return cls(**options)


class SettingsOptions(TypedDict, total=False):
    """The fields of `Settings`, as `Consumer` takes them by keyword."""

    workers: int
    tasks: int
    order: Order
    batch: int
    backlog: int
    patience: float
    drain_seconds: float
    revoke_seconds: float
    hang_seconds: float
    standstill_seconds: float
    crash_limit: int
    quarantine: bool
    most_held_per_key: int
    most_held: int
    due_seconds: float
    takeover_seconds: float
    outage_after: int | None
    outage_seconds: float
    share_circuits: bool
    strict: bool
    backoff: Backoff
    dead_letter_limit: CircuitPolicy | None
    lineage: Lineage | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerContext:
    """What the parts of one consumer share."""

    group: str
    owner: str
    """The name of this process in the database."""
    settings: Settings
    clock: Clock
    counters: Counters
    store: ConsumerStore | None
    """Its database; None for a consumer without one."""
    system: str = ""
    """The name of its broker, for spans."""

    @property
    def metrics(self) -> ConsumerMetrics:
        """What it exports."""
        return self.counters.metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """How a handler's messages are put together.

    While one batch runs the next one fills, so that without *wait* nobody waits for company
    and batches grow with the load by themselves.
    """

    size: int = 100
    """The most messages of one transaction."""
    wait: float = 0.0
    """Seconds that a message waits for company when nothing else runs."""
    whole: bool = False
    """Whether the handler takes a list of payloads, instead of being called for each."""

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ConfigurationError(f"batch size={self.size!r}: use a number from 1 up")
        if not 0 <= self.wait < float("inf"):
            raise ConfigurationError(f"batch wait={self.wait!r}: use seconds from 0 up")

    @classmethod
    def of(cls, given: Batches | int | None) -> Batches | None:
        """Return what `Consumer.on(batch=…)` means."""
        if given is None or isinstance(given, Batches):
            return given
        return cls(size=given)

    def describe(self) -> str:
        """Say it in a line for `explain()`."""
        shape = "one call for all" if self.whole else "one call for each"
        wait = f", up to {self.wait:g} s of waiting for company" if self.wait else ""
        return f"in one transaction up to {self.size} messages{wait}, {shape}"
