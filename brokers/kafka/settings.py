"""Settings of the adapter, and the ones that go to the client library untouched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError, InvalidUrl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.urls import BrokerUrl

DRIVERS = ("kafka-python", "confluent")
_PORT = 9092
_OWN = {
    "driver": str,
    "timeout": float,
    "publish_within": float,
    "commit_every": float,
    "renew_after": float,
    "auto_create": bool,
    "partitions": int,
    "replication_factor": int,
}
_OF_TOPICS = "topic."


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """What the adapter itself can be told; the same names work as `?name=value` in the URL."""

    driver: str = DRIVERS[0]
    """Which client library: kafka-python or confluent (the scheme `kafka+confluent` too)."""
    timeout: float = 10.0
    """Seconds within which the broker must answer a question or a commit."""
    publish_within: float = 30.0
    """Seconds within which a batch must be acknowledged; then it counts as `BrokerDown`."""
    commit_every: float = 1.0
    """Seconds between commits while messages are settled; a crash repeats what came after."""
    renew_after: float = 30.0
    """Seconds without progress, though there is something to read, until a client is made anew."""
    auto_create: bool = False
    """Whether a topic that is missing is made when it is first used; else it is `UnknownTopic`."""
    partitions: int = 1
    """Of topics that are made so."""
    replication_factor: int | None = None
    """Of every topic that is made; the cluster's own unless set."""
    topic: Mapping[str, str] = field(default_factory=dict)
    """Settings of every topic that is made; in the URL each with `topic.` before its name."""
    servers: tuple[str, ...]
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    native: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """For the client library, as given."""
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)
    """For the client library, from the URL: text, whatever the setting's type."""

    def __post_init__(self) -> None:
        if self.driver not in DRIVERS:
            raise ConfigurationError(f"driver={self.driver!r}: use {' or '.join(DRIVERS)}")
        for name in ("timeout", "publish_within", "renew_after"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: use more than 0 seconds")
        for name in ("partitions", "replication_factor"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ConfigurationError(f"{name}={count!r}: use 1 or more")
        if self.commit_every < 0:
            raise ConfigurationError(f"commit_every={self.commit_every!r}: use 0 or more seconds")

    @classmethod
    def read(cls, url: BrokerUrl, native: Mapping[str, Any]) -> KafkaSettings:
        """Return the settings in *url* and *native*; keywords win over the URL's query."""
        if url.path.strip("/"):
            raise InvalidUrl(f"{url} has a path: name topics where you publish and consume")
        texts, keywords = dict(url.options), dict(native)
        own: dict[str, Any] = {}
        for name, kind in _OWN.items():
            given = [source.pop(name) for source in (texts, keywords) if name in source]
            if given:
                own[name] = _converted(name, given[-1], kind)
        all_given = {**texts, **keywords}
        of_topics = [name for name in all_given if name.startswith(_OF_TOPICS)]
        own["topic"] = {name.removeprefix(_OF_TOPICS): str(all_given[name]) for name in of_topics}
        for name in of_topics:
            texts.pop(name, None)
            keywords.pop(name, None)
        if variant := url.scheme.partition("+")[2]:
            own["driver"] = variant
        return cls(
            servers=tuple(_address(host, url) for host in url.hosts) or _none(url),
            username=url.username,
            password=url.password,
            native=keywords,
            texts=texts,
            **own,
        )


def _none(url: BrokerUrl) -> tuple[str, ...]:
    raise InvalidUrl(f"{url} names no server: write kafka://host:{_PORT}")


def _address(host: str, url: BrokerUrl) -> str:
    """Return *host* with a port, an IPv6 address in its brackets."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return f"{host}:{_PORT}"
    if not name or not port.isdigit() or not 0 < int(port) < 65_536:
        raise InvalidUrl(f"{url}: {host!r} is no server: write host:port, port from 1 to 65535")
    return host


def _converted(name: str, value: Any, kind: type) -> Any:
    if kind is bool:
        if (text := str(value).lower()) in {"1", "true", "yes", "0", "false", "no"}:
            return text in {"1", "true", "yes"}
        raise ConfigurationError(f"{name}={value!r}: write true or false")
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        what = "a whole number" if kind is int else "a number of seconds"
        raise ConfigurationError(f"{name}={value!r}: write {what}") from error


def refuse(native: Mapping[str, Any], name: str, allowed: object, why: str) -> None:
    """Refuse a client setting that would break a promise."""
    if name in native and str(native[name]).lower() != str(allowed).lower():
        raise ConfigurationError(f"{name}={native[name]!r}: leave it at {allowed}, {why}")
