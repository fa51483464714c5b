"""What kind of database this is: which of our tables it has, and in which version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import inspect

from holdfast.consumer.schema import metadata as consumer
from holdfast.db.audit import metadata as audit
from holdfast.dlq.store.schema import metadata as dlq
from holdfast.findings import Finding, Severity
from holdfast.idempotency import metadata as idempotency
from holdfast.outbox import metadata as outbox
from holdfast.sagas.schema import metadata as sagas

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sqlalchemy import MetaData
    from sqlalchemy.engine import Engine

PARTS: Mapping[str, MetaData] = {
    "outbox": outbox,
    "inbox": idempotency,
    "consumer": consumer,
    "dead letters": dlq,
    "sagas": sagas,
}
"""What a database may be used for, and the tables of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaVersion:
    """The revision that the tables of one part have, and the newest that there is."""

    part: str
    has: str | None
    newest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesFound:
    """Which of our tables a database has."""

    dialect: str
    missing: Mapping[str, tuple[str, ...]]
    """Of each part that is here, the tables that are not."""
    absent: tuple[str, ...]
    """Parts of which no table is here: the database is not used for them."""

    @property
    def parts(self) -> tuple[str, ...]:
        """What the database is used for."""
        return tuple(self.missing)

    @property
    def whole(self) -> frozenset[str]:
        """Parts of which every table is here."""
        return frozenset(part for part, missing in self.missing.items() if not missing)


def tables_of(engine: Engine) -> TablesFound:
    """Return which of our tables the database of *engine* has, also along a search path."""
    shared = set(audit.tables)
    with engine.connect() as db:
        inspector = inspect(db)
        seen = set(inspector.get_table_names())
        every = {name for part in PARTS.values() for name in part.tables}
        seen |= {name for name in sorted(every - seen) if inspector.has_table(name)}
        dialect = db.dialect.name
    missing: dict[str, tuple[str, ...]] = {}
    for part, metadata in PARTS.items():
        if seen & (set(metadata.tables) - shared):
            missing[part] = tuple(sorted(set(metadata.tables) - seen))
    absent = tuple(part for part in PARTS if part not in missing)
    return TablesFound(dialect=dialect, missing=missing, absent=absent)


def judged(found: TablesFound) -> Iterator[Finding]:
    """Judge whether the tables of each part are complete."""
    facts = {"dialect": found.dialect, "parts": list(found.parts), "absent": list(found.absent)}
    if not found.parts:
        yield Finding(
            check="tables",
            severity=Severity.CRITICAL,
            text="none of Holdfast's tables is here: look at --database",
            fix="if it is the right one, run  holdfast db upgrade",
            facts=facts,
        )
        return
    yield Finding(
        check="tables",
        severity=Severity.OK,
        text=f"used for {', '.join(found.parts)}"
        + (f"; not for {', '.join(found.absent)}" if found.absent else ""),
        facts=facts,
    )
    for part, missing in found.missing.items():
        if missing:
            yield Finding(
                check="tables",
                severity=Severity.CRITICAL,
                text=f"of {part} these are missing: {', '.join(missing)}",
                fix="run  holdfast db upgrade",
                facts={"part": part, "missing": list(missing)},
            )


def judged_versions(found: Iterable[SchemaVersion], parts: Iterable[str]) -> Iterator[Finding]:
    """Judge whether the tables of the *parts* that are here have the newest revision."""
    mine = [one for one in found if one.part in _LABELS.values()]
    here = [one for one in mine if one.part in {_LABELS[part] for part in parts}]
    facts = {one.part: one.has for one in here}
    old = [one for one in here if one.has is not None and one.has != one.newest]
    if old:
        told = ", ".join(f"{one.part} {one.has} (newest {one.newest})" for one in old)
        yield Finding(check="schema", severity=Severity.CRITICAL, facts=facts,
                      text=f"an upgrade is pending: {told}",
                      fix="run  holdfast db upgrade")  # fmt: skip
    elif here and all(one.has is None for one in here):
        yield Finding(check="schema", severity=Severity.OK, facts=facts,
                      text="made without our migrations: its versions are yours")  # fmt: skip
    else:
        yield Finding(check="schema", severity=Severity.OK, facts=facts,
                      text="schema up to date")  # fmt: skip


_LABELS = {
    "outbox": "outbox",
    "inbox": "idempotency",
    "consumer": "consumer",
    "dead letters": "dlq",
    "sagas": "sagas",
}
"""The names of their branches of migrations."""
