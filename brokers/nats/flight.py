"""Messages on their way from the server to their handlers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec


class Arrival(msgspec.Struct, eq=False, gc=False):
    """A message that came, and is not yet handed out."""

    position: int
    number: int
    """The consumer's own number of this delivery."""
    count: int
    more: int
    """How many messages the server still has for this lane."""
    reply: str
    stored: float
    lease_until: float
    content: Any
    """The client library's message."""


class Flight(msgspec.Struct, eq=False, gc=False):
    """A message handed out and not yet settled."""

    reply: str
    lease_until: float
    arrival: Arrival
    """As it came."""
    keep_until: float = float("-inf")
    """Until when the lease is to be renewed."""
    key: bytes | None = None


@dataclass(slots=True)
class Pull:
    """A request for messages that the server has not yet fulfilled."""

    id: int
    left: int
    until: float
