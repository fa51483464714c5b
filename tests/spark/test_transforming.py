"""A whole topic or archive goes to another through a versioned transform: all of it, in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest
from pyarrow import parquet

from holdfast.brokers import connect
from holdfast.cli import main
from holdfast.cli.exits import EXIT_FIX, EXIT_PARTLY, EXIT_STOPPED
from holdfast.errors import (
    BrokerDown,
    ConfigurationError,
    MessageTooLarge,
    Transient,
    UnknownTopic,
)
from holdfast.message import Message
from holdfast.ports import Delivery, Lane, Published
from holdfast.spark_jobs import records
from holdfast.spark_jobs.archive.adding import add
from holdfast.spark_jobs.archive.state import ArchiveBusy, LocalFolder, NumberedLog
from holdfast.spark_jobs.archive.table import Archive
from holdfast.spark_jobs.decoding import delivery_of, raw_batch
from holdfast.spark_jobs.transform_tasks import (
    HEADER,
    ApplyTransform,
    NumberLane,
    PublishRound,
    load_work,
    message_in,
)
from holdfast.spark_jobs.transforming import (
    CountsDiffer,
    Transformed,
    TransformRequest,
    TransformState,
    transform,
)
from holdfast.testing import VirtualClock, wait_until
from tests.servers.install import spark_jars
from tests.spark.conftest import CONF
from tests.spark_letters import NOW, files_of, lettered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.dlq import DeadLetter

HERE = "tests.spark.transforms"
CENTS = f"{HERE}:cents@2"


def order(number: int, *, topic: str = "orders", key: str | None = "k", **more: Any) -> Message:
    """Return order *number* as a message."""
    payload = msgspec.json.encode({"n": number, "amount": number} | more.pop("body", {}))
    return Message.new(topic, payload, key=key, type="order", ids=lambda: f"o-{number:04}", **more)


def row_of(message: Message, position: int = 7) -> dict[str, Any]:
    """Return *message* as it lies on a topic."""
    broker = connect("memory:")
    broker.create_topic(message.topic)
    with closing(broker.source([message.topic], group="g")) as source:
        with closing(broker.sink()) as sink:
            assert sink.publish([message])[0].error is None
        (found,) = source.poll(1, 5.0)
    found.position = position
    rows: list[dict[str, Any]] = raw_batch([found]).to_pylist()
    return rows[0]


def applied(message: Message, name: str) -> dict[str, Any]:
    """Return what the transform *name* makes of *message*."""
    work = ApplyTransform(transform=name, topic="orders.v2", is_raw=True, as_letters=False)
    return work.made(row_of(message), load_work(name))


def test_a_message_keeps_its_identity_and_says_what_made_it() -> None:
    """Id, key, time, headers and place stay; payload, topic and one header change."""
    before = order(3, headers={"tenant": "acme"})
    made = applied(before, CENTS)
    after = message_in(made)
    assert made["reason"] is None
    assert (made["lane"], made["position"]) == (0, "7")
    assert msgspec.json.decode(after.payload or b"") == {"n": 3, "amount": 300}
    assert after.topic == "orders.v2"
    assert (after.id, after.key, after.type) == (before.id, before.key, before.type)
    assert (after.headers.text("tenant"), after.headers.text(HEADER)) == ("acme", CENTS)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("cents", "KeyError"), ("forgetful", "would delete the message"),
     ("absurd", "return the whole payload"), ("unwritable", "TypeError")],
)  # fmt: skip
def test_what_a_transform_refuses_stays_whole_and_has_the_reason(name: str, reason: str) -> None:
    """It raises, returns nothing, another kind of thing, or what no JSON is made of."""
    before = order(3)
    if name == "cents":
        before = before.with_(payload=b'{"n": 3}')
    made = applied(before, f"{HERE}:{name}@1")
    assert reason in made["reason"]
    kept = message_in(made)
    assert (kept.payload, kept.topic, kept.headers.text(HEADER)) == (before.payload, "orders", None)


def test_a_reason_tells_no_secret_and_is_text_that_files_take() -> None:
    """What a function raises may quote anything: a password, half a character."""
    reason = applied(order(3), f"{HERE}:talkative@1")["reason"]
    assert reason.startswith("ValueError: no charge with password=")
    assert "hunter2" not in reason
    assert reason.encode()


def test_a_tombstone_passes_as_it_is_and_a_payload_that_is_no_json_is_given_as_bytes() -> None:
    """A deletion has nothing to transform; a function may refuse bytes."""
    assert message_in(applied(order(1).with_(payload=None), CENTS)).payload is None
    assert "TypeError" in applied(order(1).with_(payload=b"\xff\x00"), CENTS)["reason"]


def test_registered_upcasters_are_a_transform_and_relabel_the_version() -> None:
    """By the registry itself, or by the name under which a module has the default one."""
    name = f"{HERE}:upcasters@2"
    after = message_in(applied(order(3, schema="order:1"), name))
    assert msgspec.json.decode(after.payload or b"")["currency"] == "EUR"
    assert (after.schema, after.headers.text(HEADER)) == ("order:2", name)
    with pytest.raises(ConfigurationError, match="has no version"):
        load_work(f"{HERE}:upcasters")
    assert load_work("holdfast:upcast@1") == load_work("holdfast.upcast:default@1")


@pytest.mark.parametrize(
    ("name", "message"),
    [("cents", "write module:function"), (f"{HERE}:nothing@1", "has no 'nothing'"),
     ("no.such.module:f@1", "cannot be imported"), (f"{HERE}:cents", "has no version"),
     (f"{HERE}:HERE@1", "has no 'HERE'"), ("json:__name__@1", "is a str, not a function")],
)  # fmt: skip
def test_a_transform_that_is_none_is_refused_before_anything_is_read(
    name: str, message: str
) -> None:
    """The function must be there, be one, and have a version."""
    with pytest.raises(ConfigurationError, match=message):
        TransformRequest(source="archive:a", to="archive:b", transform=name, checkpoint="c")


def test_a_redacted_or_encrypted_letter_is_refused() -> None:
    """Its payload is not what was sent: a transform would make the damage lasting."""
    letter = lettered(1)
    work = ApplyTransform(transform=f"{HERE}:lenient_cents@1", topic="t", is_raw=False,
                          as_letters=False)  # fmt: skip
    row = records.record_of(letter, stored_at=1.0)
    assert work.made(row, load_work(work.transform))["reason"] is None
    assert "redacted" in work.made(row | {"replayable": False}, load_work(work.transform))["reason"]
    governance = msgspec.structs.replace(letter.governance, sealed=("$.card",))
    sealed = records.record_of(
        msgspec.structs.replace(letter, governance=governance), stored_at=1.0
    )
    assert "encrypted" in work.made(sealed, load_work(work.transform))["reason"]


def test_messages_on_a_topic_are_the_same_after_their_way_through_arrow() -> None:
    """Bytes, missing keys, empty and null headers, and positions that are no numbers."""
    before = Delivery(
        lane=Lane("orders", 3), position="1526-0", key=None, body=b"\x00\xff",
        headers=[("a", b"\xff"), ("a", None), ("b", b"")], timestamp=NOW.timestamp(),
    )  # fmt: skip
    (row,) = raw_batch([before]).to_pylist()
    after = delivery_of(row)
    for name in ("lane", "position", "key", "body", "headers", "timestamp"):
        assert getattr(after, name) == getattr(before, name)


def test_a_lane_is_numbered_without_gaps_over_batches_and_refusals() -> None:
    """Numbers follow the order of the rows; what was refused takes none."""
    schema = pa.schema([("message_id", pa.string()), ("reason", pa.string())])

    def batch(*rows: tuple[str, str | None]) -> pa.RecordBatch:
        found = [{"message_id": one, "reason": why} for one, why in rows]
        return pa.RecordBatch.from_pylist(found, schema=schema)

    came = [batch(("a", None), ("b", "bad"), ("c", None)), batch(("d", "bad")),
            batch(("e", None), ("f", None))]  # fmt: skip
    made = [row for one in NumberLane(per_round=3)(iter(came)) for row in one.to_pylist()]
    placed = [(row["message_id"], row["_number"], row["round"]) for row in made
              if row["kind"] == "made"]  # fmt: skip
    assert placed == [("a", 0, 0), ("c", 1, 0), ("e", 2, 0), ("f", 3, 1)]
    assert [row["message_id"] for row in made if row["kind"] == "refused"] == ["b", "d"]


def rows_to_publish(*messages: Message) -> pa.RecordBatch:
    """Return *messages* as a round holds them."""
    work = ApplyTransform(
        transform=f"{HERE}:lenient_cents@1", topic="new", is_raw=True, as_letters=False
    )
    batch = pa.RecordBatch.from_pylist([row_of(one) for one in messages])
    (made,) = work(iter([batch]))
    return made


def test_what_the_broker_refuses_for_good_is_told_and_the_others_are_sent() -> None:
    """Too large for the broker: the reason is kept, and counted beside what was sent."""
    broker = connect("memory:?max_message=1000")
    broker.create_topic("new")
    made = rows_to_publish(order(1), order(2, body={"text": "x" * 2000}), order(3))
    with closing(broker.sink()) as sink:
        told = [row for one in PublishRound(broker="memory:").publish(sink, iter([made]))
                for row in one.to_pylist()]  # fmt: skip
    assert [row["sent"] for row in told] == [None, 2]
    assert told[0]["message_id"] == "o-0002"
    assert "MessageTooLarge" in told[0]["reason"]


class Away:
    """A sink whose broker is away for some calls, then takes all but the messages *large*.

    Those behind a refused message of the same call are left for the next, as Kafka does it.
    """

    def __init__(self, sink: Any, outages: int, large: str = "") -> None:
        self._sink = sink
        self._outages = outages
        self._large = large

    def publish(self, messages: list[Message]) -> list[Published]:
        self._outages -= 1
        if self._outages >= 0:
            self._sink.publish(messages[:1])  # it may have been stored
            raise BrokerDown("away")
        place = next((n for n, one in enumerate(messages) if one.id == self._large), None)
        if place is None:
            return self._sink.publish(messages)
        taken = self._sink.publish(messages[:place])
        rest = [Published(error=Transient("again")) for _ in messages[place + 1 :]]
        return [*taken, Published(error=MessageTooLarge(9, 1)), *rest]


def published(outages: int, large: str, patience: float) -> tuple[list[Any], list[str]]:
    """Return what a round of five orders tells, and the ids that are on the topic then."""
    broker, clock = connect("memory:"), VirtualClock(auto=True)
    broker.create_topic("new")
    made = rows_to_publish(*(order(n) for n in range(5)))
    with closing(broker.sink()) as sink, closing(broker.source(["new"], group="g")) as source:
        work = PublishRound(broker="memory:", patience=patience)
        away: Any = Away(sink, outages, large)
        told = [row for one in work.publish(away, iter([made]), clock) for row in one.to_pylist()]
        return told, [one.message.id for one in source.poll(50, 5.0)]


def test_a_broker_that_is_away_is_waited_for_and_the_order_stays() -> None:
    """The part that may have been stored is sent again; so is what Kafka left for the next call."""
    told, ids = published(3, "o-0002", patience=60.0)
    assert [(row["sent"], row["message_id"]) for row in told] == [(None, "o-0002"), (4, None)]
    assert list(dict.fromkeys(ids)) == ["o-0000", "o-0001", "o-0003", "o-0004"]
    with pytest.raises(BrokerDown, match="away"):
        published(50, "", patience=20.0)


def test_a_broker_that_cannot_be_reached_is_told_and_not_raised() -> None:
    """Spark would begin the task again and again, and each would wait as long."""
    work = PublishRound(broker="redis://127.0.0.1:1", patience=0.1)
    (told,) = [row for one in work(iter([rows_to_publish(order(1))])) for row in one.to_pylist()]
    assert "127.0.0.1:1" in told["outage"]
    assert told["sent"] is None


def test_a_topic_that_went_away_is_an_error_and_no_refusal() -> None:
    """Or else all that is left would count as refused."""
    broker = connect("memory:?auto_create=false")
    with closing(broker.sink()) as sink, pytest.raises((UnknownTopic, BrokerDown)):
        list(PublishRound(broker="memory:").publish(sink, iter([rows_to_publish(order(1))])))


def test_counts_that_do_not_add_up_are_not_whole() -> None:
    """Everything that was read is written, refused, repeated or was there."""
    found = {"transform": CENTS, "read": 10, "written": 6, "refused": 2, "repeated": 1}
    assert Transformed(**found, known=1).is_whole  # type: ignore[arg-type]
    assert not Transformed(**found).is_whole  # type: ignore[arg-type]


def put(url: str, topic: str, messages: list[Message], partitions: int = 2) -> None:
    """Make *topic* and publish *messages* to it."""
    with closing(connect(url)) as broker:
        broker.create_topic(topic, partitions=partitions)
        with closing(broker.sink()) as sink:
            assert all(one.error is None for one in sink.publish(messages))


def on_topic(url: str, topic: str) -> list[Message]:
    """Return what has come to *topic* since it was last looked at, each lane in its order."""
    with (
        closing(connect(url)) as broker,
        closing(broker.source([topic], group="looks")) as source,
    ):
        found: list[Delivery] = []

        def has_all() -> bool:
            some = source.poll(500, 0.2)
            source.accept(some)
            found.extend(some)
            return bool(source.assignment()) and not any(source.lag().values())

        wait_until(has_all, deadline=90)
        source.flush()
    return [one.message for one in found]


def numbers_by_key(messages: list[Message]) -> dict[bytes | None, list[int]]:
    """Return the orders of each key as they came, the second copies left out."""
    found: dict[bytes | None, list[int]] = defaultdict(list)
    for one in messages:
        number = msgspec.json.decode(one.payload or b"")["n"]
        if number not in found[one.key]:
            found[one.key].append(number)
    return found


def test_a_topic_of_kafka_goes_to_another_by_the_command_and_nothing_is_dropped(
    spark: SparkSession, kafka: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First nothing is sent, for some are refused; then they are put aside, and mended later."""
    del spark  # the command finds the session that is there
    url, old, new = kafka.url, "transform-orders", "transform-orders.v2"
    orders = [order(n, topic=old, key=None if n % 10 == 0 else f"k{n % 7}") for n in range(120)]
    broken = {n for n in range(120) if n % 40 == 1}
    orders = [one.with_(payload=msgspec.json.encode({"n": n})) if n in broken else one
              for n, one in enumerate(orders)]  # fmt: skip
    put(url, old, orders)

    def holdfast(*words: str, code: int = 0) -> Any:
        ended: Any = 0
        try:
            main(["spark", "transform", "--to", f"{url}?topic={new}", "--lanes", "2", "--batch",
                  "100", "--json", *words])  # fmt: skip
        except SystemExit as exit_:
            ended = exit_.code or 0
        out, err = capsys.readouterr()
        assert ended == code, err
        return json.loads(out) if out.strip() else err

    words = ("--from", f"{url}?topic={old}", "--with", CENTS, "--checkpoint", str(tmp_path / "c"))
    assert "does not exist" in holdfast(*words, code=EXIT_FIX)
    put(url, new, [])
    stopped = holdfast(*words, code=EXIT_STOPPED)
    assert (stopped["read"], stopped["written"], stopped["refused"]) == (120, 0, len(broken))
    assert on_topic(url, new) == []
    report = tmp_path / "transform.html"
    found = holdfast(*words, "--on-error", "aside", "--report", str(report), code=EXIT_PARTLY)
    assert "Why messages were refused" in report.read_text()
    assert (found["read"], found["written"], found["refused"]) == (120, 120 - len(broken), 3)
    assert found["is_whole"]
    assert list(found["reasons"].values()) == [3]
    sent = on_topic(url, new)
    assert sorted(one.id for one in sent) == [
        one.id for n, one in enumerate(orders) if n not in broken
    ]
    keyed = numbers_by_key([one for one in sent if one.key is not None])
    assert all(numbers == sorted(numbers) for numbers in keyed.values())
    assert {one.headers.text(HEADER) for one in sent} == {CENTS}
    mended = holdfast(
        "--from", f"parquet:{found['aside']}", "--with", f"{HERE}:lenient_cents@3",
        "--checkpoint", str(tmp_path / "mended"),
    )  # fmt: skip
    assert (mended["read"], mended["written"]) == (3, 3)
    assert {one.id for one in [*sent, *on_topic(url, new)]} == {one.id for one in orders}


