"""What a consumer has done so far."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Counts of this process; any thread may add to them."""

    handled: int = 0
    duplicates: int = 0
    failed: int = 0
    """Attempts for which a message was blamed."""
    released: int = 0
    """Attempts that ended because something was down, for which nobody was blamed."""
    dead_lettered: int = 0
    crashed: int = 0
    """Messages quarantined because they ended their process too often."""
    parked: int = 0
    """Messages put aside in the database: for a later retry, or behind a held key."""
    delayed: int = 0
    """Messages given to the broker for a later retry, without a database."""
    skipped: int = 0
    """Replayed messages meant for another group."""
    withdrawn: int = 0
    """Replayed copies that came too late: the plan was aborted, or the letter closed or edited."""
    unmarked: int = 0
    """Messages whose marks of a replay do not count: handled as the ordinary ones they are."""
    held_back: int = 0
    """Replayed messages left among the dead letters: an earlier one of their key failed again."""
    uncorrelated: int = 0
    """Messages that came without a correlation id."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, name: str, count: int = 1) -> None:
        """Add to the count *name*."""
        with self._lock:
            setattr(self, name, getattr(self, name) + count)
