"""Break a promise: the dedup row is written in a transaction of its own."""

from typing import Any

from holdfast.idempotency.claim import claim
from holdfast.idempotency.inbox import Inbox
from holdfast.idempotency.transactions import transact


def apart(self: Inbox, session: Any, consumer: str, items: Any, **_: Any) -> Any:
    """Remember the message before its work is committed."""
    engine = session.get_bind().engine
    return transact(engine, lambda db: claim(db, consumer, items))


Inbox.claim_all = apart  # type: ignore[method-assign]
