"""What listeners of a breaker are told; every event is a frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from datetime import datetime

    from holdfast.circuit.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged:
    """The circuit moved to another state; a higher `after.generation` is the later move."""

    name: str
    before: State
    after: State
    at: datetime
    told: bool = False
    """Whether a person or another process moved it, rather than the outcome of its calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRefused:
    """A call was not let through."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailed:
    """A call counted against the dependency: it failed, or it was slow."""

    name: str
    error: BaseException | None
    slow: bool


Event: TypeAlias = StateChanged | CallRefused | CallFailed
