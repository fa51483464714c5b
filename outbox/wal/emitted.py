"""The outbox without a table: events that exist in the write-ahead log only.

An event is a transactional logical message with the prefix `holdfast`. Its content is a
MessagePack array: id (text), topic, key (or nil), type, payload (binary or nil), headers
(the JSON text that the column `headers` would hold), shard.

What is given up: an event cannot be looked at, delayed or replayed from the database, and
a replication slot that is lost takes the events in it along. Events that the broker refuses
are parked in the table as always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.errors import InvalidMessage
from holdfast.outbox.rows import Row, values
from holdfast.outbox.staging import Outbox, connection_of
from holdfast.outbox.wal.frames import Malformed
from holdfast.sql import statements

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from holdfast.message import Message
    from holdfast.outbox.staging import Event

PREFIX: Final = "holdfast"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, str, str | None, str, bytes | None, str, int]).decode


class WalOutbox(Outbox):
    """An `Outbox` that writes no row; it needs `WalEngine(…, messages=True)` as the relay.

    The order is that of the commits, so `ordered` has nothing to add.
    """

    def add_all(  # type: ignore[override]
        self, session: Any, events: Iterable[Event]
    ) -> list[Message] | Awaitable[list[Message]]:
        """Stage *events* in their order; a delay is refused, for it needs a table."""
        events = list(events)
        if any(event.delay is not None for event in events):
            raise InvalidMessage("delay= needs a table: use Outbox for delayed events")
        messages = [self._message(event) for event in events]
        bodies = [{"prefix": PREFIX, "body": body_of(message)} for message in messages]
        if hasattr(session, "run_sync"):
            return _emit_async(session, bodies, messages)
        _emit(session, bodies)
        return messages


def body_of(message: Message) -> bytes:
    """Return the content of the logical message for *message*."""
    row = values(message)
    headers = msgspec.json.encode(row["headers"]).decode()
    return _encode(
        (message.id, message.topic, row["aggregateid"], message.type, message.payload, headers,
         row["shard"])
    )  # fmt: skip


def row_of(content: bytes, number: int) -> Row:
    """Return the outbox row in *content*, under *number*."""
    try:
        id_, topic, key, type_, payload, headers, shard = _decode(content)
    except msgspec.MsgspecError as error:
        raise Malformed(f"a logical message with prefix {PREFIX!r}: {error}") from error
    return Row(number, shard, topic, key, payload, headers, id_, type_)


def _emit(session: Any, bodies: list[dict[str, Any]]) -> None:
    db = connection_of(session)
    if bodies:
        db.execute(statements("holdfast.outbox.wal", "postgresql")["emit"], bodies)


async def _emit_async(
    session: Any, bodies: list[dict[str, Any]], messages: list[Message]
) -> list[Message]:
    await session.run_sync(_emit, bodies)
    return messages
