"""Options that the commands of `holdfast dlq` share."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from holdfast.dlq.letter import Class
from holdfast.errors import ConfigurationError

Names = Annotated[
    list[str] | None, typer.Argument(help="Ids of failure groups, or their first characters.")
]
Database = Annotated[
    str,
    typer.Option(
        envvar="HOLDFAST_DATABASE",
        show_default=False,
        help="Where the dead letters are, e.g. postgresql+psycopg://user@host/db.",
    ),
]
Letters = Annotated[
    list[str] | None, typer.Option("--id", help="A dead letter's id, or its start; may repeat.")
]
InGroup = Annotated[list[str] | None, typer.Option("--group", help="A failure group; may repeat.")]
Correlation = Annotated[
    str | None, typer.Option("--correlation", help="Only what has this correlation id.")
]
ConsumerGroup = Annotated[str | None, typer.Option("--consumer", help="Only this consumer group.")]
Topic = Annotated[str | None, typer.Option(help="Only this topic.")]
Kind = Annotated[
    str | None,
    typer.Option("--class", help="poison, transient, dependency, timeout or unknown."),
]
Error = Annotated[str | None, typer.Option(help="Only this exception type.")]
Tenant = Annotated[str | None, typer.Option(help="Only this tenant.")]
Version = Annotated[str | None, typer.Option(help="Only this version of the service.")]
Key = Annotated[str | None, typer.Option(help="Only this message key.")]
Since = Annotated[
    str | None, typer.Option(help="Failed since: 2h, 3d, or a moment like 2026-11-16T03:00Z.")
]
Until = Annotated[str | None, typer.Option(help="Failed before: 2h, 3d, or a moment.")]
MasterKey = Annotated[
    Path | None,
    typer.Option(
        envvar="HOLDFAST_MASTER_KEY_FILE",
        help="A file with the vault's master key in hex, to replay encrypted fields.",
    ),
]

_AGO = re.compile(r"(\d{1,9})(s|m|h|d|w)")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def seconds(text: str, what: str) -> float:
    """Return a length of time written as 90s, 15m, 4h, 3d or 2w."""
    found = _AGO.fullmatch(text.strip())
    if found is None:
        raise ConfigurationError(f"{what} {text!r}: write a number and a unit, e.g. 15m, 4h or 3d")
    return float(found[1]) * _UNITS[found[2]]


def retentions(given: list[str] | None) -> dict[str, float]:
    """Return how long the broker keeps which topic, from `orders=7d`."""
    found = {}
    for one in given or ():
        topic, equals, length = one.rpartition("=")
        if not equals or not topic:
            raise ConfigurationError(f"--retention {one!r}: write TOPIC=AGE, e.g. orders=7d")
        found[topic] = seconds(length, "--retention")
    return found


def known_class(kind: str | None) -> None:
    """Refuse a class that there is not: it would match nothing, which looks like peace."""
    known = [one.value for one in Class]
    if kind is not None and kind not in known:
        raise ConfigurationError(f"--class {kind!r}: use one of {', '.join(known)}")


def moment(text: str | None, what: str) -> float | None:
    """Return a moment in POSIX seconds: `2h` ago, or an ISO date or time (UTC unless it says)."""
    if text is None:
        return None
    if _AGO.fullmatch(text.strip()):
        return datetime.now(UTC).timestamp() - seconds(text, what)
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigurationError(
            f"{what} {text!r}: write 2h, 3d, or a moment like 2026-11-16T03:00Z"
        ) from error
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def share(text: str) -> float:
    """Return a share written as 10% or 0.1."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError as error:
        raise ConfigurationError(f"share {text!r}: write 10% or 0.1") from error
