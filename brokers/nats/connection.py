"""One connection at a time to a NATS server, on an event loop in a thread of its own.

The client library would reconnect by itself and then send what it had not sent before, after
messages that were lost with the connection: that breaks the order of a key. So each client
object lives for one connection, and the adapter makes the next.

The client library's own object: made, and brought to an end.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.backoff import Backoff
from holdfast.brokers.nats.errors import refused_connection, translated
from holdfast.errors import BrokerDown, ConfigurationError, HoldfastError
from holdfast.extras import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from nats.aio.client import Client

    from holdfast.clock import Clock


log = logging.getLogger("holdfast.brokers.nats")

_PLAIN = b"NATS/1.0\r\n"
_CLOSING = 1.0  # seconds that a dead connection may take to close


def new_client(*, secure: bool) -> Client:
    """Return a client that is not connected yet; a *secure* one sends nothing in clear."""
    client: Client = _client_class()()
    client.holdfast_secure = secure  # type: ignore[attr-defined]
    return client


async def end(client: Client) -> None:
    """Close *client* whatever state it is in, and end every task it left on its loop."""
    try:
        await asyncio.wait_for(client.close(), _CLOSING)
    except Exception as error:  # noqa: BLE001 - it is given up in any case
        log.debug("closing a connection: %s", error)
    transport = getattr(client, "_transport", None)
    for name in ("_io_writer", "_bare_io_writer"):
        writer = getattr(transport, name, None)
        if writer is not None:  # the client leaves the socket open when its last write fails
            writer.transport.abort()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@functools.cache
def _client_class() -> Any:
    library = driver("nats.aio.client", extra="nats")
    errors = driver("nats.errors", extra="nats")

    class OwnClient(library.Client):  # type: ignore[name-defined, misc]
        """A client that sends no password in clear when TLS was asked for, and reads faster."""

        holdfast_secure = False

        def _connect_command(self) -> bytes:
            # The last moment: the library upgrades to TLS only if the server requires it.
            if self.holdfast_secure and not self._server_info.get("tls_required"):
                raise errors.SecureConnWantedError
            command: bytes = super()._connect_command()
            return command

        async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
            # Half of what the library needs for a message is its reading of headers. Should it
            # read them elsewhere one day, this is not called and nothing is lost but time.
            if headers is None or not headers.startswith(_PLAIN):
                read: dict[str, str] | None = await super()._process_headers(headers)
                return read
            return headers_in(headers)

    return OwnClient


def headers_in(block: bytes) -> dict[str, str]:
    """Return the headers in *block*, which carries no status."""
    lines = block[len(_PLAIN) :].decode("utf-8", "replace").split("\r\n")
    split = (line.partition(":") for line in lines if line)
    return {name.strip(): value.strip() for name, colon, value in split if colon}


T = TypeVar("T")


_SLICE = 0.1  # seconds between looks whether a connection that is waited on has died


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to connect to, and how."""

    servers: tuple[str, ...]
    shown: str
    """The same for people, secrets masked."""
    secure: bool
    options: dict[str, Any]
    """Settings of the client library."""
    timeout: float


