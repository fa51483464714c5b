"""The client library's own object: made, and brought to an end."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING, Any

from holdfast.extras import driver

if TYPE_CHECKING:
    from nats.aio.client import Client

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
