"""The outbox without a table: events that exist in the write-ahead log only.

An event is a transactional logical message with the prefix `holdfast`. Its content is a
MessagePack array: id (text), topic, key (or nil), type, payload (binary or nil), headers
(the JSON text that the column `headers` would hold), shard.

What is given up: an event cannot be looked at, delayed or replayed from the database, and
a replication slot that is lost takes the events in it along; without a slot there is nothing
that could hold them, so nothing is emitted then. Events that the broker refuses are parked in
the table as always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import msgspec

from holdfast.errors import ConfigurationError, InvalidMessage
from holdfast.outbox.awaited import staged_async
from holdfast.outbox.rows import Row, values
from holdfast.outbox.slot_name import slot_for
from holdfast.outbox.staging import BOUND, Outbox, own_session, require_transaction
from holdfast.outbox.wal.frames import Malformed
from holdfast.sql import statements

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from sqlalchemy.engine import Connection, Dialect

    from holdfast.codec import Codec
    from holdfast.message import Message
    from holdfast.outbox.event import Event

PREFIX: Final = "holdfast"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, str, str | None, str, bytes | None, str, int]).decode


class WalOutbox(Outbox):
    """An `Outbox` that writes no row; it needs `WalEngine(…, messages=True)` as the relay.

    The order is that of the commits, so `ordered` has nothing to add. The first event of a
    process makes sure that the relay's slot is there, by its default name or as *slot*:
    without it the event would be gone with its commit, so it is refused.
    """

    def __init__(
        self,
        *,
        source: str = "holdfast",
        codec: Codec | None = None,
        ordered: bool = False,
        slot: str | None = None,
    ) -> None:
        super().__init__(source=source, codec=codec, ordered=ordered)
        self._slot = slot
        self._checked: WeakSet[Dialect] = WeakSet()
        """The databases whose slot was seen; a dialect belongs to one `create_engine`."""

    def add_all(  # type: ignore[override]
        self, session: Any, events: Iterable[Event]
    ) -> list[Message] | Awaitable[list[Message]]:
        """Stage *events* in their order; a delay is refused, for it needs a table."""
        events = list(events)
        session = own_session(session)
        if any(event.delay is not None for event in events):
            raise InvalidMessage("delay= needs a table: use Outbox for delayed events")
        messages = [self._message(event) for event in events]
        bodies = [{"prefix": PREFIX, "body": body_of(message)} for message in messages]
        if hasattr(session, "run_sync"):
            return staged_async(session, lambda db: self._emit(db, bodies), messages)
        self._emit(session, bodies)
        return messages

    def _emit(self, session: Any, bodies: list[dict[str, Any]]) -> None:
        is_session = hasattr(session, "get_bind")
        db: Connection = session.connection(bind_arguments=BOUND) if is_session else session
        require_transaction(db)
        if not bodies:
            return
        if db.dialect not in self._checked:
            _require_slot(db, self._slot)
            self._checked.add(db.dialect)
        db.execute(statements("holdfast.outbox.wal", "postgresql")["emit"], bodies)


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


def _require_slot(db: Connection, slot: str | None) -> None:
    """Return if what *db* commits from now on is kept for a relay.

    A slot that waits for running transactions, ours among them, is not there yet.
    """
    if db.dialect.name != "postgresql":
        raise ConfigurationError(
            f"WalOutbox writes PostgreSQL's log, not {db.dialect.name}'s: use Outbox"
        )
    sql = statements("holdfast.outbox.wal", "postgresql")
    name = slot_for(db.execute(sql["database"]).scalar_one()) if slot is None else slot
    if not db.execute(sql["keeps"], {"name": name}).scalar():
        raise ConfigurationError(
            f"replication slot {name} is not there, so nobody would ever publish this event: "
            "first run  holdfast relay --engine wal --messages  (with --once it makes the slot "
            "and ends); if the relay has a --slot, name it:  WalOutbox(slot=…)"
        )
