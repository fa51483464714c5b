"""Parked events as an operator sees them, and the edit of one: values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.codec import is_json
from holdfast.errors import InvalidMessage, NotFound
from holdfast.headers import Headers

if TYPE_CHECKING:
    from datetime import datetime

    from holdfast.headers import Pair

_FIXED = ("ce_id", "ce_partitionkey", "ce_partitionkeybase64", "ce_specversion")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedKey:
    """A key that waits: how many of its events were refused and how many wait behind."""

    topic: str
    key: str | None
    """None gathers the events without a key, which wait for nothing but themselves."""
    refused: int
    behind: int
    released: int
    since: datetime
    first: int | None
    """The first refused event, which holds the others up."""
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedEvent:
    """One parked event."""

    seq: int
    id: str
    topic: str
    key: str | None
    type: str
    state: str
    error: str | None
    parked_at: datetime
    payload: bytes | None
    headers: tuple[Pair, ...]

    @property
    def subject(self) -> str:
        """How the audit trail names it."""
        key = "" if self.key is None else f"/{self.key}"
        return f"{self.topic}{key}#{self.seq}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change to the content of an event; who it is and where it goes stay as they are."""

    payload: bytes | None = None
    """The new payload; None leaves it."""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers to set, each replacing those of its name."""
    without: tuple[str, ...] = ()
    """Headers to remove."""
    force: bool = False
    """Take a payload that is no JSON although the event says it is."""

    def __post_init__(self) -> None:
        if self.payload is None and not self.headers and not self.without:
            raise InvalidMessage("nothing to edit: give a payload, a header to set or to remove")
        for name in (*dict(self.headers), *self.without):
            if name in _FIXED:
                raise InvalidMessage(f"header {name} is the event's identity: it cannot be edited")
        Headers(self.headers)

    def apply(self, event: ParkedEvent) -> tuple[bytes | None, tuple[Pair, ...]]:
        """Return the new payload and headers of *event*."""
        kept = Headers.received(event.headers).without(self.without)
        headers = kept.with_(self.headers)
        if self.payload is None:
            return event.payload, headers.pairs
        if not self.force and is_json(headers.text("content-type")):
            _check_json(self.payload)
        return self.payload, headers.pairs


class NotParked(NotFound):
    """No parked event answers to this, or it is past the state in which this can be done."""


def _check_json(payload: bytes) -> Any:
    try:
        return msgspec.json.decode(payload)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(
            f"the new payload is not JSON although the event says it is: {error} "
            "(--force takes it all the same)"
        ) from error
