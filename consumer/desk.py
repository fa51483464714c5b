"""The operator's desk for held keys: see them, let them go on, or skip what is parked."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, insert, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.consumer.held import Held, HeldKey, HeldRow, hash_of
from holdfast.consumer.schema import audit, held, held_key
from holdfast.errors import NotFound
from holdfast.transactions import transact

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

    from holdfast.outbox.audit import Warrant


class NotHeld(NotFound):
    """No such key waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One held key as an operator sees it."""

    group: str
    topic: str
    key: str
    parked: int
    since: datetime
    dead_letter: str | None
    due: datetime | None
    note: str | None


class Desk:
    """Acts on held keys; every act is audited in its own transaction."""

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._clock = clock

    def waiting(
        self, *, group: str | None = None, topic: str | None = None, limit: int = 100
    ) -> list[Waiting]:
        """Return the held keys, the longest waiting first."""
        wanted = select(held_key).order_by(held_key.c.since).limit(limit)
        if group is not None:
            wanted = wanted.where(held_key.c.grp == group)
        if topic is not None:
            wanted = wanted.where(held_key.c.topic == topic)
        with self._engine.connect() as db:
            return [_waiting(row) for row in db.execute(wanted)]

    def messages(self, group: str, topic: str, key: str, *, limit: int = 100) -> list[HeldRow]:
        """Return what is parked behind *key*, in order."""
        with self._engine.connect() as db:
            self._require(db, group, topic, key)
            return Held(group).rows(db, _key(topic, key), limit)

    def release(self, group: str, topic: str, key: str, warrant: Warrant) -> int:
        """Let *key* go on whatever became of its dead letter; return how many were parked."""

        def act(db: Connection) -> int:
            parked = self._require(db, group, topic, key)
            Held(group).release(db, _key(topic, key))
            self._record(db, warrant, "release", f"{group} {topic} {key}", {"parked": parked})
            return parked

        return transact(self._engine, act, clock=self._clock)

    def skip(self, group: str, topic: str, key: str, warrant: Warrant, *, count: int = 1) -> int:
        """Discard the first *count* messages parked behind *key*; return how many there were."""

        def act(db: Connection) -> int:
            self._require(db, group, topic, key)
            rows = Held(group).rows(db, _key(topic, key), count)
            numbers = [row.seq for row in rows]
            gone = db.execute(delete(held).where(held.c.seq.in_(numbers))).rowcount
            db.execute(
                update(held_key)
                .where(_is(group, topic, key))
                .values(parked=held_key.c.parked - gone)
            )
            detail = {"messages": [row.origin.message.id for row in rows]}
            self._record(db, warrant, "skip", f"{group} {topic} {key}", detail)
            return int(gone)

        return transact(self._engine, act, clock=self._clock)

    def _require(self, db: Connection, group: str, topic: str, key: str) -> int:
        row = db.execute(select(held_key.c.parked).where(_is(group, topic, key))).first()
        if row is None:
            raise NotHeld(
                f"key {key!r} of {topic!r} is not held for group {group!r}: see  holdfast keys list"
            )
        return int(row.parked)

    def _record(
        self, db: Connection, warrant: Warrant, action: str, subject: str, detail: dict[str, Any]
    ) -> None:
        db.execute(
            insert(audit).values(
                at=self._clock.now(), actor=warrant.actor[:255], action=action,
                subject=subject[:600], reason=warrant.reason, detail=detail,
            )
        )  # fmt: skip


def _key(topic: str, key: str) -> HeldKey:
    return HeldKey(topic, hash_of(key.encode(), ""), key.encode())


def _is(group: str, topic: str, key: str) -> Any:
    return (
        (held_key.c.grp == group)
        & (held_key.c.topic == topic)
        & (held_key.c.key_hash == hash_of(key.encode(), ""))
    )


def _waiting(row: Any) -> Waiting:
    return Waiting(
        group=row.grp,
        topic=row.topic,
        key="(no key)" if row.key is None else bytes(row.key).decode("utf-8", "replace"),
        parked=row.parked,
        since=datetime.fromtimestamp(row.since, UTC),
        dead_letter=row.dlq_id,
        due=None if row.due is None else datetime.fromtimestamp(row.due, UTC),
        note=row.note,
    )
