"""Imports of optional drivers, with an error that names the extra.

Packages whose names need a driver: they import without it, and load when asked.
"""

from __future__ import annotations

import importlib
from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType


def driver(module: str, *, extra: str) -> ModuleType:
    """Return the imported *module*, or say which extra of Holdfast brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[0] != error.name.split(".")[0]:
            raise
        raise MissingExtra(extra, module) from error


def lazily(
    package: str, homes: Mapping[str, str], *, module: str, extra: str
) -> Callable[[str], Any]:
    """Return a `__getattr__` for *package* that finds each name in its home module.

    Asking for a name without the driver *module* says which *extra* brings it.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        driver(module, extra=extra)
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return find
