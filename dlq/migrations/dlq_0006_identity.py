"""Give dead letters with hidden fields an id from which those cannot be guessed.

The id of older versions covered the payload before anything was removed or encrypted. What is
kept suffices for the new one. A letter that a replay has in hand keeps its id: its copies carry
it. This needs the database: a printed script leaves the ids as they are.
"""

from __future__ import annotations

import hashlib
import json
import logging
from base64 import b64decode
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from alembic import context, op

from holdfast.dlq.protection.redaction import without_fields
from holdfast.errors import ConfigurationError
from holdfast.ids import derived_id

revision = "dlq_0006"
down_revision = "dlq_0005"
branch_labels = None
depends_on = None

log = logging.getLogger("holdfast.dlq")
_CHILDREN = (
    ("holdfast_dlq_revision", "dlq_id"),
    ("holdfast_dlq_overtaken", "dlq_id"),
    ("holdfast_dlq_group", "sample"),
    ("holdfast_replay_item", "dlq_id"),
    ("holdfast_held_key", "dlq_id"),
)
_COLUMNS = ("seq", "dlq_id", "message_id", "payload", "envelope", "history", "exact")
_letter = sa.table(
    "holdfast_dlq_message",
    *(sa.column(name) for name in _COLUMNS),
)
_item = sa.table("holdfast_replay_item", sa.column("dlq_id"), sa.column("live"))
_held = sa.table("holdfast_held_key", sa.column("dlq_id"), sa.column("note"))


def upgrade() -> None:
    """Rename what is stored; a second run finds nothing to do."""
    if context.is_offline_mode():
        return
    db = op.get_bind()
    last = 0
    while rows := _some(db, last):
        for row in rows:
            last = row.seq
            _rename(db, row)


def downgrade() -> None:
    """Refuse: the old ids are gone for good."""
    raise ConfigurationError(
        "the dead-letter tables are not downgraded: an older version reads them as they are. "
        "Drop them by hand if they must go"
    )


def _some(db: sa.Connection, last: int) -> Any:
    live = sa.select(_item.c.live).where(_item.c.live == _letter.c.dlq_id).exists()
    query = sa.select(_letter.c.seq, _letter.c.dlq_id).where(
        _letter.c.seq > last,
        ~live,
        sa.or_(
            _letter.c.envelope.contains('"redacted":['), _letter.c.envelope.contains('"sealed":[')
        ),
    )
    return db.execute(query.order_by(_letter.c.seq).limit(200)).all()


def _rename(db: sa.Connection, row: Any) -> None:
    letter = db.execute(sa.select(_letter).where(_letter.c.seq == row.seq)).one()
    envelope = json.loads(letter.envelope)
    new = _identity(letter, envelope)
    if new == row.dlq_id:
        return
    if db.execute(sa.select(_letter.c.seq).where(_letter.c.dlq_id == new)).first() is not None:
        log.warning("dead letter %s keeps its id: its message is there twice", row.dlq_id)
        return
    history = json.dumps([_failure(new, one) for one in json.loads(letter.history)])
    where = _letter.c.seq == row.seq
    db.execute(sa.update(_letter).where(where).values(dlq_id=new, history=history))
    tables = sa.inspect(db).get_table_names()
    for name, column in _CHILDREN:
        if name in tables:
            table = sa.table(name, sa.column(column))
            old = table.c[column] == row.dlq_id
            db.execute(sa.update(table).where(old).values({column: new}))
    if _held.name in tables:
        note = f"dead letter {new}"
        db.execute(sa.update(_held).where(_held.c.dlq_id == new).values(note=note))


def _identity(letter: Any, envelope: dict[str, Any]) -> str:
    """Return the id of *letter* by what is kept of its payload."""
    kept, culprit = envelope.get("governance", {}), envelope["culprit"]
    hidden = (*kept.get("redacted", ()), *kept.get("sealed", ()))
    payload = None if letter.payload is None else bytes(letter.payload)
    bare = without_fields(payload, hidden)[0]
    digest = "null" if bare is None else hashlib.sha256(bare).hexdigest()
    exact = json.loads(letter.exact) if letter.exact else {}
    id_ = letter.message_id
    if "id" in exact:
        id_ = b64decode(exact["id"]).decode("utf-8", "surrogatepass")
    return derived_id("dead-letter", culprit["group"], culprit["handler"], id_, digest)


def _failure(dlq_id: str, one: dict[str, Any]) -> dict[str, Any]:
    """Return a failure of the letter with an id that follows from the new one."""
    at = datetime.fromtimestamp(one["at"], UTC).isoformat()
    own = derived_id("failure", dlq_id, at, one.get("host", ""), one.get("replay_id") or "")
    return {**one, "id": own}
