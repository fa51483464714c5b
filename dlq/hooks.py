"""Where alerts go: a webhook, or a command that is run without a shell."""

from __future__ import annotations

import http.client
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.errors import ConfigurationError, Transient

if TYPE_CHECKING:
    from collections.abc import Sequence

_SCHEMES = ("http://", "https://")


class Hook(Protocol):
    """Somebody who wants to know."""

    def tell(self, alert: dict[str, Any]) -> None:
        """Return once the alert was taken; any error means that it was not."""
        ...


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow nobody: the answer stays what it is, an error."""


_OPENER = urllib.request.build_opener(_NoRedirect)


def _apart(url: str) -> tuple[str, dict[str, str]]:
    """Return *url* without its user info, and that as a header."""
    parts = urllib.parse.urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, {}
    name, _, password = user.partition(":")
    both = f"{urllib.parse.unquote(name)}:{urllib.parse.unquote(password)}"
    basic = f"Basic {b64encode(both.encode()).decode()}"
    return parts._replace(netloc=host).geturl(), {"authorization": basic}


def _said(error: Exception) -> str:
    """Return what went wrong, in words that hold nothing of the address."""
    if isinstance(error, urllib.error.HTTPError):
        return f"it answered {error.code}"
    reason = getattr(error, "reason", error)
    told = getattr(reason, "strerror", None)
    return f"{type(reason).__name__}: {told}" if isinstance(told, str) else type(reason).__name__


@dataclass(frozen=True, slots=True, repr=False)
class Webhook:
    """Posts the alert as JSON; an answer of 2xx means taken, anything else that it was not.

    A redirect is not followed: it would turn the POST into a GET, whose answer says nothing.
    Path, query and user info of the address are often the secret, so only its host is shown.
    """

    url: str
    timeout: float = 10.0

    def __post_init__(self) -> None:
        if not self.url.startswith(_SCHEMES):
            raise ConfigurationError("the webhook is no address: write http:// or https://")
        try:
            parts = urllib.parse.urlsplit(self.url)
            known = parts.hostname is not None and (parts.port is None or parts.port > 0)
        except ValueError:
            known = False
        if not known:
            raise ConfigurationError("the webhook is no address: write http://host:port/path")
        if self.timeout <= 0:
            raise ConfigurationError(f"webhook timeout {self.timeout:g}: use seconds above 0")

    def tell(self, alert: dict[str, Any]) -> None:
        """Post *alert*."""
        address, headers = _apart(self.url)
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            address,
            data=msgspec.json.encode(alert),
            headers={"content-type": "application/json", "user-agent": "holdfast", **headers},
            method="POST",
        )
        try:
            with _OPENER.open(request, timeout=self.timeout):
                return
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            # Not from it: its text may hold the address.
            said = _said(error)
        raise Transient(f"the webhook at {self.host} did not take the alert: {said}")

    @property
    def host(self) -> str:
        """The part of the address that may be shown."""
        parts = urllib.parse.urlsplit(self.url)
        port = "" if parts.port is None else f":{parts.port}"
        return f"{parts.scheme}://{parts.hostname}{port}"

    def __repr__(self) -> str:
        return f"Webhook({self.host!r})"


@dataclass(frozen=True, slots=True)
class Command:
    """Runs a program with the alert as JSON on its standard input; 0 means taken.

    No shell is involved and nothing of the alert gets into the arguments, so no text of an
    error can become a command.
    """

    arguments: Sequence[str]
    timeout: float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.arguments, str) or not self.arguments:
            raise ConfigurationError(
                f"command {self.arguments!r}: give program and arguments as a list, e.g. "
                '["/usr/bin/notify", "--urgent"]'
            )

    def tell(self, alert: dict[str, Any]) -> None:
        """Run the program."""
        name = self.arguments[0]
        try:
            done = subprocess.run(  # noqa: S603 - a list, without a shell
                list(self.arguments),
                input=msgspec.json.encode(alert),
                timeout=self.timeout,
                capture_output=True,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Transient(f"command {name} did not take the alert: {error}") from error
        if done.returncode != 0:
            said = done.stderr[:200].decode("utf-8", "replace")
            raise Transient(f"command {name} ended with {done.returncode}: {said}")
