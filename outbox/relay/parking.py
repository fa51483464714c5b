"""Parked keys: what the broker refuses waits aside, in order, and the rest flows on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import msgspec
from sqlalchemy import bindparam, delete, exists, func, insert, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.sql import statements
from holdfast.db.text import MOST_TEXT, cut
from holdfast.db.transactions import transact
from holdfast.outbox.relay.leases import ShardLeaseLost
from holdfast.outbox.relay.publishing import classify_results
from holdfast.outbox.rows import Cells, Row, StagedRows, as_row
from holdfast.outbox.schema import outbox, parked
from holdfast.publishing import fitting
from holdfast.scrubbing import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.outbox.relay.leases import Leases
    from holdfast.outbox.relay.publishing import MissingTopics, Refused, RelaySink

log = logging.getLogger("holdfast.outbox")
T = TypeVar("T")

REFUSED, BEHIND, RELEASED = "refused", "behind", "released"
_LOOK_SECONDS, _MOST = 0.5, 1000
_REST = 10  # looking takes a tenth of the time at most
_ONE = select(parked.c.seq).limit(1)
_COPIED = [column.name for column in outbox.columns]


class Parking:
    """The relay's side of parked keys; every write is guarded by the leases.

    Only the owner of a key's shard parks or drains it, so the order within the key holds:
    first what is parked, by `seq`, then what is still in the outbox.
    """

    def __init__(
        self, engine: Engine, missing: MissingTopics, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._engine = engine
        self._missing = missing
        self._clock = clock
        self._keys: set[tuple[str, str]] = set()
        self._looked = float("-inf")
        self._pause = _LOOK_SECONDS
        self._shards: object = None

    def is_due(self, leases: Leases) -> bool:
        """Whether it is time for `refresh`."""
        is_fresh = self._clock.monotonic() - self._looked < self._pause
        return not is_fresh or self._shards is not leases.owned

    def is_told(self, leases: Leases, found: object) -> bool:
        """Return whether anything is parked, which somebody has just *found*, or has not."""
        if found:
            return True
        self._keys, self._looked, self._pause = set(), self._clock.monotonic(), _LOOK_SECONDS
        self._shards = leases.owned
        return False

    def refresh(self, leases: Leases, sink: RelaySink) -> int:
        """Learn which keys are parked; publish what was released and return how many went.

        Now and then, and always after a renewal: it may have brought a shard of which the
        former owner has parked a key since.
        """
        if not self.is_due(leases):
            return 0
        now = self._clock.monotonic()
        # Until a look has succeeded, what is known may be of another owner's time.
        owned, self._shards = leases.owned, None
        if not self.is_told(leases, self._any()):
            return 0
        with self._engine.connect() as db:
            released = self._released(db, leases)
        published = self._publish(leases, sink, released)
        with self._engine.connect() as db:
            key = parked.c.aggregateid
            # MySQL takes keys for one that differ only by spaces at the end; lengths tell.
            keys = select(parked.c.aggregatetype, key, func.length(key)).distinct()
            ours = parked.c.shard.in_(list(owned))
            rows = db.execute(keys.where(key.is_not(None), ours))
            self._keys = {(topic, key) for topic, key, _ in rows}
            self._shards = owned
        if len(released) < _MOST:
            self._looked = now
        # With very many of them a look takes long; the other keys must not wait for it.
        self._pause = max(_LOOK_SECONDS, _REST * (self._clock.monotonic() - now))
        return published

    def _any(self) -> bool:
        """Whether anything is parked at all; a quick look, for the next event waits for it."""
        with self._engine.connect() as db:
            return db.execute(_ONE).first() is not None

    def split(self, rows: list[Cells]) -> tuple[list[Cells], list[Row]]:
        """Return the rows to publish and those that wait behind a parked one of their key."""
        if not self._keys:
            return rows, []
        named = map(as_row, rows)
        behind = [r for r in named if r.key is not None and (r.topic, r.key) in self._keys]
        held = {row.seq for row in behind}
        return [row for row in rows if row[0] not in held], behind

    def park(self, leases: Leases, rows: Sequence[Row]) -> int:
        """Move *rows* behind the parked rows of their keys."""
        return self._move(leases, [(row, None) for row in rows])

    def refuse(self, leases: Leases, rows: Sequence[Refused]) -> int:
        """Move *rows* aside: those with an error were refused, the others wait behind."""
        for row, error in rows:
            if error is not None:
                log.error(
                    "outbox event %s to %s (key %r) is parked: %s",
                    row.id, row.topic, row.key, text_of(error), extra=_facts(row),
                )  # fmt: skip
        return self._move(leases, rows)

    def _move(self, leases: Leases, rows: Sequence[Refused]) -> int:
        if not rows:
            return 0
        gone = self._parked_by(lambda db: self._set_aside(db, leases, rows), rows)
        for row, _ in gone:
            log.warning("outbox event %s is gone from the table: nothing is parked", row.id)
        return len(rows) - len(gone)

    def _parked_by(self, work: Callable[[Connection], T], rows: Sequence[Refused]) -> T:
        """Return what *work* returns, which parks *rows*; their keys are known as parked then.

        A commit whose answer was lost may have parked them: the next look tells.
        """
        shards, self._shards = self._shards, None
        result = transact(self._engine, work, clock=self._clock)
        self._shards = shards
        self._keys |= {(row.topic, row.key) for row, _ in rows if row.key is not None}
        return result

    def _set_aside(self, db: Connection, leases: Leases, rows: Sequence[Refused]) -> list[Refused]:
        """Move *rows*; return those that somebody has deleted meanwhile."""
        if not leases.holds(db):
            raise ShardLeaseLost
        there = outbox.c.seq == bindparam("at")
        source = select(
            *(outbox.c[name] for name in _COPIED),
            bindparam("why", type_=parked.c.error.type),
            bindparam("now", type_=parked.c.parked_at.type),
            bindparam("how", type_=parked.c.state.type),
        ).where(there)
        copy = insert(parked).from_select([*_COPIED, "error", "parked_at", "state"], source)
        copy = copy.execution_options(preserve_rowcount=True)
        now = self._clock.now()
        missing: list[Refused] = []
        for row, error in rows:
            why = None if error is None else cut(text_of(error), MOST_TEXT)
            how = BEHIND if error is None else REFUSED
            copied = db.execute(copy, {"at": row.seq, "why": why, "now": now, "how": how})
            if not copied.rowcount and not self._keep(db, row, why, how):
                missing.append((row, error))
        gone = statements("holdfast.outbox", self._engine.dialect.name)["delete"]
        db.execute(gone, {"seqs": leases.listed(row.seq for row, _ in rows)})
        return missing

    def _keep(self, _db: Connection, _row: Row, _why: str | None, _how: str) -> bool:
        """Park a row that is gone from the table by what was read of it; whether that is done.

        Not here: the table alone says what exists, and a row that was deleted does not.
        """
        return False

    def _released(self, db: Connection, leases: Leases) -> list[Cells]:
        """Return what may go in our shards: of each key, all before the first still refused."""
        ahead = parked.alias("ahead")
        held = exists().where(
            ahead.c.aggregatetype == parked.c.aggregatetype,
            ahead.c.aggregateid == parked.c.aggregateid,
            ahead.c.state == REFUSED,
            ahead.c.seq < parked.c.seq,
        )
        ours = parked.c.shard.in_(list(leases.owned))
        columns = (
            parked.c.seq, parked.c.shard, parked.c.aggregatetype, parked.c.aggregateid,
            parked.c.payload, parked.c.headers, parked.c.id, parked.c.type,
        )  # fmt: skip
        sizes = select(parked.c.seq, func.length(parked.c.payload))
        free = sizes.where(ours, parked.c.state != REFUSED, ~held).order_by(parked.c.seq)
        if topics := self._missing.held:
            free = free.where(parked.c.aggregatetype.not_in(topics))
        seqs = fitting(map(tuple, db.execute(free.limit(_MOST))))
        if not seqs:
            return []
        these = select(*columns).where(parked.c.seq.in_(seqs)).order_by(parked.c.seq)
        found = db.execute(these).all()
        return [Row(*row[:5], _as_text(row[5]), str(row[6]), row[7]) for row in found]

    def _publish(self, leases: Leases, sink: RelaySink, found: list[Cells]) -> int:
        if not found:
            return 0
        rows, refused = sink.precheck(found, self._missing)
        results = sink.publish(StagedRows(rows)) if rows else []
        outcome = classify_results(rows, results)
        self._missing.note(outcome.missing)
        if outcome.outage is None:
            self._missing.there({row[2] for row in rows} - outcome.missing.keys())
        again = [*refused, *outcome.refused]
        for row, error in again:
            if error is not None:
                text = text_of(error)
                log.error("released event %s is refused again: %s", row.id, text, extra=_facts(row))

        def settle(db: Connection) -> None:
            if not leases.holds(db):
                raise ShardLeaseLost
            if outcome.done:
                db.execute(delete(parked).where(parked.c.seq.in_(outcome.done)))
            for row, error in again:
                if error is not None:
                    why = {"state": REFUSED, "error": cut(text_of(error), MOST_TEXT)}
                    db.execute(update(parked).where(parked.c.seq == row.seq).values(**why))

        transact(self._engine, settle, clock=self._clock)
        if outcome.outage is not None:
            raise outcome.outage
        return len(outcome.done)

    def count(self) -> int:
        """Return how many events are parked."""
        with self._engine.connect() as db:
            return db.execute(select(func.count()).select_from(parked)).scalar_one()


def _facts(row: Row) -> dict[str, object]:
    """Return what a log record tells of *row* beside its sentence."""
    return {"event": row.id, "seq": row.seq, "topic": row.topic, "shard": row.shard}


def _as_text(headers: Iterable[object]) -> str:
    return msgspec.json.encode(headers).decode()
