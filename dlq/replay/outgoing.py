"""The messages of a plan on their way: read batch by batch, addressed, and fit to be sent."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from sqlalchemy import and_, bindparam, case, select

from holdfast.binary_rows import in_binary
from holdfast.columns import is_utf8
from holdfast.dlq.replay.letters import named
from holdfast.dlq.replay.marks import Stamp
from holdfast.dlq.replay.replayed import NO_TIME, REST, Replayed
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.state import NOT_CLAIMED, ItemState
from holdfast.dlq.replay.supersession import superseded
from holdfast.dlq.replay.target import Place, target_topic
from holdfast.dlq.restoring import opened
from holdfast.dlq.rows import PENDING, Envelope, exact_of
from holdfast.dlq.schema import message, overtaken, revision
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import ColumnElement, Select
    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.replay.plan import Plan
    from holdfast.dlq.vault import Vault
    from holdfast.message import Message

_envelope = msgspec.json.Decoder(Envelope).decode
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
_HEAD = len(_PARTS) - len(REST)
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


def _exactly(exact: str, own_id: str, kind: str, rest: Any) -> tuple[str, str, Any]:
    """Return the id, the type and the `REST` of a message as they came, if a wire takes that."""
    whole = {name: text for name, text in exact_of(exact).items() if is_utf8(text)}
    named = zip(REST, rest, strict=True)
    return (
        whole.get("id", own_id),
        whole.get("type", kind),
        tuple(
            whole.get("schema" if name == "schema_ref" else name, value) for name, value in named
        ),
    )


class Refusal(NamedTuple):
    """A message of a plan that is not to be sent, and why."""

    number: int
    dlq_id: str
    words: str
    state: ItemState = ItemState.SKIPPED
    holds: bool = True
    """Whether what follows of its key must wait for somebody to decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Numbers *start* up to before *end* of a plan: what is to be sent of them."""

    start: int
    end: int
    numbers: list[int]
    ids: list[str]
    messages: list[Message]
    places: Collection[Place] = ()
    unfit: tuple[Refusal, ...] = ()

    def without(self, gone: Collection[int]) -> Batch:
        """Return the batch without the numbers in *gone*."""
        if not gone:
            return self
        kept = [index for index, number in enumerate(self.numbers) if number not in gone]
        return Batch(
            start=self.start,
            end=self.end,
            numbers=[self.numbers[index] for index in kept],
            ids=[self.ids[index] for index in kept],
            messages=[self.messages[index] for index in kept],
            places=self.places,
        )


class Reader:
    """Reads the batches of one plan as they are to be published."""

    def __init__(self, plan: Plan, vault: Vault | None = None) -> None:
        self._plan_id = plan.id
        self._to_topic = plan.target
        self._commutative = plan.policy.commutative
        self._vault = vault
        self._addresses: dict[Place, tuple[str, Stamp]] = {}

    def batch(self, engine: Engine, start: int, end: int) -> Batch:
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

    def _made(self, rows: list[Any], start: int, end: int, unfit: list[Refusal]) -> Batch:
        numbers, ids = [], []
        found: list[Message] = []
        places: set[Place] = set()
        for row in rows:
            (number, dlq_id, is_there, topic, group, state, envelope, own_id, kind, key, exact,
             payload, headers) = row[:_HEAD]  # fmt: skip
            rest = row[_HEAD:]
            if exact is not None:
                own_id, kind, rest = _exactly(exact, own_id, kind, rest)
            if not is_there:
                unfit.append(Refusal(number, dlq_id, _GONE, holds=False))
                continue
            if envelope is not None:
                try:
                    governance = _envelope(envelope).governance
                    payload = opened(payload, governance, self._vault, own_id)
                except ConfigurationError as error:
                    unfit.append(Refusal(number, dlq_id, str(error)))
            if state != PENDING:
                words = f"it is {state} meanwhile: there is nothing to send"
                unfit.append(Refusal(number, dlq_id, words, holds=False))
            places.add((topic, group))
            target, stamp = self._addresses.get((topic, group)) or self._address(topic, group)
            numbers.append(number)
            ids.append(dlq_id)
            found.append(
                Replayed(
                    id=own_id,
                    topic=target,
                    payload=payload,
                    type=kind,
                    key=key,
                    time=NO_TIME,
                    replayed=True,
                    packed=headers,
                    dlq_id=dlq_id,
                    rest=rest,
                    stamp=stamp,
                    in_bytes=exact is not None,
                )
            )
        return Batch(
            start=start,
            end=end,
            numbers=numbers,
            ids=ids,
            messages=found,
            places=places,
            unfit=tuple(unfit),
        )

    def _overtaken(self, db: Connection, start: int, end: int) -> list[Refusal]:
        """Return what a newer event of its key has overtaken since the plan was frozen."""
        where = self._range(start, end)
        numbers = {dlq_id: number for number, dlq_id in db.execute(_OVERTAKEN, where)}
        if not numbers:
            return []
        return [
            Refusal(numbers[dlq_id], dlq_id, words, ItemState.HELD, holds=False)
            for dlq_id, words in superseded(db, named(db, sorted(numbers))).items()
        ]

    def settled(self, db: Connection, start: int, end: int) -> set[int]:
        """Return the numbers from *start* up to before *end* that are not to be sent any more."""
        return set(db.execute(_SETTLED, self._range(start, end)).scalars())

    def _range(self, start: int, end: int) -> dict[str, Any]:
        return {"plan": self._plan_id, "start": start, "end": end}

    def _address(self, topic: str, group: str) -> tuple[str, Stamp]:
        place = topic, group
        target = target_topic(topic, group, self._to_topic)
        stamp = Stamp(group=group, plan=self._plan_id, topic=topic, commutative=self._commutative)
        found = self._addresses[place] = (target, stamp)
        return found
