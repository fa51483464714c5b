"""Create the outbox tables.

A revision is frozen: it spells out its types instead of importing today's schema. Tables
that `create_tables` made before are kept, so a database can be adopted at any time.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

from holdfast.errors import ConfigurationError

revision = "outbox_0001"
down_revision = None
branch_labels = ("outbox",)
depends_on = None

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_ID = sa.Uuid(native_uuid=False).with_variant(sa.Uuid(), "postgresql")
_PAYLOAD = sa.LargeBinary().with_variant(mysql.LONGBLOB, "mysql", "mariadb")
_NAME = sa.String(255).with_variant(mysql.VARCHAR(255, collation="utf8mb4_bin"), "mysql", "mariadb")
# Every row is deleted soon, so waiting for a share of the table to be dead would let a
# backlog of millions rot: vacuum after a fixed number instead, also the large payloads.
_VACUUM = """
ALTER TABLE holdfast_outbox SET (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
    toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 5000
)
"""


def upgrade() -> None:
    """Create what is missing."""
    _create("holdfast_outbox", _number(), *_event(), sqlite_autoincrement=True)
    _create(
        "holdfast_outbox_delayed",
        _number(),
        *_event(),
        sa.Column("due", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    _index("holdfast_outbox_delayed_due", "holdfast_outbox_delayed", ["due"])
    _create_relays()
    _create(
        "holdfast_outbox_parked",
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        *_event(),
        sa.Column("error", sa.Text),
        sa.Column("parked_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
    )
    _index("holdfast_outbox_parked_key", "holdfast_outbox_parked", ["aggregatetype", "aggregateid"])
    _create_audit()
    if context.get_context().dialect.name == "postgresql":
        op.execute(_VACUUM)


def downgrade() -> None:
    """Refuse: the tables may hold events that nobody has published yet."""
    raise ConfigurationError(
        "the outbox tables are not downgraded: they may hold events that nobody has published "
        "yet. Drain them with  holdfast relay --once , then drop them by hand"
    )


def _create_relays() -> None:
    _create(
        "holdfast_outbox_shard",
        sa.Column("shard", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column("owner", sa.String(64)),
        sa.Column("until", sa.Double, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
    )
    _create(
        "holdfast_outbox_relay",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("until", sa.Double, nullable=False),
        sa.Column("engine", sa.String(16), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
    )


def _create_audit() -> None:
    _create(
        "holdfast_outbox_audit",
        _number(),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(255), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(600), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
        sqlite_autoincrement=True,
    )


def _number() -> sa.Column[Any]:
    return sa.Column("seq", _SEQUENCE, primary_key=True)


def _event() -> list[sa.Column[Any]]:
    return [
        sa.Column("id", _ID, nullable=False),
        sa.Column("aggregatetype", _NAME, nullable=False),
        sa.Column("aggregateid", _NAME),
        sa.Column("type", sa.String(255), nullable=False),
        sa.Column("payload", _PAYLOAD),
        sa.Column("headers", sa.JSON, nullable=False),
        sa.Column("shard", sa.SmallInteger, nullable=False),
    ]


def _create(table: str, *columns: sa.Column[Any], **options: Any) -> None:
    if context.is_offline_mode() or not sa.inspect(op.get_bind()).has_table(table):
        op.create_table(table, *columns, **options)


def _index(name: str, table: str, columns: list[str]) -> None:
    if not context.is_offline_mode():
        indexes = sa.inspect(op.get_bind()).get_indexes(table)
        if any(index["name"] == name for index in indexes):
            return
    op.create_index(name, table, columns)
