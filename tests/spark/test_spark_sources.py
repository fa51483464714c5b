"""Sources of records: databases by JDBC, Kafka by Spark's connector, brokers by our adapters."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from sqlalchemy import insert

from holdfast.brokers import connect
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterTopic, create_tables
from holdfast.dlq.store.rows import fingerprint_of, letter_of, row_of
from holdfast.dlq.store.schema import message
from holdfast.errors import ConfigurationError, DependencyDown
from holdfast.spark_jobs import records, topics
from holdfast.spark_jobs.archive import marks
from holdfast.spark_jobs.archive.adding import add
from holdfast.spark_jobs.archive.table import Archive
from holdfast.spark_jobs.data_source import HoldfastDataSource, TableReader, register
from holdfast.spark_jobs.errors import translated
from holdfast.spark_jobs.secrets import require_no_secret
from holdfast.spark_jobs.sources import SourceSpec, read
from holdfast.spark_jobs.topics import stream_kafka
from tests.servers.postgres import Postgres
from tests.servers.waiting import wait_until
from tests.spark_letters import NOW, files_of, lettered, stored

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from holdfast.dlq import DeadLetter


def letters_in(frame: DataFrame) -> list[DeadLetter]:
    """Return the letters of *frame*, sorted."""
    found = [letter_of(records.row_of_record(row.asDict())) for row in frame.collect()]
    return sorted(found, key=lambda one: one.dlq_id)


def by_id(letters: list[DeadLetter]) -> list[DeadLetter]:
    """Return *letters*, sorted."""
    return sorted(letters, key=lambda one: one.dlq_id)


def database(request: pytest.FixtureRequest, kind: str, name: str) -> str:
    """Return the URL of a new store on the server *kind*."""
    url: str = request.getfixturevalue(kind).database(name)
    engine = open_database(url)
    create_tables(engine)
    engine.dispose()
    return url


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_jdbc_reads_the_store_in_parts_and_whole(
    spark: SparkSession, request: pytest.FixtureRequest, kind: str
) -> None:
    """Every letter once, as it was put in: bytes, null keys, headers and the envelope."""
    url = database(request, kind, "spark_jdbc")
    originals = [lettered(n, payload=bytes([n, 0, 255])) for n in range(1, 40)]
    originals.append(lettered(40, key=None))
    engine = open_database(url)
    stored(engine, originals)
    engine.dispose()
    frame = read(spark, url, partitions=3)
    assert frame.rdd.getNumPartitions() == 3
    assert letters_in(frame) == by_id(originals)
    row = frame.where("key IS NULL").select("seq", "stored_at", "replayable").collect()
    assert [one["replayable"] for one in row] == [True]


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_no_late_commit_slips_past_the_mark(
    spark: SparkSession, request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    """A transaction has the lower number and commits last: its letter is archived all the same."""
    url = database(request, kind, "spark_late")
    engine = open_database(url)
    archive = Archive(spark, f"{tmp_path}/letters")
    slow, fast = lettered(1), lettered(2)
    with engine.connect() as late:
        late.execute(insert(message), [_row(slow)])
        stored(engine, [fast])
        first = add(archive, [url], patience=0.0)
        assert (first.new, len(first.unsettled)) == (1, 1)
        late.commit()
    second = add(archive, [url], patience=60.0)
    assert (second.new, second.unsettled) == (1, ())
    assert letters_in(archive.records()) == by_id([slow, fast])
    engine.dispose()


def _row(one: DeadLetter) -> dict[str, Any]:
    return row_of(one, fingerprint_of(one.failure), now=NOW.timestamp())


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_the_horizon_waits_for_those_that_are_open_and_for_no_later_ones(
    request: pytest.FixtureRequest, kind: str
) -> None:
    """The mark moves as soon as they have ended; a stream of new writers does not hold it."""
    url = database(request, kind, "spark_horizon")
    engine = open_database(url)
    stored(engine, [lettered(1)])
    assert marks.store_horizon(url, mark=0, patience=60.0).is_settled
    with engine.connect() as db:
        db.execute(insert(message), [_row(lettered(2))])
        stored(engine, [lettered(3)])
        held = marks.store_horizon(url, mark=0, patience=0.3)
        assert not held.is_settled
        assert held.settled == 0
        db.rollback()
    done = marks.store_horizon(url, mark=0, patience=60.0)
    assert (done.highest, done.is_settled) == (held.highest, True)
    engine.dispose()


def test_kafka_is_read_by_offsets_and_goes_on_where_it_ended(
    spark: SparkSession, kafka: Any, tmp_path: Path, event_log: Path, capsys: Any
) -> None:
    """Letters of two partitions, once; the next run reads what came since and nothing else."""
    topic = "sparkorders.billing.dlq"
    with closing(connect(kafka.url)) as broker:
        broker.create_topic(topic, partitions=2)
        home = DeadLetterTopic.on(broker)
        originals = [lettered(n, topic="sparkorders") for n in range(20)]
        for one in originals:
            home.put(one)
        source = f"{kafka.url}?topic={topic}"
        found = letters_in(read(spark, source))
        assert [one.dlq_id for one in found] == [one.dlq_id for one in by_id(originals)]
        assert [one.message for one in found] == [one.message for one in by_id(originals)]
        assert {one.origin for one in found} == {"collected"}

        archive = Archive(spark, f"{tmp_path}/letters")
        assert add(archive, [source]).new == 20
        home.put(lettered(20, topic="sparkorders"))
        home.put(originals[0])
        done = add(archive, [source])
        assert (done.read, done.new, done.known, done.total) == (2, 1, 1, 21)
        (tmp_path / "word").write_text("hunter-kafka-3")
        (tmp_path / "level").write_text("read_committed")
        guarded = (
            f"{source}&kafka.isolation.level=${{file:{tmp_path}/level}}"
            f"&kafka.ssl.key.password=${{file:{tmp_path}/word}}"
        )
        frame = read(spark, guarded)
        assert frame.count() == 22
        frame.explain("extended")
        assert "hunter-kafka-3" not in capsys.readouterr().out
        wait_until(lambda: any("KafkaRelation" in one for one in _logged(event_log)), "the log", 60)
        assert not any("hunter-kafka-3" in one for one in _logged(event_log))
        assert add(archive, [source]).read == 0

        query = (
            stream_kafka(spark, SourceSpec.parse(source))
            .writeStream.format("parquet")
            .option("path", f"{tmp_path}/stream")
            .option("checkpointLocation", f"{tmp_path}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(120)
        assert query.exception() is None
        assert read(spark, f"parquet:{tmp_path}/stream").count() == 22


TOPIC = "sparkadapter.billing.dlq"


def named(url: str, folder: Path) -> dict[str, str]:
    """Make the topic at *url* and return the options that name both, with the URL in a file."""
    with closing(connect(url)) as broker:
        broker.create_topic(TOPIC, partitions=2)
    (folder / "url").write_text(url)
    return {"url": f"${{file:{folder}/url}}", "topic": TOPIC}


@pytest.mark.parametrize("kind", ["sqlite", "nats", "redis", "kafka"])
def test_any_broker_that_can_replay_is_written_and_read_by_its_adapter(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    """Records become dead letters on a topic, and the same records again, as often as one reads.

    Readers and writers are plain classes: what Spark does with them is the same for every broker.
    """
    url = f"sqlite:///{tmp_path}/broker.db"
    if kind != "sqlite":
        url = request.getfixturevalue(kind).url
    source = HoldfastDataSource(named(url, tmp_path))
    schema = from_arrow_schema(records.arrow_schema())
    originals = [lettered(n, topic="sparkadapter") for n in range(12)]
    came = [records.record_of(one, stored_at=NOW.timestamp()) for one in originals]
    batches = [records.batch_of(came[:5]), records.batch_of(came[5:])]
    source.writer(schema, overwrite=False).write(iter(batches))
    reader = source.reader(schema)
    for _ in range(2):
        lanes = reader.partitions()
        assert len(lanes) == 2
        rows = [row for lane in lanes for batch in reader.read(lane) for row in batch.to_pylist()]
        found = by_id([letter_of(records.row_of_record(row)) for row in rows])
        assert [one.dlq_id for one in found] == [one.dlq_id for one in by_id(originals)]
        assert [one.message for one in found] == [one.message for one in by_id(originals)]


def test_spark_writes_and_reads_a_broker_by_the_data_source(
    spark: SparkSession, tmp_path: Path
) -> None:
    """`format("holdfast")`, with tasks that write and read through an adapter."""
    options = named(f"sqlite:///{tmp_path}/broker.db", tmp_path)
    register(spark)
    originals = [lettered(n, topic="sparkadapter") for n in range(12)]
    came = read(spark, files_of(tmp_path / "in", originals))
    came.write.format("holdfast").options(**options).mode("append").save()
    found = letters_in(spark.read.format("holdfast").options(**options).load())
    assert [one.dlq_id for one in found] == [one.dlq_id for one in by_id(originals)]
    assert [one.message for one in found] == [one.message for one in by_id(originals)]


def test_an_empty_table_of_sqlite_is_read_as_nothing(tmp_path: Path) -> None:
    """One range without rows: Spark would make up a partition of its own where there is none."""
    url = f"sqlite:///{tmp_path}/store.db"
    engine = open_database(url)
    create_tables(engine)
    engine.dispose()
    reader = TableReader({"url": url, "table": message.name, "column": "seq"}, ["seq", "dlq_id"])
    (nothing,) = reader.partitions()
    assert list(reader.read(nothing)) == []


def test_a_secret_is_in_no_plan_and_no_event_log(
    spark: SparkSession, request: pytest.FixtureRequest, event_log: Path, capsys: Any
) -> None:
    """A password in a database URL reaches the driver of the database, and nothing that is kept."""
    url = database(request, "postgres", "spark_secret")
    engine = open_database(url)
    stored(engine, [lettered(1)])
    engine.dispose()
    frame = read(spark, url.replace("postgres@", "postgres:hunter-secret-2@"))
    assert frame.count() == 1
    frame.explain("extended")
    capsys.readouterr().out.index("JDBCRelation")
    frame.select("dlq_id").explain("formatted")
    assert "hunter-secret-2" not in capsys.readouterr().out
    wait_until(lambda: any("JDBCRelation" in one for one in _logged(event_log)), "the log", 60)
    assert not any("hunter-secret-2" in one for one in _logged(event_log))


def _logged(folder: Path) -> list[str]:
    return [one.read_text(errors="replace") for one in folder.rglob("*") if one.is_file()]


def test_a_secret_that_would_travel_is_refused(spark: SparkSession) -> None:
    """The data source's options are shown by Spark: they name the secret, and do not hold it."""
    with pytest.raises(ConfigurationError, match=r"write \$\{NAME\}") as told:
        read(spark, "redis://:hunter2@host:6379?topic=orders.billing.dlq")
    assert "hunter2" not in str(told.value)


