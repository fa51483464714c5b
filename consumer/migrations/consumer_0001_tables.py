"""Create the consumer's tables: held keys, parked messages, their audit, shared circuits.

A revision is frozen: it spells out its types instead of importing today's schema. Tables
that `create_tables` made before are kept, so a database can be adopted at any time.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

from holdfast.errors import ConfigurationError

revision = "consumer_0001"
down_revision = None
branch_labels = ("consumer",)
depends_on = None

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_NAME = sa.String(255).with_variant(mysql.VARCHAR(255, collation="utf8mb4_bin"), "mysql", "mariadb")
_HASH = sa.String(64).with_variant(mysql.VARCHAR(64, collation="ascii_bin"), "mysql", "mariadb")
_BYTES = sa.LargeBinary().with_variant(mysql.LONGBLOB, "mysql", "mariadb")


def upgrade() -> None:
    """Create what is missing."""
    _create(
        "holdfast_held_key",
        sa.Column("grp", _NAME, primary_key=True),
        sa.Column("topic", _NAME, primary_key=True),
        sa.Column("key_hash", _HASH, primary_key=True),
        sa.Column("key", _BYTES),
        sa.Column("dlq_id", sa.String(64)),
        sa.Column("due", sa.Double),
        sa.Column("parked", sa.Integer, nullable=False),
        sa.Column("since", sa.Double, nullable=False),
        sa.Column("owner", sa.String(64)),
        sa.Column("until", sa.Double, nullable=False),
        sa.Column("note", sa.Text),
    )
    _index("holdfast_held_key_due", "holdfast_held_key", ["grp", "due"])
    _create(
        "holdfast_held",
        _number(),
        sa.Column("grp", _NAME, nullable=False),
        sa.Column("topic", _NAME, nullable=False),
        sa.Column("key_hash", _HASH, nullable=False),
        sa.Column("message_id", _NAME, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("position", sa.String(64), nullable=False),
        sa.Column("headers", _BYTES, nullable=False),
        sa.Column("body", _BYTES),
        sa.Column("stored", sa.Double),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("parked_at", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    _index("holdfast_held_in_order", "holdfast_held", ["grp", "topic", "key_hash", "seq"])
    _create(
        "holdfast_held_audit",
        _number(),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(255), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(600), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
        sqlite_autoincrement=True,
    )
    _create(
        "holdfast_circuit",
        sa.Column("name", _NAME, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("is_open", sa.SmallInteger, nullable=False),
        sa.Column("until", sa.Double, nullable=False),
    )


def downgrade() -> None:
    """Refuse: the tables may hold messages that nobody has handled yet."""
    raise ConfigurationError(
        "the consumer's tables are not downgraded: they may hold messages that nobody has handled "
        "yet. Look with  holdfast keys list , then drop them by hand"
    )


def _number() -> sa.Column[Any]:
    return sa.Column("seq", _SEQUENCE, primary_key=True)


def _create(table: str, *columns: sa.Column[Any], **options: Any) -> None:
    if context.is_offline_mode() or not sa.inspect(op.get_bind()).has_table(table):
        op.create_table(table, *columns, **options)


def _index(name: str, table: str, columns: list[str]) -> None:
    if not context.is_offline_mode():
        indexes = sa.inspect(op.get_bind()).get_indexes(table)
        if any(index["name"] == name for index in indexes):
            return
    op.create_index(name, table, columns)
