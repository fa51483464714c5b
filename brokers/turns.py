"""Turns of the messages of a key: what may be sent while earlier ones are on their way.

A broker may refuse one message and store the next, of a queue that is full for a moment say, or
lose one with a leader and store the next with its successor. So a message is sent only once
those before it of its key are stored, and not at all in a batch that lost one of them.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")
Key = tuple[str, bytes]
"""A topic, and a key of it."""


class KeyTurns(Generic[T]):
    """Lets *window* messages of each key be on their way; keyless ones need no turn."""

    __slots__ = ("_open", "_waiting", "_window")

    def __init__(self, window: int) -> None:
        self._window = window
        self._open: dict[Key, int] = {}
        self._waiting: dict[Key, deque[T]] = {}

    def may_go(self, key: Key | None, item: T) -> bool:
        """Whether *item* may be sent now; else it waits here for its turn."""
        if key is None:
            return True
        on_their_way = self._open.get(key, 0)
        if on_their_way < self._window and key not in self._waiting:
            self._open[key] = on_their_way + 1
            return True
        self._waiting.setdefault(key, deque()).append(item)
        return False

    def stored(self, key: Key | None) -> T | None:
        """Note that one of *key* is stored; return the one whose turn it is now."""
        if key is None:
            return None
        if (waiting := self._waiting.get(key)) is None:
            self._open[key] -= 1
            return None
        item = waiting.popleft()
        if not waiting:
            del self._waiting[key]
        return item

    def refused(self, key: Key | None) -> list[T]:
        """Note that one of *key* is not stored; return what must not be sent behind it."""
        if key is None:
            return []
        self._open[key] -= 1
        return list(self._waiting.pop(key, ()))

    def forget(self) -> list[T]:
        """Return all that waits, which nobody will send any more."""
        left = [item for waiting in self._waiting.values() for item in waiting]
        self._waiting.clear()
        return left


def turn_of(topic: str, key: bytes | None) -> Key | None:
    """Return whose turns a message takes; None if it needs none."""
    return None if key is None else (topic, key)
