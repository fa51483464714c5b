"""How topics and groups are called on the server.

A stream, a consumer or a subject token may not hold dots, spaces, wildcards or slashes, so
every byte but ASCII letters, digits, `-` and `_` is written as `=` and two hex digits:
`orders.eu` is stream `orders=2Eeu` with subjects `orders=2Eeu.0`, `orders=2Eeu.1`, … No two
names share a token, and `name_of` gets the name back.

Topics as streams: one stream each, one subject per lane.

How many lanes a topic has is written in its stream (metadata `holdfast-lanes`), so that all
processes agree whatever their own settings say.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from holdfast.brokers.nats.errors import STREAM_EXISTS, STREAM_NOT_FOUND, JetStreamRefusal
from holdfast.errors import ConfigurationError, UnknownTopic

if TYPE_CHECKING:
    from collections.abc import Collection

    from holdfast.brokers.nats.broker import NatsSettings
    from holdfast.brokers.nats.jetstream import Answer, JetStream


_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_OTHER = re.compile(r"[^A-Za-z0-9_-]")
_ESCAPED = re.compile(r"(?:=[0-9A-F]{2})+")
_TAKEN = ("KV_", "OBJ_")  # streams of the server's own key-value and object stores
_LONGEST = 255


def token(name: str) -> str:
    """Return *name* as one token, legal and unique wherever the server wants one."""
    if _PLAIN.fullmatch(name) and not name.startswith(_TAKEN):
        result = name
    elif name.startswith(_TAKEN):
        result = f"={ord(name[0]):02X}" + _OTHER.sub(_escape, name[1:])
    else:
        result = _OTHER.sub(_escape, name)
    if not 0 < len(result) <= _LONGEST:
        raise ConfigurationError(
            f"name {name[:40]!r} takes {len(result)} characters on NATS: use 1 to {_LONGEST}"
        )
    return result


def name_of(written: str) -> str:
    """Return the name that `token` wrote as *written*."""
    return _ESCAPED.sub(_unescape, written)


def subject(topic: str, partition: int) -> str:
    """Return the subject that holds one lane of *topic*."""
    return f"{token(topic)}.{partition}"


def consumer(group: str, partition: int, seeks: int) -> str:
    """Return the durable consumer of *group* for one lane, a new one after each seek."""
    suffix = f"_{partition}" if seeks == 0 else f"_{partition}~{seeks}"
    name = token(group) + suffix
    if len(name) > _LONGEST:
        raise ConfigurationError(f"group {group[:40]!r} is too long for NATS: shorten it")
    return name


def _escape(match: re.Match[str]) -> str:
    return "".join(f"={byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))


def _unescape(match: re.Match[str]) -> str:
    return bytes.fromhex(match[0].replace("=", "")).decode("utf-8", "surrogatepass")


LANES = "holdfast-lanes"
_NANO = 1_000_000_000


class NatsTopics:
    """Finds and makes the streams of topics."""

    def __init__(self, jetstream: JetStream, settings: NatsSettings) -> None:
        self._js = jetstream
        self._settings = settings

    def lanes(self, topic: str) -> int:
        """Return the number of lanes of *topic*, making it where allowed."""
        known = self.find(topic)
        if known is None and self._settings.auto_create:
            self.create(topic, self._settings.partitions)
            known = self.find(topic)
        if known is None:
            raise UnknownTopic(topic, "create it with broker.create_topic(), or auto_create")
        return known

    def find(self, topic: str) -> int | None:
        """Return the number of lanes of *topic*; None if it does not exist."""
        config = self._config(topic)
        return None if config is None else self._checked(topic, config)

    def retention(self, topics: Collection[str]) -> dict[str, float]:
        """Return the `max_age` of the streams of *topics*, in seconds, where they have one."""
        ages = {topic: (self._config(topic) or {}).get("max_age", 0) for topic in topics}
        return {topic: age / _NANO for topic, age in ages.items() if age > 0}

    def _config(self, topic: str) -> Answer | None:
        try:
            config: Answer = self._js.ask(f"STREAM.INFO.{token(topic)}")["config"]
        except JetStreamRefusal as refusal:
            if refusal.number == STREAM_NOT_FOUND:
                return None
            raise refusal.translated() from refusal
        return config

    def all(self) -> dict[str, int]:
        """Return the topics with the number of their lanes; streams of others are left out."""
        found: dict[str, int] = {}
        offset = total = 0
        while offset == 0 or offset < total:
            try:
                page = self._js.ask("STREAM.LIST", {"offset": offset})
            except JetStreamRefusal as refusal:
                raise refusal.translated() from refusal
            streams = page.get("streams") or []
            for stream in streams:
                config = stream["config"]
                if (lanes := (config.get("metadata") or {}).get(LANES)) is not None:
                    found[name_of(config["name"])] = int(lanes)
            offset, total = offset + len(streams), page["total"]
            if not streams:
                break
        return found

    def counts(self, topic: str) -> dict[str, int]:
        """Return how many messages each subject of *topic* holds."""
        answer = self._js.ask(f"STREAM.INFO.{token(topic)}", {"subjects_filter": ">"})
        found: dict[str, int] = answer["state"].get("subjects") or {}
        return found

    def create(self, topic: str, lanes: int) -> None:
        """Make sure that *topic* exists; an existing one is left as it is."""
        config = {
            "storage": "file",
            "retention": "limits",
            "discard": "new",  # a full topic refuses messages; it never forgets unread ones
            "duplicate_window": round(self._settings.dedup * _NANO),
            "allow_direct": True,
            **self._settings.stream,
            "name": token(topic),
            # Listed one by one: what is sent to a lane that nobody reads is refused.
            "subjects": [subject(topic, lane) for lane in range(lanes)],
            "metadata": {**self._settings.stream.get("metadata", {}), LANES: str(lanes)},
        }
        try:
            self._js.ask(f"STREAM.CREATE.{token(topic)}", config)
        except JetStreamRefusal as refusal:
            if refusal.number != STREAM_EXISTS:
                raise refusal.translated() from refusal

    def _checked(self, topic: str, config: Answer) -> int:
        lanes = (config.get("metadata") or {}).get(LANES)
        if lanes is None:
            raise ConfigurationError(
                f"stream {config['name']!r} was not made for topic {topic!r}: it has no metadata "
                f"{LANES!r} (servers before 2.10 keep none); use another topic name, or give the "
                f"stream subjects {subject(topic, 0)!r}, … and the metadata"
            )
        window = config.get("duplicate_window", 0) / _NANO
        if window < self._settings.dedup:
            raise ConfigurationError(
                f"stream {config['name']!r} remembers message ids for {window:g} s, less than "
                f"dedup={self._settings.dedup:g}: raise its duplicate_window, or connect with "
                f"dedup={window:g}"
            )
        return int(lanes)
