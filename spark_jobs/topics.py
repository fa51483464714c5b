"""Dead-letter topics as sources: Kafka by Spark's own connector, other brokers by our adapters.

A batch read has an end that is fixed before it starts: what is published meanwhile is for the
next one. `Offsets` are that end, and where the next read goes on.
"""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from holdfast.errors import ConfigurationError
from holdfast.spark_jobs import records
from holdfast.spark_jobs.decoding import RAW, decoded
from holdfast.spark_jobs.secrets import require_no_secret, revealed
from holdfast.spark_jobs.session import require

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

    from holdfast.spark_jobs.sources import SourceSpec

Offsets = dict[str, dict[str, int]]
"""The next offset by topic and partition, as Spark writes them."""
_OWN = ("via",)
_PROTOCOL, _MECHANISM = "kafka.security.protocol", "kafka.sasl.mechanism"
_LOGIN, _TRUST_TYPE = "kafka.sasl.jaas.config", "kafka.ssl.truststore.type"
_SHARED = {
    _PROTOCOL: "security_protocol",
    _MECHANISM: "sasl_mechanism",
    "kafka.ssl.truststore.location": "ssl_cafile",
}
"""What both clients know, under the name that Holdfast's own has for it."""
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
    return {
        "kafka.bootstrap.servers": spec.place,
        "subscribe": ",".join(spec.topics),
        "includeHeaders": "true",
        "failOnDataLoss": "true",
        "kafka.isolation.level": "read_committed",
        **_login(spec),
        **_given(spec),
    }


def _given(spec: SourceSpec) -> dict[str, str]:
    """Return the settings of Spark's Kafka client that *spec* names, with what they stand for."""
    return {name: revealed(value) for name, value in spec.options.items() if name not in _OWN}


def _login(spec: SourceSpec) -> dict[str, str]:
    """Return what a user in the URL means, the same as to Holdfast's own adapter."""
    if not spec.user:
        return {}
    mechanism = _given(spec).get(_MECHANISM, "PLAIN")
    module = "scram.ScramLoginModule" if mechanism.startswith("SCRAM") else "plain.PlainLoginModule"
    name, word = (json.dumps(revealed(one), ensure_ascii=False)
                  for one in (spec.user, spec.password))  # fmt: skip
    return {
        _PROTOCOL: "SASL_SSL",
        _MECHANISM: mechanism,
        _LOGIN: f"org.apache.kafka.common.security.{module} required username={name} "
        f"password={word};",
    }


def _records(raw: DataFrame) -> DataFrame:
    return raw.select(*_RAW).mapInArrow(decoded, records.ddl())


def kafka_ends(spec: SourceSpec) -> Offsets:
    """Return where the topics of *spec* end now; asked by Holdfast's own client."""
    from holdfast.brokers import connect

    ends: Offsets = {topic: {} for topic in spec.topics}
    who = ""
    if spec.user:
        who = ":".join(quote(revealed(one), safe="") for one in (spec.user, spec.password)) + "@"
    with closing(connect(f"kafka://{who}{spec.place}", **_own_client(spec))) as broker:
        found: Any = broker
        for lane, end in found.ends(spec.topics).items():
            ends[lane.topic][str(lane.partition)] = int(end)
    return ends


def _own_client(spec: SourceSpec) -> dict[str, str]:
    """Return the security settings of *spec* under the names of the client of our adapter."""
    found = {}
    given = _given(spec)
    for name, value in given.items():
        if name in _SHARED:
            found[_SHARED[name]] = value
        elif name != _TRUST_TYPE and name.startswith(("kafka.sasl.", "kafka.ssl.")):
            raise ConfigurationError(_unknown(name))
    if "ssl_cafile" in found and given.get(_TRUST_TYPE, "JKS").upper() != "PEM":
        raise ConfigurationError(_unknown(_TRUST_TYPE))
    return found


def _unknown(name: str) -> str:
    return (
        f"{name}: the end of a topic is asked by Holdfast's own client, which does not know this "
        "setting; write the user into the URL, kafka://user:${NAME}@host:9092, and trust by "
        f"{_TRUST_TYPE}=PEM, or read by the adapter with &via=adapter"
    )


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
