"""What still stands in the database of a run, and who could move it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sqlalchemy import func, select

from holdfast.db.sql import statements
from holdfast.outbox.schema import SHARDS, delayed, outbox, parked, shard
from tests.checker.verdict import Row

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

_TABLES = (outbox, delayed, parked)


class Places:
    """Where an event can be that was committed and has not been published."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._now = statements("holdfast.outbox", engine.dialect.name)["now"]

    def counts(self) -> dict[str, int]:
        """Return how much stands where; all zero once everything is published and owned."""
        with self._engine.connect() as db:
            found = {
                table.name: int(db.execute(select(func.count()).select_from(table)).scalar_one())
                for table in _TABLES
            }
            found["shards without an owner"] = SHARDS - len(self._owners(db))
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
