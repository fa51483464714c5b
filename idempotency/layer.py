"""`@idempotent`: a message whose effect is already there is not handled again."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from holdfast.errors import ConfigurationError
from holdfast.idempotency.inbox import Inbox
from holdfast.layer import Call, Done, Layer, Stage

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from holdfast.plan import Handler


class Idempotent(Layer):
    """Claims the message in the handler's transaction, or ends the run as a duplicate."""

    stage: ClassVar[Stage] = Stage.DEDUP
    label: ClassVar[str] = "@idempotent"

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def describe(self) -> str:
        """Say where duplicates are remembered."""
        return "once per group, handler and message id"

    def enter(self, call: Call) -> Done | None:
        """End the run when this message was handled before."""
        if call.session is None or call.message is None:
            raise ConfigurationError(
                "@idempotent needs the handler's transaction: register the handler with "
                "Consumer(..., database=...) "
            )
        if self._inbox.claim(call.session, call.consumer, call.message.id):
            return None
        call.duplicate = True
        return Done()


def idempotent(function: Callable[..., Any]) -> Handler:
    """Handle each message id once: dedup row and the handler's writes commit together."""
    return Idempotent(Inbox())(function)
