"""Broker and database URLs: parsed once, never shown with their secrets."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from holdfast.errors import InvalidUrl

_SECRET = re.compile(r"(?i)(pass|secret|token|key|credential|sasl_plain)")
# Up to the last @ of the word: a password may hold an unescaped @ or /, a port does not.
_USERINFO = re.compile(
    r"(?P<lead>[a-zA-Z][\w+.\-]*://[^\s:@/]*):(?!\d*(?:[/?#,\s]|$))\S*@|"
    r"(?P<nats>nats://)[^\s:@/]+@"  # its user alone is a token
)
_QUERY = re.compile(
    r"(?i)(?P<lead>[?&;#][\w.\-]*(?:pass|secret|token|credential|key)[\w.\-]*=)[^&\s]*"
)
_HOST = re.compile(r"(?:\[[^\]]*\]|[^:\[\]]*)(?::\d*)?")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BrokerUrl:
    """The parts of a broker URL; `str()` and `repr()` of it mask the secrets."""

    scheme: str
    hosts: tuple[str, ...] = ()
    username: str | None = None
    password: str | None = None
    path: str = ""
    options: dict[str, str] = field(default_factory=dict)
    raw: str

    @classmethod
    def parse(cls, url: str) -> BrokerUrl:
        """Return the parts of *url*; several hosts are separated by commas."""
        if not isinstance(url, str) or ":" not in url:
            raise InvalidUrl(
                f"{mask(str(url))!r} is not a broker URL: write scheme://host:port, "
                "sqlite:///file.db or memory:"
            )
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise InvalidUrl(f"{mask(url)!r} is not a broker URL: {error}") from error
        if not parts.scheme:
            raise InvalidUrl(f"{mask(url)!r} has no scheme: write scheme://host:port")
        user, _, hosts = parts.netloc.rpartition("@")
        name, _, password = user.partition(":")
        if not all(map(_HOST.fullmatch, hosts.split(","))):
            raise InvalidUrl(
                f"{mask(url)!r} has a port that is no number: write scheme://user:password@host:port"
                " and percent-encode / ? # and @ in the password"
            )
        return cls(
            scheme=parts.scheme,
            hosts=tuple(host for host in hosts.split(",") if host),
            username=unquote(name) or None,
            password=unquote(password) or None,
            path=unquote(parts.path),
            options=dict(parse_qsl(parts.query, keep_blank_values=True)),
            raw=url,
        )

    def __str__(self) -> str:
        return mask(self.raw)

    def __repr__(self) -> str:
        return f"BrokerUrl({mask(self.raw)!r})"


def mask(text: str) -> str:
    """Return *text* with the secrets of any URL in it replaced by ***."""
    return _QUERY.sub(r"\g<lead>***", _USERINFO.sub(_masked, text))


def _masked(found: re.Match[str]) -> str:
    return f"{found['nats']}***@" if found["nats"] else f"{found['lead']}:***@"


def is_secret(name: str) -> bool:
    """Whether a setting called *name* must never be shown."""
    return _SECRET.search(name) is not None
