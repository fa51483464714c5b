"""Held keys: messages parked in the database, in order, until their key may go on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, bindparam, case, delete, func, insert, select, update

from holdfast.consumer.schema import held, held_key
from holdfast.db.clock import database_now
from holdfast.db.lease import LeaseColumns
from holdfast.db.sql import listed, looked_up
from holdfast.db.text import fitted, storable
from holdfast.errors import StaleDelivery
from holdfast.ports import Delivery, Lane
from holdfast.stored_message import header_bytes, pairs_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy.engine import Connection

_LEASE = LeaseColumns(owner=held_key.c.owner, until=held_key.c.until)


@dataclass(frozen=True, slots=True)
class ParkedKey:
    """One key of one topic, for one group."""

    topic: str
    key_hash: str
    key: bytes | None = None


@dataclass(frozen=True, slots=True)
class ParkedRow:
    """One parked message: where it waits, how often it failed, and as what it came."""

    seq: int
    key: ParkedKey
    attempt: int
    origin: Delivery
    rules: str | None = None
    """What a dead letter of it must hide, and its handler's name (`CaptureSettings.rules`).

    None: an older version parked it, and nobody knows."""


def hash_of(key: bytes | None, message_id: str) -> str:
    """Return how a key is found; a message without a key is alone with itself."""
    content = b"id:" + message_id.encode("utf-8", "surrogatepass") if key is None else b"key:" + key
    return hashlib.sha256(content).hexdigest()


class HandledElsewhere(StaleDelivery):
    """A parked message is not there any more: another process has handled it."""


class ParkedMessages:
    """The held keys of one group; every method joins the caller's transaction."""

    def __init__(self, group: str) -> None:
        self._group = group

    def among(self, db: Connection, topic: str, hashes: Collection[str]) -> set[str]:
        """Return those of *hashes* whose key is held."""
        if not hashes:
            return set()
        some = listed(db.dialect.name, sorted(hashes))
        own = {"own_group": self._group, "own_topic": topic}
        return set(db.execute(_held_among(db.dialect.name), {**own, **some}).scalars())

    def hold(self, db: Connection, key: ParkedKey, *, dlq_id: str | None, note: str) -> None:
        """Hold *key* until dead letter *dlq_id* is closed; what is parked there stays."""
        changed = db.execute(
            update(held_key)
            .where(self._is(key))
            .values(_LEASE.released())
            .values(dlq_id=dlq_id, due=None, note=storable(note))
        )
        if changed.rowcount == 0:
            self._insert_key(db, key, dlq_id=dlq_id, due=None, note=note)

    def park(
        self, db: Connection, key: ParkedKey, origin: Delivery, attempt: int,
        *, rules: str | None = None,
    ) -> int | None:  # fmt: skip
        """Park *origin* behind its key; return how many wait there, None if it is not held."""
        counted = update(held_key).where(self._is(key)).values(parked=held_key.c.parked + 1)
        if db.execute(counted).rowcount == 0:
            return None
        return self._add(db, key, origin, attempt, rules)

    def postpone(
        self, db: Connection, key: ParkedKey, origin: Delivery, *, attempt: int, delay: float,
        note: str, rules: str | None = None,
    ) -> None:  # fmt: skip
        """Park *origin* to be tried again after *delay*; its key waits behind it."""
        due = database_now() + delay
        counted = (
            update(held_key)
            .where(self._is(key))
            .values(parked=held_key.c.parked + 1, due=_unless_dead(due))
        )
        if db.execute(counted).rowcount == 0:
            self._insert_key(db, key, dlq_id=None, due=due, note=note, parked=1)
        self._add(db, key, origin, attempt, rules)

    def postpone_again(self, db: Connection, row: ParkedRow, *, attempt: int, delay: float) -> None:
        """Keep a parked message for later; whoever is free then takes its key up."""
        db.execute(update(held).where(held.c.seq == row.seq).values(attempt=attempt))
        db.execute(
            update(held_key)
            .where(self._is(row.key))
            .values(_LEASE.released())
            .values(due=_unless_dead(database_now() + delay))
        )

    def done(self, db: Connection, row: ParkedRow) -> None:
        """Remove a parked message in the transaction of its effect: once, whoever else tries."""
        if db.execute(delete(held).where(held.c.seq == row.seq)).rowcount != 1:
            raise HandledElsewhere(f"parked message {row.seq} was handled by another process")
        db.execute(update(held_key).where(self._is(row.key)).values(parked=held_key.c.parked - 1))

    def let_go(self, db: Connection, key: ParkedKey) -> bool:
        """Stop holding *key* if nothing waits there; return whether it is free."""
        gone = delete(held_key).where(
            self._is(key), held_key.c.parked <= 0, held_key.c.dlq_id.is_(None)
        )
        return db.execute(gone).rowcount == 1

    def claim_due(
        self, db: Connection, owner: str, ttl: float, limit: int, topics: Collection[str]
    ) -> list[ParkedKey]:
        """Take up keys of *topics* whose time has come and that nobody works on."""
        due = and_(
            held_key.c.grp == self._group,
            held_key.c.topic.in_(sorted(topics)),
            held_key.c.due <= database_now(),
            held_key.c.dlq_id.is_(None),
        )
        columns = (held_key.c.topic, held_key.c.key_hash, held_key.c.key)
        free = select(*columns).where(due, _LEASE.is_free())
        found = db.execute(free.order_by(held_key.c.due).limit(limit)).all()
        return [
            key
            for key in (ParkedKey(*row) for row in found)
            if _LEASE.take(db, self._is(key) & due, owner=owner, seconds=ttl)
        ]

    def renew(self, db: Connection, owner: str, ttl: float) -> list[ParkedKey]:
        """Keep the keys of *owner* for another while, and return them."""
        mine = held_key.c.grp == self._group
        columns = (held_key.c.topic, held_key.c.key_hash, held_key.c.key)
        kept = select(*columns).where(mine, _LEASE.is_held_by(owner=owner))
        found = [ParkedKey(*row) for row in db.execute(kept)]
        if found:
            _LEASE.renew(db, mine, owner=owner, seconds=ttl)
        return found

    def leave(self, db: Connection, owner: str) -> None:
        """Give the keys of *owner* to the others at once."""
        _LEASE.release(db, held_key.c.grp == self._group, owner=owner)

    def rows(self, db: Connection, key: ParkedKey, limit: int) -> list[ParkedRow]:
        """Return the first messages parked behind *key*, in order."""
        wanted = (
            select(held)
            .where(
                held.c.grp == self._group,
                held.c.topic == key.topic,
                held.c.key_hash == key.key_hash,
            )
            .order_by(held.c.seq)
            .limit(limit)
        )
        return [_row(key, row) for row in db.execute(wanted)]

    def quarantined(self, db: Connection, after: str, limit: int) -> list[tuple[str, ParkedKey]]:
        """Return keys that wait for a dead letter to be closed, in the order of its id."""
        columns = (held_key.c.topic, held_key.c.key_hash, held_key.c.key, held_key.c.dlq_id)
        wanted = (
            select(*columns)
            .where(held_key.c.grp == self._group, held_key.c.dlq_id > after)
            .order_by(held_key.c.dlq_id)
            .limit(limit)
        )
        return [(row.dlq_id, ParkedKey(*row[:3])) for row in db.execute(wanted)]

    def held_by(self, db: Connection, key: ParkedKey) -> str | None:
        """Return the dead letter that *key* waits for, None if there is none."""
        found: str | None = db.execute(select(held_key.c.dlq_id).where(self._is(key))).scalar()
        return found

    def release(self, db: Connection, key: ParkedKey) -> bool:
        """Let *key* go on: what is parked runs in order, before anything newer."""
        freed = update(held_key).where(self._is(key)).values(dlq_id=None, due=0.0)
        return db.execute(freed).rowcount == 1

    def totals(self, db: Connection, topics: Collection[str]) -> tuple[int, int, int]:
        """Return how many keys are held, how many messages wait, and keys of *topics* to retry."""
        mine = case((held_key.c.topic.in_(sorted(topics)), held_key.c.due))
        wanted = select(
            func.count(), func.coalesce(func.sum(held_key.c.parked), 0), func.count(mine)
        ).where(held_key.c.grp == self._group)
        keys, parked, due = db.execute(wanted).one()
        return int(keys), int(parked), int(due)

    def _insert_key(
        self, db: Connection, key: ParkedKey, *, dlq_id: str | None, due: Any, note: str,
        parked: int = 0,
    ) -> None:  # fmt: skip
        db.execute(
            insert(held_key).values(
                grp=self._group, topic=key.topic, key_hash=key.key_hash, key=key.key,
                dlq_id=dlq_id, due=due, parked=parked, since=database_now(), owner=None,
                until=0.0, note=storable(note),
            )
        )  # fmt: skip

    def _add(
        self, db: Connection, key: ParkedKey, origin: Delivery, attempt: int, rules: str | None
    ) -> int:
        """Add the row, unless a rival with the same lane has done so; the key row is locked.

        The same id of another source is another message. With other content it is one, too: it
        must not vanish, but show as the conflict that it is when its turn comes.
        """
        mine = and_(
            held.c.grp == self._group, held.c.topic == key.topic, held.c.key_hash == key.key_hash
        )
        message_id = fitted(origin.message.id)
        same = select(held).where(mine, held.c.message_id == message_id)
        copies = (_row(key, row).origin for row in db.execute(same))
        if not any(_is_copy(origin, copy) for copy in copies):
            db.execute(
                insert(held).values(
                    grp=self._group, topic=key.topic, key_hash=key.key_hash,
                    message_id=message_id, partition=origin.lane.partition,
                    position=fitted(str(origin.position), 64), headers=header_bytes(origin.headers),
                    body=origin.body, stored=origin.timestamp, attempt=attempt,
                    parked_at=database_now(), rules=rules,
                )
            )  # fmt: skip
        else:
            less = update(held_key).where(self._is(key)).values(parked=held_key.c.parked - 1)
            db.execute(less)
        counted: int = db.execute(select(held_key.c.parked).where(self._is(key))).scalar_one()
        return counted

    def _is(self, key: ParkedKey) -> Any:
        return and_(
            held_key.c.grp == self._group,
            held_key.c.topic == key.topic,
            held_key.c.key_hash == key.key_hash,
        )


@cache
def _held_among(dialect: str) -> Any:
    own = held_key.c.grp == bindparam("own_group"), held_key.c.topic == bindparam("own_topic")
    found = looked_up(dialect, select(held_key.c.key_hash).where(*own), held_key.c.key_hash)
    return select(found.c.key_hash)


def _is_copy(origin: Delivery, other: Delivery) -> bool:
    return origin.body == other.body and origin.message.identity == other.message.identity


def _unless_dead(due: Any) -> Any:
    """Return *due* for a key that waits for a retry; one that waits for a dead letter has none."""
    return case((held_key.c.dlq_id.is_(None), due))


def _row(key: ParkedKey, row: Any) -> ParkedRow:
    origin = Delivery(
        lane=Lane(row.topic, row.partition),
        position=row.position,
        key=key.key,
        body=row.body,
        headers=pairs_of(row.headers),
        timestamp=row.stored,
        known_id=row.message_id,
    )
    return ParkedRow(row.seq, key, row.attempt, origin, row.rules)
