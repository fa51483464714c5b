"""What the commands of `holdfast dlq` share: their filter, and how they open the store."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.opened import existing_database, operator_of
from holdfast.cli.options import AnyGroup, AnyTopic, Key, seconds
from holdfast.clock import SYSTEM_CLOCK
from holdfast.dlq.letter import Class
from holdfast.dlq.operations import DeadLetterAdmin, require_tables
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.store.rows import CLOSED, PENDING
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

    from holdfast.db.audit import Operator


Names = Annotated[
    list[str] | None, typer.Argument(help="Ids of failure groups, or their first characters.")
]
Letters = Annotated[
    list[str] | None, typer.Option("--id", help="A dead letter's id, or its start; may repeat.")
]
Problems = Annotated[
    list[str] | None,
    typer.Option("--problem", help="A failure group, or its start; may repeat."),
]
Correlation = Annotated[
    str | None, typer.Option("--correlation", help="Only what has this correlation id.")
]
Kind = Annotated[
    str | None,
    typer.Option("--class", help="poison, transient, dependency, timeout or unknown."),
]
State = Annotated[str, typer.Option(help="pending, confirmed, discarded, parked or any.")]
MasterKey = Annotated[
    Path | None,
    typer.Option(
        envvar="HOLDFAST_MASTER_KEY_FILE",
        help="A file with the vault's master key in hex, to replay encrypted fields.",
    ),
]

_STATES = (PENDING, *CLOSED, "any")
_AGO = re.compile(r"[\d.]+(s|m|h|d|w)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Which dead letters a command speaks of: the same options everywhere, and all must hold."""

    topic: AnyTopic = None
    group: AnyGroup = None
    kind: Kind = None
    error: Annotated[str | None, typer.Option(help="Only this exception type.")] = None
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None
    version: Annotated[str | None, typer.Option(help="Only this version of the service.")] = None
    key: Key = None
    correlation: Correlation = None
    since: Annotated[
        str | None,
        typer.Option(help="Failed since: 2h, 3d, or a moment like 2026-11-16T03:00Z."),
    ] = None
    until: Annotated[str | None, typer.Option(help="Failed before: 2h, 3d, or a moment.")] = None

    def selection(
        self,
        admin: DeadLetterAdmin,
        *,
        groups: list[str] | None = None,
        letters: list[str] | None = None,
        state: str = PENDING,
        due: bool = False,
    ) -> Selection:
        """Return what is meant; *groups* of failures and *letters* are beginnings of ids."""
        known_class(self.kind)
        if state not in _STATES:
            raise ConfigurationError(f"--state {state!r}: use one of {', '.join(_STATES)}")
        return Selection(
            groups=tuple(admin.group(name).group_id for name in groups or ()),
            dlq_ids=tuple(admin.letter_id(name) for name in letters or ()),
            topic=self.topic,
            consumer_group=self.group,
            kind=self.kind,
            error=self.error,
            tenant=self.tenant,
            version=self.version,
            key=self.key,
            correlation=self.correlation,
            since=moment(self.since, "--since"),
            until=moment(self.until, "--until"),
            due=due,
            state=None if state == "any" else state,
        )


def named(admin: DeadLetterAdmin, groups: list[str] | None, letters: list[str] | None) -> Selection:
    """Return the groups and letters that are named; refused when none is."""
    if not groups and not letters:
        raise ConfigurationError("what? name groups, or single letters with --id")
    return LetterFilter().selection(admin, groups=groups, letters=letters)


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
        return SYSTEM_CLOCK.now().timestamp() - seconds(text, what)
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


@contextmanager
def dead_letters(url: str) -> Iterator[Engine]:
    """Yield the store at *url* if it has the tables; say so if it lacks them."""
    engine = existing_database(url)
    try:
        require_tables(engine)
        yield engine
    finally:
        engine.dispose()


def operator(actor: str | None, reason: str) -> Operator:
    """Return who acts and why."""
    return operator_of(actor, reason)
