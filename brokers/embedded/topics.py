"""Topics and their lanes in the embedded broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError, InvalidMessage, UnknownTopic

if TYPE_CHECKING:
    from holdfast.brokers.embedded.settings import EmbeddedSettings
    from holdfast.brokers.embedded.store import Session


class Topics:
    """Finds topics, and makes them where that is allowed."""

    def __init__(self, session: Session, settings: EmbeddedSettings) -> None:
        self._db = session
        self._settings = settings

    def create(self, topic: str, partitions: int) -> None:
        """Make sure that *topic* exists; an existing one keeps its partitions."""
        if not topic:
            raise InvalidMessage("topic is empty: name the topic to create")
        if partitions < 1:
            raise ConfigurationError(f"partitions={partitions}: a topic needs at least 1")
        with self._db.write() as db:
            known = db.execute("SELECT 1 FROM hf_lane WHERE topic = ?", (topic,)).fetchone()
            if known is None:
                db.executemany(
                    "INSERT INTO hf_lane (topic, partition) VALUES (?, ?)",
                    [(topic, partition) for partition in range(partitions)],
                )

    def find(self, topic: str) -> dict[int, int]:
        """Return the lane ids of *topic* by partition; empty if there is no such topic."""
        rows = self._db.read("SELECT partition, id FROM hf_lane WHERE topic = ?", topic)
        return dict(rows)

    def lanes(self, topic: str) -> dict[int, int]:
        """Return the lane ids of *topic* by partition, making the topic where allowed."""
        found = self.find(topic)
        if not found:
            if not self._settings.auto_create:
                raise UnknownTopic(topic, "create it with broker.create_topic(), or auto_create")
            self.create(topic, self._settings.partitions)
            found = self.find(topic)
        return found
