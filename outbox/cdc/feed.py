"""Change events out of pgoutput, bounded and in commit order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.outbox.cdc.envelope import Envelope, Origin, Shape, moment
from holdfast.outbox.wal.intake import MOST_BYTES
from holdfast.outbox.wal.marks import Marks
from holdfast.outbox.wal.pgoutput import (
    Begin,
    Commit,
    Delete,
    Insert,
    Relation,
    Truncate,
    Update,
    decode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.message import Message
    from holdfast.outbox.cdc.kinds import Kinds
    from holdfast.outbox.wal.pgoutput import Message as Told

_BY_KEY = "di"  # replica identities of which the log itself tells the key


class Feed:
    """Takes pgoutput messages and gives the change events to publish."""

    def __init__(
        self, envelope: Envelope, keys: Callable[[int], Sequence[str]], kinds: Kinds, *, most: int
    ) -> None:
        self.marks = Marks()
        self._envelope = envelope
        self._keys = keys
        self._kinds = kinds
        self._most = most
        self._shapes: dict[int, Shape] = {}
        self._messages: list[Message] = []
        self._bytes = 0
        self._origin: Origin | None = None
        self._number = 0

    @property
    def full(self) -> bool:
        """Whether to stop receiving until a batch is taken."""
        return len(self._messages) >= self._most or self._bytes >= MOST_BYTES

    @property
    def waiting(self) -> bool:
        """Whether events wait to be taken."""
        return bool(self._messages)

    def feed(self, data: bytes) -> None:
        """Take one pgoutput message."""
        told = decode(data)
        if isinstance(told, Begin):
            self._number = 0
            self._origin = Origin(lsn=told.position, tx=told.xid, time=moment(told.time))
        elif isinstance(told, Commit):
            self._origin = None
            self.marks.mark(told.end)
        elif isinstance(told, Relation):
            self._learn(told)
        else:
            for message in self._events(told):
                self._messages.append(message)
                self._bytes += len(data)
                self.marks.count += 1

    def _learn(self, relation: Relation) -> None:
        read = self._kinds.converter
        columns = [(one.name, read(one.type, one.modifier)) for one in relation.columns]
        # The table may have changed since; the catalog is asked only where the log is silent.
        flagged = [column.name for column in relation.columns if column.key]
        key = flagged if relation.identity in _BY_KEY else self._keys(relation.id)
        self._shapes[relation.id] = Shape.of(relation.schema, relation.name, columns, key)

    def _events(self, told: Told) -> Iterator[Message]:
        if (origin := self._origin) is None:
            return
        self._number += 1
        envelope, shapes, number = self._envelope, self._shapes, self._number
        match told:
            case Insert():
                yield from envelope.inserted(shapes[told.relation], told.new, origin, number)
            case Update():
                yield from envelope.updated(shapes[told.relation], told, origin, number)
            case Delete():
                yield from envelope.deleted(shapes[told.relation], told.old, origin, number)
            case Truncate():
                for relation in told.relations:
                    yield envelope.truncated(shapes[relation], origin, number)

    def keepalive(self, end: int) -> None:
        """Note that everything before *end* was sent; inside a transaction it says nothing."""
        if self._origin is None:
            self.marks.mark(end)

    def take(self) -> list[Message]:
        """Return everything that waits."""
        taken, self._messages, self._bytes = self._messages, [], 0
        return taken
