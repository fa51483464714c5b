"""The whole system as its lineage knows it: who publishes what to whom, how often, how deep."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select

from holdfast.db.clock import database_now
from holdfast.db.tables import require_tables
from holdfast.tracing.chain import Chain
from holdfast.tracing.lineage import LineageOutcome, records_of
from holdfast.tracing.schema import lineage, metadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy.engine import Engine


LOOKED_AT = 200
"""Chains that are counted event by event: the newest."""
PRODUCER = "urn:holdfast:lineage"
JOB_EVENT = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/JobEvent"
_MOST_RECORDS = 5000  # of one chain


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRoute:
    """Events of one type on one topic, from the service that publishes to one that handles."""

    type: str
    topic: str
    publisher: str
    handler: str | None
    """None: no service with a lineage handles them."""
    handled: int
    dead_letters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leads:
    """How often events of one type led to events of another."""

    cause: str
    effect: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsPerAction:
    """What becomes of one kind of first event: an order, a payment, a nightly job."""

    type: str
    looked_at: int
    """The newest of its chains that were counted, `LOOKED_AT` at most."""
    mean_events: float
    """Events in such a chain, the first included."""
    most_events: int
    deepest: int
    """The longest way from a first event to a last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemMap:
    """Who publishes what to whom, and what leads to what."""

    routes: tuple[EventRoute, ...]
    leads: tuple[Leads, ...]
    published: dict[str, int]
    """Events of each type."""
    actions: tuple[EventsPerAction, ...]
    """How many events one action is, by its first event."""
    at: float
    """When it was drawn, by the clock of the first database."""

    @property
    def depth(self) -> int:
        """The longest chain of types that lead to one another; a circle counts once."""
        after: dict[str, list[str]] = defaultdict(list)
        for one in self.leads:
            after[one.cause].append(one.effect)
        known: dict[str, int] = {}
        for first in sorted({*self.published, *after}):
            ahead = [(first, False)]  # not by recursion: nobody bounds how long chains are
            under_way: set[str] = set()
            while ahead:
                name, done = ahead.pop()
                if done:
                    known[name] = 1 + max((known.get(to, 0) for to in after[name]), default=0)
                    under_way.discard(name)
                elif name not in known and name not in under_way:
                    under_way.add(name)
                    ahead += [(name, True), *((to, False) for to in after[name])]
        return max(known.values(), default=0)

    def mermaid(self) -> str:
        """Return it as a Mermaid flowchart: services, and the events between them."""
        services = dict.fromkeys(
            name for one in self.routes for name in (one.publisher, one.handler) if name is not None
        )
        ids = {name: f"s{number}" for number, name in enumerate(services)}
        lines = ["flowchart LR", *(f'    {ids[one]}["{_text(one)}"]' for one in services)]
        for number, one in enumerate(self.routes):
            if one.handler is None:
                lines.append(f'    x{number}(("nobody"))')
            to = f"x{number}" if one.handler is None else ids[one.handler]
            count = self.published.get(one.type, 0)
            lines.append(f'    {ids[one.publisher]} -->|"{_text(one.type)} {count}"| {to}')
        return "\n".join(lines) + "\n"

    def openlineage(self) -> list[dict[str, Any]]:
        """Return one `JobEvent` per service, with its topics as datasets."""
        inputs, outputs = defaultdict(set), defaultdict(set)
        for one in self.routes:
            outputs[one.publisher].add(one.topic)
            if one.handler is not None:
                inputs[one.handler].add(one.topic)
        return [
            {
                "eventTime": datetime.fromtimestamp(self.at, UTC).isoformat(),
                "producer": PRODUCER,
                "schemaURL": JOB_EVENT,
                "job": {"namespace": "holdfast", "name": service},
                "inputs": _datasets(inputs[service]),
                "outputs": _datasets(outputs[service]),
            }
            for service in sorted({*inputs, *outputs})
        ]


