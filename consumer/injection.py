"""What a handler may ask for beside its payload, by parameter name or annotation."""

from __future__ import annotations

import inspect
import typing
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from sqlalchemy.orm import Session

from holdfast.errors import ConfigurationError
from holdfast.idempotency import idempotency_key
from holdfast.layer import Call, Layer, Stage
from holdfast.message import Message
from holdfast.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Callable


class Attempt(msgspec.Struct, frozen=True):
    """Which attempt this is, over every kind of retry, crash and restart."""

    number: int
    idempotency_key: str
    """The same for every attempt of this handler at this message: pass it to external APIs."""
    error: BaseException | None = None
    """Why the attempt before failed, if this process saw it."""


_NAMES = ("session", "message", "attempt", "outbox")


class Injection(Layer):
    """Hands the handler what it asked for, afresh for each attempt."""

    stage: ClassVar[Stage] = Stage.INJECT
    label: ClassVar[str] = "inject"

    def __init__(self, wanted: dict[str, str], *, outbox: Outbox) -> None:
        self._wanted = wanted
        self._outbox = outbox

    def describe(self) -> str:
        """Say what is handed over."""
        return ", ".join(self._wanted)

    def enter(self, call: Call) -> None:
        """Fill the keyword arguments of this attempt."""
        for parameter, what in self._wanted.items():
            call.kwargs[parameter] = self._value(what, call)

    def _value(self, what: str, call: Call) -> Any:
        match what:
            case "session":
                return call.session
            case "message":
                return None if call.message is None else call.message.unmarked()
            case "outbox":
                return self._outbox
            case _:
                identity = "" if call.message is None else call.message.id
                return Attempt(call.attempt, idempotency_key(call.consumer, identity), call.error)


def wanted_by(function: Callable[..., Any]) -> dict[str, str]:
    """Return what the parameters of *function* after the first ask for: parameter → what."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except ValueError:  # some builtins have no signature
        return {}
    kinds = _kinds()
    found: dict[str, str] = {}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        what = kinds.get(_bare_name(parameter.annotation), parameter.name)
        if what in _NAMES:
            found[parameter.name] = what
        elif parameter.default is parameter.empty:
            raise ConfigurationError(
                f"{getattr(function, '__qualname__', function)}() asks for {parameter.name!r}, "
                f"which nobody can give: after the payload use {', '.join(_NAMES)}, or a default"
            )
    return found


def wants_async_session(function: Callable[..., Any]) -> bool:
    """Whether *function* annotates its session as an `AsyncSession`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return False
    return any(_bare_name(p.annotation) == "AsyncSession" for p in parameters)


def _kinds() -> dict[str, str]:
    return {
        Session.__name__: "session",
        "AsyncSession": "session",
        Message.__name__: "message",
        Attempt.__name__: "attempt",
        Outbox.__name__: "outbox",
    }


def _bare_name(annotation: Any) -> str:
    """Return the class name of *annotation*, which may be text, a class or `X | None`."""
    if isinstance(annotation, str):
        return annotation.removesuffix("| None").strip().rpartition(".")[2]
    arguments = [one for one in typing.get_args(annotation) if one is not type(None)]
    if len(arguments) == 1 and typing.get_origin(annotation) is not None:
        annotation = arguments[0]
    return getattr(annotation, "__name__", "")
