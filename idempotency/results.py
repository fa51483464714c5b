"""What a handler returned, kept beside its claim and given back to duplicates."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable


class Results:
    """Writes results as JSON and reads them as the type that the function declares."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = getattr(function, "__qualname__", repr(function))
        self._decoder = msgspec.json.Decoder(_return_type(function))

    def encode(self, result: Any) -> bytes:
        """Return *result* as it is stored; one that JSON cannot hold fails the attempt."""
        try:
            return msgspec.json.encode(result)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ConfigurationError(
                f"{self._name}() returned a {type(result).__name__} that JSON cannot hold "
                f"({error}): return plain data, or leave out keep_result"
            ) from error

    def decode(self, stored: bytes | None) -> Any:
        """Return what was stored, None if nothing was."""
        if stored is None:
            return None
        try:
            return self._decoder.decode(stored)
        except msgspec.ValidationError:
            return msgspec.json.decode(stored)  # the function declares another type by now


def _return_type(function: Callable[..., Any]) -> Any:
    try:
        declared = typing.get_type_hints(function).get("return", Any)
        msgspec.json.Decoder(declared)
    except (NameError, TypeError, AttributeError):
        return Any
    return Any if declared in (None, type(None)) else declared