def system_map(databases: Sequence[Engine]) -> SystemMap:
    """Return what the lineage in *databases* knows; every service's database has its own part."""
    publishers: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    handlers: dict[tuple[str, str], dict[str, dict[str, int]]] = defaultdict(dict)
    causes: dict[tuple[str, str], int] = defaultdict(int)
    at = 0.0
    for engine in databases:
        with engine.connect() as db:
            require_tables(db, metadata, otherwise=", or call holdfast.tracing.create_tables(…)")
            for row in db.execute(_SEEN):
                key = row.type, row.topic
                if row.outcome == LineageOutcome.PUBLISHED.value:
                    publishers[key][row.service] += row.number
                else:
                    handlers[key].setdefault(row.service, {})[row.outcome] = row.number
            for row in db.execute(_LED):
                causes[row.cause, row.effect] += row.number
            at = at or float(db.execute(select(database_now())).scalar_one())
    routes = [
        EventRoute(
            type=type_, topic=topic, publisher=publisher, handler=handler,
            handled=outcomes.get(LineageOutcome.HANDLED.value, 0),
            dead_letters=outcomes.get(LineageOutcome.DEAD_LETTERED.value, 0),
        )
        for (type_, topic), services in sorted(publishers.items())
        for publisher in sorted(services)
        for handler, outcomes in _handled(handlers[type_, topic])
    ]  # fmt: skip
    published: dict[str, int] = defaultdict(int)
    for (type_, _), services in publishers.items():
        published[type_] += sum(services.values())
    leads = [
        Leads(cause=cause, effect=effect, count=count)
        for (cause, effect), count in sorted(causes.items())
    ]
    return SystemMap(
        routes=tuple(routes), leads=tuple(leads), published=dict(published),
        actions=tuple(_actions(databases)), at=at,
    )  # fmt: skip


def _actions(databases: Sequence[Engine]) -> Iterator[EventsPerAction]:
    """Yield what the newest chains of each first event are like, the largest first."""
    newest: dict[str, None] = {}
    for engine in databases:
        with engine.connect() as db:
            newest |= dict.fromkeys(db.execute(_BEGUN).scalars())
    chains: dict[str, list[Chain]] = defaultdict(list)
    for correlation in [*newest][:LOOKED_AT]:
        records = []
        for engine in databases:
            with engine.connect() as db:
                records += records_of(db, correlation, most=_MOST_RECORDS)
        chain = Chain(records)
        if chain.events:
            chains[chain.roots[0].type].append(chain)
    found = [
        EventsPerAction(
            type=type_, looked_at=len(several),
            mean_events=sum(len(one.events) for one in several) / len(several),
            most_events=max(len(one.events) for one in several),
            deepest=max(one.depth for one in several),
        )
        for type_, several in chains.items()
    ]  # fmt: skip
    return iter(sorted(found, key=lambda one: (-one.mean_events, one.type)))


def _handled(found: dict[str, dict[str, int]]) -> list[tuple[str | None, dict[str, int]]]:
    return [*sorted(found.items())] or [(None, {})]


_SEEN = select(
    lineage.c.type, lineage.c.topic, lineage.c.service, lineage.c.outcome,
    func.count(lineage.c.event_id.distinct()).label("number"),
).group_by(lineage.c.type, lineage.c.topic, lineage.c.service, lineage.c.outcome)  # fmt: skip

_cause, _effect = lineage.alias("cause"), lineage.alias("effect")
_LED = (
    select(
        _cause.c.type.label("cause"), _effect.c.type.label("effect"),
        func.count(_effect.c.event_id.distinct()).label("number"),
    )
    .join(_effect, _effect.c.causation_id == _cause.c.event_id)
    .where(_effect.c.outcome == LineageOutcome.PUBLISHED.value)
    .group_by(_cause.c.type, _effect.c.type)
)  # fmt: skip


_BEGUN = (
    select(lineage.c.correlation_id)
    .where(lineage.c.outcome == LineageOutcome.PUBLISHED.value, lineage.c.causation_id.is_(None))
    .order_by(lineage.c.seq.desc())
    .limit(LOOKED_AT)
)


def _datasets(topics: set[str]) -> list[dict[str, str]]:
    return [{"namespace": "holdfast", "name": topic} for topic in sorted(topics)]


def _text(name: str) -> str:
    return "".join(char if char.isalnum() or char in " _-." else f"#{ord(char)};" for char in name)
