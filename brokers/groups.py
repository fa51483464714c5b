"""What the adapters have in common about groups."""

from __future__ import annotations

from holdfast.errors import ConfigurationError, Unsupported


def named(topic: str, group: str) -> None:
    """Refuse to speak of a group without a name, or of no topic."""
    if not topic or not group:
        raise ConfigurationError(f"topic {topic!r}, group {group!r}: name both")


def no_prune(broker: str, instead: str) -> Unsupported:
    """Return the error of a broker where messages end in another way."""
    return Unsupported("prune topics", broker, instead)
