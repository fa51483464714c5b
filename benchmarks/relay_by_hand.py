"""A relay by hand, as fast as one thread of Python gets: what the lease engine is measured by.

It drains an outbox of PostgreSQL to Kafka and ends: rows by a binary cursor in one snapshot,
four batches on their way to the broker, each deleted while its owner still has the lease. It
renews no lease, parks no key, waits for no broker and tells nobody what it does.
"""

from __future__ import annotations

import gc
import sys
from collections import deque

import confluent_kafka
import msgspec
import psycopg

_BATCH, _IN_FLIGHT = 5_000, 4
_READ = (
    "DECLARE rows BINARY NO SCROLL CURSOR FOR SELECT seq, aggregatetype, aggregateid, payload,"
    " headers::text FROM holdfast_outbox ORDER BY seq"
)
_LEASE = "CREATE TABLE IF NOT EXISTS by_hand (owner int PRIMARY KEY, until timestamptz)"
_TAKE = (
    "INSERT INTO by_hand VALUES (1, now() + interval '1 hour')"
    " ON CONFLICT (owner) DO UPDATE SET until = excluded.until"
)
_DELETE = (
    "DELETE FROM holdfast_outbox WHERE seq BETWEEN %s AND %s"
    " AND EXISTS (SELECT FROM by_hand WHERE owner = 1 AND until > now())"
)


class Batch:
    """Rows on their way, and how many of them the broker has."""

    def __init__(self, first: int, last: int, count: int) -> None:
        self.first, self.last, self.left = first, last, count

    def taken(self, error: object, _record: object) -> None:
        """Count one acknowledgement."""
        assert error is None, error
        self.left -= 1


def main(database: str, kafka: str) -> None:
    """Drain the outbox."""
    gc.freeze()
    wire = msgspec.json.Decoder(list[tuple[str, str]]).decode
    settings = {"bootstrap.servers": kafka, "enable.idempotence": True, "linger.ms": 50}
    producer = confluent_kafka.Producer(settings)
    with (
        psycopg.connect(database) as reading,
        psycopg.connect(database, autocommit=True) as db,
    ):
        db.execute(_LEASE)
        db.execute(_TAKE)
        reading.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reading.execute(_READ)
        going: deque[Batch] = deque()
        while rows := reading.execute(f"FETCH {_BATCH} FROM rows", binary=True).fetchall():
            batch = Batch(rows[0][0], rows[-1][0], len(rows))
            going.append(batch)
            taken, produce = batch.taken, producer.produce
            for _, topic, key, body, headers in rows:
                while True:
                    try:
                        produce(topic, body, key, headers=wire(headers), on_delivery=taken)
                        break
                    except BufferError:
                        producer.poll(0.05)
            producer.poll(0)
            while len(going) >= _IN_FLIGHT:
                _delete(going.popleft(), producer, db)
        producer.flush()
        while going:
            _delete(going.popleft(), producer, db)


def _delete(batch: Batch, producer: confluent_kafka.Producer, db: psycopg.Connection) -> None:
    while batch.left:
        producer.poll(0.05)
    db.execute(_DELETE, (batch.first, batch.last))


if __name__ == "__main__":
    main(*sys.argv[1:])
