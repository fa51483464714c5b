"""The relay: publishes what the outbox holds, in order, at least once."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import Row, delete, select

from holdfast.cloudevents import from_wire
from holdfast.outbox.schema import outbox

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Engine

    from holdfast.message import Message
    from holdfast.ports import Published, Sink

_IDLE_SECONDS = 0.05


class Relay:
    """Moves committed events from the outbox table to a broker.

    A row is deleted only after the broker has taken its message: a crash in between
    publishes it again, and never loses it. Run one relay per database.
    """

    def __init__(self, engine: Engine, sink: Sink, *, batch: int = 500) -> None:
        self._engine = engine
        self._sink = sink
        self._batch = batch
        self._stop = threading.Event()

    def run(self) -> None:
        """Publish until `stop` is called."""
        while not self._stop.is_set():
            if self.run_once() == 0:
                self._stop.wait(_IDLE_SECONDS)

    def stop(self) -> None:
        """End `run` after the batch in hand."""
        self._stop.set()

    def run_once(self) -> int:
        """Publish one batch; return how many rows left the outbox."""
        with self._engine.connect() as connection:
            rows = connection.execute(
                select(outbox).order_by(outbox.c.seq).limit(self._batch)
            ).all()
        if not rows:
            return 0
        results = self._sink.publish([message(row) for row in rows])
        # Publish before deleting: a crash here duplicates, never loses.
        done = published(rows, results)
        with self._engine.begin() as connection:
            connection.execute(delete(outbox).where(outbox.c.seq.in_(done)))
        return len(done)


def published(rows: Sequence[Row[Any]], results: list[Published]) -> list[int]:
    """Return the rows that may go: each key's, up to its first that was not published."""
    stuck: set[str] = set()
    done = []
    for row, result in zip(rows, results, strict=True):
        if result.error is not None and row.aggregateid is not None:
            stuck.add(row.aggregateid)
        elif result.error is None and row.aggregateid not in stuck:
            done.append(row.seq)
    return done


def message(row: Row[Any]) -> Message:
    """Return the message that *row* holds."""
    return from_wire(
        topic=row.aggregatetype,
        key=None if row.aggregateid is None else row.aggregateid.encode(),
        body=row.payload,
        headers=[(n, None if v is None else v.encode("latin-1")) for n, v in row.headers],
        fallback_id=lambda: str(row.id),
        fallback_time=lambda: datetime.now(UTC),
    )
