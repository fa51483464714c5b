"""Settings of the embedded broker, from keywords and from the URL's query."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSettings:
    """What can be set; the same names work as `?name=value` in the URL."""

    partitions: int = 4
    """Lanes of a topic that is created on first use."""
    session: float = 10.0
    """Seconds without a poll after which a member is taken for dead."""
    lease: float = 60.0
    """Seconds that a delivery may stay unsettled before it is handed out again."""
    max_message: int = 1_048_576
    """Bytes of payload, key and headers."""
    auto_create: bool = True
    """Whether a topic may be created by its first use."""
    adopt: bool = False
    """Whether the tables may join another application's SQLite file."""

    def __post_init__(self) -> None:
        for name in ("partitions", "session", "lease", "max_message"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: use more than 0")

    @classmethod
    def read(cls, options: Mapping[str, str], native: Mapping[str, Any]) -> EmbeddedSettings:
        """Return the settings in *options* (text, from the URL) and *native* (keywords)."""
        kinds = {field.name: type(field.default) for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in {**options, **native}.items():
            if name not in kinds:
                raise ConfigurationError(
                    f"the embedded broker has no setting {name!r}; it has {', '.join(kinds)}"
                )
            values[name] = _converted(name, value, kinds[name])
        return cls(**values)

    @staticmethod
    def refuse(native: Mapping[str, Any], what: str) -> None:
        """Refuse settings where there are none."""
        if native:
            raise ConfigurationError(
                f"{what} of the embedded broker takes no settings ({', '.join(native)}): "
                "give them to connect()"
            )


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
