"""Is what is stored what was sent? A redacted message becomes fit when an edit fills its gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import and_, select

from holdfast.dlq.letter import SCHEMA_VERSION
from holdfast.dlq.redaction import redacted_in
from holdfast.dlq.rows import Envelope
from holdfast.dlq.schema import message, revision

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.engine import Connection

_CHUNK = 500
_envelope = msgspec.json.Decoder(Envelope).decode
_GAPS = (
    "the redacted fields {} are not in it: put them back with  holdfast dlq edit  first, or "
    "discard it"
)
_NEWER = "its envelope is of a newer version: upgrade Holdfast to replay it"


def unfit(db: Connection, rows: Iterable[Any]) -> dict[str, str]:
    """Return why which of the candidates in *rows* cannot be sent as they were."""
    doubtful = [row.dlq_id for row in rows if not row.replayable]
    latest = and_(revision.c.dlq_id == message.c.dlq_id, revision.c.revision == message.c.revision)
    found: dict[str, str] = {}
    for start in range(0, len(doubtful), _CHUNK):
        query = (
            select(message.c.dlq_id, message.c.envelope, message.c.schema_version,
                   revision.c.revision, revision.c.payload.label("edited"))
            .outerjoin(revision, latest)
            .where(message.c.dlq_id.in_(doubtful[start : start + _CHUNK]))
        )  # fmt: skip
        for row in db.execute(query):
            envelope = _envelope(row.envelope)
            gaps = envelope.governance.redacted
            if row.revision is not None:
                gaps = redacted_in(None if row.edited is None else bytes(row.edited), gaps)
            if envelope.newer is not None or row.schema_version > SCHEMA_VERSION:
                found[row.dlq_id] = _NEWER
            elif gaps:
                found[row.dlq_id] = _GAPS.format(", ".join(gaps))
            elif row.revision is None:
                found[row.dlq_id] = "what is stored is not what was sent: edit it first"
    return found
