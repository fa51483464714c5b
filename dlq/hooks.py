"""Where alerts go: a webhook, or a command that is run without a shell."""

from __future__ import annotations

import http.client
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.errors import ConfigurationError, Transient
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Sequence

_SCHEMES = ("http://", "https://")


class Hook(Protocol):
    """Somebody who wants to know."""

    def tell(self, alert: dict[str, Any]) -> None:
        """Return once the alert was taken; any error means that it was not."""
        ...


@dataclass(frozen=True, slots=True)
class Webhook:
    """Posts the alert as JSON; an answer of 2xx means taken."""

    url: str
    timeout: float = 10.0

    def __post_init__(self) -> None:
        if not self.url.startswith(_SCHEMES):
            raise ConfigurationError(f"webhook {mask(self.url)!r}: write http:// or https://")
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
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            self.url,
            data=msgspec.json.encode(alert),
            headers={"content-type": "application/json", "user-agent": "holdfast"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout):  # noqa: S310
                return
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            raise Transient(f"webhook {mask(self.url)} did not take the alert: {error}") from error


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
