"""What the adapters have in common about groups."""

from __future__ import annotations

from holdfast.errors import ConfigurationError


def named(topic: str, group: str) -> None:
    """Refuse to speak of a group without a name, or of no topic."""
    if not topic or not group:
        raise ConfigurationError(f"topic {topic!r}, group {group!r}: name both")
