"""Errors of the client library and of the JetStream API, translated at the adapter's edge."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from holdfast.errors import BrokerDown, ConfigurationError, HoldfastError, InvalidUrl
from holdfast.urls import mask

STREAM_NOT_FOUND = 10059
STREAM_EXISTS = 10058
CONSUMER_NOT_FOUND = 10014
MESSAGE_NOT_FOUND = 10037
MESSAGE_TOO_LARGE = 10054
HEADERS_TOO_LARGE = 10097
WRONG_LAST_SEQUENCE = (10071, 10164)
_NOT_ENABLED = (10039, 10076)
_DENIED = ("authorization", "authentication", "credentials")


class JetStreamRefusal(Exception):
    """The JetStream API answered with an error; never leaves the adapter."""

    def __init__(self, operation: str, error: dict[str, Any]) -> None:
        self.code = int(error.get("code", 0))
        self.number = int(error.get("err_code", 0))
        self.text = str(error.get("description", "no reason given"))
        super().__init__(f"{operation}: {self.text} (error {self.number or self.code})")

    def translated(self) -> HoldfastError:
        """Return what it means to the caller: their settings, or a server in trouble."""
        if self.number in _NOT_ENABLED:
            return no_jetstream(str(self))
        if 400 <= self.code < 500:  # the server says that the request is wrong
            return ConfigurationError(f"NATS refused {self}")
        return BrokerDown(f"NATS cannot do it now: {self}")


def no_jetstream(why: str) -> ConfigurationError:
    """Return the error for a server that does not store messages."""
    return ConfigurationError(
        f"JetStream is not enabled on this NATS server or account ({why}): start the server with "
        "--jetstream, or enable JetStream for the account"
    )


def translated(error: Exception, where: str) -> HoldfastError | None:
    """Return what *error* of a live connection means; None if it is none of the client's."""
    if isinstance(error, HoldfastError):
        return error
    if isinstance(error, JetStreamRefusal):
        return error.translated()
    if isinstance(error, (OSError, asyncio.TimeoutError)) or _is_client(error):
        return BrokerDown(f"{where} does not answer: {_text(error)}")
    return None


def refused_connection(error: Exception, where: str, seen: list[Exception]) -> HoldfastError | None:
    """Return why no connection came about; None if *error* is a fault of the program.

    *seen* are the errors the client reported on its way, of which the last says most.
    """
    cause = (
        seen[-1] if seen and type(error).__name__ in {"NoServersError", "TimeoutError"} else error
    )
    text = _text(cause)
    if type(cause).__name__ == "SecureConnWantedError":
        return ConfigurationError(f"{where} does not offer TLS: use nats:// or enable TLS there")
    if isinstance(cause, ssl.SSLError):
        return ConfigurationError(f"TLS with {where} failed: {text}: check certificates and `tls=`")
    if any(word in text.lower() for word in _DENIED):
        return ConfigurationError(f"{where} refused the login: {text}: check user, password, token")
    if "connect url" in text:
        return InvalidUrl(f"{where}: {text}")
    if isinstance(cause, (TypeError, ValueError, ImportError)):
        return ConfigurationError(f"NATS client settings: {text}")
    if isinstance(cause, (OSError, asyncio.TimeoutError)) or _is_client(cause):
        return BrokerDown(f"cannot connect to {where}: {text}")
    return None


def _is_client(error: BaseException) -> bool:
    return any(kind.__module__.split(".")[0] == "nats" for kind in type(error).__mro__)


def _text(error: BaseException) -> str:
    return mask(str(error)) or type(error).__name__
