"""Settings of the adapters: the same names as keywords and as `?name=value` in a URL."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from holdfast.errors import ConfigurationError

_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def kinds(settings: type, *, but: str = "") -> dict[str, type]:
    """Return the type of each setting of a dataclass, by its default; *but* one is left out."""
    return {f.name: type(f.default) for f in fields(settings) if f.name != but}


def converted(name: str, value: Any, kind: type) -> Any:
    """Return *value*, which is text where it comes from a URL, as what setting *name* is."""
    if kind is bool:
        if (known := _BOOLEANS.get(str(value).lower())) is None:
            raise ConfigurationError(f"{name}={value!r}: write true or false")
        return known
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        what = "a whole number" if kind is int else "a number"
        raise ConfigurationError(f"{name}={value!r}: write {what}") from error


def positive(settings: object, *names: str) -> None:
    """Refuse settings that are 0 or less."""
    for name in names:
        if not (value := getattr(settings, name)) > 0:
            raise ConfigurationError(f"{name}={value!r}: use more than 0")
