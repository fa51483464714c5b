"""Transforms: functions with a version that repair many payloads at once."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.dlq.replay.handlers import load
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """A pure function by name and version that makes new payloads: `shop.fixes:cents@2`."""

    name: str
    version: str
    function: Callable[..., Any]

    @classmethod
    def load(cls, text: str) -> Transform:
        """Return the function `module:function@version`; the version may be its attribute."""
        name, _, version = text.partition("@")
        function = load(name)
        version = version or str(getattr(function, "__version__", ""))
        if not version:
            raise ConfigurationError(
                f"{text!r} has no version: write {name}@1, so that the stored edits say what made "
                "them"
            )
        return cls(name=name, version=version, function=function)

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"

    def applied(self, payload: bytes | None) -> bytes | None:
        """Return the new payload for *payload*."""
        body: Any = payload
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            body = None if payload is None else msgspec.json.decode(payload)
        result = self.function(body)
        if result is None or isinstance(result, bytes):
            return result
        return msgspec.json.encode(result)
