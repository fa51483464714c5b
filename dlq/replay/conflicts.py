"""Ordering conflicts: a message whose key has an earlier one that this replay does not send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, case, exists, or_, select

from holdfast.dlq.closing import SYSTEM
from holdfast.dlq.positions import is_newer
from holdfast.dlq.replay.schema import item
from holdfast.dlq.rows import PARKED, PENDING, key_hash
from holdfast.dlq.schema import message

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy.engine import Connection

    from holdfast.dlq.replay.manifest import Candidate
    from holdfast.dlq.replay.selection import Selection

_CHUNK = 500
_FIELDS = (
    "dlq_id", "seq", "topic", "consumer_group", "lane", "position", "key_hash", "state", "group_id",
)  # fmt: skip


def behind(ordered: Sequence[Candidate], stuck: Mapping[str, str]) -> dict[str, str]:
    """Return which of *ordered* follow, in their key, one of those that are *stuck*."""
    found: dict[str, str] = {}
    blocked: dict[str, str] = {}
    for letter in ordered:
        if letter.dlq_id in stuck:
            blocked.setdefault(letter.key_hash, letter.dlq_id)
        elif (first := blocked.get(letter.key_hash)) is not None:
            found[letter.dlq_id] = _reason(f"({first}) is set aside: {stuck[first]}")
    return found


def elsewhere(db: Connection, selection: Selection, ordered: Sequence[Candidate]) -> dict[str, str]:
    """Return which of *ordered* have an earlier one of their key open outside of *selection*.

    Open is what is pending, in another failure group or in a plan of somebody else, and
    what the loop cap has parked for a person.
    """
    by_key: dict[tuple[str, str, str | None], list[Candidate]] = {}
    for letter in ordered:
        if letter.key is not None:
            by_key.setdefault((letter.topic, letter.group, key_hash(letter.key)), []).append(letter)
    hashes = sorted({name for _, _, name in by_key if name is not None})
    found: dict[str, str] = {}
    for start in range(0, len(hashes), _CHUNK):
        for row in db.execute(_open(selection, hashes[start : start + _CHUNK])):
            for letter in by_key.get((row.topic, row.consumer_group, row.key_hash), ()):
                if letter.dlq_id != row.dlq_id and _is_after(letter, row):
                    what = "parked" if row.state == PARKED else "pending"
                    text = f"({row.dlq_id}) is {what} in group {row.group_id[:8]}: replay them"
                    found.setdefault(letter.dlq_id, _reason(f"{text} together, or close that one"))
    return found


def _open(selection: Selection, hashes: Sequence[str]) -> Any:
    # Not `NOT (…)`: where a column is null that is neither true nor false.
    outside = case((and_(*selection.where()), 0), else_=1) == 1
    claimed = exists().where(item.c.live == message.c.dlq_id)
    by_cap = and_(message.c.state == PARKED, message.c.closed_by == SYSTEM)
    return (
        select(*(message.c[name] for name in _FIELDS))
        .where(
            message.c.key_hash.in_(hashes),
            or_(message.c.state == PENDING, by_cap),
            or_(outside, claimed),
        )
        .order_by(message.c.seq)
    )


def _is_after(letter: Candidate, row: Any) -> bool:
    """Whether *letter* came after *row*: by position, else by when the store received it."""
    same_lane = letter.partition == (-1 if row.lane is None else row.lane)
    newer = is_newer(letter.position, row.position) if same_lane else None
    return letter.seq > row.seq if newer is None else newer


def _reason(text: str) -> str:
    return f"an earlier message of its key {text} (--commutative if order does not matter)"
