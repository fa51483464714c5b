"""The operator's side of parked keys: look, edit, release, skip; each act is audited.

What an edit changed is told without telling the values.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import case, delete, func, literal, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.codec import is_json
from holdfast.db.audit import OUTBOX, Audit, Operator
from holdfast.db.transactions import transact
from holdfast.errors import ConfigurationError, InvalidMessage, NotFound
from holdfast.headers import Headers
from holdfast.outbox.relay.parking import BEHIND, REFUSED, RELEASED
from holdfast.outbox.schema import parked
from holdfast.stored_message import packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import ColumnElement
    from sqlalchemy.engine import Connection, Engine, RowMapping

    from holdfast.headers import Pair


_MOST = 200  # paths; an edit that changes more is a replacement

Change = dict[str, str]


def size(payload: bytes | None) -> int | None:
    """Return how large *payload* is.

    All that the trail says of its content: entries outlive events, and a digest would let whoever
    reads them try out what a short payload said.
    """
    return None if payload is None else len(payload)


def changes(before: bytes | None, after: bytes | None) -> list[Change]:
    """Return the JSON paths that differ; what is not JSON is replaced as a whole."""
    if before == after:
        return []
    try:
        old, new = msgspec.json.decode(before or b""), msgspec.json.decode(after or b"")
        found = list(_compared("$", old, new))
    except (ValueError, RecursionError):
        return [{"path": "$", "change": "replaced"}]
    if len(found) > _MOST:
        return [*found[:_MOST], {"path": "…", "change": f"{len(found) - _MOST} more"}]
    return found or [{"path": "$", "change": "rewritten"}]  # same values, other bytes


def _compared(path: str, old: Any, new: Any) -> Iterator[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _member(f"{path}.{name}", name, old, new)
    elif isinstance(old, list) and isinstance(new, list):
        for number in range(max(len(old), len(new))):
            yield from _item(f"{path}[{number}]", number, old, new)
    elif type(old) is not type(new) or old != new:
        yield {"path": path, "change": "changed"}


def _member(path: str, name: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[Change]:
    if name not in new:
        yield {"path": path, "change": "removed"}
    elif name not in old:
        yield {"path": path, "change": "added"}
    else:
        yield from _compared(path, old[name], new[name])


def _item(path: str, number: int, old: list[Any], new: list[Any]) -> Iterator[Change]:
    if number >= len(new):
        yield {"path": path, "change": "removed"}
    elif number >= len(old):
        yield {"path": path, "change": "added"}
    else:
        yield from _compared(path, old[number], new[number])


_FIXED = ("ce_id", "ce_partitionkey", "ce_partitionkeybase64", "ce_specversion")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedEventKey:
    """A key that waits: how many of its events were refused and how many wait behind."""

    topic: str
    key: str | None
    """None gathers the events without a key, which wait for nothing but themselves."""
    refused: int
    behind: int
    released: int
    since: datetime
    first: int | None
    """The first refused event, which holds the others up."""
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedEvent:
    """One parked event."""

    seq: int
    id: str
    topic: str
    key: str | None
    type: str
    state: str
    error: str | None
    parked_at: datetime
    payload: bytes | None
    headers: tuple[Pair, ...]

    @property
    def subject(self) -> str:
        """How the audit trail names it."""
        key = "" if self.key is None else f"/{self.key}"
        return f"{self.topic}{key}#{self.seq}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventEdit:
    """A change to the content of an event; who it is and where it goes stay as they are."""

    payload: bytes | None = None
    """The new payload; None leaves it."""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers to set, each replacing those of its name."""
    without: tuple[str, ...] = ()
    """Headers to remove."""
    force: bool = False
    """Take a payload that is no JSON although the event says it is."""

    def __post_init__(self) -> None:
        if self.payload is None and not self.headers and not self.without:
            raise InvalidMessage("nothing to edit: give a payload, a header to set or to remove")
        for name in (*dict(self.headers), *self.without):
            if name in _FIXED:
                raise InvalidMessage(f"header {name} is the event's identity: it cannot be edited")
        Headers(self.headers)

    def apply(self, event: ParkedEvent) -> tuple[bytes | None, tuple[Pair, ...]]:
        """Return the new payload and headers of *event*."""
        kept = Headers.received(event.headers).without(self.without)
        headers = kept.with_(self.headers)
        if self.payload is None:
            return event.payload, headers.pairs
        if not self.force and is_json(headers.text("content-type")):
            _check_json(self.payload)
        return self.payload, headers.pairs


