"""One edit as an operator asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from holdfast.dlq.replay.marks import NAMES
from holdfast.errors import ConfigurationError, InvalidMessage
from holdfast.headers import Headers

if TYPE_CHECKING:
    from holdfast.message import Message

_LOCKED = frozenset(NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of one dead letter; what is None stays as it is."""

    payload: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    without: tuple[str, ...] = ()
    force: bool = False
    """Take a payload that is no JSON although the original was."""

    def __post_init__(self) -> None:
        if self.payload is None and not self.headers and not self.without:
            raise ConfigurationError("the edit changes nothing: give a payload or headers")
        for name in (*(name for name, _ in self.headers), *self.without):
            if name.lower() in _LOCKED or name.startswith(("ce_", "ce-", "cloudEvents")):
                raise ConfigurationError(f"header {name!r} is locked: it is part of the identity")

    def applied_to(self, before: Message) -> Message:
        """Return *before* with the change; a payload that stops being JSON is refused."""
        payload = before.payload if self.payload is None else self.payload
        if payload is not None and not self.force and _is_json(before.payload):
            try:
                msgspec.json.decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InvalidMessage(
                    f"the new payload is no JSON ({error}) and the old one was: fix it, or --force"
                ) from error
        headers = before.headers.without(self.without)
        return before.with_(payload=payload, headers=headers.with_(Headers(self.headers)))


def _is_json(payload: bytes | None) -> bool:
    try:
        msgspec.json.decode(payload or b"")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True
