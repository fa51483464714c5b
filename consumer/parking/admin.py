"""What an operator does with held keys: see them, let them go on, or skip what holds them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.consumer.parking.skip import SkipParked, SkippedRun
from holdfast.consumer.parking.store import ParkedKey, ParkedMessages, ParkedRow, hash_of
from holdfast.consumer.schema import held_key
from holdfast.db.audit import KEYS, Audit, entries
from holdfast.db.transactions import transact
from holdfast.errors import ConfigurationError, NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.db.audit import AuditEntry, Operator


_BY_ID = "id:"
_SHORTEST = 6


class NotParked(NotFound):
    """No such key waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingMessage:
    """One held key as an operator sees it."""

    group: str
    topic: str
    id: str
    """How the key is named to a command: also one that is no text, or none at all."""
    key: str
    parked: int
    since: datetime
    dead_letter: str | None
    due: datetime | None
    note: str | None


class ParkingAdmin:
    """Acts on held keys; every act is audited in its own transaction."""

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._clock = clock

    def waiting(
        self, *, group: str | None = None, topic: str | None = None, limit: int = 100
    ) -> list[WaitingMessage]:
        """Return the held keys, the longest waiting first."""
        wanted = select(held_key).order_by(held_key.c.since).limit(limit)
        if group is not None:
            wanted = wanted.where(held_key.c.grp == group)
        if topic is not None:
            wanted = wanted.where(held_key.c.topic == topic)
        with self._engine.connect() as db:
            return [_waiting(row) for row in db.execute(wanted)]

    def messages(self, group: str, topic: str, key: str, *, limit: int = 100) -> list[ParkedRow]:
        """Return what is parked behind *key*, in order."""
        with self._engine.connect() as db:
            found, _ = self._require(db, group, topic, key)
            return ParkedMessages(group).rows(db, found, limit)

    def release(self, group: str, topic: str, key: str, operator: Operator) -> int:
        """Let *key* go on whatever became of its dead letter; return how many were parked."""

        def act(db: Connection) -> int:
            found, parked = self._require(db, group, topic, key)
            ParkedMessages(group).release(db, found)
            self._record(db, operator, "release", f"{group} {topic} {key}", {"parked": parked})
            return parked

        return transact(self._engine, act, clock=self._clock)

    def skippable(
        self, group: str, topic: str, key: str, *, numbers: Sequence[int] = ()
    ) -> tuple[list[SkippedRun], int]:
        """Return what `skip` would discard, and how many messages wait behind the key."""
        with self._engine.connect() as db:
            found, parked = self._require(db, group, topic, key)
            return SkipParked(self._engine, group, found, self._clock).going(db, numbers), parked

    def skip(
        self, group: str, topic: str, key: str, operator: Operator, *,
        numbers: Sequence[int] = (), unredacted: bool = False,
    ) -> list[SkippedRun]:  # fmt: skip
        """Discard the message that holds *key*, so that what waits behind it runs; return it.

        It becomes a discarded dead letter, which can be reopened and hides what the handler
        hides. *numbers* name parked messages that go instead; the key then waits as before. What
        an older version parked goes only if it may be kept *unredacted*.
        """

        def act(db: Connection) -> list[SkippedRun]:
            found, _ = self._require(db, group, topic, key)
            going = SkipParked(self._engine, group, found, self._clock)
            gone = going.skip(db, numbers, operator, unredacted=unredacted)
            if not gone:
                raise NotParked(
                    f"nothing of key {key!r} is left to skip: let it go on with release"
                )
            detail = {"messages": [one.message_id for one in gone],
                      "dead_letters": [one.dlq_id for one in gone]}  # fmt: skip
            self._record(db, operator, "skip", f"{group} {topic} {key}", detail)
            return gone

        return transact(self._engine, act, clock=self._clock)

    def audited(self, *, limit: int = 100) -> list[AuditEntry]:
        """Return what was done, newest first."""
        with self._engine.connect() as db:
            return entries(db, limit=limit, area=KEYS)

    def _require(self, db: Connection, group: str, topic: str, key: str) -> tuple[ParkedKey, int]:
        """Return the key that *key* names, by its text or by `id:` and its id."""
        columns = (held_key.c.topic, held_key.c.key_hash, held_key.c.key, held_key.c.parked)
        wanted = select(*columns).where(_is(group, topic))
        exact = wanted.where(held_key.c.key_hash == hash_of(key.encode(), ""))
        rows = db.execute(exact).all()
        start = key.removeprefix(_BY_ID).lower()
        if not rows and key.startswith(_BY_ID) and len(start) >= _SHORTEST:
            begins = held_key.c.key_hash.startswith(start, autoescape=True)
            rows = db.execute(wanted.where(begins).limit(2)).all()
        if not rows:
            raise NotParked(
                f"key {key!r} of {topic!r} is not held for group {group!r}: see  holdfast keys list"
                f" ; a key that is no text is named by its id, as {_BY_ID}0f3a…"
            )
        if len(rows) > 1:
            raise ConfigurationError(f"{key!r} begins several ids: write more of it")
        (row,) = rows
        return ParkedKey(*row[:3]), int(row.parked)

    def _record(
        self, db: Connection, operator: Operator, action: str, subject: str, detail: dict[str, Any]
    ) -> None:
        Audit(KEYS, clock=self._clock).append(db, operator, action, subject, detail)


def _is(group: str, topic: str) -> Any:
    return (held_key.c.grp == group) & (held_key.c.topic == topic)


def _shown(key: bytes | None) -> str:
    if key is None:
        return "(no key)"
    try:
        return bytes(key).decode()
    except UnicodeDecodeError:
        return f"0x{bytes(key).hex()}"


def _waiting(row: Any) -> WaitingMessage:
    return WaitingMessage(
        group=row.grp,
        topic=row.topic,
        id=f"{_BY_ID}{row.key_hash[:12]}",
        key=_shown(row.key),
        parked=row.parked,
        since=datetime.fromtimestamp(row.since, UTC),
        dead_letter=row.dlq_id,
        due=None if row.due is None else datetime.fromtimestamp(row.due, UTC),
        note=row.note,
    )