class Connection:
    """A connection that its owner's thread uses through blocking calls.

    `run` never outlasts the timeouts of what it runs. A connection that was lost or dropped
    is replaced by `ensure`, not earlier than the backoff allows.
    """

    def __init__(self, address: Address, clock: Clock) -> None:
        self.generation = 0
        """How many connections there were: another number means that all was set up anew."""
        self.bell = threading.Event()
        """Rings when something came, or when the connection was lost."""
        self._address = address
        self._clock = clock
        self._backoff = Backoff(first=0.05, ceiling=2.0)
        self._failures = 0
        self._not_before = float("-inf")
        self._denied = ""
        self._client: Client | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # a loop alone does not keep its tasks

    @property
    def is_up(self) -> bool:
        """Whether there is a connection, as far as the client knows."""
        return self._client is not None and not self._client.is_closed

    @property
    def max_payload(self) -> int:
        """Bytes of one message that the server takes."""
        return self._client.max_payload if self._client is not None else 0

    @property
    def has_jetstream(self) -> bool:
        """Whether the server said that it stores messages."""
        return bool(getattr(self._client, "_server_info", {}).get("jetstream"))

    @property
    def server(self) -> str:
        """The server we are connected to; another name after each of its restarts."""
        return str(getattr(self._client, "_server_info", {}).get("server_id", ""))

    def ensure(self, patience: float = 2.0) -> None:
        """Return with a connection, or raise `BrokerDown` after about *patience* seconds."""
        if self.is_up:
            return
        if self._client is not None:
            log.warning("lost the connection to %s", self._address.shown)
            self.drop()
        wait = self._not_before - self._clock.monotonic()
        if wait > 0:
            self.bell.clear()
            self._clock.wait(self.bell, min(wait, patience))
            if wait > patience:
                raise BrokerDown(f"{self._address.shown} is down; trying again in {wait:.1f} s")
        try:
            self._client = self._result(self._dial())
        except BrokerDown as error:
            self._failures += 1
            pause = self._backoff.delay(self._failures) or 0.0
            self._not_before = self._clock.monotonic() + pause
            log.warning("%s; trying again in %.1f s", error, pause)
            raise
        self._failures = 0
        self.generation += 1
        log.info("connected to %s", self._address.shown)

    def run(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        """Return what *work* returns on the loop; a connection in doubt raises `BrokerDown`."""
        client = self._client
        if client is None or client.is_closed:
            raise BrokerDown(f"there is no connection to {self._address.shown}")
        try:
            return self._result(_watched(client, work(client)))
        except HoldfastError as error:
            raise self._explained(error) from error.__cause__
        except Exception as error:
            known = translated(error, self._address.shown)
            if known is None:
                raise
            if isinstance(error, TimeoutError):
                self.drop()  # half open, perhaps; a new one shows
            raise self._explained(known) from error

    def _explained(self, error: HoldfastError) -> HoldfastError:
        """Return *error*, or what the server said meanwhile if that explains the silence."""
        denied, self._denied = self._denied, ""
        if not denied or not isinstance(error, BrokerDown):
            return error
        return ConfigurationError(f"{self._address.shown} does not allow it: {denied}")

    def soon(self, work: Callable[[Client], None]) -> None:
        """Run *work* on the loop, after all before it, without waiting for it."""
        if self._loop is None or self._client is None or self._client.is_closed:
            raise BrokerDown(f"there is no connection to {self._address.shown}")
        self._loop.call_soon_threadsafe(work, self._client)

    def later(self, work: Callable[[], None]) -> None:
        """Run *work* after all that is ready to run; to be called on the loop."""
        asyncio.get_running_loop().call_soon(work)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start *work*; to be called on the loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def drop(self) -> None:
        """Forget the connection; nothing that it had not sent is sent later by another."""
        client, self._client = self._client, None
        if client is not None:
            self._result(end(client))

    def close(self) -> None:
        """End the connection and the thread."""
        self.drop()
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = self._thread = None

    def _result(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="holdfast-nats", daemon=True
            )
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _dial(self) -> Client:
        seen: list[Exception] = []

        async def note(error: Exception) -> None:
            seen[:] = [*seen[-9:], error]
            log.debug("%s: %s", self._address.shown, error)
            if "permissions violation" in str(error):
                self._denied = str(error)

        async def ring() -> None:
            self.bell.set()

        own: dict[str, Any] = {"error_cb": note, "closed_cb": ring, "allow_reconnect": False}
        # Two attempts for each server, at once: the waiting is done by `ensure`.
        own |= {"max_reconnect_attempts": 1, "reconnect_time_wait": 0}
        client = new_client(secure=self._address.secure)
        try:
            async with asyncio.timeout(self._address.timeout):
                await client.connect(list(self._address.servers), **(own | self._address.options))
        except Exception as error:
            await end(client)
            known = refused_connection(error, self._address.shown, seen)
            if known is None:
                raise
            raise known from error
        return client


async def _watched(client: Client, work: Coroutine[Any, Any, T]) -> T:
    """Return what *work* returns; give it up when the connection dies, for it would wait on."""
    task = asyncio.ensure_future(work)
    is_last = False
    while not task.done():
        await asyncio.wait({task}, timeout=_SLICE)
        if is_last and not task.done():
            task.cancel()
            raise BrokerDown("the connection was lost")
        is_last = client.is_closed
    return task.result()


async def patiently(event: asyncio.Event, seconds: float, what: str) -> None:
    """Return once *event* is set; raise `BrokerDown` when it is not within *seconds*."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError as error:
        raise BrokerDown(f"{what}: no answer in {seconds:g} s") from error
