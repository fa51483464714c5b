"""Message ids: UUIDv7, time-ordered, from an injected source.

What a function is called: the same in every process, however its program was started.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import threading
import uuid
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable


NAMESPACE = uuid.UUID("6f6c6466-6173-7468-8000-000000000000")
"""Namespace of derived (UUIDv5) identities."""


class Uuid7:
    """Makes UUIDv7 strings that sort by creation within this process.

    The 12 bits after the millisecond count within it, so ids made in the same
    millisecond, or while the wall clock runs backwards, still increase.
    """

    def __init__(
        self, clock: Clock = SYSTEM_CLOCK, entropy: Callable[[int], bytes] = os.urandom
    ) -> None:
        self._clock = clock
        self._entropy = entropy
        self._lock = threading.Lock()
        self._last = -1

    def __call__(self) -> str:
        """Return the next id."""
        now = int(self._clock.now().timestamp() * 1000) << 12
        with self._lock:
            self._last = tick = max(now, self._last + 1)
        tail = (int.from_bytes(self._entropy(8), "big") & 0x3FFFFFFFFFFFFFFF) | 1 << 63
        return "%08x-%04x-7%03x-%04x-%012x" % (  # noqa: UP031 - takes half as long as an f-string
            tick >> 28, tick >> 12 & 0xFFFF, tick & 0xFFF, tail >> 48, tail & 0xFFFFFFFFFFFF
        )  # fmt: skip


def derived_id(*parts: str) -> str:
    """Return the id that always follows from *parts*: identity is derived, never invented."""
    name = NAMESPACE.bytes + "\x1f".join(parts).encode("utf-8", "surrogatepass")
    digest = hashlib.sha1(name, usedforsecurity=False).hexdigest()
    # A UUID of version 5, as `uuid.uuid5` makes it in several times the time.
    variant = "89ab"[int(digest[16], 16) & 3]
    return f"{digest[:8]}-{digest[8:12]}-5{digest[13:16]}-{variant}{digest[17:20]}-{digest[20:32]}"


new_id = Uuid7()


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
