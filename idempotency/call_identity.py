"""What a call is about: who handles which message, in which transaction.

Under a consumer the call says so itself. A function that stands alone says it by its
arguments: a session or connection, a `Message`, or what the key function makes of them.
"""

from __future__ import annotations

import inspect
import uuid
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError, PoisonMessage
from holdfast.idempotency.former import FormerScopes
from holdfast.idempotency.inbox import by_key, wanted
from holdfast.ids import former_names, has_own_name, name_of
from holdfast.message import Message, current_message

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.call import Call
    from holdfast.idempotency.claim import ClaimRequest


class CallIdentity:
    """Reads calls of one function."""

    def __init__(
        self,
        function: Callable[..., Any],
        key: Callable[..., Any] | None,
        scope: str | None = None,
    ) -> None:
        self.name = name_of(function)
        self.scope = scope
        """Whose memory it is, where the user says so; it goes before any other."""
        self.formerly = FormerScopes("", former_names(function))
        self._is_named = has_own_name(function)
        self._key = key
        self._takes_message = key is not None and _takes_two(key)
        self.makes_keys = key is not None
        """Whether a key function makes the identity, and not the message's id."""

    def consumer(self, call: Call) -> str:
        """Return whose memory it is: the group and handler, or the function's own name."""
        if self.scope is not None:
            return self.scope
        if not call.consumer and not self._is_named:
            raise ConfigurationError(
                f"@idempotent remembers under a function's name, and {self.name} may stand for "
                "several: give it a name, @idempotent(scope='billing'), or put it on a def, which "
                "may call the partial, object or lambda"
            )
        return call.consumer or self.name

    def session(self, call: Call) -> Any:
        """Return the session or connection of the attempt."""
        found = self.find_session(call)
        if found is not None:
            return found
        raise ConfigurationError(
            f"@idempotent on {self.name} needs the handler's transaction: register it with "
            "Consumer(..., database=...), or pass it a Session or Connection"
        )

    def find_session(self, call: Call) -> Any:
        """Return the session or connection of the attempt, None if it has none."""
        if call.session is not None:
            return call.session
        for value in (*call.kwargs.values(), *call.args):
            if hasattr(value, "execute") and (
                hasattr(value, "get_bind") or hasattr(value, "dialect")
            ):
                return value
        return None

    def wanted(self, call: Call) -> ClaimRequest:
        """Return what is to be claimed: the user's key, or the message's id and content."""
        message = self._message(call)
        if self._key is None:
            if message is None:
                raise ConfigurationError(
                    f"@idempotent on {self.name} needs an identity: pass it the Message, call it "
                    "while one is handled, or give @idempotent(key=lambda payload: …)"
                )
            return wanted(message, call.visible)
        given = call.args[:1] or tuple(call.kwargs.values())[:1]
        value = self._key(*given, message) if self._takes_message else self._key(*given)
        text = _text(value)
        if text is None:
            about = "" if message is None else f" for message {message.id}"
            raise PoisonMessage(
                f"the key function of {self.name} returned {value!r}{about}: it must return "
                "text, a number, a UUID, bytes, or a tuple of these"
            )
        return by_key(text)

    def _message(self, call: Call) -> Message | None:
        if call.message is not None:
            return call.message
        for value in (*call.kwargs.values(), *call.args):
            if isinstance(value, Message):
                return value
        return current_message()


def _text(value: Any) -> str | None:
    """Return a key as text in which other keys cannot hide, None for what is no key."""
    if isinstance(value, str):
        return value or None
    if isinstance(value, bytes):
        return f"bytes:{value.hex()}" if value else None
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | uuid.UUID):
        return str(value)
    if isinstance(value, tuple) and value:
        parts = [_text(part) for part in value]
        if None not in parts:
            return "\x1e".join(f"{len(part)}:{part}" for part in parts if part is not None)
    return None


def _takes_two(key: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(key).parameters.values()
    except (TypeError, ValueError):
        return False
    places = [p for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return len(places) == 2
