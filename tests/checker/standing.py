"""What still stands in the database of a run, and who could move it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sqlalchemy import func, select, text

from holdfast.outbox.schema import SHARDS, delayed, outbox, parked, shard
from holdfast.sql import statements
from tests.checker.verdict import Row

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

_TABLES = (outbox, delayed, parked)
_LOG_END = text("SELECT CAST(pg_current_wal_insert_lsn() AS text)")
_UNCONFIRMED = text(
    "SELECT greatest(0, CAST(:end AS pg_lsn) - confirmed_flush_lsn) FROM pg_replication_slots"
    " WHERE database = current_database()"
)


class Places:
    """Where an event can be that was committed and has not been published.

    Made when the last event was committed; *log* says that events may have no row, so that
    the log is to be confirmed as far as it goes now.
    """

    def __init__(self, engine: Engine, *, log: bool) -> None:
        self._engine = engine
        self._now = statements("holdfast.outbox", engine.dialect.name)["now"]
        self._end: str | None = None
        if log:
            with engine.connect() as db:
                self._end = db.execute(_LOG_END).scalar_one()

    def counts(self) -> dict[str, int]:
        """Return how much stands where; all zero once everything is published and owned."""
        with self._engine.connect() as db:
            found = {
                table.name: int(db.execute(select(func.count()).select_from(table)).scalar_one())
                for table in _TABLES
            }
            found["shards without an owner"] = SHARDS - len(self._owners(db))
            if self._end is not None:
                left = db.execute(_UNCONFIRMED, {"end": self._end}).scalar_one()
                found["bytes of the log that are not confirmed"] = int(left)
        return found

    def rows(self) -> list[Row]:
        """Return every event that is in a table, with the relay that may publish its shard."""
        found: list[Row] = []
        with self._engine.connect() as db:
            owners = self._owners(db)
            for table in _TABLES:
                for row in db.execute(select(table).order_by(table.c.seq)).mappings():
                    event = json.loads(row["payload"])
                    found.append(
                        Row(
                            event=(event["key"], event["n"]),
                            table=table.name,
                            shard=row["shard"],
                            owner=owners.get(row["shard"]),
                            why=": ".join(filter(None, (row.get("state"), row.get("error")))),
                        )
                    )
        return found

    def _owners(self, db: Connection) -> dict[int, str]:
        """Return the relays whose leases have not run out, by shard."""
        now = float(db.execute(self._now).scalar_one())
        held = select(shard.c.shard, shard.c.owner).where(
            shard.c.owner.is_not(None), shard.c.until >= now
        )
        return {row.shard: row.owner for row in db.execute(held)}