class Killed(Exception):
    """Stands for what ends a driver."""


def test_a_killed_transform_goes_on_and_sends_no_more_than_one_round_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Killed after a round was sent and before the log said so: the worst moment."""
    url = f"sqlite:///{tmp_path}/broker.db"
    orders = [order(n, key=f"k{n % 5}") for n in range(90)]
    put(url, "orders", orders)
    put(url, "new", [])
    checkpoint = tmp_path / "c"
    batch = 30
    request = TransformRequest(
        source=f"{url}?topic=orders", to=f"{url}?topic=new", transform=CENTS,
        checkpoint=str(checkpoint), lanes=2, batch=batch,
    )  # fmt: skip
    log = NumberedLog(LocalFolder(checkpoint), TransformState, called="transform")

    def killed_in_the_second_round(text: str) -> None:
        if text.startswith("round 2"):
            LocalFolder(checkpoint).delete(f"_holdfast/{log.newest().number:012d}.json")
            raise Killed

    with pytest.raises(Killed):
        transform(spark, request, tell=killed_in_the_second_round)
    assert log.newest().done == 1
    sent = on_topic(url, "new")
    assert 0 < len(sent) < 90
    other = TransformRequest(source=request.source, to=request.to, transform=f"{HERE}:cents@3",
                             checkpoint=str(checkpoint), lanes=2, batch=batch)  # fmt: skip
    with pytest.raises(ConfigurationError, match="belongs to another transform"):
        transform(spark, other)

    def overtaken(text: str) -> None:
        if text.startswith("round"):
            log.commit(msgspec.structs.replace(log.newest(), number=log.newest().number + 1))

    with pytest.raises(ArchiveBusy, match="another job has changed the transform"):
        transform(spark, request, tell=overtaken)
    found = transform(spark, request)
    assert (found.read, found.written, found.refused, found.is_whole) == (90, 90, 0, True)
    assert 0 < found.before < 90
    sent += on_topic(url, "new")
    assert {one.id for one in sent} == {one.id for one in orders}
    assert len(sent) - 90 <= 2 * batch  # it ended twice
    assert all(numbers == sorted(numbers) for numbers in numbers_by_key(sent).values())
    again = transform(spark, request)
    assert (again.written, again.before) == (90, 90)
    assert on_topic(url, "new") == []  # nothing was sent since


@pytest.mark.programs
def test_a_driver_killed_by_kill_9_is_gone_on_with_and_what_is_marked_is_there_once(
    spark: SparkSession, kafka: Any, tmp_path: Path
) -> None:
    """The command with its JVM is killed between two rounds or in one; the next command goes on."""
    old, new, batch = "killed-orders", "killed-orders.v2", 40
    count = 280
    orders = [order(n, topic=old, key=f"k{n % 7}") for n in range(count)]
    put(kafka.url, old, orders)
    put(kafka.url, new, [])
    checkpoint = tmp_path / "c"
    request = TransformRequest(
        source=f"{kafka.url}?topic={old}", to=f"{kafka.url}?topic={new}", transform=CENTS,
        checkpoint=str(checkpoint), lanes=2, batch=batch,
    )  # fmt: skip
    log = NumberedLog(LocalFolder(checkpoint), TransformState, called="transform")
    settings = [word for one in CONF.items() for word in ("--conf", "=".join(one))]
    command = [
        sys.executable, "-c", "from holdfast.cli import main; main()", "spark", "transform",
        "--from", request.source, "--to", request.to, "--with", CENTS, "--lanes", "2",
        "--batch", str(batch), "--checkpoint", str(checkpoint), *settings,
        "--jars", ",".join(map(str, spark_jars())),
    ]  # fmt: skip
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, env=here, start_new_session=True) as driver:
        try:
            wait_until(
                lambda: driver.poll() is not None or log.newest().done >= 2,
                deadline=600, every=0.02, what="two rounds",
            )  # fmt: skip
        finally:
            os.killpg(driver.pid, signal.SIGKILL)  # the JVM, too
    marked = log.newest()
    assert 2 <= marked.done < len(marked.rounds)
    first = on_topic(kafka.url, new)
    found = transform(spark, request)
    assert (found.read, found.written, found.refused, found.is_whole) == (count, count, 0, True)
    assert found.before == marked.written
    all_ = [*first, *on_topic(kafka.url, new)]
    sent = Counter(one.id for one in all_)
    assert set(sent) == {one.id for one in orders}
    assert sent.total() - count <= batch
    staged = f"{checkpoint}/staged/kind=made"
    done = {row["message_id"] for number in range(marked.done)
            for row in parquet.read_table(f"{staged}/round={number}").to_pylist()}  # fmt: skip
    assert {sent[one] for one in done} == {1}
    assert all(numbers == sorted(numbers) for numbers in numbers_by_key(all_).values())


def test_an_archive_goes_to_an_archive_a_topic_and_files(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Dead letters stay dead letters in an archive; on a topic each message is there once."""

    def failed(number: int, **more: Any) -> DeadLetter:
        place = Delivery(lane=Lane("orders", 0), position=number, key=b"k", body=b"")
        body = msgspec.json.encode({"n": number, "amount": number})
        return lettered(number, payload=body, key="k", delivery=place, **more)

    letters, twice = [failed(n) for n in range(1, 13)], failed(5, group="shipping")
    add(Archive(spark, str(tmp_path / "old")), [files_of(tmp_path / "in", [*letters, twice])])
    source = f"archive:{tmp_path / 'old'}"

    def run(to: str, **more: Any) -> Transformed:
        name = to.partition(":")[0]
        usual = {"source": source, "checkpoint": str(tmp_path / f"c-{name}"), "lanes": 2}
        return transform(spark, TransformRequest(to=to, transform=CENTS, **usual | more))

    found = run(f"archive:{tmp_path / 'new'}")
    assert (found.read, found.written, found.repeated, found.is_whole) == (13, 13, 0, True)
    rows = Archive(spark, str(tmp_path / "new")).records().collect()
    assert {row["dlq_id"] for row in rows} == {one.dlq_id for one in [*letters, twice]}
    assert {row["error_type"] for row in rows} == {letters[0].failure.root.type}
    assert max(msgspec.json.decode(row["payload"])["amount"] for row in rows) == 1200

    url = f"sqlite:///{tmp_path}/broker.db"
    put(url, "orders.v2", [])
    found = run(f"{url}?topic=orders.v2")
    assert (found.read, found.written, found.repeated, found.is_whole) == (13, 12, 1, True)
    assert [msgspec.json.decode(one.payload or b"")["n"] for one in on_topic(url, "orders.v2")] == (
        list(range(1, 13))
    )

    found = run(f"parquet:{tmp_path / 'files'}")
    assert (found.read, found.written, found.is_whole) == (13, 12, True)
    with pytest.raises(ConfigurationError, match="is not empty"):
        run(f"parquet:{tmp_path / 'files'}", checkpoint=str(tmp_path / "c2"))
    with pytest.raises(ConfigurationError, match="are the same"):
        run(source, checkpoint=str(tmp_path / "c3"))
    with pytest.raises(ConfigurationError, match="archive add"):
        run(f"parquet:{tmp_path / 'x'}", source="sqlite:///shop.db",
            checkpoint=str(tmp_path / "c4"))  # fmt: skip


def test_an_empty_source_is_done_at_once_and_staged_files_that_are_gone_are_an_error(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Nothing is no failure; messages that somebody removed in the middle are."""
    url = f"sqlite:///{tmp_path}/broker.db"
    put(url, "orders", [])
    put(url, "new", [])

    def request(name: str) -> TransformRequest:
        return TransformRequest(
            source=f"{url}?topic=orders", to=f"{url}?topic=new", transform=CENTS,
            checkpoint=str(tmp_path / name), lanes=2,
        )  # fmt: skip

    found = transform(spark, request("empty"))
    assert (found.read, found.written, found.rounds, found.is_whole) == (0, 0, 0, True)
    put(url, "orders", [order(n, key=f"k{n}") for n in range(10)])

    def killed(_text: str) -> None:
        raise Killed

    with pytest.raises(Killed):
        transform(spark, request("c"), tell=killed)
    next((tmp_path / "c/staged/kind=made/round=0").glob("*.parquet")).unlink()
    with pytest.raises(CountsDiffer, match="10 messages"):
        transform(spark, request("c"))
