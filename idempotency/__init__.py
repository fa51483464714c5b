"""Effects that happen once: the dedup row commits with the work."""

from holdfast.idempotency.attempts import AbandonedStart, AttemptHistory, AttemptLog
from holdfast.idempotency.batch import BatchOutcome, BatchRunner, InboxBatch
from holdfast.idempotency.claim import Claim, IdempotencyConflict
from holdfast.idempotency.idempotent import idempotent
from holdfast.idempotency.identity import idempotency_key
from holdfast.idempotency.inbox import Inbox
from holdfast.idempotency.lease import DatabaseLeases, InProgress, Lease, LeaseLost
from holdfast.idempotency.operations import InboxAdmin
from holdfast.idempotency.redis_inbox import RedisInbox
from holdfast.idempotency.retention import ConsumerStats, InboxStats, prune, stats
from holdfast.idempotency.savepoints import TransactionAborted
from holdfast.idempotency.schema import create_tables, metadata
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
