"""Is a dead letter still needed? Not when a newer event of its key has been handled.

What is known: newer dead letters of the key that were replayed with success, and what a
consumer's own tables tell through a `Witness`. A key that the consumer holds in quarantine
has nothing newer handled by construction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from holdfast.dlq.replay.manifest import natural
from holdfast.dlq.rows import CONFIRMED, key_hash
from holdfast.dlq.schema import message

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy.engine import Connection

    from holdfast.dlq.replay.manifest import Candidate

_CHUNK = 500
_FIELDS = ("topic", "consumer_group", "lane", "position", "key_hash")


def superseded(db: Connection, candidates: Sequence[Candidate]) -> dict[str, str]:
    """Return why which of *candidates* must be held: id → what was handled already."""
    newest = _newest(db, candidates)
    found = {}
    for letter in candidates:
        place = (letter.topic, letter.group, letter.partition, key_hash(letter.key))
        handled = newest.get(place)
        if handled is not None and natural(handled) > natural(letter.position):
            found[letter.dlq_id] = (
                f"a newer event of its key was handled ({letter.topic}/{letter.partition} at "
                f"{handled}): replay it with --commutative if order does not matter"
            )
    return found


def _newest(
    db: Connection, candidates: Iterable[Candidate]
) -> dict[tuple[str, str, int, str | None], str]:
    keys = sorted({text for letter in candidates if (text := key_hash(letter.key)) is not None})
    newest: dict[tuple[str, str, int, str | None], str] = {}
    for start in range(0, len(keys), _CHUNK):
        handled = select(*(message.c[name] for name in _FIELDS)).where(
            message.c.key_hash.in_(keys[start : start + _CHUNK]),
            message.c.state == CONFIRMED,
            message.c.position.is_not(None),
        )
        row: Any
        for row in db.execute(handled):
            lane = -1 if row.lane is None else row.lane
            place = (row.topic, row.consumer_group, lane, row.key_hash)
            if place not in newest or natural(row.position) > natural(newest[place]):
                newest[place] = row.position
    return newest
