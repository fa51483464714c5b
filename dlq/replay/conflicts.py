"""Ordering conflicts: a message whose key has an earlier one that this replay does not send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, case, exists, or_, select

from holdfast.dlq.closing import SYSTEM
from holdfast.dlq.replay.outermost import Outermost, by_key
from holdfast.dlq.replay.schema import item
from holdfast.dlq.rows import PARKED, PENDING
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
    keyed = by_key(ordered)
    hashes = sorted({name for _, _, name in keyed})
    earliest = Outermost.earliest()
    for start in range(0, len(hashes), _CHUNK):
        for row in db.execute(_open(selection, hashes[start : start + _CHUNK])):
            earliest.add(row)
    found = {}
    for dlq_id, row in earliest.beyond(keyed).items():
        what = "parked" if row.state == PARKED else "pending"
        text = f"({row.dlq_id}) is {what} in group {row.group_id[:8]}: replay them"
        found[dlq_id] = _reason(f"{text} together, or close that one")
    return found


def _open(selection: Selection, hashes: Sequence[str]) -> Any:
    # Not `NOT (…)`: where a column is null that is neither true nor false.
    outside = case((and_(*selection.where()), 0), else_=1) == 1
    claimed = exists().where(item.c.live == message.c.dlq_id)
    by_cap = and_(message.c.state == PARKED, message.c.closed_by == SYSTEM)
    return select(*(message.c[name] for name in _FIELDS)).where(
        message.c.key_hash.in_(hashes),
        or_(message.c.state == PENDING, by_cap),
        or_(outside, claimed),
    )


def _reason(text: str) -> str:
    return f"an earlier message of its key {text} (--commutative if order does not matter)"
