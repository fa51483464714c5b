"""Broker and database URLs: parsed once, never shown with their secrets."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from holdfast.errors import InvalidUrl

_SECRET = re.compile(r"(?i)(pass|secret|token|key|credential|sasl_plain)")
_USER = re.compile(r"[^\s:@/]*")
_PORT = re.compile(r"\d*(?:[/?#,\s]|\Z)")
_END = re.compile(r"\s|\Z")
_SETTING = re.compile(r"[?&;#]([\w.\-]*)=")
_SECRET_SETTING = re.compile(r"(?i)pass|secret|token|credential|key")
_VALUE = re.compile(r"[^&\s]*")
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
    """Return *text* with the secrets of any URL in it replaced by ***, in linear time."""
    if "://" in text:
        text = _without_passwords(text)
    return _without_settings(text) if "=" in text else text


def _without_passwords(text: str) -> str:
    """Return *text* without what stands between user and host in a URL."""
    pieces: list[str] = []
    last = at = word = host = 0
    while (at := text.find("://", at)) >= 0:
        begin = at + 3
        end = at = _scanned(_USER, text, begin)
        if end >= word:
            # Up to the last @ of the word: a password may hold an unescaped @ or /.
            word = _scanned(_END, text, end, search=True)
            host = text.rfind("@", end, word)
        if host < end:
            continue
        if text[end] == ":" and not _PORT.match(text, end + 1):
            pieces += [text[last:end], ":***@"]
            last = at = host + 1
        elif text[end] == "@" and end > begin and text.endswith("nats://", last, begin):
            pieces += [text[last:begin], "***@"]  # its user alone is a token
            last = at = end + 1
    return "".join([*pieces, text[last:]])


def _without_settings(text: str) -> str:
    """Return *text* without the values of secret settings in a query."""
    pieces: list[str] = []
    last = at = 0
    while found := _SETTING.search(text, at):
        at = found.end()
        if _SECRET_SETTING.search(found[1]):
            pieces += [text[last:at], "***"]
            last = at = _scanned(_VALUE, text, at)
    return "".join([*pieces, text[last:]])


def _scanned(pattern: re.Pattern[str], text: str, at: int, *, search: bool = False) -> int:
    found = pattern.search(text, at) if search else pattern.match(text, at)
    return len(text) if found is None else found.start() if search else found.end()


def is_secret(name: str) -> bool:
    """Whether a setting called *name* must never be shown."""
    return _SECRET.search(name) is not None