def test_a_store_that_dies_in_mid_job_is_told_and_leaves_the_archive_as_it_was(
    spark: SparkSession, private_server: Any, tmp_path: Path
) -> None:
    """The error says that a server went away and is worth another try; nothing is half there."""
    server: Postgres = private_server(Postgres)
    url = server.database("dying")
    engine = open_database(url)
    create_tables(engine)
    stored(engine, [lettered(n) for n in range(200)])
    archive = Archive(spark, f"{tmp_path}/letters")
    add(archive, [files_of(tmp_path / "a", [lettered(500)])])
    kept = archive.state()
    frame = read(spark, url, options={"fetchsize": "1"}, partitions=1)
    with engine.begin() as db:  # a store that answers slowly, row by row
        db.exec_driver_sql("ALTER TABLE holdfast_dlq_message RENAME TO slow")
        db.exec_driver_sql(
            "CREATE VIEW holdfast_dlq_message AS SELECT * FROM slow"
            " WHERE pg_sleep(1)::text IS NOT NULL"
        )
    engine.dispose()

    def die() -> None:
        wait_until(lambda: _reading(engine), "the job to read", 300)
        server.kill()

    killer = threading.Thread(target=die)
    killer.start()
    with pytest.raises(DependencyDown, match="went away"), translated(), archive.run() as run:
        archive.write(run, "new", frame)
    killer.join()
    engine.dispose()
    assert archive.state() == kept
    assert len(list((tmp_path / "letters/data").iterdir())) == 1


