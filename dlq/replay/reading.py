"""The messages of a plan on their way: read batch by batch, addressed, and fit to be sent.

A message of a plan on its way to a broker, its headers made when they are sent.

Where a replayed message goes: to the group that failed, and to nobody else.

The stream of a plan: the next batches are read while the one before is on its way.
"""

from __future__ import annotations

from base64 import b64encode
from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from sqlalchemy import and_, bindparam, case, select

from holdfast.cloudevents import is_text, rfc3339, wire_list
from holdfast.db.text import is_utf8
from holdfast.dlq.protection.vault import opened
from holdfast.dlq.replay.item_state import NOT_CLAIMED, ItemState
from holdfast.dlq.replay.letters import named
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.survey import superseded
from holdfast.dlq.replay.target import target_topic
from holdfast.dlq.store.rows import PENDING, LetterEnvelope, exact_of, moment
from holdfast.dlq.store.schema import message, overtaken, revision
from holdfast.errors import ConfigurationError
from holdfast.headers import REPLAY_MARKS, Headers, Pair, ReplayStamp
from holdfast.message import Message
from holdfast.publishing import BatchSizer
from holdfast.stored_message import StoredMessage, headers_of, in_binary

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from concurrent.futures import Future, ThreadPoolExecutor

    from sqlalchemy import ColumnElement, Select
    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.protection.vault import Vault
    from holdfast.dlq.replay.plan import ReplayPlan
    from holdfast.dlq.replay.target import Place


REST = (
    "event_at", "source", "schema_ref", "correlation_id", "causation_id", "traceparent",
    "content_type", "replay_count",
)  # fmt: skip
"""Columns of a dead letter that only the headers of its message tell."""
NO_TIME = datetime.fromtimestamp(0, UTC)
"""In place of the time of a message: its headers carry the real one."""
_REST = len(REST)
_NO_HEADERS = "[]"
_VERSION = ("ce_specversion", "1.0")
_texts = msgspec.json.Decoder(list[tuple[str, str]]).decode
_NAMES = frozenset(REPLAY_MARKS)


class ReplayMessage(StoredMessage, frozen=True, kw_only=True, gc=False):
    """A message of which a sink needs the wire form only, as of one from an outbox.

    `packed` are its own headers as the store keeps them.
    """

    dlq_id: str
    row: Sequence[Any]
    """Its columns as they were read, which end with `REST`: a copy of those would cost more."""
    stamp: ReplayStamp
    in_bytes: bool = False
    """Whether an attribute may hold a zero character, which ends a text on some wires."""

    @property
    def whole(self) -> Message:
        """The message with its marks."""
        at, source, schema, correlation, causation, trace, content_type, replays = self.row[-_REST:]
        own = () if self.packed == _NO_HEADERS else headers_of(self.packed).pairs
        return Message(
            id=self.id,
            topic=self.topic,
            payload=self.payload,
            type=self.type,
            source=source,
            key=self.key,
            headers=Headers.received(self.stamp.on(own, self.dlq_id, replays + 1)),
            time=moment(at),
            correlation_id=correlation,
            causation_id=causation,
            content_type=content_type,
            schema=schema,
            traceparent=trace,
            replayed=True,
        )

    @property
    def wire(self) -> tuple[Pair, ...]:
        """All headers that the message travels with."""
        if (texts := self.texts) is not None:
            return tuple([(name, text.encode()) for name, text in texts])
        return tuple(wire_list(self.whole))

    @property
    def texts(self) -> list[tuple[str, str]] | None:
        """What `wire` holds with its values as text, or None where they are not all text."""
        at, source, schema, correlation, causation, trace, content_type, replays = self.row[-_REST:]
        key, packed = self.key, self.packed
        if self.in_bytes or "\\u0000" in packed or (key is not None and b"\0" in key):
            return None
        pairs = [
            _VERSION,
            ("ce_id", self.id),
            ("ce_type", self.type),
            ("ce_source", source),
            ("ce_time", _written(at)),
        ]
        if schema is not None:
            pairs.append(("ce_dataschema", schema))
        if correlation is not None:
            pairs.append(("ce_correlationid", correlation))
        if causation is not None:
            pairs.append(("ce_causationid", causation))
        if trace is not None:
            pairs.append(("ce_traceparent", trace))
        if key is not None:
            if key and is_text(key):
                pairs.append(("ce_partitionkey", key.decode()))
            else:
                pairs.append(("ce_partitionkeybase64", b64encode(key).decode()))
        if content_type is not None:
            pairs.append(("content-type", content_type))
        if packed != _NO_HEADERS:
            try:
                pairs += [pair for pair in _texts(packed) if pair[0] not in _NAMES]
            except msgspec.MsgspecError:
                return None
        pairs += self.stamp.texts(self.dlq_id, replays + 1)
        return pairs


