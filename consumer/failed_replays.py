"""Replays whose store is elsewhere: the keys that failed again, remembered by who handles them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from holdfast.dlq.replay.marks import Marks

if TYPE_CHECKING:
    from holdfast.consumer.work import Work

_MOST = 10_000


class FailedReplays:
    """Knows which messages of a replay must not overtake one of their key that failed in it.

    Where the consumer's database holds the plan, that tells too. Where it does not, only
    this process knows, until the letter has been collected: a restart, or a rebalance of
    the key to another member, forgets. Bounded; the oldest is forgotten first.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._failed: dict[tuple[str, str, bytes], str] = {}
        self._lock = threading.Lock()

    def note(self, work: Work) -> None:
        """Remember that *work* became a dead letter, if it was replayed and order counts."""
        marks = Marks.of(work.message.headers) if work.message.is_replay else None
        if marks is None or work.key is None or marks.commutative:
            return
        if work.letter is not None and work.letter.culprit.commutative:
            return
        with self._lock:
            self._failed.setdefault((marks.plan, marks.topic, work.key), marks.dlq_id)
            if len(self._failed) > self._most:
                del self._failed[next(iter(self._failed))]

    def holds(self, work: Work) -> bool:
        """Whether another message of the key of *work* failed again in the same replay."""
        if not self._failed or work.key is None:
            return False
        marks = Marks.of(work.message.headers)
        if marks is None:
            return False
        first = self._failed.get((marks.plan, marks.topic, work.key))
        return first is not None and first != marks.dlq_id
