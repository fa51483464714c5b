"""An event as the caller hands it to the outbox."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict

from holdfast.errors import ConfigurationError, InvalidMessage

if TYPE_CHECKING:
    from holdfast.headers import HeaderInput

Key = str | bytes | int | uuid.UUID
_LONGEST_DELAY = 100 * 365.25 * 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event to stage, with where it goes; for `Outbox.add_all`."""

    body: Any
    topic: str
    key: Key | None = None
    """Events of one key keep their order; bytes must be UTF-8 text."""
    type: str | None = None
    headers: HeaderInput = ()
    delay: float | timedelta | None = None
    """Seconds after which it is published, by the database's clock."""

    def __post_init__(self) -> None:
        if self.delay is None:
            return
        seconds = self.delay_seconds
        if not isinstance(seconds, int | float) or not 0 <= seconds <= _LONGEST_DELAY:
            raise InvalidMessage(
                f"delay={self.delay!r}: use a timedelta or a number of seconds, 0 to a century"
            )

    @property
    def delay_seconds(self) -> float | None:
        """The delay as a number."""
        delay = self.delay
        return delay.total_seconds() if isinstance(delay, timedelta) else delay

    @property
    def key_text(self) -> str | bytes | None:
        """The key as a message takes it; nothing is turned into text that is not plainly so."""
        key = self.key
        if key is None or isinstance(key, str | bytes):
            return key
        if isinstance(key, int | uuid.UUID):
            return str(key)
        raise InvalidMessage(f"key is a {type(key).__name__}: pass str, bytes, int or UUID")


class Options(TypedDict, total=False):
    """What `Outbox.add` takes beside the event and its topic: the fields of `Event`."""

    key: Key | None
    type: str | None
    headers: HeaderInput
    delay: float | timedelta | None


def event_of(body: Any, topic: str, options: Options) -> Event:
    """Return the event with *options*, or name the option that there is not."""
    if unknown := set(options) - set(Options.__annotations__):
        raise ConfigurationError(
            f"unknown option {', '.join(sorted(unknown))}: use {', '.join(Options.__annotations__)}"
        )
    return Event(body=body, topic=topic, **options)
