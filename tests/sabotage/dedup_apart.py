"""Break a promise: the dedup row commits in a transaction of its own, before the handler."""

from typing import Any

from sqlalchemy.orm import Session

from holdfast.call import Call
from holdfast.idempotency.idempotent import Idempotent

enter = Idempotent._enter


def apart(self: Idempotent, call: Call, session: Any) -> Any:
    """Claim the message and commit that at once."""
    with Session(session.get_bind()) as own, own.begin():
        return enter(self, call, own)


Idempotent._enter = apart  # type: ignore[method-assign]
