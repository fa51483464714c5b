"""Effects that happen once: the dedup row commits with the work."""

from typing import TYPE_CHECKING

from holdfast.extras import lazily
from holdfast.idempotency.attempts import AbandonedStart, AttemptHistory, AttemptLog
from holdfast.idempotency.batch import BatchOutcome, BatchRunner, InboxBatch
from holdfast.idempotency.claim import Claim, IdempotencyConflict
from holdfast.idempotency.idempotent import idempotent
from holdfast.idempotency.identity import idempotency_key
from holdfast.idempotency.inbox import Inbox
from holdfast.idempotency.savepoints import TransactionAborted
from holdfast.idempotency.schema import create_tables, metadata

if TYPE_CHECKING:
    from holdfast.idempotency.lease import DatabaseLeases, InProgress, Lease, LeaseLost
    from holdfast.idempotency.operations import InboxAdmin
    from holdfast.idempotency.redis_inbox import RedisInbox
    from holdfast.idempotency.retention import ConsumerStats, InboxStats, prune, stats
    from holdfast.idempotency.versions import (
        GapTooWide,
        LastWriteWins,
        VersionConflict,
        VersionDecision,
        VersionGate,
    )

__all__ = [
    "AbandonedStart",
    "AttemptHistory",
    "AttemptLog",
    "BatchOutcome",
    "BatchRunner",
    "Claim",
    "ConsumerStats",
    "DatabaseLeases",
    "GapTooWide",
    "IdempotencyConflict",
    "InProgress",
    "Inbox",
    "InboxAdmin",
    "InboxBatch",
    "InboxStats",
    "LastWriteWins",
    "Lease",
    "LeaseLost",
    "RedisInbox",
    "TransactionAborted",
    "VersionConflict",
    "VersionDecision",
    "VersionGate",
    "create_tables",
    "idempotency_key",
    "idempotent",
    "metadata",
    "prune",
    "stats",
]

# A handler that runs once needs none of these.
__getattr__ = lazily(
    __name__,
    {
        "lease": "DatabaseLeases InProgress Lease LeaseLost",
        "operations": "InboxAdmin",
        "redis_inbox": "RedisInbox",
        "retention": "ConsumerStats InboxStats prune stats",
        "versions": "GapTooWide LastWriteWins VersionConflict VersionDecision VersionGate",
    },
)
