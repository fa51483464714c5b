"""Dead-letter topics as sources: Kafka by Spark's own connector, other brokers by our adapters.

A batch read has an end that is fixed before it starts: what is published meanwhile is for the
next one. `Offsets` are that end, and where the next read goes on.
"""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError
from holdfast.spark_jobs import records
from holdfast.spark_jobs.decoding import RAW, decoded
from holdfast.spark_jobs.secrets import require_no_secret
from holdfast.spark_jobs.session import require

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

    from holdfast.spark_jobs.sources import SourceSpec

Offsets = dict[str, dict[str, int]]
"""The next offset by topic and partition, as Spark writes them."""
_OWN = ("via",)
_RAW = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")


def read_kafka(
    spark: SparkSession,
    spec: SourceSpec,
    *,
    start: Offsets | None = None,
    end: Offsets | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return the records between *start* and *end*; all that the topics hold unless given.

    *start* that Kafka has deleted already is an error, not a silent gap. Only committed
    transactions are read.
    """
    return _records(raw_kafka(spark, spec, start=start, end=end, options=options))


def raw_kafka(
    spark: SparkSession,
    spec: SourceSpec,
    *,
    start: Offsets | None = None,
    end: Offsets | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return what lies on the topics between *start* and *end*, not decoded."""
    require(spark, "kafka")
    reader = (
        spark.read.format("kafka")
        .options(**_settings(spec), **dict(options or {}))
        .option("startingOffsets", "earliest" if not start else json.dumps(start))
        .option("endingOffsets", "latest" if end is None else json.dumps(end))
    )
    return reader.load().select(*_RAW)


def stream_kafka(
    spark: SparkSession, spec: SourceSpec, *, options: Mapping[str, str] | None = None
) -> DataFrame:
    """Return the records of the topics as a stream, from their beginning on."""
    return _records(raw_stream(spark, spec, options=options))


def raw_stream(
    spark: SparkSession, spec: SourceSpec, *, options: Mapping[str, str] | None = None
) -> DataFrame:
    """Return what lies on the topics as a stream, with offsets and headers, not decoded."""
    require(spark, "kafka")
    reader = (
        spark.readStream.format("kafka")
        .options(**_settings(spec))
        .option("startingOffsets", "earliest")
        .options(**dict(options or {}))
    )
    return reader.load().select(*_RAW)


def _settings(spec: SourceSpec) -> dict[str, str]:
    unknown = [name for name in spec.options if not name.startswith("kafka.") and name not in _OWN]
    if unknown:
        raise ConfigurationError(
            f"{', '.join(unknown)}: settings of Spark's Kafka client begin with kafka., e.g. "
            "kafka.security.protocol=SSL; ?via=adapter reads by Holdfast's adapter and its settings"
        )
    given = {name: value for name, value in spec.options.items() if name.startswith("kafka.")}
    return {
        "kafka.bootstrap.servers": spec.place,
        "subscribe": ",".join(spec.topics),
        "includeHeaders": "true",
        "failOnDataLoss": "true",
        "kafka.isolation.level": "read_committed",
        **given,
    }


def _records(raw: DataFrame) -> DataFrame:
    return raw.select(*_RAW).mapInArrow(decoded, records.ddl())


def kafka_ends(spec: SourceSpec) -> Offsets:
    """Return where the topics of *spec* end now; asked by Holdfast's own client."""
    from holdfast.brokers import connect

    ends: Offsets = {topic: {} for topic in spec.topics}
    with closing(connect(f"kafka://{spec.place}")) as broker:
        found: Any = broker
        for lane, end in found.ends(spec.topics).items():
            ends[lane.topic][str(lane.partition)] = int(end)
    return ends


def read_broker(spark: SparkSession, spec: SourceSpec, *, raw: bool = False) -> DataFrame:
    """Return the records of the topics by the adapter of the broker: one task per partition.

    *raw*: what lies on them, not decoded.
    """
    from holdfast.spark_jobs.data_source import register

    register(spark)
    reader = (
        spark.read.format("holdfast")
        .option("url", require_no_secret(spec.place))
        .option("topic", json.dumps(spec.topics))
    )
    return (reader.option("raw", "true").option("fields", RAW) if raw else reader).load()
