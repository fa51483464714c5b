"""Settings of the NATS adapter; everything else belongs to the client library."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

_NUMBERS = ("partitions", "session", "lease", "dedup", "timeout", "max_message", "key_window")
_OURS = (
    "servers", "allow_reconnect", "max_reconnect_attempts", "reconnect_time_wait",
    "reconnect_to_server_handler",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsSettings:
    """What can be set; the same names but `stream` work as `?name=value` in the URL."""

    partitions: int = 4
    """Lanes of a topic that is created on first use."""
    session: float = 10.0
    """Seconds without a poll after which a member is taken for dead."""
    lease: float = 30.0
    """Seconds that a delivery may stay unsettled before it is handed out again (ack_wait)."""
    dedup: float = 120.0
    """Seconds within which a message id is stored once (duplicate_window of new streams)."""
    timeout: float = 5.0
    """Seconds that the server may take to answer."""
    max_message: int = 1_048_576
    """Bytes of payload and headers; the server's own max_payload bounds it, too."""
    key_window: int = 1
    """Messages of one key that may be on their way to the server at once.

    With more, few keys of many messages are published faster, and a key may lose its order
    when the server refuses one of its messages and takes the next.
    """
    auto_create: bool = True
    """Whether a topic may be created by its first use."""
    domain: str = ""
    """The JetStream domain, where there are several."""
    stream: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of new streams, as the server spells it, e.g. {"num_replicas": 3}."""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: use more than 0")

    @classmethod
    def split(
        cls, options: Mapping[str, str], native: Mapping[str, Any]
    ) -> tuple[NatsSettings, dict[str, Any]]:
        """Return our settings in *options* (the URL's) and *native*, and the client's own."""
        kinds = {item.name: item.type for item in fields(cls)}
        if unknown := sorted(options.keys() - (kinds.keys() - {"stream"})):
            raise ConfigurationError(
                f"NATS URLs have no setting {', '.join(unknown)}; they have "
                f"{', '.join(name for name in kinds if name != 'stream')}; pass settings of the "
                "client library as keywords"
            )
        given = {**options, **{name: native[name] for name in native if name in kinds}}
        own = {name: _converted(name, value, str(kinds[name])) for name, value in given.items()}
        return cls(**own), client_only({n: v for n, v in native.items() if n not in kinds})


def client_only(native: Mapping[str, Any]) -> dict[str, Any]:
    """Return *native*, unless it takes over what the adapter itself must decide."""
    if taken := [name for name in _OURS if name in native]:
        raise ConfigurationError(
            f"{', '.join(taken)}: the adapter connects and reconnects by itself, so that what a "
            "lost connection had not yet sent is never sent late; leave the setting out"
        )
    return dict(native)


def _converted(name: str, value: Any, kind: str) -> Any:
    if kind == "bool":
        if str(value).lower() in {"1", "true", "yes"}:
            return True
        if str(value).lower() in {"0", "false", "no"}:
            return False
        raise ConfigurationError(f"{name}={value!r}: write true or false")
    if kind not in {"int", "float"}:
        return value
    try:
        return int(value) if kind == "int" else float(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name}={value!r}: write a number") from error
