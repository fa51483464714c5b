"""Dead letters stream from Kafka into the store, each once, whatever is lost or begun again."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import func, select

from holdfast.brokers import connect
from holdfast.cli import main
from holdfast.cli.migrations import Migrations
from holdfast.db.engine import open_database
from holdfast.dlq.store.groups import FailureGroups
from holdfast.dlq.store.schema import message
from holdfast.dlq.topic.topic import to_topic
from holdfast.errors import ConfigurationError
from holdfast.spark_jobs.streaming import StreamRequest, start_stream
from holdfast.testing import wait_until
from tests.spark.replaying import letters, url_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession
    from sqlalchemy.engine import Engine

    from holdfast.dlq.topic.stream import StreamCounts

TOPIC = "spark-stream.billing.dlq"


@pytest.fixture(scope="module")
def store(postgres: Any) -> Iterator[Engine]:
    """Open a store on PostgreSQL."""
    engine = open_database(postgres.database("streaming"))
    Migrations(engine).upgrade()
    yield engine
    engine.dispose()


def publish(url: str, count: int, start: int = 0) -> None:
    """Put dead letters on the topic."""
    made = letters(count, key=lambda n: f"k{n % 9}", start=start)
    with closing(connect(url)) as broker, closing(broker.sink()) as sink:
        for result in sink.publish([to_topic(one, topic=TOPIC) for one in made]):
            assert result.error is None


def counted(engine: Engine) -> tuple[int, int]:
    """Return how many letters there are, and how often they were dead-lettered together."""
    with engine.connect() as db:
        query = select(func.count(), func.coalesce(func.sum(message.c.occurrences), 0))
        return tuple(db.execute(query.select_from(message)).one())  # type: ignore[return-value]


def test_each_letter_is_stored_once_through_a_lost_checkpoint_and_while_more_come(
    spark: SparkSession, store: Engine, kafka: Any, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """What is there now, then again without Spark's memory of it, then as it comes."""
    with closing(connect(kafka.url)) as broker:
        broker.create_topic(TOPIC, partitions=2)
    publish(kafka.url, 40)
    told: list[StreamCounts] = []

    def request(checkpoint: str, every: float) -> StreamRequest:
        return StreamRequest(
            database=url_of(store, tmp_path), source=f"{kafka.url}?topic={TOPIC}", name="triage",
            checkpoint=str(tmp_path / checkpoint), every=every,
        )  # fmt: skip

    report = tmp_path / "stream.html"
    with pytest.raises(SystemExit) as ended:
        main(["spark", "stream", "--database", url_of(store, tmp_path), "--from",
              f"{kafka.url}?topic={TOPIC}", "--name", "triage", "--checkpoint",
              str(tmp_path / "first"), "--json", "--report", str(report)])  # fmt: skip
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["stored"] == 40
    assert "Stored by batch" in report.read_text()
    assert counted(store) == (40, 40)
    assert [one.pending for one in FailureGroups(store).listed()] == [40]

    query = start_stream(spark, request("lost", 0.1), tell=lambda _, found: told.append(found))
    try:
        wait_until(lambda: sum(one.passed for one in told) == 40, deadline=90)
        publish(kafka.url, 5, start=40)
        wait_until(lambda: sum(one.stored for one in told) == 5, deadline=90)
    finally:
        query.stop()
    assert counted(store) == (45, 45)


def test_a_stream_of_something_else_than_kafka_is_refused_with_the_command_for_it() -> None:
    """Structured Streaming needs offsets that can be read again."""
    with pytest.raises(ConfigurationError, match="holdfast dlq collect"):
        StreamRequest(
            database="sqlite:///x.db", source="redis://localhost?topic=orders.billing.dlq",
            name="triage", checkpoint="/tmp/x",  # noqa: S108
        )  # fmt: skip
