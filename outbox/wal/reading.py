"""Reading the stream: what came, in commit order, and how far it may be confirmed.

What has arrived and is not yet published is bounded. No position is confirmed before which
something is unfinished.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from holdfast.errors import ConfigurationError
from holdfast.outbox.schema import outbox
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
    reader,
)
from holdfast.outbox.wal.protocol import position_text
from holdfast.publishing import MOST_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.clock import Clock
    from holdfast.outbox.rows import Cells
    from holdfast.outbox.wal.catchup import Snapshot
    from holdfast.outbox.wal.protocol import ReplicationStream, Waker


_CONFIRM_SECONDS, _CONFIRM_ROWS = 0.1, 1000
B = TypeVar("B", covariant=True)


class Taking(Protocol[B]):
    """What makes batches out of the messages of a stream."""

    marks: ConfirmedPosition

    @property
    def full(self) -> bool:
        """Whether to stop receiving until a batch is taken."""
        ...

    @property
    def waiting(self) -> bool:
        """Whether something waits to be taken."""
        ...

    def feed(self, data: bytes) -> None:
        """Take one pgoutput message."""
        ...

    def keepalive(self, end: int) -> None:
        """Note that everything before *end* was sent."""
        ...

    def take(self) -> B:
        """Return everything that waits."""
        ...


class StreamReader(Generic[B]):
    """Reads a stream into an intake, and confirms what of it is finished."""

    def __init__(
        self,
        stream: ReplicationStream,
        intake: Taking[B],
        *,
        target: int,
        waker: Waker,
        clock: Clock,
    ) -> None:
        self._stream = stream
        self._intake = intake
        self._target = target
        self._waker = waker
        self._clock = clock
        self._told, self._rows = clock.monotonic(), 0

    @property
    def waiting(self) -> bool:
        """Whether rows wait to be taken."""
        return self._intake.waiting

    @property
    def caught_up(self) -> bool:
        """Whether everything is finished that was in the log when this began."""
        return self._intake.marks.finished and self._intake.marks.received >= self._target

    @property
    def confirmed(self) -> int:
        """The position before which everything is finished, as far as it was confirmed."""
        return self._stream.confirmed

    def receive(self) -> int:
        """Take in what has arrived, as far as there is room; return how many messages."""
        return self._stream.receive(self._intake)

    def take(self) -> B:
        """Return the rows that wait."""
        return self._intake.take()

    def wait(self, seconds: float) -> None:
        """Return when something arrives that there is room for, or when woken."""
        if self._intake.full:
            self._waker.wait(seconds)
        else:
            self._stream.wait(seconds)

    def confirm(self, finished: int, *, now: bool = False) -> None:
        """Note that the first *finished* rows are published; tell the server now and then."""
        self._intake.marks.finish(finished)
        moment = self._clock.monotonic()
        late = moment - self._told >= _CONFIRM_SECONDS
        if now or late or finished - self._rows >= _CONFIRM_ROWS:
            self._told, self._rows = moment, finished
            if (end := self._intake.marks.confirmed()) is not None:
                self._stream.confirm(end)
                now = True
        self._stream.beat(now=now)

    def close(self) -> None:
        """End the stream; the slot stays where it was confirmed."""
        self._stream.close()


class ConfirmedPosition:
    """Counts what was received and finished, and remembers positions between them.

    The end of a transaction covers what came in it, and a keepalive covers everything sent
    before it; either may be confirmed once all that was received before it is finished.
    """

    def __init__(self) -> None:
        self.count = 0
        """How much was received."""
        self.received = 0
        """The position that the server has decoded up to, as far as we heard."""
        self._done = 0
        self._marks: deque[tuple[int, int]] = deque()

    @property
    def finished(self) -> bool:
        """Whether everything received is finished."""
        return self._done == self.count

    def mark(self, position: int) -> None:
        """Note that everything before *position* was received."""
        self.received = max(self.received, position)
        if self._marks and self._marks[-1][0] == self.count:
            self._marks[-1] = (self.count, max(position, self._marks[-1][1]))
        else:
            self._marks.append((self.count, position))

    def finish(self, upto: int) -> None:
        """Note that the first *upto* are finished."""
        self._done = upto

    def confirmed(self) -> int | None:
        """Return the position before which everything is finished, if there is a new one."""
        found = None
        while self._marks and self._marks[0][0] <= self._done:
            found = self._marks.popleft()[1]
        return found


_PREFIX, _SEVEN = "holdfast", b"\x97"
"""How events without a row begin, a MessagePack array of seven: former versions wrote them."""


@dataclass(frozen=True, slots=True)
class Covered:
    """What the table already told: transactions that *snapshot* sees, all before *until*."""

    snapshot: Snapshot
    until: int
    schema: str
    """Where the table is: another of its name may be in the same publication."""


@dataclass(slots=True)
class StreamBatch:
    """Rows to publish together, and how far the stream is published once they are."""

    rows: list[Cells]
    upto: int = 0
    """Rows received before and with this batch, counted from the start of the stream."""
    xids: list[int] = field(default_factory=list)
    """The transactions that wrote the rows."""


class StreamIntake:
    """Takes pgoutput messages, gives batches; its marks know what may be confirmed.

    An event that a former version wrote to the log without a row raises: confirmed, it would
    be gone for good.
    """

    def __init__(self, most: int, covered: Covered | None) -> None:
        self.marks = ConfirmedPosition()
        self.full = False
        """Whether to stop receiving until a batch is taken; asked for each message."""
        self._most = most
        self._covered = covered
        self._schema = None if covered is None else covered.schema
        self._readers: dict[bytes, Callable[[bytes], Cells] | None] = {}
        self._rows: list[Cells] = []
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
        is_event = message.transactional and message.prefix == _PREFIX
        if is_event and message.content.startswith(_SEVEN):
            raise ConfigurationError(
                f"the log holds an event without a row (of WalOutbox, which is removed, at "
                f"{position_text(message.position)}): publish it with  holdfast relay --engine wal "
                "--messages  of the version that wrote it, or drop the slot to give it up; from "
                "now on write events with Outbox"
            )

    def _add(self, row: Cells, size: int) -> None:
        self._rows.append(row)
        self._bytes += size
        self.marks.count += 1
        self.full = len(self._rows) >= self._most or self._bytes >= MOST_BYTES

    def keepalive(self, end: int) -> None:
        """Note that everything before *end* was sent; inside a transaction it says nothing."""
        if self._xid is None:
            self.marks.mark(end)

    def take(self) -> StreamBatch:
        """Return everything that waits; the caller finishes it before taking more."""
        batch = StreamBatch(self._rows, self.marks.count, self._xids)
        self._rows, self._bytes, self.full = [], 0, False
        self._xids = [] if self._xid is None else [self._xid]
        return batch
