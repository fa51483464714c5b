"""What can be set about a consumer; every bound has a number here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from holdfast.backoff import Backoff
from holdfast.circuit import CircuitPolicy, LastCalls
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    """Messages polled at a time; also how many start marks one write covers."""
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
