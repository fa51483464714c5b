"""The Python data source `holdfast`: any broker adapter, and any SQL database, in Arrow batches.

    spark.read.format("holdfast").option("url", "redis://…").option("topic", "orders.billing.dlq")
    records.write.format("holdfast").option("url", "nats://…").option("topic", "…").mode("append")

Readers and writers are plain classes that run on executors. Only URLs without secrets travel in
options: `${NAME}` and `${file:…}` are looked up where the connection is made.
"""

from __future__ import annotations

import json
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

from holdfast.brokers import connect
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.store.rows import letter_of
from holdfast.dlq.topic.topic import to_topic
from holdfast.errors import BrokerDown, ConfigurationError, StaleDelivery, Unsupported
from holdfast.ports import BrokerPowers, Lane
from holdfast.spark_jobs import records
from holdfast.spark_jobs.decoding import raw_batch, record_in
from holdfast.spark_jobs.secrets import require_no_secret, revealed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from holdfast.ports import Broker, Delivery, Source

_BATCH = 500
_POLL_SECONDS = 1.0
_PATIENCE = 60.0
_START = datetime(1970, 1, 1, tzinfo=UTC)
GROUP = "holdfast-spark"
"""The beginning of the groups by which topics are read: one per partition, and reused."""


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("holdfast")` known to *spark*."""
    spark.dataSource.register(HoldfastDataSource)


class HoldfastDataSource(DataSource):
    """`holdfast`: options `url` and `topic`, or `url` and `table`."""

    @classmethod
    def name(cls) -> str:
        """Return the name by which Spark knows it."""
        return "holdfast"

    def schema(self) -> str:
        """Return the fields of records, or what the reader of a table was told."""
        return self.options.get("fields") or records.ddl()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return what plans and does the reading."""
        if "table" in self.options:
            return TableReader(self.options, schema.fieldNames())
        if self.options.get("raw") == "true":
            return RawTopicReader(self.options, schema.fieldNames())
        return TopicReader(self.options, schema.fieldNames())

    def writer(self, schema: StructType, overwrite: bool) -> TopicWriter:
        """Return what publishes records as dead letters."""
        if overwrite:
            raise ConfigurationError("a topic cannot be overwritten: write with mode append")
        if lacking := records.missing(schema.fieldNames()):
            raise ConfigurationError(
                f"only records can be written: {', '.join(lacking)} is missing"
            )
        return TopicWriter(self.options)


@dataclass
class LanePartition(InputPartition):
    """One lane of a topic, read by one task."""

    topic: str
    lane: int


class TopicReader(DataSourceReader):
    """Reads what is on a topic when the task starts; what comes meanwhile is for the next read."""

    def __init__(
        self, options: Mapping[str, str], names: list[str], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._url = require_no_secret(_option(options, "url"))
        self._topics = _topics(_option(options, "topic"))
        self._group = options.get("group", GROUP)
        self._names = names
        self._clock = clock

    def partitions(self) -> list[InputPartition]:
        """Return one partition per lane of the topics."""
        with closing(connect(revealed(self._url))) as broker:
            if not broker.caps.replay:
                raise Unsupported("read a topic from its beginning", broker.name)
            known = BrokerPowers.of(broker).topics() or {}
        missing = [topic for topic in self._topics if topic not in known]
        if missing:
            raise ConfigurationError(f"the broker has no topic {', '.join(missing)}")
        return [
            LanePartition(topic=topic, lane=lane)
            for topic in self._topics
            for lane in range(known[topic])
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one lane, a batch for each poll."""
        if not isinstance(partition, LanePartition):
            return  # Spark's stand-in where there are no partitions
        with closing(connect(revealed(self._url))) as broker:
            for deliveries in self._deliveries(broker, Lane(partition.topic, partition.lane)):
                batch = self.batch_of(deliveries)
                yield batch.select(self._names) if self._names != batch.schema.names else batch

    def batch_of(self, deliveries: list[Delivery]) -> pa.RecordBatch:
        """Return the records of *deliveries*."""
        found = [record_in(delivery) for delivery in deliveries]
        return records.batch_of(one for one in found if one is not None)

    def _deliveries(self, broker: Broker, lane: Lane) -> Iterator[list[Delivery]]:
        """Yield what *lane* holds now, by a group of its own, from the first message on."""
        group = f"{self._group}-{lane.partition}"
        with closing(broker.source([lane.topic], group=group)) as source:
            self._take(source, lane)
            source.seek(lane, time=_START)
            left = source.lag()[lane]
            quiet_since = self._clock.monotonic()
            while left > 0:
                batch = [one for one in source.poll(_BATCH, _POLL_SECONDS) if one.lane == lane]
                if batch:
                    left -= len(batch)
                    yield batch[: len(batch) + min(left, 0)]
                    with suppress(StaleDelivery):
                        # Settled, so that the broker may prune it: each read starts anew anyway.
                        source.accept(batch)
                    quiet_since = self._clock.monotonic()
                elif source.lag().get(lane, 0) == 0:
                    return  # gaps between offsets counted, and there is nothing more
                elif self._clock.monotonic() - quiet_since > _PATIENCE:
                    raise BrokerDown(f"{lane.topic} {lane.partition}: {left} messages do not come")
            source.flush()

    def _take(self, source: Source, lane: Lane) -> None:
        """Wait until *lane* is ours, and the others pause."""
        since = self._clock.monotonic()
        while lane not in source.assignment():
            early = source.poll(1, _POLL_SECONDS)
            for delivery in early:
                source.release(delivery, blame=False)
            if self._clock.monotonic() - since > _PATIENCE:
                raise BrokerDown(
                    f"{lane.topic} {lane.partition} is read by another member of {self._group}: "
                    "wait for that job, or name another group"
                )
        source.pause(one for one in source.assignment() if one != lane)


class RawTopicReader(TopicReader):
    """Reads messages as they lie on a topic, whatever they are; see `decoding.RAW`."""

    def batch_of(self, deliveries: list[Delivery]) -> pa.RecordBatch:
        """Return *deliveries* as rows."""
        return raw_batch(deliveries)


@dataclass
class _Sent(WriterCommitMessage):
    count: int


class TopicWriter(DataSourceArrowWriter):
    """Publishes records as dead letters, at least once: a retried task publishes its part again.

    Their ids stay, so the store keeps each once.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._url = require_no_secret(_option(options, "url"))
        self._topic = _option(options, "topic")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Return once the broker has taken all of this task."""
        count = 0
        with (
            closing(connect(revealed(self._url))) as broker,
            closing(BrokerPowers.of(broker).larger_sink(32_768)) as sink,
        ):
            for batch in iterator:
                for some in _slices(batch):
                    letters = [letter_of(records.row_of_record(one)) for one in some.to_pylist()]
                    results = sink.publish([to_topic(one, topic=self._topic) for one in letters])
                    for result in results:
                        if result.error is not None:
                            raise result.error
                    count += len(letters)
        return _Sent(count=count)


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for start in range(0, batch.num_rows, _BATCH):
        yield batch.slice(start, _BATCH)


@dataclass
class SeqRange(InputPartition):
    """The rows of a table from *low* up to, not including, *high*; all where it is None."""

    low: int | None
    high: int | None


class TableReader(DataSourceReader):
    """Reads a table with SQLAlchemy: for databases that have no JDBC driver at hand, as SQLite."""

    def __init__(self, options: Mapping[str, str], names: list[str]) -> None:
        self._url = require_no_secret(_option(options, "url"))
        self._table = _option(options, "table")
        self._column = options.get("column")
        self._partitions = int(options.get("partitions", "1"))
        self._names = names

    def partitions(self) -> list[InputPartition]:
        """Return ranges of the column, of equal width."""
        if self._column is None:
            return [SeqRange(low=None, high=None)]
        from sqlalchemy import column, func, select, table

        of: Any = column(self._column)
        with _engine(self._url) as db:
            query = select(func.min(of), func.max(of)).select_from(table(self._table))
            low, high = db.execute(query).one()
        if low is None:
            return [SeqRange(low=0, high=0)]
        step = max(1, -(-(high - low + 1) // self._partitions))
        return [SeqRange(low=start, high=start + step) for start in range(low, high + 1, step)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one range in batches, as the database has them."""
        import pyarrow
        from sqlalchemy import column, select, table

        if not isinstance(partition, SeqRange):
            return
        query: Any = select(*map(column, self._names)).select_from(table(self._table))
        if self._column is not None and partition.low is not None:
            of: Any = column(self._column)
            query = query.where(of >= partition.low, of < partition.high)
        with _engine(self._url) as db:
            schema = _arrow(db, self._table, self._names)
            for some in db.execution_options(yield_per=2000).execute(query).partitions():
                columns = list(zip(*some, strict=True))
                yield pyarrow.RecordBatch.from_arrays(
                    [
                        pyarrow.array(map(_fitting(of.type), values), of.type)
                        for values, of in zip(columns, schema, strict=True)
                    ],
                    schema=schema,
                )


def read_table(
    spark: SparkSession,
    url: str,
    name: str,
    *,
    column: str | None = None,
    partitions: int | None = None,
) -> DataFrame:
    """Return table *name* of the database at *url*, by SQLAlchemy on the executors."""
    register(spark)
    with _engine(url) as db:
        kinds = _kinds(db, name)
    reader = (
        spark.read.format("holdfast")
        .option("url", require_no_secret(url))
        .option("table", name)
        .option("fields", ", ".join(f"`{one}` {kind}" for one, kind in kinds.items()))
        .option("partitions", str(partitions or 4))
    )
    return (reader if column is None else reader.option("column", column)).load()


class _engine:  # noqa: N801 - used as a function, in `with`
    """A connection to the database at a URL, closed with its engine."""

    def __init__(self, url: str) -> None:
        from holdfast.db.engine import open_database

        self._engine = open_database(revealed(url))

    def __enter__(self) -> Any:
        self._connection = self._engine.connect()
        return self._connection

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._engine.dispose()


def _kinds(db: Any, name: str) -> dict[str, str]:
    """Return the columns of table *name* with their Spark types."""
    from sqlalchemy import inspect
    from sqlalchemy.exc import NoSuchTableError

    try:
        columns = inspect(db).get_columns(name)
    except NoSuchTableError as error:
        raise ConfigurationError(
            f"the database has no table {name}: holdfast db upgrade"
        ) from error
    return {one["name"]: _kind(one["type"]) for one in columns}


def _kind(of: Any) -> str:
    from sqlalchemy import Boolean, DateTime, Float, Integer, LargeBinary

    for known, kind in ((Boolean, "boolean"), (Integer, "bigint"), (Float, "double"),
                        (LargeBinary, "binary"), (DateTime, "timestamp")):  # fmt: skip
        if isinstance(of, known):
            return kind
    return "string"


def _arrow(db: Any, name: str, wanted: list[str]) -> pa.Schema:
    import pyarrow

    arrow = {"boolean": pyarrow.bool_(), "bigint": pyarrow.int64(), "double": pyarrow.float64(),
             "binary": pyarrow.binary(), "timestamp": pyarrow.timestamp("us", tz="UTC"),
             "string": pyarrow.string()}  # fmt: skip
    kinds = _kinds(db, name)
    return pyarrow.schema([(one, arrow[kinds[one]]) for one in wanted])


def _fitting(kind: Any) -> Any:
    """Return what makes a value one of *kind*: SQLite keeps whatever it was given."""
    import pyarrow

    if pyarrow.types.is_boolean(kind):
        return lambda value: None if value is None else bool(value)
    if pyarrow.types.is_string(kind):
        return lambda value: value if value is None or isinstance(value, str) else str(value)
    return lambda value: value


def _option(options: Mapping[str, str], name: str) -> str:
    value = options.get(name)
    if not value:
        raise ConfigurationError(f'the data source holdfast needs .option("{name}", …)')
    return value


def _topics(text: str) -> list[str]:
    return list(json.loads(text)) if text.startswith("[") else [text]
