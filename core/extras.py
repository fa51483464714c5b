"""Imports that wait until they are asked for.

Of optional drivers, with an error that names the extra; and of names of a package that need
such a driver, or that few of those who import the package ask for.
"""

from __future__ import annotations

import importlib
import sys
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
    package: str, homes: Mapping[str, str], *, module: str | None = None, extra: str = ""
) -> Callable[[str], Any]:
    """Return a `__getattr__` for *package*: each home, a module within it, has names in a line.

    Asking for a name without the driver *module* says which *extra* brings it. No name may be
    that of a module, which would hide it.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if module is not None:
            driver(module, extra=extra)
        found = getattr(import_module(f"{package}.{home_of[name]}"), name)
        setattr(sys.modules[package], name, found)  # asked once
        return found

    return find
