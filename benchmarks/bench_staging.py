"""Staging many events at once, against psycopg's `executemany` of the same rows."""

from __future__ import annotations

import json
import uuid
import zlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session

from figures import Figure, Goal, compare, rate
from holdfast.db.engine import open_database
from holdfast.outbox import Event, Outbox, create_tables
from holdfast.outbox.schema import SHARDS
from tests.servers import Postgres

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

BODY = b"x" * 300
COUNT, BATCH = 20_000, 5_000
TOPIC, TYPE, SOURCE = "orders", "OrderPlaced", "bench"
KEYS = [f"key-{n % 997}" for n in range(BATCH)]
_INSERT = (
    "INSERT INTO holdfast_outbox (id, aggregatetype, aggregateid, type, payload, headers, shard)"
    " VALUES (%s, %s, %s, %s, %s, %s, %s)"
)


def figures() -> Iterator[Figure]:
    """Measure a Session and a Connection, in transactions of 5,000 events."""
    with Postgres() as postgres:
        engine = open_database(postgres.database("bench_staging"))
        create_tables(engine)
        for name, ours in (("Connection", _by_connection), ("Session", _by_session)):
            yield compare(
                f"bulk staging, add_all on a {name}",
                ours=lambda ours=ours: _emptied(engine, ours),
                peer=lambda: _emptied(engine, _by_hand),
                unit="rows/s",
                goal=Goal(at_least=0.7),
                detail=f"PostgreSQL, {COUNT} events of 300 B in transactions of {BATCH}, commit to "
                "disk; the peer makes the same rows by hand (uuid4, json.dumps of the same "
                "headers, shard) and inserts them with psycopg's executemany",
                rounds=7,
            )
        engine.dispose()


def _emptied(engine: Engine, stage: Any) -> float:
    with engine.begin() as db:
        db.exec_driver_sql("TRUNCATE holdfast_outbox")

    def work() -> None:
        for _ in range(COUNT // BATCH):
            stage(engine)

    return rate(work, COUNT)


def _by_connection(engine: Engine) -> None:
    with engine.begin() as db:
        Outbox(source=SOURCE).add_all(db, _events())


def _by_session(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        Outbox(source=SOURCE).add_all(session, _events())


def _events() -> list[Event]:
    return [Event(body=BODY, topic=TOPIC, key=key, type=TYPE) for key in KEYS]


def _by_hand(engine: Engine) -> None:
    raw: Any = engine.raw_connection()
    try:
        with raw.cursor() as cursor:
            cursor.executemany(_INSERT, [_row(key) for key in KEYS])
        raw.commit()
    finally:
        raw.close()


def _row(key: str) -> tuple[Any, ...]:
    own = uuid.uuid4()
    id_ = str(own)
    headers = [
        ["ce_specversion", "1.0"],
        ["ce_id", id_],
        ["ce_type", TYPE],
        ["ce_source", SOURCE],
        ["ce_time", datetime.now(UTC).isoformat()],
        ["ce_correlationid", id_],
        ["ce_partitionkey", key],
        ["content-type", "application/octet-stream"],
    ]
    shard = zlib.crc32(f"{TOPIC}\x1f{key}".encode()) % SHARDS
    return own, TOPIC, key, TYPE, BODY, json.dumps(headers), shard


if __name__ == "__main__":
    for figure in figures():
        print(figure)
