"""The examination of the whole: what there is to look at in a database and on a broker."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.brokers import connect
from holdfast.brokers import doctor as broker_looks
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.consumer import doctor as consumer_looks
from holdfast.db.engine import reading
from holdfast.dlq import doctor as letter_looks
from holdfast.findings import Finding, Look, Severity
from holdfast.idempotency import doctor as inbox_looks
from holdfast.idempotency.operations import groups_of
from holdfast.outbox.doctor import Doctor, Limits
from holdfast.sagas import doctor as saga_looks
from holdfast.status.looking import Looking
from holdfast.status.tables import SchemaVersion, TablesFound, judged, judged_versions, tables_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sqlalchemy.engine import Engine

    Versions = Callable[[Engine], Sequence[SchemaVersion]]

AREAS = {
    "database": ("database", "tables", "schema", "clock", "privileges", "transactions", "vacuum"),
    "outbox": ("outbox", "shards", "delayed", "parked"),
    "relays": ("relays", "leases", "publication"),
    "slots": ("slots",),
    "consumers": ("consumers", "inbox"),
    "keys": ("keys",),
    "circuits": ("circuits",),
    "dead letters": ("dead letters", "retries"),
    "replays": ("replays",),
    "sagas": ("sagas",),
    "broker": ("broker", "topics"),
    "lag": ("lag",),
}
"""What belongs together on a screen, by the names of checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookBounds:
    """How long looking may take, and from when on something of the outbox is worth a word."""

    seconds: float = 5.0
    """For the first answer of the database, and again for all the rest."""
    limits: Limits = field(default_factory=Limits)
    slot: str | None = None
    publication: str = "holdfast_outbox"


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """One part of the whole, and what was found there."""

    name: str
    findings: tuple[Finding, ...]

    @property
    def severity(self) -> Severity:
        """The worst of it."""
        return max(finding.severity for finding in self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What was found, in the order of looking."""

    tables: TablesFound | None
    """None when the database does not answer."""
    findings: tuple[Finding, ...]

    @property
    def severity(self) -> Severity:
        """The worst finding."""
        return max(finding.severity for finding in self.findings)

    @property
    def areas(self) -> list[Area]:
        """What was found, the most urgent first, and else in the order of the map."""
        found = [
            Area(name=name, findings=tuple(f for f in self.findings if f.check in checks))
            for name, checks in AREAS.items()
        ]
        return sorted((area for area in found if area.findings), key=lambda area: -area.severity)


def examine(
    engine: Engine,
    *,
    broker: str | None = None,
    bounds: LookBounds | None = None,
    versions: Versions | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Examination:
    """Look at everything in the database, and at the *broker* if one is named; change nothing.

    Answers within about twice the seconds of *bounds*, whatever is down. *versions* tells which
    revisions of the migrations the database has. Settings that are wrong raise.
    """
    own = LookBounds() if bounds is None else bounds
    engine = reading(engine)
    found: list[TablesFound] = []

    def answers() -> Iterator[Finding]:
        found.append(tables_of(engine))
        yield from judged(found[0])

    first = Looking([Look("database", answers)], clock)
    asked = None if broker is None else Looking([Look("broker", lambda: _answers(broker))], clock)
    findings = first.findings(own.seconds, down="start it, or correct --database")
    tables = found[0] if found else None
    if tables is not None:
        looks = _looks(engine, tables, own, clock)
        if versions is not None and tables.parts:
            looks.insert(0, Look("schema", lambda: judged_versions(versions(engine), tables.parts)))
        findings += Looking(looks, clock).findings(own.seconds)
    if broker is not None and asked is not None:
        heard = asked.findings(own.seconds, down="start it, or correct --broker")
        findings += heard
        if heard[0].severity is Severity.OK:
            reads = tables is not None and "inbox" in tables.whole
            read = engine if reads else None
            findings += Looking(_on(broker, read, clock), clock).findings(own.seconds)
    return Examination(tables=tables, findings=tuple(findings))


def _looks(engine: Engine, tables: TablesFound, bounds: LookBounds, clock: Clock) -> list[Look]:
    """Return what there is to look at in tables that are there whole."""
    doctor = Doctor(
        engine, limits=bounds.limits, slot=bounds.slot, publication=bounds.publication, clock=clock
    )
    by_part: dict[str, Callable[[], list[Look]]] = {
        "outbox": doctor.looks,
        "inbox": lambda: inbox_looks.looks(engine),
        "consumer": lambda: consumer_looks.looks(engine),
        "dead letters": lambda: letter_looks.looks(engine, clock=clock),
        "sagas": lambda: saga_looks.looks(engine),
    }
    return [look for part, looks in by_part.items() if part in tables.whole for look in looks()]


def _answers(url: str) -> Iterator[Finding]:
    with closing(connect(url)) as broker:
        yield from broker_looks.answers(broker)


def _on(url: str, engine: Engine | None, clock: Clock) -> list[Look]:
    """Return what there is to look at on the broker; threads do not share a connection of it."""

    def topics() -> Iterator[Finding]:
        groups = {} if engine is None else groups_of(engine)
        with closing(connect(url)) as broker:
            read = {topic for names in groups.values() for topic in names}
            yield from broker_looks.topics(broker, read)

    def lag() -> Iterator[Finding]:
        groups = {} if engine is None else groups_of(engine)
        with closing(connect(url)) as broker:
            yield from consumer_looks.lag(broker, groups, clock=clock)

    return [Look("topics", topics), Look("lag", lag)]