def _written(at: float) -> str:
    """Return `rfc3339(moment(at))` as text, at less cost."""
    if at < _LATE:
        text = _json(datetime.fromtimestamp(at, UTC)).decode()
        return text[1:-1] if len(text) == _WITH_MICROS else f"{text[1:20]}.000000Z"
    return rfc3339(moment(at)).decode()


_json = msgspec.json.Encoder().encode
_WITH_MICROS = 29  # characters, with the quotes
_LATE = 253_402_300_799.0  # the last second of the year 9999


_envelope = msgspec.json.Decoder(LetterEnvelope).decode
_PIECE = 1000
"""Rows per statement. For many more PostgreSQL would start a worker process each time, and
sort the rows whole, instead of following the index."""
_edited = revision.c.revision.is_not(None)
_PARTS = (
    item.c.position.label("number"),
    item.c.dlq_id,
    (message.c.dlq_id == item.c.dlq_id).label("is_there"),
    message.c.topic,
    message.c.consumer_group,
    message.c.state,
    # The envelope is long, and only that of a data subject can name encrypted fields.
    case((message.c.subject.is_not(None), message.c.envelope)).label("envelope"),
    message.c.message_id,
    message.c.type,
    message.c.message_key,
    message.c.exact,
    case((_edited, revision.c.payload), else_=message.c.payload).label("payload"),
    case((_edited, revision.c.headers), else_=message.c.headers).label("headers"),
    *(message.c[name] for name in REST),
)
_HEAD = len(_PARTS) - _REST
_IN_RANGE = (
    item.c.plan_id == bindparam("plan"),
    item.c.position >= bindparam("start"),
    item.c.position < bindparam("end"),
)


def _batch(joined: ColumnElement[bool]) -> Select[Any]:
    latest = and_(revision.c.dlq_id == message.c.dlq_id, revision.c.revision == message.c.revision)
    return (
        select(*_PARTS)
        .select_from(item.outerjoin(message, joined).outerjoin(revision, latest))
        .where(*_IN_RANGE, item.c.state == ItemState.CLAIMED)
        .order_by(item.c.position)
    )


_BATCH = _batch(message.c.seq == item.c.seq)
_BY_ID = _batch(message.c.dlq_id == item.c.dlq_id)
"""For items that do not know their letter's number: those of a plan of an older version."""
_OVERTAKEN = (
    select(item.c.position, item.c.dlq_id)
    .join(overtaken, overtaken.c.dlq_id == item.c.dlq_id)
    .where(*_IN_RANGE, item.c.state == ItemState.CLAIMED)
)
_SETTLED = select(item.c.position).where(*_IN_RANGE, item.c.state.in_(NOT_CLAIMED))
_GONE = "its dead letter is no longer in the store: there is nothing to send"
_is_there = itemgetter(2)


