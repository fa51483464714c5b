"""Settings of the RabbitMQ adapter; all others belong to pika and reach it untouched."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit, urlunsplit

from holdfast.brokers.settings import converted, kinds, positive
from holdfast.errors import ConfigurationError, InvalidUrl
from holdfast.extras import driver
from holdfast.ports import Caps, Counts, Ordering, Pause, Settle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.urls import BrokerUrl

LONGEST_DELAY = 28 * 86_400.0
"""Seconds; RabbitMQ takes a time to live below 2**32 milliseconds."""

CONTENT, DELIVERY = "content", "delivery"
_FRAME = 131_072  # what RabbitMQ and pika agree on unless told otherwise
_HEARTBEAT = 20  # RabbitMQ proposes 60, which lets a dead peer go unnoticed for two minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitSettings:
    """What can be set here; the same names work as `?name=value` in the URL."""

    partitions: int = 4
    """Lanes of a topic that is created on first use."""
    auto_create: bool = True
    """Whether a topic may be created by its first use."""
    prefetch: int = 256
    """Messages of one lane that may be unsettled, handed out or not; at most 65535."""
    max_message: int = 16 * 1_048_576
    """Bytes of payload, key and headers; the server's own limit is 128 MiB by default."""
    patience: float = 10.0
    """Seconds without any answer or confirm after which the broker counts as down."""
    session: float = 1800.0
    """Seconds without a poll after which a member leaves its group, so that others go on."""
    maturity: float = 3.0
    """Seconds before a new queue is trusted with messages; RabbitMQ killed sooner forgets it."""
    key_window: int = 1
    """Messages of one key that may be on their way to the server at once.

    With more, few keys of many messages are published faster, and a key may lose its order
    when the server refuses one of its messages and takes the next.
    """
    identity: str = CONTENT
    """What a foreign message without `message_id` is recognised by when it comes again.

    By its `content`, so that an effect happens once; but two that are alike in everything,
    `timestamp` included, are then taken for one. With `delivery` each delivery is another
    message: none is ever taken for another one, and one that comes again has its effect again.
    """
    identity_key: str = field(default="", repr=False)
    """A secret of the group, with which the content of such a message is digested.

    Without one, whoever sees its id and the rest of its content can try out fields that dead
    letters hide. All programs of the group need the same one; another one makes messages new.
    """
    native: Mapping[str, Any] = field(default_factory=dict)
    """Settings of pika's connection parameters."""

    def __post_init__(self) -> None:
        positive(self, "partitions", "prefetch", "max_message", "patience", "session", "key_window")
        if self.maturity < 0:
            raise ConfigurationError(f"maturity={self.maturity}: use 0 or more")
        if self.identity not in {CONTENT, DELIVERY}:
            raise ConfigurationError(f"identity={self.identity!r}: use {CONTENT} or {DELIVERY}")
        if self.prefetch > 65_535:
            raise ConfigurationError(f"prefetch={self.prefetch}: use 65535 at most")

    @classmethod
    def read(cls, options: Mapping[str, str], native: Mapping[str, Any]) -> RabbitSettings:
        """Return the settings among *options* (text, from the URL) and *native* (keywords)."""
        own: dict[str, Any] = {n: value for n, value in options.items() if n in _KINDS}
        if "frame_max" in options:  # needed here, too: it bounds the headers
            own["frame_max"] = converted("frame_max", options["frame_max"], int)
        return cls().also({**own, **native})

    def also(self, given: Mapping[str, Any]) -> RabbitSettings:
        """Return these settings with those of one sink or source on top."""
        own = {n: converted(n, v, _KINDS[n]) for n, v in given.items() if n in _KINDS}
        native = {n: v for n, v in given.items() if n not in _KINDS}
        return replace(self, **own, native={**self.native, **native})

    def parameters(self, url: BrokerUrl) -> list[Any]:
        """Return pika's connection parameters, one for each host of *url*."""
        pika = driver("pika", extra="rabbitmq")
        unset = pika.ConnectionParameters()
        foreign = {n: v for n, v in url.options.items() if n not in _KINDS}
        for name in (*foreign, *self.native):
            if not hasattr(unset, name):
                raise ConfigurationError(
                    f"neither Holdfast nor pika has a connection setting {name!r}; Holdfast has "
                    f"{', '.join(_KINDS)}, pika those of ConnectionParameters"
                )
        parts = urlsplit(url.raw)
        user, at, _ = parts.netloc.rpartition("@")
        found = []
        for host in url.hosts or ("localhost",):
            part = parts._replace(netloc=user + at + host, query=urlencode(foreign))
            try:
                one = pika.URLParameters(urlunsplit(part))
                if "heartbeat" not in foreign:
                    one.heartbeat = _HEARTBEAT
                if not one.client_properties:
                    one.client_properties = {"connection_name": "holdfast"}
                for name, value in self.native.items():
                    setattr(one, name, value)
            except (TypeError, ValueError) as error:
                raise InvalidUrl(f"{url} cannot be used: {error}") from error
            found.append(one)
        return found

    def caps(self) -> Caps:
        """Return what RabbitMQ can do through this adapter with these settings."""
        frame = self.native.get("frame_max", _FRAME)
        return Caps(
            settle=Settle.INDIVIDUAL,
            ordering=Ordering.PARTITION,
            counts=Counts.DELIVERY,
            delay=LONGEST_DELAY,
            pause=Pause.LANE,
            max_message=self.max_message,
            # All headers travel in one frame; half of it is left for names and lengths.
            max_headers=frame // 2,
        )


_KINDS = kinds(RabbitSettings, but="native")
