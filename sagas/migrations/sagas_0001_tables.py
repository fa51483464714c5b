"""Create the tables of sagas: instances, attempts, timers, signals, history, marks, locks.

The audit trail that sagas share with all packages comes with the revisions of the others.
A revision is frozen: it spells out its types instead of importing today's schema. Tables
that `create_tables` made before are kept, so a database can be adopted at any time.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

from holdfast.errors import ConfigurationError

revision = "sagas_0001"
down_revision = None
branch_labels = ("sagas",)
depends_on = None

_NAME = sa.String(255).with_variant(mysql.VARCHAR(255, collation="utf8mb4_bin"), "mysql", "mariadb")
_ID = sa.String(36).with_variant(mysql.VARCHAR(36, collation="ascii_bin"), "mysql", "mariadb")
_WORD = sa.String(16).with_variant(mysql.VARCHAR(16, collation="ascii_bin"), "mysql", "mariadb")
_BYTES = sa.LargeBinary().with_variant(mysql.LONGBLOB, "mysql", "mariadb")


def upgrade() -> None:
    """Create what is missing."""
    _create_saga()
    _create_timer()
    _create(
        "holdfast_saga_step",
        *_attempt(),
        sa.Column("status", _WORD, nullable=False),
        sa.Column("message_id", _ID),
        sa.Column("began_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.Column("error", sa.Text),
    )
    _create(
        "holdfast_saga_signal",
        sa.Column("saga_id", _ID, primary_key=True),
        sa.Column("name", _NAME, primary_key=True),
        sa.Column("payload", _BYTES),
        sa.Column("at", sa.Double, nullable=False),
    )
    _create(
        "holdfast_saga_history",
        sa.Column("saga_id", _ID, primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("event", _BYTES, nullable=False),
        sa.Column("effects", _BYTES, nullable=False),
        sa.Column("causation_id", _NAME),
    )
    _create_mark()
    _create(
        "holdfast_saga_lock",
        sa.Column("resource", _NAME, primary_key=True),
        sa.Column("saga_id", _ID),
        sa.Column("until", sa.Double, nullable=False),
        sa.Column("fence", sa.BigInteger, nullable=False),
    )
    _index("holdfast_saga_lock_saga", "holdfast_saga_lock", ["saga_id"])


def downgrade() -> None:
    """Refuse: the tables hold sagas that have not ended yet."""
    raise ConfigurationError(
        "the saga tables are not downgraded: they may hold sagas that have not ended. Look with  "
        "holdfast saga list , then drop them by hand"
    )


def _create_saga() -> None:
    _create(
        "holdfast_saga",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("type", _NAME, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("hash", _WORD, nullable=False),
        sa.Column("business_key", _NAME, nullable=False),
        sa.Column("active_key", _NAME),
        sa.Column("status", _WORD, nullable=False),
        sa.Column("progress", _BYTES, nullable=False),
        sa.Column("data", _BYTES, nullable=False),
        sa.Column("start_digest", _WORD, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("correlation_id", _NAME),
        sa.Column("traceparent", sa.String(64)),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("changed_at", sa.Double, nullable=False),
        sa.Column("deadline_at", sa.Double),
        sa.Column("ended_at", sa.Double),
        sa.Column("alerted_at", sa.Double),
        sa.UniqueConstraint("type", "active_key", name="holdfast_saga_active"),
    )
    _index("holdfast_saga_key", "holdfast_saga", ["type", "business_key"])
    _index("holdfast_saga_status", "holdfast_saga", ["status", "changed_at"])


def _create_timer() -> None:
    _create(
        "holdfast_saga_timer",
        *_attempt(),
        sa.Column("kind", _WORD, primary_key=True),
        sa.Column("type", _NAME, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("due", sa.Double, nullable=False),
        sa.Column("tries", sa.SmallInteger, nullable=False),
        sa.Column("payload", _BYTES),
        sa.Column("owner", sa.String(64)),
        sa.Column("until", sa.Double, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
    )
    _index("holdfast_saga_timer_due", "holdfast_saga_timer", ["due"])


def _create_mark() -> None:
    _create(
        "holdfast_saga_mark",
        sa.Column("saga_id", _ID, primary_key=True),
        sa.Column("step", _NAME, primary_key=True),
        sa.Column("status", _WORD, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("answer", _WORD, nullable=False),
        sa.Column("reply", _BYTES),
        sa.Column("reply_type", _NAME),
        sa.Column("content_type", _NAME),
        sa.Column("error", sa.Text),
        sa.Column("at", sa.Double, nullable=False),
    )
    _index("holdfast_saga_mark_at", "holdfast_saga_mark", ["at"])


def _attempt() -> list[sa.Column[Any]]:
    return [
        sa.Column("saga_id", _ID, primary_key=True),
        sa.Column("step", _NAME, primary_key=True),
        sa.Column("direction", _WORD, primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    ]


def _create(table: str, *columns: Any, **options: Any) -> None:
    if context.is_offline_mode() or not sa.inspect(op.get_bind()).has_table(table):
        op.create_table(table, *columns, **options)


def _index(name: str, table: str, columns: list[str]) -> None:
    if not context.is_offline_mode():
        indexes = sa.inspect(op.get_bind()).get_indexes(table)
        if any(index["name"] == name for index in indexes):
            return
    op.create_index(name, table, columns)
