"""What a handler may ask for beside its payload, by parameter name or annotation.

The payload: brought to its newest version and decoded to what the handler annotates.
"""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from holdfast.call import Call, Stage
from holdfast.codec import JsonCodec, resolved
from holdfast.errors import ConfigurationError, PoisonMessage
from holdfast.idempotency import idempotency_key
from holdfast.layer import Layer
from holdfast.message import Message
from holdfast.upcast import default as upcasters

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.outbox import Outbox


class Attempt(msgspec.Struct, frozen=True):
    """Which attempt this is, over every kind of retry, crash and restart."""

    number: int
    consumer: str
    """Group and handler."""
    identity: str
    """`message.identity`: source and id; or the key that `@idempotent(key=…)` makes of it."""
    error: BaseException | None = None
    """Why the attempt before failed, if this process saw it."""

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of this handler at this identity: pass it to external APIs."""
        return idempotency_key(self.consumer, self.identity)


_NAMES = ("session", "message", "attempt", "outbox")
_KINDS = {
    "Session": "session",
    "AsyncSession": "session",
    "Message": "message",
    "Attempt": "attempt",
    "Outbox": "outbox",
}
_HOMES = ("sqlalchemy", "holdfast")
_CLASSES = {
    "session": "Session or AsyncSession",
    "message": "Message",
    "attempt": "Attempt",
    "outbox": "Outbox",
}


class Arguments(Layer):
    """Hands the handler what it asked for, afresh for each attempt."""

    stage: ClassVar[Stage] = Stage.INJECT
    label: ClassVar[str] = "inject"

    def __init__(self, wanted: dict[str, str], *, outbox: Outbox) -> None:
        self._wanted = wanted
        ways: dict[str, Callable[[Call], Any]] = {**_WAYS, "outbox": lambda _: outbox}
        self._ways = [(parameter, ways[what]) for parameter, what in wanted.items()]

    def describe(self) -> str:
        """Say what is handed over."""
        return ", ".join(self._wanted)

    def enter(self, call: Call) -> None:
        """Fill the keyword arguments of this attempt."""
        kwargs = call.kwargs
        for parameter, way in self._ways:
            kwargs[parameter] = way(call)


def _message(call: Call) -> Message | None:
    return None if call.message is None else call.message.unmarked()


def _attempt(call: Call) -> Attempt:
    known = call.identity
    if known is None:
        known = "" if call.message is None else call.message.identity
    return Attempt(call.attempt, call.consumer, known, call.error)


_WAYS: dict[str, Callable[[Call], Any]] = {
    "session": attrgetter("session"),
    "message": _message,
    "attempt": _attempt,
}
"""How each of them is had from the call."""


def wanted_by(function: Callable[..., Any]) -> dict[str, str]:
    """Return what the parameters of *function* after the first ask for: parameter → what.

    What is annotated goes by its class, the rest by its name. A parameter with a default that
    is annotated as something else is the user's own.
    """
    found: dict[str, str] = {}
    name = getattr(function, "__qualname__", function)
    for first in _parameters(function)[:1]:
        if _kind(resolved(function, first.annotation)) in ("session", "attempt", "outbox"):
            raise ConfigurationError(
                f"{name}() begins with {first.name!r}: its first parameter is the payload, put "
                f"{first.name!r} after it"
            )
    for parameter in _parameters(function)[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        annotation = resolved(function, parameter.annotation)
        what = _kind(annotation)
        if what is None and not (_is_foreign(annotation) and _has_default(parameter)):
            what = parameter.name
            if what in _NAMES and _is_class(annotation):
                raise ConfigurationError(
                    f"{name}() asks for {what!r} as {annotation.__name__}, and would get something "
                    f"else: annotate it as {_CLASSES[what]}, or call your own otherwise"
                )
        if what in _NAMES:
            found[parameter.name] = what
        elif not _has_default(parameter):
            raise ConfigurationError(
                f"{name}() asks for {parameter.name!r}, which nobody can give: after the payload "
                f"use {', '.join(_NAMES)}, or a default"
            )
    return found


def wants_async_session(function: Callable[..., Any]) -> bool:
    """Whether *function* annotates its session as an `AsyncSession`."""
    return any(
        "AsyncSession" in _names(resolved(function, parameter.annotation))
        for parameter in _parameters(function)
    )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # some builtins have no signature
        return []


def _has_default(parameter: inspect.Parameter) -> bool:
    return parameter.default is not parameter.empty


def _kind(annotation: Any) -> str | None:
    return next((_KINDS[name] for name in _names(annotation) if name in _KINDS), None)


def _names(annotation: Any) -> list[str]:
    """Return the names of the classes, ours or SQLAlchemy's, that *annotation* stands for.

    Text is a name that only type checkers can import.
    """
    if isinstance(annotation, str):
        home, _, name = annotation.removesuffix("| None").strip().rpartition(".")
        return [name] if not home or home.split(".")[0] in (*_HOMES, "orm") else []
    if not isinstance(annotation, type):
        return []
    return [kind.__name__ for kind in annotation.__mro__ if kind.__module__.split(".")[0] in _HOMES]


def _is_class(annotation: Any) -> bool:
    """Whether *annotation* is a plain class, which what is handed over would not be one of."""
    is_protocol = getattr(annotation, "_is_protocol", False)
    return isinstance(annotation, type) and _is_foreign(annotation) and not is_protocol


def _is_foreign(annotation: Any) -> bool:
    """Whether *annotation* says that something else is meant, or nothing that is known."""
    return annotation not in (inspect.Parameter.empty, None, Any, object)


class Payload(Layer):
    """Decodes once per run; what cannot be decoded is poison, no attempt is made.

    A handler whose first parameter is annotated `Message` gets the message as it came.
    """

    stage: ClassVar[Stage] = Stage.DECODE
    label: ClassVar[str] = "decode"

    def __init__(self, annotation: Any, *, strict: bool) -> None:
        self._annotation = annotation
        self._takes_message = annotation is Message
        self._decode = JsonCodec().decoder_for(None if self._takes_message else annotation)
        self._strict = strict

    def describe(self) -> str:
        """Say the type."""
        if self._takes_message:
            return "nothing: the handler takes the message" + (", strict" if self._strict else "")
        kind = "JSON" if self._annotation is None else getattr(self._annotation, "__name__", "")
        return (kind or str(self._annotation)) + (", strict" if self._strict else "")

    def enter(self, call: Call) -> None:
        """Put the decoded payload in the place of the first argument."""
        message = call.message
        if message is None:
            raise ConfigurationError("a handler of a Consumer runs with a message: use handle()")
        if self._strict and message.correlation_id is None:
            raise PoisonMessage(
                f"message {message.id} has no correlation id: send one, or use strict=False"
            )
        if message.type in upcasters.types:
            message = upcasters.apply(message)
        call.args = (message.unmarked() if self._takes_message else self._decode(message.payload),)
