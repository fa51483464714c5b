"""Forget the digests of handled payloads: fields that are hidden elsewhere could be guessed.

Messages that were handled before are known by their ids as ever; only other content under one
of those ids is not noticed any more. A table of many millions of rows takes some minutes.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

from holdfast.errors import ConfigurationError

revision = "idempotency_0003"
down_revision = "idempotency_0001"
branch_labels = None
depends_on = None

_inbox = sa.table("holdfast_inbox", sa.column("digest", sa.LargeBinary(8)))
_NOTHING = {
    "postgresql": "decode('0000000000000000', 'hex')",
    "mysql": "unhex('0000000000000000')",
    "mariadb": "unhex('0000000000000000')",
    "sqlite": "zeroblob(8)",
}


def upgrade() -> None:
    """Clear them; a second run finds nothing to do."""
    zero: sa.ColumnElement[bytes] = sa.literal_column(_NOTHING[context.get_context().dialect.name])
    op.execute(sa.update(_inbox).where(_inbox.c.digest != zero).values(digest=zero))


def downgrade() -> None:
    """Refuse: nothing is gained by it."""
    raise ConfigurationError(
        "the inbox is not downgraded: an older version takes rows without a digest as well. "
        "Drop the tables by hand if they must go"
    )
