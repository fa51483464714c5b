"""The messages of a plan on their way: read batch by batch, addressed, and fit to be sent.

Where a replayed message goes: to the group that failed, and to nobody else.

The stream of a plan: the next batches are read while the one before is on its way.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from sqlalchemy import and_, bindparam, case, literal_column, select

from holdfast.db.engine import looking
from holdfast.db.text import is_utf8
from holdfast.dlq.protection.vault import opened
from holdfast.dlq.replay.item_state import NOT_CLAIMED, ItemState
from holdfast.dlq.replay.letters import named
from holdfast.dlq.replay.outgoing import (
    CELLS,
    EXACT,
    ID,
    PAYLOAD,
    REST,
    Cells,
    ReplayRows,
    place_of,
)
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.survey import superseded
from holdfast.dlq.replay.target import target_topic
from holdfast.dlq.store.rows import PENDING, LetterEnvelope, exact_of
from holdfast.dlq.store.schema import message, overtaken, revision
from holdfast.errors import ConfigurationError
from holdfast.headers import ReplayStamp
from holdfast.publishing import BatchSizer
from holdfast.stored_message import in_binary

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from concurrent.futures import Future, ThreadPoolExecutor

    from sqlalchemy import ColumnElement, Select
    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.protection.vault import Vault
    from holdfast.dlq.replay.plan import ReplayPlan
    from holdfast.dlq.replay.target import Place


_envelope = msgspec.json.Decoder(LetterEnvelope).decode
_PIECE = 1000
"""Rows per statement. For many more PostgreSQL would start a worker process each time, and
sort the rows whole, instead of following the index."""
_edited = revision.c.revision.is_not(None)
_OWN: dict[str, ColumnElement[Any]] = {
    "number": item.c.position.label("number"),
    "dlq_id": item.c.dlq_id,
    "payload": case((_edited, revision.c.payload), else_=message.c.payload).label("payload"),
    "headers": case((_edited, revision.c.headers), else_=message.c.headers).label("headers"),
}
_ODD = (
    (message.c.dlq_id == item.c.dlq_id).label("is_there"),
    message.c.state,
    # The envelope is long, and only that of a data subject can name encrypted fields.
    case((message.c.subject.is_not(None), message.c.envelope)).label("envelope"),
)
_IN_RANGE = (
    item.c.plan_id == bindparam("plan"),
    item.c.position >= bindparam("start"),
    item.c.position < bindparam("end"),
)


def _cells(own: Mapping[str, ColumnElement[Any]]) -> list[ColumnElement[Any]]:
    return [own[name] if name in own else message.c[name] for name in CELLS]


def _batch(joined: ColumnElement[bool]) -> Select[Any]:
    latest = and_(revision.c.dlq_id == message.c.dlq_id, revision.c.revision == message.c.revision)
    return (
        select(*_cells(_OWN), *_ODD)
        .select_from(item.outerjoin(message, joined).outerjoin(revision, latest))
        .where(*_IN_RANGE, item.c.state == ItemState.CLAIMED)
        .order_by(item.c.position)
    )


_BATCH = _batch(message.c.seq == item.c.seq)
_BY_ID = _batch(message.c.dlq_id == item.c.dlq_id)
"""For items that do not know their letter's number: those of a plan of an older version."""
_is_plain = and_(
    message.c.dlq_id == item.c.dlq_id,
    message.c.state == PENDING,
    message.c.subject.is_(None),
    message.c.revision == 0,
    message.c.exact.is_(None),
)
_AS_KEPT: dict[str, ColumnElement[Any]] = {
    "number": _OWN["number"],
    "dlq_id": _OWN["dlq_id"],
    "exact": case((_is_plain, None), else_=literal_column("'odd'")).label("is_odd"),
}
_PLAIN = (
    select(*_cells(_AS_KEPT))
    .select_from(item.outerjoin(message, message.c.seq == item.c.seq))
    .where(*_IN_RANGE, item.c.state == ItemState.CLAIMED)
    .order_by(item.c.position)
)
"""Letters as most are: pending, and sent just as they are kept. Others have `odd` for `exact`."""
_OVERTAKEN = (
    select(item.c.position, item.c.dlq_id)
    .join(overtaken, overtaken.c.dlq_id == item.c.dlq_id)
    .where(*_IN_RANGE, item.c.state == ItemState.CLAIMED)
)
_SETTLED = select(item.c.position).where(*_IN_RANGE, item.c.state.in_(NOT_CLAIMED))
_GONE = "its dead letter is no longer in the store: there is nothing to send"
_WIDTH = len(CELLS)
_is_there = itemgetter(_WIDTH)
_exact = itemgetter(EXACT)


