"""Packages whose names need a driver: they import without it, and load when asked."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.extras import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


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
