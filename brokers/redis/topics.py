"""Which topics there are, and how many lanes each has for good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError, InvalidMessage, UnknownTopic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.brokers.redis.keys import Keys
    from holdfast.brokers.redis.link import Link
    from holdfast.brokers.redis.settings import RedisSettings


class Topics:
    """The register of topics; what was learned once is not asked again."""

    def __init__(self, link: Link, keys: Keys, settings: RedisSettings) -> None:
        self._link = link
        self._keys = keys
        self._settings = settings
        self._lanes: dict[str, int] = {}

    def lanes(self, topic: str) -> int:
        """Return the number of lanes of *topic*, which is made where that is allowed."""
        if (count := self._lanes.get(topic)) is not None:
            return count
        if topic not in self.known([topic]):
            if not self._settings.auto_create:
                raise UnknownTopic(topic, "create it with broker.create_topic(), or auto_create")
            self.create(topic, self._settings.partitions)
        return self.known([topic])[topic]

    def known(self, topics: Sequence[str]) -> dict[str, int]:
        """Return the number of lanes of those *topics* that exist."""
        unknown = [topic for topic in topics if topic not in self._lanes]
        if unknown:
            counts = self._link.call("HMGET", self._keys.topics, *unknown)
            self._lanes.update(
                {t: int(count) for t, count in zip(unknown, counts, strict=True) if count}
            )
        return {topic: self._lanes[topic] for topic in topics if topic in self._lanes}

    def all(self) -> list[str]:
        """Return the names of all topics."""
        return [name.decode() for name in self._link.call("HKEYS", self._keys.topics)]

    def create(self, topic: str, partitions: int) -> None:
        """Make sure that *topic* exists; whoever comes first decides the number of lanes."""
        if not topic:
            raise InvalidMessage("topic is empty: name the topic to create")
        if partitions < 1:
            raise ConfigurationError(f"partitions={partitions}: a topic needs at least 1")
        self._link.call("HSETNX", self._keys.topics, topic, partitions)
