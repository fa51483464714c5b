"""What the adapters' brokers have in common about groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from holdfast.errors import ConfigurationError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class NoPrune:
    """A broker where messages end in another way than by `prune`."""

    prune_instead: ClassVar[tuple[str, str]]
    """The broker's name, and what to do instead."""

    def prune(
        self,
        topics: Sequence[str] | None = None,
        *,
        older_than: float,
        most: int = 10_000,
        dry_run: bool = False,
    ) -> Mapping[str, int]:
        """Refuse: messages end in another way here."""
        del topics, older_than, most, dry_run
        raise Unsupported("prune topics", *self.prune_instead)


class LateGroups(ABC):
    """A broker that keeps its messages for groups yet to come: each starts at the beginning."""

    def create_group(self, topic: str, group: str) -> None:
        """Make sure that *topic* exists, and that its messages are kept for *group*."""
        named(topic, group)
        self._introduce(topic, group)

    def has_group(self, topic: str, group: str) -> bool:
        """Return whether *topic* exists: every group starts at its beginning."""
        named(topic, group)
        return self._has_topic(topic)

    @abstractmethod
    def _introduce(self, topic: str, group: str) -> None:
        """Make the topic where that is allowed, and note the group where that is needed."""

    @abstractmethod
    def _has_topic(self, topic: str) -> bool:
        """Ask the broker whether *topic* exists; nothing is made."""


def named(topic: str, group: str) -> None:
    """Refuse to speak of a group without a name, or of no topic."""
    if not topic or not group:
        raise ConfigurationError(f"topic {topic!r}, group {group!r}: name both")


def subscribed(topics: Sequence[str], group: str) -> None:
    """Refuse a source without topics or group; a lone name would be read letter by letter."""
    if isinstance(topics, str) or not topics or not group:
        raise ConfigurationError(
            f"source(topics={topics!r}, group={group!r}): name a list of topics and a group"
        )