class EventNotParked(NotFound):
    """No parked event answers to this, or it is past the state in which this can be done."""


def _check_json(payload: bytes) -> Any:
    try:
        return msgspec.json.decode(payload)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(
            f"the new payload is not JSON although the event says it is: {error} "
            "(--force takes it all the same)"
        ) from error


_LISTED = 1000  # numbers of events kept in one audit entry
_DIGITS = 18  # of the largest number that every database can compare; no event has more


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedSelection:
    """Which parked events are meant: named ones, those of a key, or those of a topic."""

    events: tuple[str, ...] = ()
    """Sequence numbers or ids."""
    topic: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if self.key is not None and self.topic is None:
            raise ConfigurationError("a key belongs to a topic: give --topic as well")
        if bool(self.events) == (self.topic is not None):
            raise ConfigurationError("name the events, or give --topic and perhaps --key")

    @property
    def subject(self) -> str:
        """How the audit trail names it."""
        if self.topic is None:
            return ", ".join(self.events)
        return self.topic if self.key is None else f"{self.topic}/{self.key}"

    def where(self) -> list[ColumnElement[bool]]:
        """Return the conditions on the table."""
        if self.topic is None:
            return [_named(self.events)]
        conditions = [parked.c.aggregatetype == self.topic]
        if self.key is not None:
            conditions += [parked.c.aggregateid == self.key, _same_length(self.key)]
        return conditions


