"""Bring what was done to dead letters into the audit trail that all of Holdfast shares.

A revision is frozen. Rows are sealed to the end of the shared chain; a printed script cannot do
that and leaves the old table where it is: run  holdfast db upgrade  to move it.
"""

from __future__ import annotations

from holdfast.db.audit_moving import share_trail
from holdfast.errors import ConfigurationError

revision = "dlq_0008"
down_revision = "dlq_0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Move the rows and drop their table."""
    share_trail("holdfast_dlq_audit", "")


def downgrade() -> None:
    """Refuse: the trail is one chain now."""
    raise ConfigurationError(
        "the audit trail is not downgraded: it is one chain now. Drop its tables by hand if it "
        "must go"
    )
