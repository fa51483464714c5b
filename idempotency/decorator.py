"""`@idempotent`, with or without settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from holdfast.errors import ConfigurationError
from holdfast.idempotency.inbox import DEFAULT_WINDOW, Inbox
from holdfast.idempotency.layer import Idempotent

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.idempotency.window import Duration
    from holdfast.layer import Layer
    from holdfast.plan import Handler


@overload
def idempotent(function: Callable[..., Any], /) -> Handler: ...
@overload
def idempotent(
    *,
    window: Duration | None = ...,
    key: Callable[..., Any] | None = ...,
    keep_result: bool = ...,
) -> Layer: ...


def idempotent(
    function: Callable[..., Any] | None = None,
    /,
    *,
    window: Duration | None = DEFAULT_WINDOW,
    key: Callable[..., Any] | None = None,
    keep_result: bool = False,
) -> Handler | Layer:
    """Handle each message once: dedup row and the handler's writes commit together.

    *window* is how long a handled message is remembered. *key* makes the identity from the
    payload, or from payload and message, instead of the message's id; then the content is
    not compared. With *keep_result*, a duplicate returns what the first run returned.
    """
    if function is not None and not callable(function):
        raise ConfigurationError(
            f"@idempotent({function!r}): settings have names, e.g. @idempotent(window='14d')"
        )
    if key is not None and not callable(key):
        raise ConfigurationError(
            f"@idempotent(key={key!r}): pass a function of the payload, e.g. lambda o: o.id"
        )
    layer = Idempotent(Inbox(window=window), key=key, keep_result=keep_result)
    return layer if function is None else layer(function)
