"""A database whose tables are captured, and what was told of them."""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine, text

from holdfast.outbox.cdc import Cdc
from holdfast.outbox.cdc.events import ChangeEvent, change_event
from holdfast.outbox.wal import drop_slot
from holdfast.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

    from tests.servers import Postgres
    from tests.wal.shop import Recorder


class Source:
    """A database with a table, and a name for what is captured of it."""

    def __init__(self, engine: Engine, server: str) -> None:
        self.engine = engine
        self.server = server
        self.slot = f"holdfast_cdc_{server}"
        self.run("CREATE TABLE item (id int PRIMARY KEY, name text)")

    @property
    def url(self) -> str:
        """The database's address."""
        return self.engine.url.render_as_string(hide_password=False)

    def run(self, *statements: str) -> None:
        """Commit *statements* in one transaction."""
        with self.engine.begin() as db:
            for statement in statements:
                db.execute(text(statement))

    def ask(self, query: str) -> Any:
        """Return the one value of *query*."""
        with self.engine.connect() as db:
            return db.execute(text(query)).scalar()

    def cdc(self, sink: Recorder, *tables: str, **options: Any) -> Cdc:
        """Return a capture."""
        return Cdc(self.engine, sink, tables=tables or ["item"], server=self.server, **options)

    def drop_slot(self) -> bool:
        """Drop the slot; return whether the database has none any more."""
        drop_slot(self.engine, self.slot)
        slots = "SELECT 1 FROM pg_replication_slots WHERE database = current_database()"
        return self.ask(slots) is None


@contextmanager
def captured(postgres: Postgres, name: str) -> Iterator[Source]:
    """Yield a database of its own for the test *name*; its slot goes with it."""
    own = f"cdc_{zlib.crc32(name.encode())}"
    source = Source(create_engine(postgres.database(own)), own)
    try:
        yield source
    finally:
        wait_until(source.drop_slot, what="the slot is dropped")
        source.engine.dispose()


def events(sink: Recorder) -> list[ChangeEvent]:
    """Return what was published."""
    return [change_event(message) for message in sink.messages]


def told(sink: Recorder) -> list[tuple[str | None, Any, Any]]:
    """Return op, key and the new name of every event."""
    return [
        (event.op, (event.key or {}).get("id"), (event.after or {}).get("name"))
        for event in events(sink)
    ]
