"""The group's rows for one lane: how far it is, and the exceptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.brokers.embedded.lane import SHIFT, DelayedMessage, EmbeddedLane

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Sequence

    from holdfast.ports import Lane

WAITING, DONE, FLYING = 0, 1, 2
Row = tuple[int, bytes | None, bytes, bytes | None, float]


class CursorTable:
    """Reads and writes lane progress inside the caller's transaction.

    Every write is preceded there by `owns`, so a member that lost the lane changes nothing.
    """

    LAG = (
        "SELECT l.id, l.next - coalesce(c.committed, 0) - (SELECT count(*) FROM hf_mark m"
        " WHERE m.grp = c.grp AND m.lane = c.lane AND m.state = 1)"
        " FROM hf_lane l LEFT JOIN hf_cursor c ON c.lane = l.id AND c.grp = ?"
    )

    def __init__(self, group: str, member: str) -> None:
        self._group = group
        self._member = member

    def owns(self, db: sqlite3.Connection, state: EmbeddedLane) -> bool:
        """Whether the lane is still ours, under the same epoch."""
        row = db.execute(
            "SELECT owner, epoch FROM hf_cursor WHERE grp = ? AND lane = ?",
            (self._group, state.id),
        ).fetchone()
        return bool(row == (self._member, state.epoch))

    def load(self, db: sqlite3.Connection, lane: Lane, lane_id: int, offset: float) -> EmbeddedLane:
        """Return the state a new owner starts from; *offset* is wall clock less monotonic.

        What the last owner held without settling waits again, with one failure more: that
        owner died with it, since one that leaves puts everything back itself.
        """
        where = (self._group, lane_id)
        committed, fetched, epoch = db.execute(
            "SELECT committed, fetched, epoch FROM hf_cursor WHERE grp = ? AND lane = ?", where
        ).fetchone()
        db.execute(
            "UPDATE hf_mark SET state = 0, failures = failures + 1, due = 0"
            " WHERE grp = ? AND lane = ? AND state = 2",
            where,
        )
        db.execute(
            "INSERT OR IGNORE INTO hf_mark (grp, lane, position, state, failures)"
            " SELECT ?, ?, id - ?, 0, 1 FROM hf_message WHERE id >= ? AND id < ?",
            (*where, *_ids(lane_id, 0, committed, fetched)),
        )
        state = EmbeddedLane(lane, lane_id, epoch, committed, fetched)
        rows = db.execute(
            "SELECT m.position, m.state, m.due, m.failures, b.key FROM hf_mark m"
            " JOIN hf_message b ON b.id = m.position + ? WHERE m.grp = ? AND m.lane = ?"
            " ORDER BY m.position",
            (lane_id << SHIFT, *where),
        )
        for position, mark, due, failures, key in rows:
            state.marked = True
            if mark != DONE:
                state.waiting[position] = DelayedMessage(
                    key, failures, due - offset if due else 0.0
                )
        return state

    def messages(
        self, db: sqlite3.Connection, state: EmbeddedLane, offsets: Sequence[int]
    ) -> list[Row]:
        """Return the messages at *offsets*, in order."""
        rows: list[Row] = []
        for offset in offsets:
            rows += db.execute(
                "SELECT id, key, headers, body, stored FROM hf_message WHERE id = ?",
                ((state.id << SHIFT) + offset,),
            )
        return rows

    def fresh(self, db: sqlite3.Connection, state: EmbeddedLane, limit: int) -> list[Row]:
        """Return the next messages never handed out."""
        return db.execute(
            "SELECT id, key, headers, body, stored FROM hf_message"
            " WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
            (state.first_id, (state.id + 1) << SHIFT, limit),
        ).fetchall()

    def advance(self, db: sqlite3.Connection, state: EmbeddedLane) -> None:
        """Note how far messages were handed out. Nothing counts as settled by this."""
        db.execute(
            "UPDATE hf_cursor SET fetched = ? WHERE grp = ? AND lane = ?",
            (state.fetched, self._group, state.id),
        )

    def wait(
        self,
        db: sqlite3.Connection,
        state: EmbeddedLane,
        entries: Iterable[tuple[int, DelayedMessage]],
        offset: float,
    ) -> None:
        """Note messages to be handed out (again) once due; *offset* as for `load`."""
        rows = [
            (self._group, state.id, o, WAITING, e.failures, e.due + offset if e.due else 0.0)
            for o, e in entries
        ]
        self._upsert(db, state, rows)

    def fly(self, db: sqlite3.Connection, state: EmbeddedLane, offsets: Sequence[int]) -> None:
        """Note messages handed out again, so that a crash with them is counted."""
        if offsets:
            rows = [
                (self._group, state.id, o, FLYING, state.flying[o].failures, 0.0) for o in offsets
            ]
            self._upsert(db, state, rows)

    def settle(self, db: sqlite3.Connection, state: EmbeddedLane) -> None:
        """Note the watermark, and what is settled ahead of it."""
        ahead = state.settle()
        db.execute(
            "UPDATE hf_cursor SET committed = ? WHERE grp = ? AND lane = ?",
            (state.committed, self._group, state.id),
        )
        if state.marked:
            db.execute(
                "DELETE FROM hf_mark WHERE grp = ? AND lane = ? AND position < ?",
                (self._group, state.id, state.committed),
            )
            state.marked = bool(state.waiting or state.flying)
        self._upsert(db, state, [(self._group, state.id, o, DONE, 0, 0.0) for o in ahead])

    def move(self, db: sqlite3.Connection, state: EmbeddedLane, offset: int) -> None:
        """Put the group at *offset* under a new epoch, forgetting every exception."""
        where = (self._group, state.id)
        db.execute("DELETE FROM hf_mark WHERE grp = ? AND lane = ?", where)
        db.execute(
            "UPDATE hf_cursor SET committed = ?, fetched = ?, epoch = epoch + 1"
            " WHERE grp = ? AND lane = ?",
            (offset, offset, *where),
        )

    def end(self, db: sqlite3.Connection, state: EmbeddedLane) -> int:
        """Return the offset that the next message of the lane will get."""
        (end,) = db.execute("SELECT next FROM hf_lane WHERE id = ?", (state.id,)).fetchone()
        return int(end)

    def at_time(self, db: sqlite3.Connection, state: EmbeddedLane, moment: float, end: int) -> int:
        """Return the offset of the first message stored at or after *moment*, else *end*."""
        found = db.execute(
            "SELECT id - ? FROM hf_message WHERE id >= ? AND id < ? AND stored >= ?"
            " ORDER BY id LIMIT 1",
            (*_ids(state.id, 0, 0, end), moment),
        ).fetchone()
        return end if found is None else int(found[0])

    def _upsert(self, db: sqlite3.Connection, state: EmbeddedLane, rows: list[Any]) -> None:
        if rows:
            state.marked = True
            db.executemany(
                "INSERT OR REPLACE INTO hf_mark (grp, lane, position, state, failures, due)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                rows,
            )


def _ids(lane_id: int, base: int, first: int, end: int) -> tuple[int, int, int]:
    start = (lane_id << SHIFT) + base
    return start, start + first, start + end
