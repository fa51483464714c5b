"""What lies on a dead-letter topic as records: the same letters that the collector would store.

It runs on executors, batch by batch. A message without a readable envelope becomes a record of
its own group, as in the store; reports of replays that were handled are no letters and left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.dlq.replay.outcomes import report_in
from holdfast.dlq.topic.collector import letter_in, unreadable
from holdfast.errors import PoisonMessage
from holdfast.extras import driver
from holdfast.ports import Delivery, Lane
from holdfast.spark_jobs import records

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa

RAW = (
    "key binary, value binary, topic string, partition int, offset string, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>"
)
"""Messages as they lie on a topic, with the names of Spark's Kafka source."""


def record_in(delivery: Delivery) -> dict[str, Any] | None:
    """Return the record of *delivery*; None for a report that a replayed message was handled."""
    if report_in(delivery.message) is not None:
        return None
    try:
        letter = letter_in(delivery)
    except PoisonMessage as error:
        letter = unreadable(delivery, error)
    stored_at = delivery.timestamp
    if stored_at is None:
        stored_at = letter.history.last_failed_at
    return records.record_of(letter, stored_at=stored_at)


def decoded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the records in *batches* of Spark's Kafka source, for `mapInArrow`."""
    for batch in batches:
        found = [record_in(delivery_of(row)) for row in batch.to_pylist()]
        yield records.batch_of(record for record in found if record is not None)


def delivery_of(row: dict[str, Any]) -> Delivery:
    """Return a *row* of Spark's Kafka source as what an adapter would have delivered."""
    at = row["timestamp"]
    return Delivery(
        lane=Lane(row["topic"], row["partition"]),
        position=row["offset"],
        key=row["key"],
        body=row["value"],
        headers=[(pair["key"], pair["value"]) for pair in row["headers"] or ()],
        timestamp=None if at is None else at.timestamp(),
    )


def raw_batch(deliveries: Iterable[Delivery]) -> pa.RecordBatch:
    """Return *deliveries* as rows of `RAW`; `delivery_of` takes them."""
    pyarrow = driver("pyarrow", extra="spark")
    text, binary = pyarrow.string(), pyarrow.binary()
    pairs = pyarrow.list_(pyarrow.struct([("key", text), ("value", binary)]))
    moment = pyarrow.timestamp("us", tz="UTC")
    schema = pyarrow.schema(
        [("key", binary), ("value", binary), ("topic", text), ("partition", pyarrow.int32()),
         ("offset", text), ("timestamp", moment), ("headers", pairs)]
    )  # fmt: skip
    rows = [
        {
            "key": one.key, "value": one.body, "topic": one.lane.topic,
            "partition": one.lane.partition, "offset": str(one.position),
            "timestamp": records.moment(one.timestamp),
            "headers": [{"key": name, "value": value} for name, value in one.headers],
        }
        for one in deliveries
    ]  # fmt: skip
    return pyarrow.RecordBatch.from_pylist(rows, schema=schema)
