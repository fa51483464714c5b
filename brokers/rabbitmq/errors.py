"""Errors of pika and of the server, turned into those that state the remedy."""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING, Any

from holdfast.errors import BrokerDown, ConfigurationError, HoldfastError
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOT_FOUND, _REFUSED, _LOCKED, _PRECONDITION = 404, 403, 405, 406
_PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
_PROBE_SECONDS = 2.0


class QueueNotFound(ConfigurationError):
    """A queue or exchange that was asked for does not exist."""


class ChannelRefused(ConfigurationError):
    """The broker closed the channel over what was asked of it."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.is_mismatch = code == _PRECONDITION


def no_connection(error: BaseException, parameters: Any) -> HoldfastError:
    """Return why no connection came about, given what pika made of it."""
    address = f"{parameters.host}:{parameters.port}"
    text = mask(repr(list(_causes(error))[-1]))
    if faults := [e for e in _causes(error) if isinstance(e, ssl.SSLError)]:
        fault = faults[0]
        return ConfigurationError(
            f"no TLS connection to {address}: {fault.reason or fault}; check the certificates, or "
            "write amqp:// if the server does not speak TLS on this port"
        )
    if "(403)" in text:
        return ConfigurationError(
            f"{address} refuses user {parameters.credentials.username!r}: check user name and "
            "password in the URL (and note that 'guest' may log in on the server's host only)"
        )
    if "(530)" in text and "limit" not in text:
        return ConfigurationError(
            f"{address} refuses virtual host {parameters.virtual_host!r}: create it, or allow "
            f"user {parameters.credentials.username!r} to use it ({text})"
        )
    if "IncompatibleProtocol" in text and (other := _other_protocol(parameters)):
        return ConfigurationError(f"{address} {other}")
    return BrokerDown(f"RabbitMQ at {address} cannot be reached: {text}")


def closed(error: BaseException) -> HoldfastError:
    """Return what the end of a channel or connection means for whoever waits on it."""
    code, text = getattr(error, "reply_code", 0), getattr(error, "reply_text", "")
    if type(error).__name__ == "ChannelClosedByBroker":
        if "down or inaccessible" in text:  # a queue that has not yet come up after a restart
            return BrokerDown(f"RabbitMQ is not ready: {text}")
        if code == _NOT_FOUND:
            return QueueNotFound(text)
        if code in (_REFUSED, _LOCKED, _PRECONDITION):
            return ChannelRefused(text, code)
    return BrokerDown(f"the connection to RabbitMQ was lost: {mask(repr(error))}")


def _causes(error: object) -> Iterator[BaseException]:
    """Yield *error* and everything that pika has wrapped in it."""
    if isinstance(error, BaseException):
        yield error
        inner = (*error.args, getattr(error, "exception", None), *getattr(error, "exceptions", ()))
        for one in inner:
            yield from _causes(one)


def _other_protocol(parameters: Any) -> str | None:
    """Return what answers instead of AMQP; None where nothing does, as in a server that dies."""
    if parameters.ssl_options is not None:
        return None
    try:
        with socket.create_connection((parameters.host, parameters.port), _PROBE_SECONDS) as probe:
            probe.sendall(_PROTOCOL_HEADER)
            greeting = probe.recv(16)
    except OSError:
        return None
    if greeting.startswith(b"\x15\x03"):
        return "speaks TLS: write amqps:// in the URL"
    if greeting and not greeting.startswith(b"\x01\x00\x00"):
        return f"does not speak AMQP 0-9-1 (it says {greeting!r}): check the port"
    return None
