"""Create the tables of the inbox, the leases, the versions and the attempt ledger.

A revision is frozen: it spells out its types instead of importing today's schema. Tables
that `create_tables` made before are kept, so a database can be adopted at any time.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

from holdfast.errors import ConfigurationError

revision = "idempotency_0001"
down_revision = None
branch_labels = ("idempotency",)
depends_on = None

_NAME = sa.String(255).with_variant(mysql.VARCHAR(255, collation="utf8mb4_bin"), "mysql", "mariadb")
_OWNER = sa.String(64).with_variant(mysql.VARCHAR(64, collation="utf8mb4_bin"), "mysql", "mariadb")
_KEY = sa.LargeBinary(16).with_variant(mysql.BINARY(16), "mysql", "mariadb")
_DIGEST = sa.LargeBinary(8).with_variant(mysql.BINARY(8), "mysql", "mariadb")
_CONTENT = sa.LargeBinary().with_variant(mysql.LONGBLOB, "mysql", "mariadb")
# Rows leave as fast as they come: wait for a fixed number of dead ones, not for a share.
_VACUUM = """
ALTER TABLE {table} SET (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = {rows}
)
"""


def upgrade() -> None:
    """Create what is missing."""
    _create_inbox()
    _create_versions()
    _create_ledger()
    if context.get_context().dialect.name == "postgresql":
        op.execute(_VACUUM.format(table="holdfast_start", rows=5000))
        op.execute(_VACUUM.format(table="holdfast_inbox", rows=100000))


def downgrade() -> None:
    """Refuse: without the tables messages would be handled a second time."""
    raise ConfigurationError(
        "the inbox tables are not downgraded: without them messages would be handled "
        "again. Drop them by hand once no consumer runs"
    )


def _create_inbox() -> None:
    _create(
        "holdfast_inbox",
        *_handled_key(),
        sa.Column("handled_at", sa.Double, nullable=False),
        sa.Column("digest", _DIGEST, nullable=False),
        sa.Column("result", _CONTENT),
        sqlite_with_rowid=False,
    )
    _index("holdfast_inbox_handled_at", "holdfast_inbox", ["handled_at"], postgresql_using="brin")
    _create(
        "holdfast_inbox_consumer",
        sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("name", sa.String(1024), nullable=False),
        sa.Column("window_seconds", sa.Double),
    )
    _create(
        "holdfast_inbox_lease",
        *_handled_key(),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("until", sa.Double, nullable=False),
        sqlite_with_rowid=False,
    )


def _create_versions() -> None:
    _create(
        "holdfast_version",
        sa.Column("consumer", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("entity", _NAME, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("stale", sa.BigInteger, nullable=False),
        sa.Column("last_stale", sa.BigInteger),
        sa.Column("changed_at", sa.Double, nullable=False),
    )
    _create(
        "holdfast_ahead",
        sa.Column("consumer", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("entity", _NAME, primary_key=True),
        sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("content", _CONTENT, nullable=False),
        sa.Column("held_at", sa.Double, nullable=False),
    )


def _create_ledger() -> None:
    _create(
        "holdfast_owner",
        sa.Column("owner", _OWNER, primary_key=True),
        sa.Column("until", sa.Double, nullable=False),
    )
    _create(
        "holdfast_start",
        sa.Column("consumer", _NAME, primary_key=True),
        sa.Column("message_id", _NAME, primary_key=True),
        sa.Column("owner", _OWNER, primary_key=True),
        sa.Column("alone", sa.SmallInteger, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
    )
    _create(
        "holdfast_attempt",
        sa.Column("consumer", _NAME, primary_key=True),
        sa.Column("message_id", _NAME, primary_key=True),
        sa.Column("failed", sa.Integer, nullable=False),
        sa.Column("released", sa.Integer, nullable=False),
        sa.Column("crashed", sa.Integer, nullable=False),
        sa.Column("suspected", sa.Integer, nullable=False),
        sa.Column("first_failed_at", sa.Double),
        sa.Column("last_failed_at", sa.Double),
        sa.Column("last_error", sa.Text),
        sa.Column("changed_at", sa.Double, nullable=False),
    )
    _index("holdfast_attempt_changed_at", "holdfast_attempt", ["changed_at"])


def _handled_key() -> list[sa.Column[Any]]:
    return [
        sa.Column("consumer", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("message", _KEY, primary_key=True),
    ]


def _create(table: str, *columns: sa.Column[Any], **options: Any) -> None:
    if context.is_offline_mode() or not sa.inspect(op.get_bind()).has_table(table):
        op.create_table(table, *columns, **options)


def _index(name: str, table: str, columns: list[str], **options: Any) -> None:
    if not context.is_offline_mode():
        indexes = sa.inspect(op.get_bind()).get_indexes(table)
        if any(index["name"] == name for index in indexes):
            return
    op.create_index(name, table, columns, **options)