class ParkedKeys:
    """What an operator can see and do about events that the broker refused.

    Only refused events are changed here, and the relay never touches a refused one: no
    act can cross with a publish under way. Each act commits together with its audit entry.
    """

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._clock = clock
        self._audit = Audit(OUTBOX, clock=clock)

    def waiting(
        self, *, topic: str | None = None, limit: int = 100, held: bool = False
    ) -> list[ParkedEventKey]:
        """Return the keys that wait, the longest waiting first; *held*: for an operator only."""
        names = (parked.c.aggregatetype, parked.c.aggregateid)
        first_refused = func.min(case((parked.c.state == REFUSED, parked.c.seq)))
        grouped = (
            select(
                *names,
                *(func.sum(case((parked.c.state == state, 1), else_=0)) for state in _STATES),
                func.min(parked.c.parked_at),
                first_refused,
            )
            .group_by(*names)
            .order_by(func.min(parked.c.seq))
            .limit(limit)
        )
        if topic is not None:
            grouped = grouped.where(parked.c.aggregatetype == topic)
        if held:
            grouped = grouped.having(first_refused.is_not(None))
        with self._engine.connect() as db:
            rows: Sequence[Any] = db.execute(grouped).all()
            errors = self._errors(db, [row[-1] for row in rows if row[-1] is not None])
        return [
            ParkedEventKey(
                topic=topic, key=key, refused=int(refused), behind=int(behind),
                released=int(released), since=_in_utc(since), first=first,
                error=errors.get(first),
            )
            for topic, key, refused, behind, released, since, first in rows
        ]  # fmt: skip

    def _errors(self, db: Connection, seqs: list[int]) -> dict[int | None, str | None]:
        rows = db.execute(select(parked.c.seq, parked.c.error).where(parked.c.seq.in_(seqs)))
        return {seq: error for seq, error in rows}  # noqa: C416 - a Row is not yet a pair to mypy

    def events(self, selection: ParkedSelection, *, limit: int = 100) -> list[ParkedEvent]:
        """Return the selected events in their order."""
        found = select(parked).where(*selection.where()).order_by(parked.c.seq).limit(limit)
        with self._engine.connect() as db:
            return [_event(row) for row in db.execute(found).mappings()]

    def release(self, selection: ParkedSelection, operator: Operator) -> int:
        """Let the selected refused events go: the relay publishes them and what waits behind.

        The order of each key holds. Return how many were released.
        """

        def act(db: Connection) -> int:
            refused = (*selection.where(), parked.c.state == REFUSED)
            found = select(parked.c.seq).where(*refused).order_by(parked.c.seq).with_for_update()
            seqs = db.execute(found).scalars().all()
            if not seqs:
                raise EventNotParked(f"nothing refused is parked under {selection.subject}")
            db.execute(update(parked).where(*refused).values(state=RELEASED))
            detail = {"events": len(seqs), "seqs": list(seqs[:_LISTED])}
            self._audit.append(db, operator, "release", selection.subject, detail)
            return len(seqs)

        return transact(self._engine, act, clock=self._clock)

    def skip(self, event: str, operator: Operator) -> ParkedEvent:
        """Discard one refused event for good; what waits behind it then flows by itself."""

        def act(db: Connection) -> ParkedEvent:
            found = self._refused(db, event)
            db.execute(delete(parked).where(parked.c.seq == found.seq))
            detail = {**_identity(found), "payload_bytes": size(found.payload)}
            self._audit.append(db, operator, "skip", found.subject, detail)
            return found

        return transact(self._engine, act, clock=self._clock)

    def edit(self, event: str, edit: EventEdit, operator: Operator) -> ParkedEvent:
        """Change the content of one refused event; it stays parked until it is released."""

        def act(db: Connection) -> ParkedEvent:
            found = self._refused(db, event)
            payload, headers = edit.apply(found)
            new = {"payload": payload, "headers": packed(headers)}
            db.execute(update(parked).where(parked.c.seq == found.seq).values(**new))
            names = {name for name, _ in set(headers) ^ set(found.headers)}
            detail = {
                **_identity(found),
                "payload_bytes": {"before": size(found.payload), "after": size(payload)},
                "payload_changes": changes(found.payload, payload),
                "headers_changed": sorted(names),
            }
            self._audit.append(db, operator, "edit", found.subject, detail)
            return self._refused(db, event)

        return transact(self._engine, act, clock=self._clock)

    def _refused(self, db: Connection, event: str) -> ParkedEvent:
        found = select(parked).where(_named([event])).with_for_update()
        row = db.execute(found).mappings().first()
        if row is None:
            raise EventNotParked(f"no event {event} is parked: see  holdfast outbox parked list")
        if row["state"] == BEHIND:
            raise EventNotParked(
                f"event {event} was not refused, it waits behind one of its key: "
                "release, edit or skip that one"
            )
        if row["state"] == RELEASED:
            raise EventNotParked(f"event {event} is released already: the relay is publishing it")
        return _event(row)


_STATES = (REFUSED, BEHIND, RELEASED)


def _named(events: Sequence[str]) -> ColumnElement[bool]:
    numbers = [event for event in events if event.isascii() and event.isdigit()]
    seqs = [int(number) for number in numbers if len(number) <= _DIGITS]
    ids = [_uuid(event) for event in events if event not in numbers]
    return parked.c.seq.in_(seqs) | parked.c.id.in_(ids)


def _same_length(key: str) -> ColumnElement[bool]:
    # MySQL compares without regard to spaces at the end.
    return func.length(parked.c.aggregateid) == func.length(literal(key))


def _uuid(text: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError as error:
        raise ConfigurationError(
            f"{text!r} names no event: use its number or its id from  holdfast outbox parked show"
        ) from error


def _event(row: RowMapping) -> ParkedEvent:
    return ParkedEvent(
        seq=row["seq"],
        id=str(row["id"]),
        topic=row["aggregatetype"],
        key=row["aggregateid"],
        type=row["type"],
        state=row["state"],
        error=row["error"],
        parked_at=_in_utc(row["parked_at"]),
        payload=row["payload"],
        headers=unpacked(msgspec.json.encode(row["headers"]).decode()),
    )


def _identity(event: ParkedEvent) -> dict[str, Any]:
    return {"seq": event.seq, "id": event.id, "topic": event.topic, "key": event.key}


def _in_utc(moment: datetime) -> datetime:
    """Return a stored *moment* in UTC; some databases give it back without its zone."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
