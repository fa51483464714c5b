"""Create the dead-letter tables.

A revision is frozen: it spells out its types instead of importing today's schema. Tables
that `create_tables` made before are kept, so a database can be adopted at any time.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

from holdfast.errors import ConfigurationError

revision = "dlq_0001"
down_revision = None
branch_labels = ("dlq",)
depends_on = None

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_BYTES = sa.LargeBinary().with_variant(mysql.LONGBLOB, "mysql", "mariadb")
_DOCUMENT = sa.Text().with_variant(mysql.LONGTEXT(collation="utf8mb4_bin"), "mysql", "mariadb")
# Rows of changes are folded and deleted soon: vacuum after a fixed number of them.
_VACUUM = """
ALTER TABLE holdfast_dlq_change SET (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000
)
"""


def upgrade() -> None:
    """Create what is missing."""
    _create_message()
    _create_revision()
    _create_group()
    _create_change()
    _create_hour()
    _create_hit()
    _create_regrouped()
    _create_audit()
    _create_head()
    _create_subject_key()
    if context.get_context().dialect.name == "postgresql":
        op.execute(_VACUUM)


def downgrade() -> None:
    """Refuse: the tables may hold messages that nobody has handled yet."""
    raise ConfigurationError(
        "the dead-letter tables are not downgraded: they may hold messages that nobody has dealt "
        "with. Look with  holdfast dlq stats , then drop them by hand"
    )


def _create_message() -> None:
    _create(
        "holdfast_dlq_message",
        sa.Column("seq", _SEQUENCE, primary_key=True),
        sa.Column("dlq_id", _name(36), nullable=False),
        sa.Column("group_id", _name(32), nullable=False),
        sa.Column("state", _name(16), nullable=False),
        sa.Column("message_id", _name(), nullable=False),
        sa.Column("topic", _name(), nullable=False),
        sa.Column("type", _name(), nullable=False),
        sa.Column("source", _DOCUMENT, nullable=False),
        sa.Column("message_key", _BYTES),
        sa.Column("key_hash", _name(32)),
        sa.Column("payload", _BYTES),
        sa.Column("headers", _DOCUMENT, nullable=False),
        sa.Column("event_at", sa.Double, nullable=False),
        sa.Column("correlation_id", _name()),
        sa.Column("causation_id", _name()),
        sa.Column("content_type", _name()),
        sa.Column("schema_ref", _DOCUMENT),
        sa.Column("traceparent", _name()),
        sa.Column("broker", _name(64), nullable=False),
        sa.Column("lane", sa.Integer),
        sa.Column("position", _name(64)),
        sa.Column("consumer_group", _name(), nullable=False),
        sa.Column("handler", _name(), nullable=False),
        sa.Column("service_version", _name(64), nullable=False),
        sa.Column("stage", _name(16), nullable=False),
        sa.Column("class", _name(16), nullable=False),
        sa.Column("error_type", _name(), nullable=False),
        sa.Column("error_text", _DOCUMENT, nullable=False),
        sa.Column("fingerprint", _name(64), nullable=False),
        sa.Column("shape", _name(64), nullable=False),
        sa.Column("envelope", _DOCUMENT, nullable=False),
        sa.Column("schema_version", sa.Integer, nullable=False),
        sa.Column("origin", _name(16), nullable=False),
        sa.Column("tenant", _name()),
        sa.Column("entity_ref", _name()),
        sa.Column("subject", _name()),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("occurrences", sa.Integer, nullable=False),
        sa.Column("first_failed_at", sa.Double, nullable=False),
        sa.Column("last_failed_at", sa.Double, nullable=False),
        sa.Column("history", _DOCUMENT, nullable=False),
        sa.Column("stored_at", sa.Double, nullable=False),
        sa.Column("replay_count", sa.Integer, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("replayable", sa.Boolean, nullable=False),
        sa.Column("verdict", _name(16), nullable=False),
        sa.Column("retries", sa.Integer, nullable=False),
        sa.Column("due_at", sa.Double),
        sa.Column("closed_at", sa.Double),
        sa.Column("closed_by", _name()),
        sa.Column("closed_reason", _DOCUMENT),
        sa.Column("expires_at", sa.Double),
        sqlite_autoincrement=True,
    )
    _index("holdfast_dlq_message_id", "holdfast_dlq_message", ["dlq_id"], unique=True)
    _index("holdfast_dlq_message_group", "holdfast_dlq_message", ["group_id", "state", "seq"])
    _index("holdfast_dlq_message_state", "holdfast_dlq_message", ["state", "stored_at"])
    _index("holdfast_dlq_message_due", "holdfast_dlq_message", ["due_at"])
    _index("holdfast_dlq_message_key", "holdfast_dlq_message", ["key_hash"])
    _index("holdfast_dlq_message_message", "holdfast_dlq_message", ["message_id"])
    _index("holdfast_dlq_message_subject", "holdfast_dlq_message", ["subject"])


def _create_revision() -> None:
    _create(
        "holdfast_dlq_revision",
        sa.Column("dlq_id", _name(36), primary_key=True),
        sa.Column("revision", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("payload", _BYTES),
        sa.Column("headers", _DOCUMENT, nullable=False),
        sa.Column("difference", _DOCUMENT, nullable=False),
        sa.Column("transform", _name(), nullable=False),
        sa.Column("actor", _name(), nullable=False),
        sa.Column("reason", _DOCUMENT, nullable=False),
        sa.Column("made_at", sa.Double, nullable=False),
    )


def _create_group() -> None:
    _create(
        "holdfast_dlq_group",
        sa.Column("group_id", _name(32), primary_key=True),
        sa.Column("fingerprint", _name(64), nullable=False),
        sa.Column("algorithm", _name(8), nullable=False),
        sa.Column("consumer_group", _name(), nullable=False),
        sa.Column("topic", _name(), nullable=False),
        sa.Column("handler", _name(), nullable=False),
        sa.Column("title", _DOCUMENT, nullable=False),
        sa.Column("error_type", _name(), nullable=False),
        sa.Column("class", _name(16), nullable=False),
        sa.Column("stage", _name(16), nullable=False),
        sa.Column("hints", _DOCUMENT, nullable=False),
        sa.Column("sample", _name(36), nullable=False),
        sa.Column("state", _name(16), nullable=False),
        sa.Column("muted_until", sa.Double),
        sa.Column("owner", _name()),
        sa.Column("note", _DOCUMENT),
        sa.Column("first_seen", sa.Double, nullable=False),
        sa.Column("last_seen", sa.Double, nullable=False),
        sa.Column("arrived", sa.BigInteger, nullable=False),
        sa.Column("reopened", sa.BigInteger, nullable=False),
        sa.Column("confirmed", sa.BigInteger, nullable=False),
        sa.Column("discarded", sa.BigInteger, nullable=False),
        sa.Column("parked", sa.BigInteger, nullable=False),
        sa.Column("alerted_at", sa.Double),
        sa.Column("moved_to", _name(32)),
    )
    _index("holdfast_dlq_group_state", "holdfast_dlq_group", ["state"])


def _create_change() -> None:
    _create(
        "holdfast_dlq_change",
        sa.Column("seq", _SEQUENCE, primary_key=True),
        sa.Column("group_id", _name(32), nullable=False),
        sa.Column("kind", _name(16), nullable=False),
        sa.Column("n", sa.Integer, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("key_hash", _name(32)),
        sa.Column("tenant", _name()),
        sa.Column("version", _name(64)),
        sqlite_autoincrement=True,
    )


def _create_hour() -> None:
    _create(
        "holdfast_dlq_hour",
        sa.Column("group_id", _name(32), primary_key=True),
        sa.Column("hour", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("arrived", sa.BigInteger, nullable=False),
        sa.Column("closed", sa.BigInteger, nullable=False),
    )
    _index("holdfast_dlq_hour_hour", "holdfast_dlq_hour", ["hour"])


def _create_hit() -> None:
    _create(
        "holdfast_dlq_hit",
        sa.Column("group_id", _name(32), primary_key=True),
        sa.Column("kind", _name(8), primary_key=True),
        sa.Column("value", _name(), primary_key=True),
    )


def _create_regrouped() -> None:
    _create(
        "holdfast_dlq_regrouped",
        sa.Column("old_group", _name(32), primary_key=True),
        sa.Column("new_group", _name(32), primary_key=True),
        sa.Column("algorithm", _name(8), nullable=False),
        sa.Column("moved", sa.BigInteger, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
    )


def _create_audit() -> None:
    _create(
        "holdfast_dlq_audit",
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("at", _name(32), nullable=False),
        sa.Column("actor", _name(), nullable=False),
        sa.Column("action", _name(32), nullable=False),
        sa.Column("subject", _name(600), nullable=False),
        sa.Column("reason", _DOCUMENT, nullable=False),
        sa.Column("detail", _DOCUMENT, nullable=False),
        sa.Column("previous", _name(64), nullable=False),
        sa.Column("hash", _name(64), nullable=False),
    )


def _create_head() -> None:
    _create(
        "holdfast_dlq_head",
        sa.Column("name", _name(16), primary_key=True),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("hash", _name(64), nullable=False),
    )


def _create_subject_key() -> None:
    _create(
        "holdfast_dlq_subject",
        sa.Column("subject", _name(), primary_key=True),
        sa.Column("wrapped", _BYTES),
        sa.Column("made_at", sa.Double, nullable=False),
        sa.Column("forgotten_at", sa.Double),
    )


def _name(length: int = 255) -> sa.String:
    return sa.String(length).with_variant(
        mysql.VARCHAR(length, collation="utf8mb4_bin"), "mysql", "mariadb"
    )


def _create(table: str, *columns: sa.Column[Any], **options: Any) -> None:
    if context.is_offline_mode() or not sa.inspect(op.get_bind()).has_table(table):
        op.create_table(table, *columns, **options)


def _index(name: str, table: str, columns: list[str], *, unique: bool = False) -> None:
    if not context.is_offline_mode():
        indexes = sa.inspect(op.get_bind()).get_indexes(table)
        if any(index["name"] == name for index in indexes):
            return
    op.create_index(name, table, columns, unique=unique)
