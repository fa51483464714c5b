"""A handler named on the command line: found, and asked what it takes."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.codec import JsonCodec, payload_annotation
from holdfast.errors import ConfigurationError
from holdfast.plan import Handler

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Named:
    """A function by its name `module:function`, and how payloads are decoded for it."""

    name: str
    function: Callable[..., Any]
    decode: Callable[[bytes | None], Any]

    @classmethod
    def load(cls, name: str) -> Named:
        """Import `module:function`, also from the current folder; of a handler the function."""
        found = load(name)
        function = found.plan.function if isinstance(found, Handler) else found
        return cls(name, function, JsonCodec().decoder_for(payload_annotation(function)))


def load(name: str) -> Any:
    """Return the callable called `module:function`; say what is missing if it is not there."""
    found = loaded(name)
    if not callable(found):
        raise ConfigurationError(f"{name!r} is a {type(found).__name__}, not a function")
    return found


def loaded(name: str) -> Any:
    """Return what is called `module:name`, whatever it is."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigurationError(f"{name!r}: write module:function, e.g. shop.handlers:bill")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(
            f"{name!r} cannot be imported: {error} (run this where the service's code is installed)"
        ) from error
    except Exception as error:
        raise ConfigurationError(
            f"{module_name!r} fails when it is imported: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"module {module_name!r} has no {attribute!r}")
        found = getattr(found, part)
    return found
