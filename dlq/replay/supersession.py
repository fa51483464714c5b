"""Is a dead letter still needed? Not when a newer event of its key has been handled.

Two things are known: newer dead letters of the key that were replayed with success, and
ordinary events that a consumer handled while this one was dead (`holdfast.dlq.overtaking`).
A key that the consumer holds in quarantine has nothing newer handled by construction.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import select

from holdfast.dlq.replay.outermost import Outermost, by_key
from holdfast.dlq.rows import CONFIRMED, Envelope
from holdfast.dlq.schema import message, overtaken

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sqlalchemy.engine import Connection

    from holdfast.dlq.replay.manifest import Candidate

_CHUNK = 500
_FIELDS = (
    "seq", "message_id", "topic", "consumer_group", "lane", "position", "key_hash", "closed_at",
)  # fmt: skip
_envelope = msgspec.json.Decoder(Envelope).decode


def superseded(db: Connection, candidates: Sequence[Candidate]) -> dict[str, str]:
    """Return which of *candidates* must be held, and by what they were superseded.

    Not those whose handler was declared commutative when they failed.
    """
    found = _by_letters(db, candidates) | _by_events(db, candidates)
    for dlq_id in commutative_among(db, found):
        del found[dlq_id]
    return found


def _by_events(db: Connection, candidates: Iterable[Candidate]) -> dict[str, str]:
    """Return what ordinary events have overtaken."""
    topics = {letter.dlq_id: letter.topic for letter in candidates}
    found = {}
    for chunk in _chunks(sorted(topics)):
        for row in db.execute(select(overtaken).where(overtaken.c.dlq_id.in_(chunk))):
            found[row.dlq_id] = _reason(topics[row.dlq_id], row, row.handled_at)
    return found


def _by_letters(db: Connection, candidates: Iterable[Candidate]) -> dict[str, str]:
    """Return what newer dead letters of the key, handled when replayed, have overtaken."""
    keyed = by_key(candidates)
    newest = Outermost.newest()
    for chunk in _chunks(sorted({name for _, _, name in keyed})):
        handled = select(*(message.c[name] for name in _FIELDS)).where(
            message.c.key_hash.in_(chunk), message.c.state == CONFIRMED
        )
        for row in db.execute(handled):
            newest.add(row)
    return {
        dlq_id: _reason(row.topic, row, row.closed_at)
        for dlq_id, row in newest.beyond(keyed).items()
    }


def commutative_among(db: Connection, dlq_ids: Iterable[str]) -> list[str]:
    """Return those of *dlq_ids* whose handler was declared commutative when they failed."""
    found = []
    for chunk in _chunks(sorted(dlq_ids)):
        wanted = select(message.c.dlq_id, message.c.envelope).where(message.c.dlq_id.in_(chunk))
        found += [
            dlq_id for dlq_id, text in db.execute(wanted) if _envelope(text).culprit.commutative
        ]
    return found


def _reason(topic: str, row: Any, at: float | None) -> str:
    place = "" if row.position is None else f", {topic}/{row.lane} at {row.position}"
    when = "" if at is None else f" on {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return (
        f"a newer event of its key was handled{when} (message {row.message_id}{place}): discard "
        "this one if that made it void, or replay it with --commutative if order does not matter"
    )


def _chunks(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (ids[start : start + _CHUNK] for start in range(0, len(ids), _CHUNK))
