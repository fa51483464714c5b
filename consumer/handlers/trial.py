"""A handler called as a consumer calls it: the payload it decodes, and what it asks for."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

from holdfast.call import Call
from holdfast.codec import payload_annotation
from holdfast.consumer.handlers.arguments import Arguments, Payload, wanted_by, wants_async_session
from holdfast.errors import ConfigurationError
from holdfast.outbox import Outbox

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from holdfast.dlq.replay.selection import LetterRef
    from holdfast.dlq.replay.simulation import Named
    from holdfast.message import Message


class Trial:
    """Runs a handler for a simulation; each message is its first attempt.

    The outbox is one whose events are rolled back with the session that they are added to.
    """

    def __init__(self, handler: Named) -> None:
        self.name = handler.name
        self._function = handler.function
        if wants_async_session(handler.function):
            raise ConfigurationError(
                f"{handler.name} asks for an AsyncSession, which a simulation cannot roll back for "
                "it: name a function that takes a Session"
            )
        self._wanted = wanted_by(handler.function)
        self.wants_session = "session" in self._wanted.values()
        self._payload = Payload(payload_annotation(handler.function), strict=False)

    def __call__(self, message: Message, session: Session | None, letter: LetterRef) -> None:
        """Handle *message*, or raise what the handler raises."""
        call = Call(
            (), {}, message=message, consumer=f"{letter.group}/{letter.handler}", session=session
        )
        self._payload.enter(call)
        Arguments(self._wanted, outbox=Outbox(source=letter.group)).enter(call)
        result = self._function(*call.args, **call.kwargs)
        if inspect.isawaitable(result):
            asyncio.run(_awaited(result))


async def _awaited(result: Any) -> Any:
    return await result
