"""Where records come from: one function reads them, whatever they are kept in.

A source is written as one word:

- `parquet:PATH`, `delta:PATH`, `FORMAT:PATH`: files or tables that the session can read;
- `archive:PATH`: the newest state of an archive of dead letters;
- `postgresql+psycopg://…`, `mysql+pymysql://…`, `sqlite:///…`: the SQL store;
- `kafka://host:9092?topic=orders.billing.dlq`: a dead-letter topic, by Spark's connector;
- any other broker URL with `?topic=…`: a dead-letter topic, by Holdfast's own adapter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from holdfast.errors import ConfigurationError
from holdfast.spark_jobs.files import read_files
from holdfast.spark_jobs.secrets import hidden
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

_WORD = re.compile(r"([a-z][a-z0-9_.]*):(?!//)(.+)", re.DOTALL)
_FILE_SYSTEMS = ("file", "s3a", "s3", "gs", "hdfs", "abfs", "abfss", "wasbs", "dbfs", "viewfs")
_DATABASES = ("postgresql", "mysql", "mariadb", "sqlite")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """A source, read from its word: `kind` is files, archive, store, kafka or broker."""

    kind: str
    place: str = field(repr=False)
    format: str = ""
    topics: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    user: str = ""
    password: str = field(default="", repr=False)
    """Of Kafka, perhaps as references; other servers have both in their `place`."""

    @classmethod
    def parse(cls, text: str, *, format: str | None = None) -> SourceSpec:  # noqa: A002
        """Return the source that *text* names; *format* says how files are read."""
        if not text:
            raise ConfigurationError("the source is empty: write e.g. parquet:letters/")
        scheme, is_url, _ = text.partition("://")
        if is_url and ":" not in scheme:
            if scheme in _FILE_SYSTEMS:
                return cls(kind="files", place=text, format=format or "parquet")
            return cls._server(text, scheme)
        word = _WORD.fullmatch(text)
        if word is None:
            return cls(kind="files", place=text, format=format or "parquet")
        if word[1] == "archive":
            return cls(kind="archive", place=word[2])
        return cls(kind="files", place=word[2], format=format or word[1])

    @classmethod
    def _server(cls, text: str, scheme: str) -> SourceSpec:
        bare, shown = hidden(text)  # or `${file:/run/x}` in a password would end the host
        url = urlsplit(bare)
        given = [(name, shown(value)) for name, value in parse_qsl(url.query, True)]
        topics = tuple(value for name, value in given if name == "topic")
        if not topics:
            if scheme.partition("+")[0] in _DATABASES:
                return cls(kind="store", place=text)
            raise ConfigurationError(
                f"{mask(text)}: name the dead-letter topic, {mask(text)}?topic=orders.billing.dlq"
            )
        rest = [(name, value) for name, value in given if name != "topic"]
        if scheme == "kafka" and dict(rest).get("via") != "adapter":
            user, password = (shown(unquote(one or "")) for one in (url.username, url.password))
            place = shown(url.netloc.rpartition("@")[2])
            return cls(kind="kafka", place=place, topics=topics, options=dict(rest), user=user,
                       password=password)  # fmt: skip
        options = dict(rest)
        options.pop("via", None)
        # The query that is left belongs to the adapter; the rest stays to the letter.
        query = urlencode(options, safe="${}:/.")
        place = text.partition("?")[0] + (f"?{query}" if query else "")
        return cls(kind="broker", place=place, topics=topics)


def read(
    spark: SparkSession,
    source: str | SourceSpec,
    *,
    format: str | None = None,  # noqa: A002
    partitions: int | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return the records of *source*, upgraded to this version; nothing is read yet.

    *options* go to Spark's reader untouched. `ConfigurationError` for what are no records.
    """
    spec = SourceSpec.parse(source, format=format) if isinstance(source, str) else source
    given = dict(options or {})
    match spec.kind:
        case "files":
            return read_files(spark, spec.place, spec.format, given)
        case "archive":
            from holdfast.spark_jobs.archive.table import Archive

            return Archive(spark, spec.place).records()
        case "store":
            from holdfast.spark_jobs.store import read_store

            return read_store(spark, spec.place, partitions=partitions, options=given)
        case "kafka":
            from holdfast.spark_jobs.topics import read_kafka

            return read_kafka(spark, spec, options=given)
        case _:
            from holdfast.spark_jobs.topics import read_broker

            return read_broker(spark, spec)
