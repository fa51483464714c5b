"""Codecs: values to payload bytes and back, checked against the handler's annotation."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import types
import typing
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.errors import ConfigurationError, DecodeFailed, InvalidMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Decoder = typing.Callable[["bytes | None"], Any]
"""Turns a payload into what a handler wants, or raises `DecodeFailed`."""

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
BINARY = "application/octet-stream"

_BYTE = re.compile(r" \((byte \d{1,20})\)$")
_LINE = re.compile(r"line \d{1,20} column \d{1,20}")
_DEEPEST = 64  # how far the search for an unserialisable value goes


class Codec(Protocol):
    """One way to write values as bytes."""

    def encode(self, value: object) -> tuple[bytes | None, str | None]:
        """Return payload and content type of *value*, or raise `InvalidMessage`."""
        ...

    def decoder_for(self, annotation: Any) -> Decoder:
        """Return the decoder to *annotation*, compiled once; its failures are `DecodeFailed`."""
        ...


class JsonCodec:
    """JSON by msgspec; bytes and text travel as they are, None is a tombstone.

    Takes msgspec Structs, dataclasses, typed and plain dicts, lists and pydantic models.
    """

    def encode(self, value: object) -> tuple[bytes | None, str | None]:
        """Return payload and content type of *value*."""
        if isinstance(value, bytes):
            return value, BINARY
        if value is None:
            return None, None
        try:
            payload = value.encode() if isinstance(value, str) else _json(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            path, culprit = _culprit(value, "$", 0)
            raise InvalidMessage(
                f"{path} is a {type(culprit).__name__} that JSON cannot hold ({error}): "
                "convert it first, or pass bytes"
            ) from error
        if isinstance(value, str):
            return payload, TEXT
        if b"null" in payload:
            _require_finite(value, "$", 0)
        return payload, JSON

    def decoder_for(self, annotation: Any) -> Decoder:
        """Return the decoder to *annotation*; only `X | None` takes tombstones."""
        wanted, optional = _without_none(annotation)
        full = typing.Optional[wanted] if optional else wanted  # noqa: UP045 - of a value
        return _guarded(_strict_decoder(wanted, full), _name(wanted), optional=optional)


def is_json(content_type: str | None) -> bool:
    """Whether *content_type* promises JSON."""
    kind = "" if content_type is None else content_type.partition(";")[0].strip().lower()
    return kind.endswith(("/json", "+json"))


def failure(error: Exception, payload: bytes = b"") -> DecodeFailed:
    """Return the `DecodeFailed` that says what *error* found wrong, and where."""
    if isinstance(error, RecursionError):
        return DecodeFailed("the payload is nested too deeply", "$")
    if isinstance(error, UnicodeDecodeError):
        return DecodeFailed(f"the payload is not UTF-8: {error.reason}", _first_bad_byte(payload))
    if (found := getattr(error, "errors", None)) is not None:
        return _pydantic_failure(found(include_url=False, include_context=False))
    reason, _, path = str(error).partition(" - at ")
    byte = _BYTE.search(reason)
    if byte:
        return DecodeFailed(reason[: byte.start()], byte[1])
    return DecodeFailed(reason, path.replace("`", "") or ("end" if "truncated" in reason else "$"))


_UNRESOLVED = (NameError, AttributeError, TypeError, SyntaxError)


def payload_annotation(function: Callable[..., object]) -> Any:
    """Return the annotation of the first positional parameter of *function*, None if bare."""
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except ValueError:  # some builtins have no signature
        return None
    if first is None or first.kind > first.POSITIONAL_OR_KEYWORD:
        return None
    if first.annotation is first.empty:
        return None
    try:
        return _evaluated(function, first.annotation)
    except _UNRESOLVED as error:
        plain = _plain_function(function)
        raise ConfigurationError(
            f"annotation {first.annotation!r} of {first.name!r} in "
            f"{getattr(plain, '__qualname__', plain)} cannot be resolved ({error}): define or "
            "import the class at module level, outside TYPE_CHECKING"
        ) from error


def resolved(function: Callable[..., object], annotation: Any) -> Any:
    """Return the class behind an *annotation* of *function*, None of `X | None` left over.

    What only type checkers can import stays the text that it is.
    """
    try:
        found = _evaluated(function, annotation)
    except _UNRESOLVED:
        return annotation
    if typing.get_origin(found) is typing.Annotated:
        found = typing.get_args(found)[0]
    if typing.get_origin(found) in (typing.Union, types.UnionType):
        rest = [one for one in typing.get_args(found) if one is not type(None)]
        found = rest[0] if len(rest) == 1 else found
    return found


def _evaluated(function: Callable[..., object], annotation: Any) -> Any:
    """Return *annotation* alone: those of other parameters may be for type checkers only."""
    plain = _plain_function(function)
    holder = types.SimpleNamespace(__annotations__={"only": annotation})
    return typing.get_type_hints(
        holder, getattr(plain, "__globals__", {}), dict(_enclosed(plain)), include_extras=True
    )["only"]


def _hook(value: object) -> object:
    if _is_pydantic(type(value)):
        return typing.cast("Any", value).model_dump(mode="json", by_alias=True)
    raise TypeError("unsupported type")


_json = msgspec.json.Encoder(enc_hook=_hook).encode


def _require_finite(value: object, path: str, depth: int) -> None:
    """Refuse what JSON has no number for: msgspec would write null, and nobody would know."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidMessage(
            f"{path} is {value}, which JSON cannot hold: leave it out, or pass None or text"
        )
    for name, child in _children(value) if depth < _DEEPEST else ():
        _require_finite(child, path + name, depth + 1)


