"""Settings of the Redis adapter; everything else goes to redis-py untouched."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from holdfast.errors import ConfigurationError, InvalidUrl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.urls import BrokerUrl


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """What can be set; the same names work as `?name=value` in the URL."""

    partitions: int = 4
    """Lanes of a topic that is created on first use."""
    session: float = 10.0
    """Seconds without a poll after which a member is taken for dead."""
    max_message: int = 1_048_576
    """Bytes of payload, key and headers."""
    auto_create: bool = True
    """Whether a topic may be created by its first use."""
    prefix: str = "hf"
    """What the name of every key starts with."""

    def __post_init__(self) -> None:
        for name in ("partitions", "session", "max_message"):
            value = getattr(self, name)
            if not value > 0 or math.isinf(value):
                raise ConfigurationError(f"{name}={value!r}: use a number above 0")
        if not self.prefix or "{" in self.prefix:
            raise ConfigurationError(f"prefix={self.prefix!r}: use a name without braces")

    @classmethod
    def split(
        cls, url: BrokerUrl, native: Mapping[str, Any]
    ) -> tuple[RedisSettings, str, dict[str, Any]]:
        """Return our settings, and the URL and the keywords that are left for redis-py."""
        kinds = {field.name: type(field.default) for field in fields(cls)}
        given = {**url.options, **native}
        own = {name: _converted(name, given[name], kinds[name]) for name in kinds if name in given}
        parts = urlsplit(url.raw)
        query = parse_qsl(parts.query, keep_blank_values=True)
        left = urlencode([pair for pair in query if pair[0] not in kinds])
        rest = urlunsplit(parts._replace(query=left))
        _check(url)
        return cls(**own), rest, {name: native[name] for name in native if name not in kinds}


def _check(url: BrokerUrl) -> None:
    """Refuse what redis-py would ignore: it reads an odd database as 0, and one host only."""
    if len(url.hosts) != 1:
        raise InvalidUrl(f"{url}: name one server, as in redis://localhost:6379/0")
    database = url.path.strip("/")
    if database and not database.isdecimal():
        raise InvalidUrl(f"{url}: {database!r} is no database number, write e.g. /0")


def _converted(name: str, value: Any, kind: type) -> Any:
    if kind is bool:
        if str(value).lower() in {"1", "true", "yes"}:
            return True
        if str(value).lower() in {"0", "false", "no"}:
            return False
        raise ConfigurationError(f"{name}={value!r}: write true or false")
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name}={value!r}: write a number") from error