def _reading(engine: Any) -> bool:
    """Whether somebody but us is in the middle of reading letters."""
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE state = 'active'"
        " AND strpos(query, 'holdfast_dlq_message') > 0 AND pid <> pg_backend_pid()"
    )
    with engine.connect() as db:
        return bool(db.exec_driver_sql(query).scalar())


@pytest.mark.parametrize(
    ("word", "kind", "place"),
    [
        ("parquet:/data/x", "files", "/data/x"),
        ("/data/x", "files", "/data/x"),
        ("delta:s3a://bucket/x", "files", "s3a://bucket/x"),
        ("s3a://bucket/x", "files", "s3a://bucket/x"),
        ("archive:letters", "archive", "letters"),
        ("archive:hdfs://host/letters", "archive", "hdfs://host/letters"),
        ("postgresql+psycopg://u@h/db", "store", "postgresql+psycopg://u@h/db"),
        ("sqlite:///shop.db", "store", "sqlite:///shop.db"),
        ("sqlite:///shop.db?topic=a.b.dlq", "broker", "sqlite:///shop.db"),
        ("kafka://h:9092?topic=a&topic=b", "kafka", "h:9092"),
        ("kafka://h:9092?topic=a&via=adapter", "broker", "kafka://h:9092"),
        ("redis://h:6379/0?topic=a&x=1", "broker", "redis://h:6379/0?x=1"),
    ],
)
def test_a_source_is_one_word(word: str, kind: str, place: str) -> None:
    """What stands in front of it says what it is."""
    spec = SourceSpec.parse(word)
    assert (spec.kind, spec.place) == (kind, place)


