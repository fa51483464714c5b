"""The inbox: which messages a handler has already worked off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.idempotency.claim import Wanted, claim
from holdfast.idempotency.keys import UNCOMPARED, message_key

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection
    from sqlalchemy.orm import Session


class Inbox:
    """Remembers handled messages inside the handler's own transaction."""

    def claim(self, session: Session | Connection, consumer: str, message_id: str) -> bool:
        """Return whether *message_id* is new to *consumer*, and remember it.

        The memory commits or rolls back with the caller's work. A rival that handles the
        same message right now is waited for.
        """
        wanted = Wanted(key=message_key(message_id), digest=UNCOMPARED, id=message_id)
        return claim(session, consumer, [wanted])[0].is_new
