"""What a function is called: the same in every process, however its program was started."""

from __future__ import annotations

import functools
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST_NAME = 255
"""Of a group, a handler or a scope: what the tables have room for."""

STARTED = ("__main__", "__mp_main__")
"""What Python calls the module that a process was started with, whichever it is."""


def name_of(function: Callable[..., Any]) -> str:
    """Return the stable name of *function*: of what a partial wraps, of the class of an object.

    The program that was started is called by its own name: `python billing.py`, `python -m
    billing` and an import of `billing` all say `billing`.
    """
    named = _named(function)
    return f"{_module(named.__module__)}.{named.__qualname__}"


def former_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return what earlier versions called *function*: by whatever module it was found in."""
    named = _named(function)
    modules = dict.fromkeys((named.__module__, _module(named.__module__), *STARTED))
    return tuple(f"{module}.{named.__qualname__}" for module in modules)


def require_name(name: object, where: str) -> str:
    """Return *name* if it can stand in a table and before people; *where* says who asks."""
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"{where}: name it by a text, not {name!r}")
    if len(name) > LONGEST_NAME:
        raise ConfigurationError(
            f"{where}: {name[:20]!r}… has {len(name)} characters, use at most {LONGEST_NAME}"
        )
    if not name.isprintable():
        raise ConfigurationError(
            f"{where}: {name!r} has characters that cannot be shown: use letters, digits, . - _"
        )
    return name


def short_name(function: Callable[..., Any]) -> str:
    """Return how people call *function*."""
    return name_of(function).rpartition(".")[2]


def has_own_name(function: Callable[..., Any]) -> bool:
    """Whether no other function is likely to have its name: partials, objects and lambdas share.

    Memory that is kept under a shared name would take one function's work for another's.
    """
    return not getattr(function, "__qualname__", "<lambda>").endswith("<lambda>")


def _named(function: Callable[..., Any]) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__qualname__") else type(function)


def _module(name: str) -> str:
    """Return the module's own name, also where Python calls it by how it was started."""
    if name not in STARTED:
        return name
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    own = "" if spec is None else spec.name.removesuffix(".__main__")
    if own and own not in STARTED:
        return str(own)
    path = PurePath(getattr(module, "__file__", None) or "")
    stem = path.parent.name if path.stem == "__main__" else path.stem
    return stem or "main"  # typed in, or given with -c
