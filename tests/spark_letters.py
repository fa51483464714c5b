"""Dead letters for the tests of Spark jobs: as files of records, and in stores."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyarrow import parquet
from sqlalchemy import insert

from holdfast.dlq.store.rows import fingerprint_of, row_of
from holdfast.dlq.store.schema import message
from holdfast.spark_jobs import records
from tests.dead_letters import letter

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from holdfast.dlq import DeadLetter

NOW = datetime(2026, 11, 10, 12, tzinfo=UTC)


class StillClock:
    """A clock that stands still."""

    def __init__(self, at: datetime) -> None:
        self._at = at

    def now(self) -> datetime:
        return self._at


def lettered(number: int, at: datetime = NOW, **more: Any) -> DeadLetter:
    """Return a letter of an event at *at*, of a subject if given."""
    subject = more.pop("subject", None)
    found = letter(number, clock=StillClock(at), **more)
    governance = msgspec.structs.replace(found.governance, subject=subject)
    return msgspec.structs.replace(found, governance=governance)


def files_of(folder: Path, letters: list[DeadLetter], **more: Any) -> str:
    """Write *letters* as a Parquet file of records and return the source that reads it."""
    found = [records.record_of(one, stored_at=one.history.last_failed_at) | more for one in letters]
    folder.mkdir(exist_ok=True, parents=True)
    name = f"{len(list(folder.iterdir()))}.parquet"
    parquet.write_table(pa.Table.from_batches([records.batch_of(found)]), folder / name)
    return f"parquet:{folder}"


def stored(engine: Engine, letters: list[DeadLetter]) -> None:
    """Put *letters* into the store, fast."""
    rows = [row_of(one, fingerprint_of(one.failure), now=NOW.timestamp()) for one in letters]
    with engine.begin() as db:
        db.execute(insert(message), rows)
