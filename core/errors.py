"""Errors whose type states the remedy.

HoldfastError
├── ConfigurationError            FIX          the program or its settings; nothing was done
│   ├── MissingExtra
│   ├── UnknownScheme
│   ├── InvalidUrl
│   ├── PlanError
│   ├── UnknownTopic
│   ├── FencedOff
│   └── Unsupported
├── NotFound                      FIX          nothing answers to the name that was given
│   └── UnknownGroup
├── InvalidMessage                FIX          refused before anything was sent
│   └── MessageTooLarge
├── PoisonMessage                 DEAD_LETTER  no retry will ever help
│   └── DecodeFailed
├── Transient                     RETRY        the same call may pass later
│   ├── AttemptTimeout
│   └── ResultRejected
├── DependencyDown                PAUSE        nobody is to blame; stop asking for a while
│   ├── BrokerDown
│   └── CircuitOpen
└── StaleDelivery                 RELEASE      somebody else owns this message now
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from datetime import datetime


class Remedy(Enum):
    """What to do about an error; every Holdfast error carries one."""

    FIX = "fix"
    DEAD_LETTER = "dead-letter"
    RETRY = "retry"
    PAUSE = "pause"
    RELEASE = "release"


class HoldfastError(Exception):
    """Root of every error raised by Holdfast."""

    remedy: ClassVar[Remedy] = Remedy.FIX

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an exception is made again from its text alone, which an error that is
        # made from several facts does not survive on its way from another process.
        return _remade, (type(self), self.args, self.__dict__)


class ConfigurationError(HoldfastError):
    """The program or its settings must change; nothing was sent or stored."""


class MissingExtra(ConfigurationError):
    """A driver is not installed; the message names the extra that brings it."""

    def __init__(self, extra: str, module: str) -> None:
        super().__init__(
            f"{module!r} is not installed: run  pip install 'holdfast[{extra}]'  to use it"
        )
        self.extra = extra
        self.module = module


class UnknownScheme(ConfigurationError):
    """No adapter answers for this URL scheme."""

    def __init__(self, scheme: str, known: list[str]) -> None:
        super().__init__(
            f"no broker adapter for scheme {scheme!r}; known: {', '.join(known)} "
            "(an adapter registers in the entry-point group 'holdfast.brokers')"
        )
        self.scheme = scheme
        self.known = known


class InvalidUrl(ConfigurationError):
    """A broker URL cannot be understood."""


class PlanError(ConfigurationError):
    """Decorators are stacked in an order that would lose or repeat messages."""


class UnknownTopic(ConfigurationError):
    """The topic does not exist and may not be created."""

    def __init__(self, topic: str, fix: str) -> None:
        super().__init__(f"topic {topic!r} does not exist: {fix}")
        self.topic = topic


class FencedOff(ConfigurationError):
    """Another sink has opened the same transactional id: the broker takes nothing from this."""


class Unsupported(ConfigurationError):
    """The broker lacks a capability and Holdfast does not pretend to have it."""

    def __init__(self, capability: str, broker: str, fix: str = "") -> None:
        super().__init__(f"{broker} cannot {capability}" + (f": {fix}" if fix else ""))
        self.capability = capability
        self.broker = broker


class NotFound(HoldfastError):
    """Nothing answers to the name or number that was given; the command exits with 1."""


class UnknownGroup(NotFound):
    """The broker knows neither members of the group nor anything that it has settled."""

    def __init__(self, group: str, broker: str) -> None:
        super().__init__(
            f"{broker} does not know group {group!r}: nobody is a member, and it has settled "
            "nothing; check the name (group= of the consumer) and --broker"
        )
        self.group = group


class InvalidMessage(HoldfastError, ValueError):
    """A message is malformed; it was refused before anything was sent."""


class MessageTooLarge(InvalidMessage):
    """A message exceeds what the broker takes."""

    def __init__(self, size: int, limit: int, what: str = "message") -> None:
        super().__init__(
            f"{what} of {size} bytes exceeds the limit of {limit}: store the content elsewhere "
            "and send a reference, or raise the limit on broker and client"
        )
        self.size = size
        self.limit = limit


class PoisonMessage(HoldfastError):
    """The message itself is at fault: retrying cannot help, dead-letter it."""

    remedy = Remedy.DEAD_LETTER


class DecodeFailed(PoisonMessage):
    """The payload does not decode or validate; `position` says where."""

    def __init__(self, reason: str, position: str) -> None:
        super().__init__(f"{reason} (at {position})")
        self.reason = reason
        self.position = position


class Transient(HoldfastError):
    """A passing fault; `retry_after` is the least wait the other side asked for."""

    remedy = Remedy.RETRY

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class AttemptTimeout(Transient, TimeoutError):
    """One attempt took longer than its `@timeout`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the attempt took longer than {seconds:g} s")
        self.seconds = seconds


class ResultRejected(Transient):
    """Every attempt returned a result that the retry condition refuses."""

    def __init__(self, result: object, attempts: int) -> None:
        super().__init__(f"the result is still refused after {attempts} attempt(s)")
        self.result = result
        self.attempts = attempts


class DependencyDown(HoldfastError):
    """A dependency is unavailable: pause the intake, burn no attempts."""

    remedy = Remedy.PAUSE


class BrokerDown(DependencyDown):
    """The broker does not answer; nothing was acknowledged."""


class CircuitOpen(DependencyDown):
    """The breaker of dependency *name* lets no call through: none was made, none is blamed.

    `retry_at` is when it will admit the next one, None if only an event or a person can tell.
    """

    def __init__(
        self, name: str, retry_at: datetime | None, *, retry_after: float | None = None
    ) -> None:
        until = "" if retry_at is None else f" until {retry_at.isoformat(timespec='seconds')}"
        super().__init__(f"the circuit of {name!r} is open{until}")
        self.name = name
        self.retry_at = retry_at
        self.retry_after = retry_after


class StaleDelivery(HoldfastError):
    """The delivery belongs to an assignment that has ended; its settling was ignored."""

    remedy = Remedy.RELEASE


def _remade(
    kind: type[HoldfastError], args: tuple[object, ...], facts: dict[str, object]
) -> HoldfastError:
    """Return an error as it was, from what a copy of it carries."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(facts)
    return error