@pytest.mark.parametrize(
    ("url", "is_shown"),
    [
        ("redis://:${WORD}@h:6379/0", True),
        ("postgresql+psycopg://app:${file:/run/word}@h/db", True),
        ("${STORE}", True),
        ("redis://:word@h:6379/0", False),
        ("redis://:word${WORD}@h:6379/0", False),
        ("kafka://h:9092?password=word", False),
        ("kafka://h:9092?password=${WORD}", True),
    ],
)
def test_a_name_of_a_secret_may_travel_and_a_secret_may_not(url: str, is_shown: bool) -> None:
    """Also where the name is the whole password."""
    if is_shown:
        assert require_no_secret(url) == url
        return
    with pytest.raises(ConfigurationError):
        require_no_secret(url)


def test_a_user_of_kafka_is_one_to_both_clients(tmp_path: Path) -> None:
    """Who is in the URL logs in: by Spark's client, and by ours, which asks for the ends."""
    (tmp_path / "word").write_text('s3"cret/@')
    spec = SourceSpec.parse(f"kafka://ann:${{file:{tmp_path}/word}}@h:9092?topic=a")
    assert (spec.place, spec.user, "cret" in repr(spec)) == ("h:9092", "ann", False)
    given = topics._settings(spec)
    assert given["kafka.bootstrap.servers"] == "h:9092"
    assert (given["kafka.security.protocol"], given["kafka.sasl.mechanism"]) == (
        "SASL_SSL",
        "PLAIN",
    )
    assert given["kafka.sasl.jaas.config"] == (
        "org.apache.kafka.common.security.plain.PlainLoginModule required"
        ' username="ann" password="s3\\"cret/@";'
    )
    own = SourceSpec.parse("kafka://a%40b:p%2Fw@h?topic=a&kafka.sasl.mechanism=SCRAM-SHA-512"
                           "&kafka.security.protocol=SASL_PLAINTEXT")  # fmt: skip
    given = topics._settings(own)
    assert given["kafka.security.protocol"] == "SASL_PLAINTEXT"
    assert 'scram.ScramLoginModule required username="a@b"' in given["kafka.sasl.jaas.config"]


@pytest.mark.parametrize(
    "setting", ["kafka.ssl.truststore.location=/x.jks", "kafka.ssl.keystore.location=/x.p12"]
)
def test_a_setting_that_only_sparks_client_knows_is_no_reason_to_connect_in_the_clear(
    setting: str,
) -> None:
    """The ends of a topic are asked by our client: it says what it cannot do."""
    spec = SourceSpec.parse(f"kafka://h:9092?topic=a&kafka.security.protocol=SSL&{setting}")
    with pytest.raises(ConfigurationError, match="via=adapter"):
        topics.kafka_ends(spec)


def test_a_broker_without_a_topic_is_told_how_to_name_one() -> None:
    """It would be read as nothing at all."""
    with pytest.raises(ConfigurationError, match="topic=orders"):
        SourceSpec.parse("redis://host:6379")
