"""Imports of optional drivers, with an error that names the extra."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from holdfast.errors import MissingExtra

if TYPE_CHECKING:
    from types import ModuleType


def driver(module: str, *, extra: str) -> ModuleType:
    """Return the imported *module*, or say which extra of Holdfast brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[0] != error.name.split(".")[0]:
            raise
        raise MissingExtra(extra, module) from error
