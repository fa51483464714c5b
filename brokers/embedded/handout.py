"""Handing out the messages of owned lanes, in order, each noted in the tables first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.brokers.embedded.lane import MASK, Held, LaneState
from holdfast.errors import HoldfastError
from holdfast.ports import Delivery

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from holdfast.brokers.embedded.marks import Row
    from holdfast.brokers.embedded.ownership import Ownership
    from holdfast.brokers.embedded.store import Session
    from holdfast.clock import Clock
    from holdfast.ports import Lane

_MOST_WAITING = 10_000  # per lane; beyond it the lane hands out nothing new
_headers = msgspec.msgpack.Decoder(list[tuple[str, bytes | None]]).decode


class Handout:
    """Takes the next messages from the lanes in turn: what is due again, then what is new."""

    def __init__(self, session: Session, own: Ownership, clock: Clock, lease: float) -> None:
        self._db = session
        self._own = own
        self._clock = clock
        self._lease = lease
        self._lease_until = 0.0
        self._receipt = 0
        self._turn = 0

    def batch(self, limit: int, paused: set[Lane]) -> list[Delivery]:
        """Return at most *limit* deliveries from the lanes that are not *paused*."""
        self._expire_leases()
        lanes = [s for s in self._own.lanes.values() if s.lane not in paused]
        if not lanes:
            return []
        self._turn = (self._turn + 1) % len(lanes)
        lanes = lanes[self._turn :] + lanes[: self._turn]
        ends = self._ends(lanes)
        now = self._clock.monotonic()
        if not any(ends[s.id] > s.fetched or s.due(now, 1) for s in lanes):
            return []  # without taking the write lock: idle members do not disturb writers
        batch: list[Delivery] = []
        self._receipt += 1  # one for the whole batch: a message is in it once at most
        self._lease_until = self._clock.monotonic() + self._lease
        try:
            # Need not be on disk: a power cut forgets at most that these were handed out.
            with self._db.write(durable=False) as db:
                for state in lanes:
                    if self._own.marks.owns(db, state):
                        self._take(db, state, limit, now, batch)
        except HoldfastError:
            for delivery in batch:  # not noted in the tables, so not handed out
                self._own.lanes[delivery.lane].land(int(delivery.position), 0.0)
            raise
        return batch

    def _ends(self, lanes: Sequence[LaneState]) -> dict[int, int]:
        marks = ",".join("?" * len(lanes))
        sql = f"SELECT id, next FROM hf_lane WHERE id IN ({marks})"  # noqa: S608 - marks only
        return dict(self._db.read(sql, *(s.id for s in lanes)))

    def _take(
        self,
        db: sqlite3.Connection,
        state: LaneState,
        limit: int,
        now: float,
        batch: list[Delivery],
    ) -> None:
        """Hand out what is due again, then what is new, and note both in the tables."""
        due = state.due(now, limit - len(batch))
        rows = self._own.marks.messages(db, state, due)
        batch += [self._launch(state, row, state.waiting.pop(row[0] & MASK)) for row in rows]
        self._own.marks.fly(db, state, due)
        if len(batch) < limit and len(state.waiting) < _MOST_WAITING:
            self._take_new(db, state, limit - len(batch), now, batch)

    def _take_new(
        self,
        db: sqlite3.Connection,
        state: LaneState,
        limit: int,
        now: float,
        batch: list[Delivery],
    ) -> None:
        rows = self._own.marks.fresh(db, state, limit)
        if not rows:
            return
        blocked = state.held_keys(now)
        behind = []
        for row in rows:
            offset = row[0] & MASK
            held = Held(row[1])
            if blocked and row[1] in blocked:
                state.waiting[offset] = held
                behind.append((offset, held))
            else:
                batch.append(self._launch(state, row, held))
        state.fetched = (rows[-1][0] & MASK) + 1
        self._own.marks.advance(db, state)
        self._own.marks.wait(db, state, behind, self._own.offset())

    def _launch(self, state: LaneState, row: Row, held: Held) -> Delivery:
        message_id, key, headers, body, stored = row
        offset = message_id & MASK
        state.flying[offset] = held
        held.receipt, held.lease_until = self._receipt, self._lease_until
        return Delivery(
            lane=state.lane,
            position=offset,
            key=key,
            body=body,
            headers=_headers(headers),
            timestamp=stored,
            count=held.failures + 1,
            epoch=state.epoch,
            lease_until=self._lease_until,
            receipt=self._receipt,
        )

    def _expire_leases(self) -> None:
        mono = self._clock.monotonic()
        for state in self._own.lanes.values():
            if expired := state.expired(mono):
                behind = state.behind(expired)
                with self._db.write() as db:
                    if self._own.marks.owns(db, state):
                        self._own.put_back(db, state, expired, blame=1, due=0.0)
                        self._own.put_back(db, state, behind, blame=0, due=0.0)
