"""`@idempotent`, with or without settings."""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING, Any, overload

from holdfast.errors import ConfigurationError
from holdfast.idempotency.inbox import DEFAULT_WINDOW, Inbox
from holdfast.idempotency.layer import Idempotent
from holdfast.idempotency.leased import Leased, LeaseSettings
from holdfast.idempotency.window import in_seconds
from holdfast.names import require_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.idempotency.lease import LeaseStore
    from holdfast.idempotency.window import Duration
    from holdfast.layer import Layer
    from holdfast.plan import Handler

DEFAULT_LEASE = "30s"


@overload
def idempotent(function: Callable[..., Any], /) -> Handler: ...
@overload
def idempotent(
    *,
    window: Duration | EllipsisType | None = ...,
    key: Callable[..., Any] | None = ...,
    keep_result: bool = ...,
    lease: Duration | None = ...,
    store: LeaseStore | None = ...,
    scope: str | None = ...,
) -> Layer: ...


def idempotent(
    function: Callable[..., Any] | None = None,
    /,
    *,
    window: Duration | EllipsisType | None = ...,
    key: Callable[..., Any] | None = None,
    keep_result: bool = False,
    lease: Duration | None = None,
    store: LeaseStore | None = None,
    scope: str | None = None,
) -> Handler | Layer:
    """Handle each message once: dedup row and the handler's writes commit together.

    *window* is how long a handled message is remembered: 30 days, or what *store* is set to,
    unless told otherwise; None is for ever. *key* makes the identity from the
    payload, or from payload and message, instead of the message's id; then the content is
    not compared. With *keep_result*, a duplicate returns what the first run returned.

    With *lease*, for effects outside the database, one worker at a time holds the message,
    for as long as its heartbeat renews the lease. *store* is where leases are kept, e.g.
    `DatabaseLeases(engine)` or `RedisInbox(url)`; under a consumer its database by default.

    *scope* names whose memory it is. Without it that is the consumer's group and handler, and
    alone the module and name of the function.
    """
    if function is not None and not callable(function):
        raise ConfigurationError(
            f"@idempotent({function!r}): settings have names, e.g. @idempotent(window='14d')"
        )
    if key is not None and not callable(key):
        raise ConfigurationError(
            f"@idempotent(key={key!r}): pass a function of the payload, e.g. lambda o: o.id"
        )
    if store is not None and not (hasattr(store, "take") and hasattr(store, "complete")):
        raise ConfigurationError(
            f"@idempotent(store={store!r}): pass where leases are kept, e.g. "
            "DatabaseLeases(engine) or RedisInbox(url)"
        )
    if scope is not None:
        require_name(scope, "@idempotent(scope=…)")
    inbox = Inbox(window=DEFAULT_WINDOW if isinstance(window, EllipsisType) else window)
    if store is not None and not isinstance(window, EllipsisType):
        store = _remembering(store, window)
    layer: Layer
    if lease is None and store is None:
        layer = Idempotent(inbox, key=key, keep_result=keep_result, scope=scope)
    else:
        settings = LeaseSettings(
            seconds=in_seconds(DEFAULT_LEASE if lease is None else lease, of="lease"),
            inbox=inbox,
            store=store,
            key=key,
            keep_result=keep_result,
            scope=scope,
        )
        layer = Leased(settings)
    return layer if function is None else layer(function)


def _remembering(store: LeaseStore, window: Duration | None) -> LeaseStore:
    """Return *store* with the *window* of one handler."""
    if not hasattr(store, "with_window"):
        raise ConfigurationError(
            f"@idempotent(window={window!r}, store={type(store).__name__}): this store decides by "
            "itself how long it remembers; leave out window, or give it with_window(window)"
        )
    other: LeaseStore = store.with_window(window)
    return other
