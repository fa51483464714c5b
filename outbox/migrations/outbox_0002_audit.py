"""Bring what was done to parked events into the audit trail that all of Holdfast shares.

A revision is frozen. Rows are sealed to the end of the shared chain; a printed script cannot do
that and leaves the old table where it is: run  holdfast db upgrade  to move it.
"""

from __future__ import annotations

from holdfast.db.audit_moving import share_trail
from holdfast.errors import ConfigurationError

revision = "outbox_0002"
down_revision = "outbox_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Move the rows and drop their table."""
    share_trail("holdfast_outbox_audit", "outbox.")


def downgrade() -> None:
    """Refuse: the trail is one chain now."""
    raise ConfigurationError(
        "the outbox tables are not downgraded: they may hold events that nobody has published "
        "yet. Drain them with  holdfast relay --once , then drop them by hand"
    )
