"""The `stream` job: dead letters go from their topics into the store as they come.

Structured Streaming reads the topics of Kafka; every batch is stored by the functions of the
collector, so groups, figures and triage are those of any other letter. Offsets are kept with the
letters, in one transaction, so each is stored once through restarts, killed tasks, a second driver
and a lost checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from holdfast.db.engine import open_database
from holdfast.dlq.destination import DeadLetterStore
from holdfast.dlq.store.counters import fold
from holdfast.dlq.topic.stream import StreamCollector, StreamCounts
from holdfast.errors import ConfigurationError
from holdfast.spark_jobs.arrow import schema_of
from holdfast.spark_jobs.decoding import delivery_of
from holdfast.spark_jobs.secrets import require_no_secret, revealed
from holdfast.spark_jobs.sources import SourceSpec
from holdfast.spark_jobs.topics import raw_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from holdfast.ports import Delivery


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """What is streamed, where to, and where Spark remembers how far it is."""

    database: str
    source: str
    """`kafka://host:9092?topic=orders.billing.dlq`, as Spark's own connector reads it."""
    name: str
    """By which the store knows the stream: the same name goes on where that one was."""
    checkpoint: str
    every: float | None = None
    """Seconds between batches; None: store what is there now, then end."""

    def __post_init__(self) -> None:
        require_no_secret(self.database)
        if SourceSpec.parse(self.source).kind != "kafka":
            raise ConfigurationError(
                "a stream reads Kafka by Spark's connector: kafka://host:9092?topic=…; for other "
                "brokers run  holdfast dlq collect"
            )
        if self.every is not None and self.every < 0:
            raise ConfigurationError(f"every {self.every:g} s: use 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBatch:
    """Stores one part of a batch on an executor: whole partitions, in the order of offsets."""

    SCHEMA: ClassVar[str] = "stored bigint, confirmed bigint, passed bigint, unreadable bigint"

    database: str
    name: str
    batch: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield what became of the messages."""
        import pyarrow

        engine = open_database(revealed(self.database))
        try:
            collector = StreamCollector(store=DeadLetterStore(engine), name=self.name)
            found = collector.collect(self.batch, _deliveries(batches))
        finally:
            engine.dispose()
        row = {name: getattr(found, name) for name in StreamCounts.__slots__}
        yield pyarrow.RecordBatch.from_pylist([row], schema=schema_of(self.SCHEMA))


def _deliveries(batches: Iterator[pa.RecordBatch]) -> Iterator[Delivery]:
    for batch in batches:
        for row in batch.to_pylist():
            yield delivery_of(row)


def store_batch(frame: DataFrame, request: StreamRequest, batch: int) -> StreamCounts:
    """Store the messages of *frame*, which are batch number *batch* of the stream."""
    work = StoreBatch(database=request.database, name=request.name, batch=batch)
    rows = (
        # All of a partition to one task, whatever divided it: its offsets must rise.
        frame.repartition("topic", "partition")
        .sortWithinPartitions("topic", "partition", "offset")
        .mapInArrow(work, StoreBatch.SCHEMA)
        .collect()
    )
    return sum((StreamCounts(**row.asDict()) for row in rows), StreamCounts())


def start_stream(
    spark: SparkSession,
    request: StreamRequest,
    *,
    tell: Callable[[int, StreamCounts], object] | None = None,
    options: Mapping[str, str] | None = None,
) -> StreamingQuery:
    """Start the stream and return Spark's query; *tell* hears of every batch."""

    def store(frame: DataFrame, batch: int) -> None:
        found = store_batch(frame, request, batch)
        engine = open_database(revealed(request.database))
        try:
            fold(engine, batches=2)
        finally:
            engine.dispose()
        if tell is not None:
            tell(batch, found)

    raw = raw_stream(spark, SourceSpec.parse(request.source), options=options)
    writer = (
        raw.writeStream.queryName(f"holdfast {request.name}")
        .option("checkpointLocation", request.checkpoint)
        .foreachBatch(store)
    )
    if request.every is None:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{request.every} seconds").start()
