"""Effects that happen once: the dedup row commits with the work."""

from holdfast.idempotency.batch import BatchRunner
from holdfast.idempotency.batch_work import Batch, Outcome
from holdfast.idempotency.claim import Claim, IdempotencyConflict
from holdfast.idempotency.database_leases import DatabaseLeases
from holdfast.idempotency.decorator import idempotent
from holdfast.idempotency.gate import (
    Admission,
    GapTooWide,
    LastWriteWins,
    VersionConflict,
    VersionGate,
)
from holdfast.idempotency.inbox import Inbox
from holdfast.idempotency.keys import idempotency_key
from holdfast.idempotency.lease import InProgress, Lease, LeaseLost
from holdfast.idempotency.ledger import Ledger
from holdfast.idempotency.pruner import prune
from holdfast.idempotency.redis_inbox import RedisInbox
from holdfast.idempotency.schema import create_tables, metadata
from holdfast.idempotency.standing import Orphan, Standing
from holdfast.idempotency.stats import InboxStats, stats

__all__ = [
    "Admission",
    "Batch",
    "BatchRunner",
    "Claim",
    "DatabaseLeases",
    "GapTooWide",
    "IdempotencyConflict",
    "InProgress",
    "Inbox",
    "InboxStats",
    "LastWriteWins",
    "Lease",
    "LeaseLost",
    "Ledger",
    "Orphan",
    "Outcome",
    "RedisInbox",
    "Standing",
    "VersionConflict",
    "VersionGate",
    "create_tables",
    "idempotency_key",
    "idempotent",
    "metadata",
    "prune",
    "stats",
]
