"""Topics as streams: one stream each, one subject per lane.

How many lanes a topic has is written in its stream (metadata `holdfast-lanes`), so that all
processes agree whatever their own settings say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.brokers.nats.faults import STREAM_EXISTS, STREAM_NOT_FOUND, Refusal
from holdfast.brokers.nats.names import name_of, subject, token
from holdfast.errors import ConfigurationError, UnknownTopic

if TYPE_CHECKING:
    from holdfast.brokers.nats.jetstream import Answer, JetStream
    from holdfast.brokers.nats.settings import NatsSettings

LANES = "holdfast-lanes"
_NANO = 1_000_000_000


class Topics:
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
        try:
            config = self._js.ask(f"STREAM.INFO.{token(topic)}")["config"]
        except Refusal as refusal:
            if refusal.number == STREAM_NOT_FOUND:
                return None
            raise refusal.translated() from refusal
        return self._checked(topic, config)

    def all(self) -> dict[str, int]:
        """Return the topics with the number of their lanes; streams of others are left out."""
        found: dict[str, int] = {}
        offset = total = 0
        while offset == 0 or offset < total:
            try:
                page = self._js.ask("STREAM.LIST", {"offset": offset})
            except Refusal as refusal:
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
        except Refusal as refusal:
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