def _exactly(cells: Cells) -> Cells:
    """Return *cells* with the attributes of the message as they came, if a wire takes that."""
    found = dict(zip(CELLS, cells, strict=True))
    for name, text in exact_of(cells[EXACT]).items():
        column = _COLUMNS.get(name, name)
        if column in _ATTRIBUTES and is_utf8(text):
            found[column] = text
    return tuple(found.values())


_COLUMNS = {"id": "message_id", "schema": "schema_ref"}  # attributes that are named otherwise
_ATTRIBUTES = frozenset({"message_id", "type", *REST})


class ReplayRefusal(NamedTuple):
    """A message of a plan that is not to be sent, and why."""

    number: int
    dlq_id: str
    words: str
    state: ItemState = ItemState.SKIPPED
    holds: bool = True
    """Whether what follows of its key must wait for somebody to decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayBatch:
    """Numbers *start* up to before *end* of a plan: what is to be sent of them."""

    start: int
    end: int
    messages: ReplayRows
    places: Collection[Place] = ()
    unfit: tuple[ReplayRefusal, ...] = ()

    def without(self, gone: Collection[int]) -> ReplayBatch:
        """Return the batch without the numbers in *gone*."""
        if not gone:
            return self
        kept = self.messages.without(gone)
        return ReplayBatch(start=self.start, end=self.end, messages=kept, places=self.places)


class PlanReader:
    """Reads the batches of one plan as they are to be published."""

    def __init__(self, plan: ReplayPlan, vault: Vault | None = None) -> None:
        self._plan_id = plan.id
        self._to_topic = plan.target
        self._commutative = plan.policy.commutative
        self._vault = vault

    def batch(self, engine: Engine, start: int, end: int) -> ReplayBatch:
        """Return what the plan still has to send from *start* up to before *end*, in order."""
        plain: list[Cells] = []
        odd: list[Any] = []
        with looking(engine).connect() as db:
            unfit = [] if self._commutative else self._overtaken(db, start, end)
            with in_binary(db):
                for first in range(start, end, _PIECE):
                    where = self._range(first, min(first + _PIECE, end))
                    # Where some are odd, the next will hardly be plain: that is not even tried.
                    rows = None if odd else self._plain(db, where)
                    if rows is None:
                        odd += self._piece(db, where)
                    else:
                        plain += rows
        # Not inside: a vault reads the database itself, and SQLite lets only one in.
        if odd:
            plain += self._fit(odd, unfit)
        addresses = {place: self._address(place) for place in set(map(place_of, plain))}
        return ReplayBatch(
            start=start,
            end=end,
            messages=ReplayRows(plain, addresses),
            places=tuple(sorted(addresses)),
            unfit=tuple(unfit),
        )

    def _plain(self, db: Connection, where: dict[str, Any]) -> list[Cells] | None:
        """Return the letters if all are sent as they are kept; None: look at each of them."""
        cursor: Any = db.execute(_PLAIN, where).cursor
        rows: list[Cells] = cursor.fetchall()
        return None if any(map(_exact, rows)) else rows

    def _piece(self, db: Connection, where: dict[str, Any]) -> list[Any]:
        cursor: Any = db.execute(_BATCH, where).cursor
        rows: list[Any] = cursor.fetchall()
        if not all(map(_is_there, rows)):
            cursor = db.execute(_BY_ID, where).cursor
            rows = cursor.fetchall()
        return rows

    def _fit(self, rows: list[Any], unfit: list[ReplayRefusal]) -> list[Cells]:
        """Return what is to be sent of *rows*, and add to *unfit* what is not."""
        found: list[Cells] = []
        for row in rows:
            cells = tuple(row[:_WIDTH])
            number, dlq_id = cells[:2]
            is_there, state, envelope = row[_WIDTH:]
            if not is_there:
                unfit.append(ReplayRefusal(number, dlq_id, _GONE, holds=False))
                continue
            if cells[EXACT] is not None:
                cells = _exactly(cells)
            if envelope is not None:
                try:
                    cells = self._opened(cells, envelope)
                except ConfigurationError as error:
                    unfit.append(ReplayRefusal(number, dlq_id, str(error)))
            if state != PENDING:
                words = f"it is {state} meanwhile: there is nothing to send"
                unfit.append(ReplayRefusal(number, dlq_id, words, holds=False))
            found.append(cells)
        return found

    def _opened(self, cells: Cells, envelope: str) -> Cells:
        governance = _envelope(envelope).governance
        payload = opened(cells[PAYLOAD], governance, self._vault, cells[ID])
        return (*cells[:PAYLOAD], payload, *cells[PAYLOAD + 1 :])

    def _overtaken(self, db: Connection, start: int, end: int) -> list[ReplayRefusal]:
        """Return what a newer event of its key has overtaken since the plan was frozen."""
        where = self._range(start, end)
        numbers = {dlq_id: number for number, dlq_id in db.execute(_OVERTAKEN, where)}
        if not numbers:
            return []
        return [
            ReplayRefusal(numbers[dlq_id], dlq_id, words, ItemState.HELD, holds=False)
            for dlq_id, words in superseded(db, named(db, sorted(numbers))).items()
        ]

    def settled(self, db: Connection, start: int, end: int) -> set[int]:
        """Return the numbers from *start* up to before *end* that are not to be sent any more."""
        return set(db.execute(_SETTLED, self._range(start, end)).scalars())

    def _range(self, start: int, end: int) -> dict[str, Any]:
        return {"plan": self._plan_id, "start": start, "end": end}

    def _address(self, place: Place) -> tuple[str, ReplayStamp]:
        """Return the topic for letters of *place*, and the marks that they share."""
        topic, group = place
        stamp = ReplayStamp(
            group=group, plan=self._plan_id, topic=topic, commutative=self._commutative
        )
        return target_topic(topic, group, self._to_topic), stamp


_SECOND = 1.0
_FIRST = 200  # messages, before anything is known about their size
_GROWTH = 5  # so that the second batch does not wait for a whole one to be read
_MOST_BYTES = 12 * 1024 * 1024
"""Of payloads in a batch: four of them are in memory at a time."""
AHEAD = 2
"""Batches that are read ahead, and the threads for it: the database looks for the rows of one
while those of the other become messages."""


class _Ahead(NamedTuple):
    start: int
    end: int
    batch: Future[ReplayBatch]


class LetterStream:
    """Gives out the items of a plan in batches of bounded size."""

    def __init__(
        self, engine: Engine, reader: PlanReader, threads: ThreadPoolExecutor, *, batch: int
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._threads = threads
        self._ahead: deque[_Ahead] = deque()
        self._sizer = BatchSizer(batch, first=_FIRST, growth=_GROWTH, most_bytes=_MOST_BYTES)

    def fits(self, start: int) -> int:
        """Return how many messages from *start* make a batch: those that are read already."""
        if self._ahead and self._ahead[0].start == start:
            return self._ahead[0].end - start
        return self._sizer.rows

    def read(self, start: int, end: int, meanwhile: Callable[[], None]) -> ReplayBatch:
        """Return what is to be sent from *start* up to before *end*.

        While that takes long, *meanwhile* is called every second.
        """
        was_ahead = bool(self._ahead) and self._ahead[0][:2] == (start, end)
        if not was_ahead:
            self._drop()
            self._begin(start, end)
        future = self._ahead.popleft().batch
        while not wait([future], _SECOND).done:
            meanwhile()
        found = future.result()
        return self.current(found) if was_ahead else found

    def _drop(self) -> None:
        """Forget what was read ahead: something else is wanted."""
        for one in self._ahead:
            one.batch.cancel()
        self._ahead.clear()

    def read_ahead(self, start: int, until: int) -> None:
        """Begin to read the next batches from *start* on, up to before *until*."""
        if self._ahead:
            start = self._ahead[-1].end
        while start < until and len(self._ahead) < AHEAD:
            end = min(until, start + self._sizer.rows)
            self._begin(start, end)
            start = end

    def _begin(self, start: int, end: int) -> None:
        self._ahead.append(_Ahead(start, end, self._threads.submit(self._fetch, start, end)))

    def current(self, batch: ReplayBatch) -> ReplayBatch:
        """Return *batch* without what was held back or confirmed since it was read."""
        with looking(self._engine).connect() as db:
            return batch.without(self._reader.settled(db, batch.start, batch.end))

    def _fetch(self, start: int, end: int) -> ReplayBatch:
        batch = self._reader.batch(self._engine, start, end)
        self._sizer.came(len(batch.messages), batch.messages.size)
        return batch
