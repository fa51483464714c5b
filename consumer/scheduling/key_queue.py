"""A key lane: the messages of one key in hand, in order, and why its head does not run."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

from holdfast.consumer.scheduling.eligibility import may_share_batch

if TYPE_CHECKING:
    from holdfast.consumer.scheduling.work import LaneKey, Work


class State(Enum):
    """Why the head of a key lane does not run, or that it does."""

    PENDING = "pending"
    RUNNING = "running"
    WAITING = "waiting"
    GATED = "gated"
    SUSPECT = "suspect"
    POOLED = "pooled"


class KeyQueue:
    """The messages of one key in hand, in order."""

    __slots__ = ("due", "holds", "is_gone", "key", "queue", "state")

    def __init__(self, key: LaneKey) -> None:
        self.key = key
        self.queue: deque[Work] = deque()
        self.state = State.PENDING
        self.due = 0.0
        self.holds = False
        """Whether what comes next is to be parked behind an earlier message of its key."""
        self.is_gone = False
        """Whether it has been empty: later messages of the key have another lane."""

    @property
    def is_live(self) -> bool:
        """Whether it still holds messages."""
        return bool(self.queue) and not self.is_gone

    @property
    def is_plain(self) -> bool:
        """Whether its head may run in a batch."""
        return not self.holds and may_share_batch(self.queue[0])

    def same(self, work: Work) -> Work | None:
        """Return the message in hand of which *work* is another delivery."""
        new = work.delivery
        if new is None or new.lease_until is None:  # without a lease it stays until it is settled
            return None
        position = new.position
        for one in self.queue:  # a partition may be one long queue: what differs most comes first
            held = one.delivery
            if held is None or held.position != position or held.lane != new.lane:
                continue
            if not one.is_revoked:
                return one
        return None

    def plain(self, most: int) -> list[Work]:
        """Return the works at its head, at most *most*, that may run in one batch."""
        found: list[Work] = []
        if self.holds:
            return found
        for work in self.queue:
            if len(found) == most or not work.is_admitted or not may_share_batch(work):
                break
            found.append(work)
        return found

    def plain_count(self, most: int) -> int:
        """Return how many works `plain` finds."""
        if len(self.queue) == 1:  # as nearly always
            return int(most > 0 and self.queue[0].is_admitted and self.is_plain)
        return len(self.plain(most))
