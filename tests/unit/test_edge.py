"""A request or a job, and the correlation of what follows from it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import pytest

from holdfast import Message, handling
from holdfast.errors import ConfigurationError
from holdfast.tracing import (
    CorrelationMiddleware,
    WsgiCorrelationMiddleware,
    correlated,
    current_correlation,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
REFUSED = ["", " ", "a b", "a" * 129, "a\x00b", "ünïcode", "<script>", "a;b", "a\tb"]


def made() -> Message:
    return Message.new("orders", b"{}")


class AsgiClient:
    """Calls an ASGI application as a server does."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def get(self, kind: str = "http", **headers: str) -> dict[str, str]:
        """Return the headers of the response."""
        sent: list[dict[str, Any]] = []
        pairs = [(k.replace("_", "-").lower().encode(), v.encode()) for k, v in headers.items()]

        async def receive() -> dict[str, Any]:
            return {"type": "http.request"}

        async def send(event: dict[str, Any]) -> None:
            sent.append(event)

        asyncio.run(self._app({"type": kind, "headers": pairs}, receive, send))
        return {name.decode(): value.decode() for name, value in sent[0].get("headers", ())}


def serving(events: list[Message], kind: str = "http.response.start") -> CorrelationMiddleware:
    """Return an application that makes an event here, in a task and in a thread."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        events.append(made())
        events.append(await asyncio.create_task(in_task()))
        events.append(await asyncio.to_thread(made))
        await send({"type": kind, "status": 200, "headers": [(b"x-correlation-id", b"its own")]})

    async def in_task() -> Message:
        return made()

    return CorrelationMiddleware(app)


@pytest.mark.parametrize("kind", ["http.response.start", "websocket.accept"])
def test_events_of_a_request_have_its_correlation_and_trace(kind: str) -> None:
    """Those of its tasks and threads as well; the response tells it."""
    events: list[Message] = []
    client = AsgiClient(serving(events, kind))
    told = client.get(
        kind.split(".")[0], x_correlation_id="corr-7", traceparent=PARENT, tracestate="a=1"
    )
    assert told == {"x-correlation-id": "corr-7"}
    assert {one.correlation_id for one in events} == {"corr-7"}
    assert {(one.traceparent, one.tracestate) for one in events} == {(PARENT, "a=1")}
    assert current_correlation() is None
    assert made().correlation_id != "corr-7"


def test_without_a_correlation_the_trace_is_one_and_without_a_trace_a_new_one_is_made() -> None:
    """Each request then has its own."""
    events: list[Message] = []
    client = AsgiClient(serving(events))
    assert client.get(traceparent=PARENT)["x-correlation-id"] == TRACE_ID
    first, second = (client.get()["x-correlation-id"] for _ in range(2))
    assert len({TRACE_ID, first, second}) == 3
    assert [one.correlation_id for one in events[::3]] == [TRACE_ID, first, second]


@pytest.mark.parametrize("given", REFUSED)
def test_a_correlation_that_is_not_well_formed_is_not_taken_over(given: str) -> None:
    """It would stand in tables, logs and headers."""
    told = AsgiClient(serving([])).get(x_correlation_id=given)["x-correlation-id"]
    assert told not in REFUSED
    assert told.isascii()
    assert len(told) <= 128


@pytest.mark.parametrize(
    "given",
    [
        "", "nonsense", PARENT.upper(), f"{PARENT}-x", f"ff{PARENT[2:]}",
        PARENT.replace(TRACE_ID, "0" * 32),
    ],
)  # fmt: skip
def test_a_trace_that_is_not_well_formed_is_left_out(given: str) -> None:
    """The request is served all the same, with a correlation of its own."""
    events: list[Message] = []
    told = AsgiClient(serving(events)).get(traceparent=given, tracestate="a=1")
    assert (events[0].traceparent, events[0].tracestate) == (None, None)
    assert events[0].correlation_id == told["x-correlation-id"]


def test_other_scopes_pass_through() -> None:
    """Lifespan has no headers."""
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])
        assert current_correlation() is None
        await send({"type": "lifespan.startup.complete"})

    assert AsgiClient(CorrelationMiddleware(app)).get("lifespan") == {}
    assert seen == ["lifespan"]


class _Silent(WSGIRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def served() -> Iterator[Callable[[Any], str]]:
    """Serve WSGI applications by a real server; return the address."""
    servers: list[WSGIServer] = []

    def serve(app: Any) -> str:
        server = make_server("127.0.0.1", 0, app, handler_class=_Silent)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("streams", [True, False])
def test_a_wsgi_request_has_a_correlation_until_its_body_is_through(
    served: Callable[[Any], str], *, streams: bool
) -> None:
    """A body that is made while it is sent belongs to the request as well."""
    events: list[Message] = []
    closed: list[str | None] = []

    def parts() -> Iterator[bytes]:
        try:
            events.append(made())
            yield b"one"
            events.append(made())
            yield b"two"
        finally:
            closed.append(current_correlation())

    def app(environ: Any, start_response: Any) -> Any:
        events.append(made())
        start_response("200 OK", [("Content-Type", "text/plain"), ("x-correlation-id", "old")])
        return parts() if streams else [*parts()]

    url = served(WsgiCorrelationMiddleware(app))
    asked = Request(url, headers={"X-Correlation-ID": "corr-9", "Traceparent": PARENT})  # noqa: S310
    with urlopen(asked, timeout=30) as response:  # noqa: S310
        assert response.read() == b"onetwo"
        assert response.headers.get_all("X-Correlation-ID") == ["corr-9"]
    assert [one.correlation_id for one in events] == ["corr-9"] * 3
    assert {one.traceparent for one in events} == {PARENT}
    assert closed == ["corr-9"]
    assert current_correlation() is None


def test_a_job_has_one_correlation() -> None:
    """An inner block goes on with it unless it names another."""
    with correlated() as job:
        assert made().correlation_id == job
        with correlated() as inner:
            assert inner == job
        with correlated("import-7"):
            assert made().correlation_id == "import-7"
        assert made().correlation_id == job
    assert current_correlation() is None


def test_a_message_that_is_handled_counts_more_than_the_request() -> None:
    """What it causes has its correlation, not that of the block around it."""
    cause = made()
    with correlated("job"), handling(cause):
        assert made().correlation_id == cause.correlation_id


@pytest.mark.parametrize("given", [*REFUSED, 7])
def test_a_wrong_correlation_of_a_job_is_refused(given: Any) -> None:
    """The error says what is right."""
    with pytest.raises(ConfigurationError, match="use 1 to 128 letters"), correlated(given):
        pass