def _culprit(value: object, path: str, depth: int) -> tuple[str, object]:
    """Return the innermost value that does not serialise, with its path."""
    for name, child in _children(value) if depth < _DEEPEST else ():
        try:
            _json(child)
        except (TypeError, ValueError, OverflowError, RecursionError):
            return _culprit(child, path + name, depth + 1)
    return path, value


def _children(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f".{key}", child) for key, child in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    elif isinstance(value, msgspec.Struct):
        yield from ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)
    elif dataclasses.is_dataclass(value):
        yield from ((f".{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value))
    elif _is_pydantic(type(value)):
        yield from _children(typing.cast("Any", value).model_dump(by_alias=True))


def _strict_decoder(wanted: Any, full: Any) -> Callable[[bytes], Any]:
    if wanted is bytes:
        return bytes
    if wanted is str:
        return bytes.decode
    if _mentions_pydantic(wanted):
        from pydantic import TypeAdapter  # not a dependency: the caller's class has brought it

        return TypeAdapter(full).validate_json
    try:
        # msgspec takes any class and would fail on every message.
        if not isinstance(msgspec.inspect.type_info(wanted), msgspec.inspect.CustomType):
            return msgspec.json.Decoder(full).decode
        reason = "msgspec does not know how to build one"
    except TypeError as error:
        reason = str(error)
    raise ConfigurationError(
        f"cannot decode a payload to {_name(wanted)}: {reason}; annotate with a msgspec "
        "Struct, dataclass, TypedDict, pydantic model, dict, list, str, bytes or Any"
    )


def _guarded(decode: Callable[[bytes], Any], name: str, *, optional: bool) -> Decoder:
    def guarded(payload: bytes | None) -> Any:
        if payload is None:
            if optional:
                return None
            raise DecodeFailed(
                f"the message is a tombstone and the handler wants {name}: "
                f"annotate `{name} | None` to handle deletions",
                "$",
            )
        try:
            return decode(payload)
        except (ValueError, RecursionError) as error:
            raise failure(error, payload) from error

    return guarded


def _pydantic_failure(errors: list[dict[str, Any]]) -> DecodeFailed:
    first = errors[0]
    reason = first["msg"] + (f", and {len(errors) - 1} more" if len(errors) > 1 else "")
    where = _LINE.search(reason)
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
    return DecodeFailed(reason, where[0] if where else f"${path}")


def _first_bad_byte(payload: bytes) -> str:
    try:
        payload.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start}"
    return "$"


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """Return *annotation* without None, and whether None was part of it."""
    if annotation in (Any, object, None, types.NoneType):
        return Any, True
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation, False
    kept = tuple(part for part in typing.get_args(annotation) if part is not types.NoneType)
    return typing.Union[kept], len(kept) < len(typing.get_args(annotation))  # noqa: UP007


def _is_pydantic(kind: object) -> bool:
    return hasattr(kind, "__pydantic_core_schema__") and hasattr(kind, "model_dump")


def _mentions_pydantic(annotation: Any) -> bool:
    return hasattr(annotation, "__pydantic_core_schema__") or any(
        map(_mentions_pydantic, typing.get_args(annotation))
    )


def _plain_function(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not inspect.isroutine(function):
        function = type(function).__call__
    return getattr(function, "__func__", function)


def _enclosed(function: Any) -> Iterator[tuple[str, object]]:
    """Yield what *function* closes over, where classes of an enclosing function may be."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue


def _name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