def _exactly(exact: str, own_id: str, kind: str, row: Any) -> tuple[str, str, Any]:
    """Return the id, the type and the *row* of a message as they came, if a wire takes that."""
    whole = {name: text for name, text in exact_of(exact).items() if is_utf8(text)}
    named = zip(REST, row[-_REST:], strict=True)
    return (
        whole.get("id", own_id),
        whole.get("type", kind),
        tuple(
            whole.get("schema" if name == "schema_ref" else name, value) for name, value in named
        ),
    )


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
    numbers: list[int]
    messages: list[ReplayMessage]
    places: Collection[Place] = ()
    unfit: tuple[ReplayRefusal, ...] = ()

    def without(self, gone: Collection[int]) -> ReplayBatch:
        """Return the batch without the numbers in *gone*."""
        if not gone:
            return self
        kept = [index for index, number in enumerate(self.numbers) if number not in gone]
        return ReplayBatch(
            start=self.start,
            end=self.end,
            numbers=[self.numbers[index] for index in kept],
            messages=[self.messages[index] for index in kept],
            places=self.places,
        )


class PlanReader:
    """Reads the batches of one plan as they are to be published."""

    def __init__(self, plan: ReplayPlan, vault: Vault | None = None) -> None:
        self._plan_id = plan.id
        self._to_topic = plan.target
        self._commutative = plan.policy.commutative
        self._vault = vault

    def batch(self, engine: Engine, start: int, end: int) -> ReplayBatch:
        """Return what the plan still has to send from *start* up to before *end*, in order."""
        rows: list[Any] = []
        with engine.connect() as db:
            late = [] if self._commutative else self._overtaken(db, start, end)
            with in_binary(db):
                for first in range(start, end, _PIECE):
                    rows += self._piece(db, first, min(first + _PIECE, end))
        # Not inside: a vault reads the database itself, and SQLite lets only one in.
        return self._made(rows, start, end, late)

    def _piece(self, db: Connection, start: int, end: int) -> list[Any]:
        where = self._range(start, end)
        cursor: Any = db.execute(_BATCH, where).cursor
        rows: list[Any] = cursor.fetchall()
        if not all(map(_is_there, rows)):
            cursor = db.execute(_BY_ID, where).cursor
            rows = cursor.fetchall()
        return rows

    def _made(
        self, rows: list[Any], start: int, end: int, unfit: list[ReplayRefusal]
    ) -> ReplayBatch:
        numbers: list[int] = []
        found: list[ReplayMessage] = []
        addresses: dict[Place, tuple[str, ReplayStamp]] = {}
        for row in rows:
            (number, dlq_id, is_there, topic, group, state, envelope, own_id, kind, key, exact,
             payload, headers) = row[:_HEAD]  # fmt: skip
            if exact is not None:
                own_id, kind, row = _exactly(exact, own_id, kind, row)  # noqa: PLW2901 - as it came
            if not is_there:
                unfit.append(ReplayRefusal(number, dlq_id, _GONE, holds=False))
                continue
            if envelope is not None:
                try:
                    governance = _envelope(envelope).governance
                    payload = opened(payload, governance, self._vault, own_id)
                except ConfigurationError as error:
                    unfit.append(ReplayRefusal(number, dlq_id, str(error)))
            if state != PENDING:
                words = f"it is {state} meanwhile: there is nothing to send"
                unfit.append(ReplayRefusal(number, dlq_id, words, holds=False))
            place = topic, group
            address = addresses.get(place)
            if address is None:
                address = addresses[place] = self._address(place)
            numbers.append(number)
            found.append(
                ReplayMessage(
                    id=own_id,
                    topic=address[0],
                    payload=payload,
                    type=kind,
                    key=key,
                    time=NO_TIME,
                    replayed=True,
                    packed=headers,
                    dlq_id=dlq_id,
                    row=row,
                    stamp=address[1],
                    in_bytes=exact is not None,
                )
            )
        return ReplayBatch(
            start=start,
            end=end,
            numbers=numbers,
            messages=found,
            places=tuple(addresses),
            unfit=tuple(unfit),
        )

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
        with self._engine.connect() as db:
            return batch.without(self._reader.settled(db, batch.start, batch.end))

    def _fetch(self, start: int, end: int) -> ReplayBatch:
        batch = self._reader.batch(self._engine, start, end)
        size = sum([len(message.payload or b"") for message in batch.messages])
        self._sizer.came(len(batch.messages), size)
        return batch
