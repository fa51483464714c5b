"""Message ids: UUIDv7, time-ordered, from an injected source."""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
from typing import TYPE_CHECKING

from holdfast.clock import SYSTEM_CLOCK, Clock

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
        tail = int.from_bytes(self._entropy(8), "big") & 0x3FFFFFFFFFFFFFFF
        high = ((tick >> 12) << 16) | 0x7000 | (tick & 0xFFF)
        text = f"{high:016x}{tail | 0x8000000000000000:016x}"
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def derived_id(*parts: str) -> str:
    """Return the id that always follows from *parts*: identity is derived, never invented."""
    name = NAMESPACE.bytes + "\x1f".join(parts).encode("utf-8", "surrogatepass")
    digest = hashlib.sha1(name, usedforsecurity=False).hexdigest()
    # A UUID of version 5, as `uuid.uuid5` makes it in several times the time.
    variant = "89ab"[int(digest[16], 16) & 3]
    return f"{digest[:8]}-{digest[8:12]}-5{digest[13:16]}-{variant}{digest[17:20]}-{digest[20:32]}"


new_id = Uuid7()
