"""What really happened at a broker, in order, and the checks over it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from holdfast.testing.observed import check_nothing_lost, check_order_per_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.ports import Lane

Kind = Literal[
    "published", "refused", "handed out", "accepted", "released", "rejected", "extended",
    "assigned", "revoked", "lost", "flushed", "closed", "crashed",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEvent:
    """One thing that happened; what does not apply is None."""

    kind: Kind
    member: str
    """The sink or source it happened to."""
    group: str | None = None
    id: str | None = None
    """The id of the message."""
    key: bytes | None = None
    lane: Lane | None = None


class EventHistory:
    """An append-only record, shared by all threads and all simulated processes of a test."""

    def __init__(self) -> None:
        self._events: list[HistoryEvent] = []
        self._lock = threading.Lock()

    def add(self, event: HistoryEvent) -> None:
        """Record *event* as the latest."""
        with self._lock:
            self._events.append(event)

    def __iter__(self) -> Iterator[HistoryEvent]:
        with self._lock:
            return iter(tuple(self._events))

    def __len__(self) -> int:
        return len(self._events)

    def of(self, *kinds: Kind, group: str | None = None) -> list[HistoryEvent]:
        """Return the events of *kinds*, in order; of one *group* where given."""
        return [e for e in self if e.kind in kinds and group in (None, e.group)]

    def published(self) -> list[tuple[bytes | None, str]]:
        """Return key and id of every message stored, in order."""
        return _told(self.of("published"))

    def settled(self, group: str) -> list[tuple[bytes | None, str]]:
        """Return key and id of every message that *group* accepted or rejected, in order."""
        return _told(self.of("accepted", "rejected", group=group))

    def check_nothing_lost(self, group: str) -> None:
        """Raise `Violation` unless *group* settled every message that was stored."""
        check_nothing_lost(
            [id_ for _, id_ in self.published()], [id_ for _, id_ in self.settled(group)]
        )

    def check_order_per_key(self, group: str) -> None:
        """Raise `Violation` unless *group* first settled each key's messages as published."""
        check_order_per_key(self.published(), self.settled(group))


def _told(events: list[HistoryEvent]) -> list[tuple[bytes | None, str]]:
    return [(event.key, event.id) for event in events if event.id is not None]
