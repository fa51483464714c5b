"""What has arrived from the stream and is not yet published: bounded, in commit order."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError
from holdfast.outbox.rows import staged
from holdfast.outbox.schema import outbox
from holdfast.outbox.wal.emitted import PREFIX, row_of
from holdfast.outbox.wal.frames import Malformed, position_text
from holdfast.outbox.wal.marks import Marks
from holdfast.outbox.wal.pgoutput import (
    BEGIN,
    COMMIT,
    EMITTED,
    INSERT,
    RELATION,
    Begin,
    Commit,
    Emitted,
    Relation,
    decode,
)
from holdfast.outbox.wal.rowform import reader
from holdfast.scrubbing import text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.message import Message
    from holdfast.outbox.rows import Row
    from holdfast.outbox.wal.visibility import Snapshot

log = logging.getLogger("holdfast.outbox.wal")

MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Covered:
    """What the table already told: transactions that *snapshot* sees, all before *until*."""

    snapshot: Snapshot
    until: int
    schema: str
    """Where the table is: another of its name may be in the same publication."""


@dataclass(slots=True)
class Batch:
    """Rows to publish together, and how far the stream is published once they are."""

    rows: list[Row]
    messages: list[Message]
    """The rows' messages, made while the batch before this one is being published."""
    upto: int = 0
    """Rows received before and with this batch, counted from the start of the stream."""
    xids: list[int] = field(default_factory=list)
    """The transactions that wrote the rows."""


class Intake:
    """Takes pgoutput messages, gives batches; its marks know what may be confirmed.

    Without *messages*, an event of `WalOutbox` raises: confirmed, it would be gone for good.
    """

    def __init__(self, most: int, covered: Covered | None, *, messages: bool = False) -> None:
        self.marks = Marks()
        self.full = False
        """Whether to stop receiving until a batch is taken; asked for each message."""
        self._most = most
        self._covered = covered
        self._schema = None if covered is None else covered.schema
        self._messages = messages
        self._readers: dict[bytes, Callable[[bytes], Row] | None] = {}
        self._rows: list[Row] = []
        self._ready: list[Message] = []
        self._bytes = 0
        self._xids: list[int] = []
        self._xid: int | None = None
        self._skip = False

    @property
    def waiting(self) -> bool:
        """Whether rows wait to be taken."""
        return bool(self._rows)

    def feed(self, data: bytes) -> None:
        """Take one pgoutput message."""
        kind = data[0]
        if kind == INSERT:
            if not self._skip and (read := self._readers[data[1:5]]) is not None:
                self._add(read(data), len(data))
        elif kind == BEGIN:
            self._begin(decode(data))  # type: ignore[arg-type]
        elif kind == COMMIT:
            self._commit(decode(data))  # type: ignore[arg-type]
        elif kind == RELATION:
            self._learn(decode(data))  # type: ignore[arg-type]
        elif kind == EMITTED:
            self._emitted(decode(data))  # type: ignore[arg-type]

    def _begin(self, begin: Begin) -> None:
        self._xid = begin.xid
        self._xids.append(begin.xid)
        if self._covered is not None and begin.position > self._covered.until:
            self._covered = None  # from here on nothing is old enough to be in the snapshot
        self._skip = self._covered is not None and self._covered.snapshot.sees(begin.xid)

    def _commit(self, commit: Commit) -> None:
        self._xid = None
        if not self._rows:
            self._xids.clear()
        self.marks.mark(commit.end)

    def _learn(self, relation: Relation) -> None:
        # Another outbox counts its rows as ours does: by its numbers we would delete our own.
        is_ours = relation.name == outbox.name and self._schema in (None, relation.schema)
        self._readers[relation.id.to_bytes(4)] = reader(relation) if is_ours else None

    def _emitted(self, message: Emitted) -> None:
        if message.transactional and message.prefix == PREFIX:
            where = position_text(message.position)
            try:
                # Never skipped: no table holds them. Negative: no row has that number.
                row = row_of(message.content, -self.marks.count - 1)
            except Malformed as error:
                log.error("a stranger's message at %s is left out: %s",  # noqa: TRY400
                          where, text_of(error))  # fmt: skip
                return
            if not self._messages:
                raise ConfigurationError(
                    f"the log holds an event without a row (of WalOutbox, at {where}): start the "
                    "relay with  --messages  (HOLDFAST_MESSAGES; in code messages=True), for "
                    "without it this event would be lost"
                )
            self._add(row, len(message.content))

    def _add(self, row: Row, size: int) -> None:
        self._rows.append(row)
        self._ready.append(staged(row))
        self._bytes += size
        self.marks.count += 1
        self.full = len(self._rows) >= self._most or self._bytes >= MOST_BYTES

    def keepalive(self, end: int) -> None:
        """Note that everything before *end* was sent; inside a transaction it says nothing."""
        if self._xid is None:
            self.marks.mark(end)

    def take(self) -> Batch:
        """Return everything that waits; the caller finishes it before taking more."""
        batch = Batch(self._rows, self._ready, self.marks.count, self._xids)
        self._rows, self._ready, self._bytes, self.full = [], [], 0, False
        self._xids = [] if self._xid is None else [self._xid]
        return batch
