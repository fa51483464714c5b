"""Overtaking: a newer event of a key was handled while an older one of it is a dead letter.

Written down once for each dead letter, in the transaction of the newer event's effect, and
only for keys that have an open dead letter: a replay must know, and nobody else pays.

Positions as brokers give them: numbers that can be compared, or names that cannot.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import bindparam, select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.sql import insert_ignoring, listed, looked_up
from holdfast.db.text import cut, plain
from holdfast.dlq.store.rows import PENDING, key_hash
from holdfast.dlq.store.schema import message, overtaken

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy.engine import Connection

    from holdfast.message import Message
    from holdfast.ports import Delivery


# An offset (`17`), or the parts of a stream entry's or a ledger's (`1700000000000-2`).
_NUMBERS = re.compile(r"\d{1,30}(?:[-:.]\d{1,30}){0,4}", re.ASCII)
_NUMBER = re.compile(r"\d{1,30}", re.ASCII)


def place_of(position: int | str | None) -> tuple[int, ...] | None:
    """Return what *position* sorts by within its lane; None where it is only a name."""
    if position is None or isinstance(position, int):
        return None if position is None else (position,)
    if _NUMBERS.fullmatch(position) is None:
        return None
    return tuple(int(number) for number in _NUMBER.findall(position))


def is_newer(position: int | str | None, other: int | str | None) -> bool | None:
    """Whether *position* comes after *other* in one lane; None where nobody can tell."""
    mine, its = place_of(position), place_of(other)
    return None if mine is None or its is None else mine > its


_CHUNK = 500


class OpenLetter(NamedTuple):
    """An open dead letter that nothing has overtaken yet: which message it is, and where from."""

    dlq_id: str
    message_id: str
    source: str
    lane: int | None
    position: str | None

    def is_before(self, message: Message, delivery: Delivery | None) -> bool:
        """Whether *message*, handled after this letter was stored, is a newer event.

        Where positions cannot be compared, what is handled later counts as newer: to hold
        one too many costs a question, to let one pass brings back an old value.
        """
        if cut(message.id) == self.message_id and plain(message.source) == self.source:
            return False
        comparable = delivery is not None and delivery.lane.partition == self.lane
        newer = is_newer(delivery.position, self.position) if comparable and delivery else None
        return newer is None or newer


def open_letters(
    db: Connection, group: str, topic: str, keys: Iterable[bytes]
) -> dict[bytes, list[OpenLetter]]:
    """Return the open dead letters of *keys* that no newer event has overtaken."""
    names = {key_hash(key): key for key in keys}
    letters: dict[bytes, list[OpenLetter]] = {}
    hashes = sorted(name for name in names if name is not None)
    wanted, own = _open_among(db.dialect.name), {"own_topic": cut(topic), "own_group": cut(group)}
    for start in range(0, len(hashes), _CHUNK):
        some = listed(db.dialect.name, hashes[start : start + _CHUNK])
        for name, *values in db.execute(wanted, {**own, **some}):
            letters.setdefault(names[name], []).append(OpenLetter(*values))
    return letters


@cache
def _open_among(dialect: str) -> Any:
    columns = ("key_hash", "topic", "consumer_group", "state", *OpenLetter._fields)
    mine = select(*(message.c[name] for name in columns))
    found = looked_up(dialect, mine, message.c.key_hash)
    return (
        select(found.c.key_hash, *(found.c[name] for name in OpenLetter._fields))
        .outerjoin(overtaken, overtaken.c.dlq_id == found.c.dlq_id)
        .where(
            found.c.topic == bindparam("own_topic"),
            found.c.consumer_group == bindparam("own_group"),
            found.c.state == PENDING,
            overtaken.c.dlq_id.is_(None),
        )
    )


def overtake(
    db: Connection,
    letters: Sequence[OpenLetter],
    message: Message,
    delivery: Delivery | None,
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Write down which of *letters* the handled *message* has overtaken.

    Call it in the transaction of the message's effect, not for one that dedup knew: its
    effect is older than its delivery.
    """
    rows: list[dict[str, Any]] = [
        {
            "dlq_id": letter.dlq_id,
            "message_id": cut(message.id),
            "lane": None if delivery is None else delivery.lane.partition,
            "position": None if delivery is None else cut(str(delivery.position), 64),
            "handled_at": clock.now().timestamp(),
        }
        for letter in sorted(letters)
        if letter.is_before(message, delivery)
    ]
    for row in rows:
        db.execute(insert_ignoring(db, overtaken), row)
