"""Recognising the dead letter of a message that comes again, whatever its handler was called.

In a group one handler has a topic, so the handler's name says nothing about which message it
is; earlier versions made it a part of the letter's id.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from holdfast.db.sql import listed, looked_up
from holdfast.db.text import cut, plain
from holdfast.dlq.letter import dead_letter_id
from holdfast.dlq.store.rows import PENDING
from holdfast.dlq.store.schema import message as letters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.engine import Connection

    from holdfast.message import Message

_CHUNK = 500


def with_letters(db: Connection, message_ids: Iterable[str]) -> set[str]:
    """Return which of *message_ids*, as columns take them, some dead letter has."""
    wanted = sorted({cut(one) for one in message_ids})
    found: set[str] = set()
    for start in range(0, len(wanted), _CHUNK):
        some = listed(db.dialect.name, wanted[start : start + _CHUNK])
        found.update(db.execute(_among(db.dialect.name), some).scalars())
    return found


@cache
def _among(dialect: str) -> Any:
    mine = looked_up(dialect, select(letters.c.message_id), letters.c.message_id)
    return select(mine.c.message_id)


def open_letter_of(
    db: Connection, group: str, handler: str, message: Message, hidden: tuple[str, ...] = ()
) -> str | None:
    """Return the id of the open dead letter that *message* is, None if it is none.

    The same id with other content is another message. Where fields of the stored one are
    protected the content cannot be compared: then the same id and source suffice.
    """
    own = dead_letter_id(group, handler, message, hidden)
    columns = ("dlq_id", "topic", "consumer_group", "state", "source", "payload", "replayable",
               "subject")  # fmt: skip
    # By the message alone: PostgreSQL might read a fresh table by all that is pending.
    mine = select(*(letters.c[name] for name in columns)).where(
        letters.c.message_id == cut(message.id)
    )
    for row in db.execute(mine):
        if (row.consumer_group, row.topic) != (cut(group), cut(message.topic)):
            continue
        if row.state != PENDING:
            continue
        is_hidden = bool(hidden) or not row.replayable or row.subject is not None
        payload = None if row.payload is None else bytes(row.payload)
        is_same = row.source == plain(message.source) and (is_hidden or payload == message.payload)
        if row.dlq_id == own or is_same:
            return str(row.dlq_id)
    return None
