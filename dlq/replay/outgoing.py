"""The messages of a plan on their way to a broker, as rows: headers are made when they are sent.

A row has the columns of `CELLS`, in their order. Most messages are never made at all: a client
library that takes records gets topic, payload, key and headers straight from the row.
"""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any, overload

import msgspec

from holdfast.cloudevents import is_text, rfc3339, wire_list
from holdfast.dlq.store.rows import moment
from holdfast.errors import InvalidMessage
from holdfast.headers import REPLAY_MARKS, Headers, Pair, ReplayStamp
from holdfast.message import Message
from holdfast.stored_message import StoredMessage, StoredMessages, headers_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from holdfast.dlq.replay.target import Place
    from holdfast.stored_message import Record


REST = (
    "event_at", "source", "schema_ref", "correlation_id", "causation_id", "traceparent",
    "content_type", "replay_count",
)  # fmt: skip
"""Columns of a dead letter that only the headers of its message tell."""
CELLS = (
    "number", "dlq_id", "topic", "consumer_group", "message_id", "type", "message_key", "exact",
    "payload", "headers", *REST,
)  # fmt: skip
"""What a row holds: its number in the plan, where it came from, and the columns of its letter."""
Cells = tuple[Any, ...]
"""A row with the fields of `CELLS`: plain, as the collector of garbage looks at it only once."""
Address = tuple[str, ReplayStamp]
"""Where the messages of a place go, and the marks that they share."""
NO_TIME = datetime.fromtimestamp(0, UTC)
"""In place of the time of a message: its headers carry the real one."""
_NO_HEADERS = "[]"
_VERSION = ("ce_specversion", "1.0")
_texts = msgspec.json.Decoder(list[tuple[str, str]]).decode
_NAMES = frozenset(REPLAY_MARKS)
ID, EXACT, PAYLOAD = map(CELLS.index, ("message_id", "exact", "payload"))
_REST = len(REST)
_number, _payload = itemgetter(0), itemgetter(PAYLOAD)
place_of = itemgetter(2, 3)
"""Returns the place of a row."""


class ReplayMessage(StoredMessage, frozen=True, kw_only=True, gc=False):
    """A message of which a sink needs the wire form only, as of one from an outbox.

    `packed` are its own headers as the store keeps them.
    """

    row: Cells
    """Its columns as they were read: a copy of those would cost more."""
    stamp: ReplayStamp

    @property
    def dlq_id(self) -> str:
        """The id of its dead letter."""
        return str(self.row[1])

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
        return _text_headers(self.row, self.stamp)


def _text_headers(row: Cells, stamp: ReplayStamp) -> list[tuple[str, str]] | None:
    """Return the headers of *row* as text, or None where they are not all text.

    None also for a zero character, which ends a text on some wires: an exact attribute may
    have one.
    """
    (_, dlq_id, _, _, own_id, kind, key, exact, _, packed,
     at, source, schema, correlation, causation, trace, content_type, replays) = row  # fmt: skip
    pairs = [
        _VERSION,
        ("ce_id", own_id),
        ("ce_type", kind),
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
        if 0 in key:
            return None
        if key and is_text(key):
            pairs.append(("ce_partitionkey", key.decode()))
        else:
            pairs.append(("ce_partitionkeybase64", b64encode(key).decode()))
    if content_type is not None:
        pairs.append(("content-type", content_type))
    if exact is not None or packed != _NO_HEADERS:
        if exact is not None or "\\u0000" in packed:
            return None
        try:
            pairs += [pair for pair in _texts(packed) if pair[0] not in _NAMES]
        except msgspec.MsgspecError:
            return None
    pairs += stamp.texts(dlq_id, replays + 1)
    return pairs


class ReplayRows(StoredMessages):
    """The messages of rows; all are made, once, when somebody walks through them."""

    __slots__ = ("_addresses", "_made", "rows")

    def __init__(self, rows: Sequence[Cells], addresses: Mapping[Place, Address]) -> None:
        self.rows = rows
        self._addresses = addresses
        self._made: list[ReplayMessage] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> ReplayMessage: ...
    @overload
    def __getitem__(self, place: slice) -> ReplayRows: ...
    def __getitem__(self, place: int | slice) -> ReplayMessage | ReplayRows:
        if isinstance(place, slice):
            return ReplayRows(self.rows[place], self._addresses)
        return self._message(self.rows[place]) if self._made is None else self._made[place]

    def __iter__(self) -> Iterator[ReplayMessage]:
        if self._made is None:
            self._made = list(map(self._message, self.rows))
        return iter(self._made)

    def _message(self, row: Cells) -> ReplayMessage:
        topic, stamp = self._addresses[place_of(row)]
        return ReplayMessage(
            id=row[4],
            topic=topic,
            payload=row[8],
            type=row[5],
            key=row[6],
            time=NO_TIME,
            replayed=True,
            packed=row[9],
            row=row,
            stamp=stamp,
        )

    @property
    def topics(self) -> list[str]:
        """The topic of each message."""
        if len(self._addresses) == 1:
            [(topic, _)] = self._addresses.values()
            return [topic] * len(self.rows)
        return [self._addresses[place][0] for place in map(place_of, self.rows)]

    def records(self) -> Iterator[Record | InvalidMessage]:
        """Return what is sent of each message, or why it cannot be written."""
        addresses = self._addresses
        for row in self.rows:
            topic, stamp = addresses[row[2], row[3]]
            try:
                pairs = _text_headers(row, stamp)
                yield topic, row[8], row[6], self._pairs(row) if pairs is None else pairs
            except InvalidMessage as error:
                yield error

    def _pairs(self, row: Cells) -> list[Pair]:
        return list(self._message(row).wire)

    @property
    def numbers(self) -> list[int]:
        """The number of each message in its plan."""
        return list(map(_number, self.rows))

    @property
    def size(self) -> int:
        """Bytes of their payloads."""
        return sum([len(body) for body in map(_payload, self.rows) if body is not None])

    def number_of(self, place: int) -> tuple[int, str]:
        """Return the number of the message at *place*, and the id of its dead letter."""
        row = self.rows[place]
        return row[0], row[1]

    def without(self, numbers: Collection[int]) -> ReplayRows:
        """Return the messages without those *numbers*."""
        rows = [row for row in self.rows if row[0] not in numbers]
        return ReplayRows(rows, self._addresses)


def _written(at: float) -> str:
    """Return `rfc3339(moment(at))` as text, at less cost."""
    if at < _LATE:
        text: str = _builtin(datetime.fromtimestamp(at, UTC))
        return text if len(text) == _WITH_MICROS else f"{text[:19]}.000000Z"
    return rfc3339(moment(at)).decode()


_builtin = msgspec.to_builtins
_WITH_MICROS = 27  # characters
_LATE = 253_402_300_799.0  # the last second of the year 9999
