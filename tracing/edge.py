"""Where work enters a service: a request or a job, and the correlation of all that follows.

A request brings `X-Correlation-ID` or `traceparent`, or gets a new correlation. Every event that it
puts into the outbox carries it, and so does everything that those events cause in other services.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError
from holdfast.ids import new_id
from holdfast.message import Origin, begin_origin, current_origin, end_origin
from holdfast.trace_context import NO_TRACE, Trace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
    from contextvars import Context

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
    AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
    WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

HEADER = "X-Correlation-ID"
"""The header in which a correlation comes with a request, and goes back with the response."""

# A header is the sender's choice: what is taken goes into tables, logs and other headers.
_ACCEPTED = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}", re.ASCII)
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")


@contextmanager
def correlated(correlation_id: str | None = None) -> Iterator[str]:
    """Give every message that is made inside one correlation, e.g. in a job or a script.

    Without *correlation_id* a new one is made; inside of a request, or of another such block,
    that one goes on. While a message is handled its own correlation counts.
    """
    outer = current_origin()
    if correlation_id is None and outer is not None:
        yield outer.correlation_id
        return
    chosen = new_id() if correlation_id is None else _required(correlation_id)
    token = begin_origin(Origin(chosen, NO_TRACE if outer is None else outer.trace))
    try:
        yield chosen
    finally:
        end_origin(token)


def current_correlation() -> str | None:
    """Return the correlation of the request or job that is served here, or None."""
    origin = current_origin()
    return None if origin is None else origin.correlation_id


class CorrelationMiddleware:
    """ASGI middleware: each request and web socket has a correlation, and its response tells it.

    ```python
    app = CorrelationMiddleware(app)          # any ASGI application
    app.add_middleware(CorrelationMiddleware)  # Starlette, FastAPI
    ```
    """

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        origin = _origin_of(_asgi_reader(scope))
        name, value = HEADER.lower().encode(), origin.correlation_id.encode()

        async def tell(event: MutableMapping[str, Any]) -> None:
            if event["type"] in ("http.response.start", "websocket.accept"):
                headers = [pair for pair in event.get("headers") or () if pair[0].lower() != name]
                event = {**event, "headers": [*headers, (name, value)]}
            await send(event)

        token = begin_origin(origin)
        try:
            await self._app(scope, receive, tell)
        finally:
            end_origin(token)


class WsgiCorrelationMiddleware:
    """WSGI middleware: each request has a correlation, and its response tells it.

    ```python
    app.wsgi_app = WsgiCorrelationMiddleware(app.wsgi_app)  # Flask
    ```
    """

    def __init__(self, app: WsgiApp) -> None:
        self._app = app

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Serve one request."""
        origin = _origin_of(lambda name: environ.get("HTTP_" + name.upper().replace("-", "_")))

        def tell(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            kept = [pair for pair in headers if pair[0].lower() != HEADER.lower()]
            return start_response(status, [*kept, (HEADER, origin.correlation_id)], *rest)

        # The body may be made while it is sent, after this call has returned.
        context = copy_context()
        context.run(begin_origin, origin)
        body = context.run(self._app, environ, tell)
        return body if isinstance(body, list | tuple) else _Body(context, body)


class _Body:
    """A response body that is made in the context of its request."""

    def __init__(self, context: Context, parts: Iterable[bytes]) -> None:
        self._context = context
        self._parts = parts
        self._iterator = context.run(iter, parts)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return self._context.run(next, self._iterator)

    def close(self) -> None:
        """Close what the application returned, as WSGI asks for."""
        close = getattr(self._parts, "close", None)
        if close is not None:
            self._context.run(close)


def _asgi_reader(scope: Scope) -> Callable[[str], str | None]:
    found = {name.lower(): value for name, value in scope.get("headers") or ()}

    def read(name: str) -> str | None:
        value = found.get(name.lower().encode())
        return None if value is None else value.decode("latin-1")

    return read


def _origin_of(read: Callable[[str], str | None]) -> Origin:
    """Return what a request with these headers belongs to; what is not well-formed is left out."""
    trace, trace_id = NO_TRACE, None
    parent = (read("traceparent") or "").strip()
    if found := _TRACEPARENT.fullmatch(parent):
        state = (read("tracestate") or "").strip()
        trace = Trace(parent, state if _TRACESTATE.fullmatch(state) else None)
        trace_id = found[1]
    given = (read(HEADER) or "").strip()
    if _ACCEPTED.fullmatch(given):
        return Origin(given, trace)
    return Origin(new_id() if trace_id is None else trace_id, trace)


def _required(correlation_id: str) -> str:
    if not isinstance(correlation_id, str) or not _ACCEPTED.fullmatch(correlation_id):
        raise ConfigurationError(
            f"correlation_id {correlation_id!r:.80}: use 1 to 128 letters, digits or ._~:/+=@-"
        )
    return correlation_id
