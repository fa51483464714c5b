"""What a function is called: the same in every process, or nothing at all."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def name_of(function: Callable[..., Any]) -> str:
    """Return the stable name of *function*: of what a partial wraps, of the class of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def short_name(function: Callable[..., Any]) -> str:
    """Return how people call *function*."""
    return name_of(function).rpartition(".")[2]


def has_own_name(function: Callable[..., Any]) -> bool:
    """Whether no other function is likely to have its name: partials, objects and lambdas share.

    Memory that is kept under a shared name would take one function's work for another's.
    """
    return not getattr(function, "__qualname__", "<lambda>").endswith("<lambda>")
