"""What revisions do to bring the trails of older versions into the one that all share.

Each package kept its own; that of the dead letters was a chain already, and goes first, row by
row as it was, so that a head that somebody kept stays true. The others are sealed behind it.
Frozen: revisions call it, so it changes no more.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

from holdfast.db.audit import append_row

_TRAIL, _HEAD = "holdfast_audit", "holdfast_audit_head"
_LETTERS, _LETTERS_HEAD = "holdfast_dlq_audit", "holdfast_dlq_head"
_COLUMNS = ("seq", "at", "actor", "action", "subject", "reason", "detail", "previous", "hash")
_DOCUMENT = sa.Text().with_variant(mysql.LONGTEXT(collation="utf8mb4_bin"), "mysql", "mariadb")


def share_trail(own: str, area: str) -> None:
    """Move the rows of the table *own* into the shared trail, as *area* and action; drop it."""
    _create()
    if context.is_offline_mode():
        _print(own)
        return
    tables = set(sa.inspect(op.get_bind()).get_table_names())
    if _LETTERS in tables:
        _adopt_letters()
    if own != _LETTERS and own in tables:
        _append(own, area)
        op.drop_table(own)


def _create() -> None:
    op.create_table(
        _TRAIL,
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("at", _name(32), nullable=False),
        sa.Column("actor", _name(255), nullable=False),
        sa.Column("action", _name(32), nullable=False),
        sa.Column("subject", _name(600), nullable=False),
        sa.Column("reason", _DOCUMENT, nullable=False),
        sa.Column("detail", _DOCUMENT, nullable=False),
        sa.Column("previous", _name(64), nullable=False),
        sa.Column("hash", _name(64), nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        _HEAD,
        sa.Column("name", _name(16), primary_key=True),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("hash", _name(64), nullable=False),
        if_not_exists=True,
    )
    head = sa.table(_HEAD, *map(sa.column, ("name", "seq", "hash")))
    there = sa.select(head.c.name).where(head.c.name == "audit").exists()
    first = sa.select(sa.literal("audit"), sa.literal(0), sa.literal("0" * 64)).where(~there)
    op.execute(sa.insert(head).from_select(["name", "seq", "hash"], first))


def _name(length: int) -> sa.String:
    own = mysql.VARCHAR(length, collation="utf8mb4_bin")
    return sa.String(length).with_variant(own, "mysql", "mariadb")


def _adopt_letters() -> None:
    """Take over the chain of the dead letters as it is, or behind what is there already."""
    db = op.get_bind()
    old = sa.table(_LETTERS, *map(sa.column, _COLUMNS))
    new = sa.table(_TRAIL, *map(sa.column, _COLUMNS))
    if db.execute(sa.select(new.c.seq).limit(1)).first() is None:
        db.execute(sa.insert(new).from_select(_COLUMNS, sa.select(old)))
        last = db.execute(sa.select(old).order_by(old.c.seq.desc()).limit(1)).first()
        source = sa.table(_LETTERS_HEAD, *map(sa.column, ("name", "seq", "hash")))
        kept = db.execute(sa.select(source).where(source.c.name == "audit")).first()
        end = kept or last  # a cut end stays to be seen
        if end is not None:
            head = sa.table(_HEAD, *map(sa.column, ("name", "seq", "hash")))
            values = {"seq": end.seq, "hash": end.hash}
            db.execute(sa.update(head).where(head.c.name == "audit").values(**values))
        db.execute(sa.delete(source).where(source.c.name == "audit"))
    else:
        _append(_LETTERS, "")
    op.drop_table(_LETTERS)


def _append(own: str, area: str) -> None:
    db = op.get_bind()
    table = sa.Table(own, sa.MetaData(), autoload_with=db)
    for row in db.execute(sa.select(table).order_by(table.c.seq)).mappings().all():
        detail = row["detail"]
        more: dict[str, Any] = json.loads(detail) if isinstance(detail, str) else dict(detail or {})
        more["moved"] = {"from": own, "seq": row["seq"]}
        action, subject, reason = f"{area}{row['action']}", row["subject"], row["reason"]
        append_row(db, _moment(row["at"]), row["actor"], action, subject, reason, more)


def _moment(at: Any) -> str:
    moment = datetime.fromisoformat(at) if isinstance(at, str) else at
    utc = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return str(utc.isoformat(timespec="microseconds"))


def _print(own: str) -> None:
    """Write what a script can do: hashes it cannot, so it moves no rows and drops no table."""
    if context.get_starting_revision_argument() is None:
        op.drop_table(own)  # made by the same script, so there is nothing in it
