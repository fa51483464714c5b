"""`holdfast lag` on real brokers: after a crash, while a member stands, before data is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from holdfast import Message
from holdfast.brokers import connect
from holdfast.ids import new_id
from holdfast.ports import BrokerPowers
from holdfast.testing import wait_until
from tests.kafka.members import QUICK, STEADY
from tests.shell import shell

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from holdfast.ports import Broker
    from tests.servers import Kafka

SECONDS = 60.0
BROKERS = ("kafka", "kafka+confluent", "redis", "nats", "rabbitmq", "sqlite")


@dataclass(kw_only=True)
class Shop:
    """A broker with a topic of one partition, and a group that reads it."""

    url: str
    folder: Path
    short: str
    """The URL for members whose death is to show soon."""
    quick: Mapping[str, Any] = field(default_factory=dict)
    steady: Mapping[str, Any] = field(default_factory=dict)
    has_offsets: bool = True
    """Whether the broker has positions, and counts what other processes hold."""
    topic: str = field(default_factory=lambda: f"orders-{new_id()[-12:]}")
    group: str = field(default_factory=lambda: f"billing-{new_id()[-12:]}")

    @contextmanager
    def broker(self) -> Iterator[Broker]:
        """Connect for a while."""
        with closing(connect(self.url)) as connected:
            yield connected

    def open(self) -> None:
        """Make topic and group, so that what is published from now on is kept."""
        with self.broker() as broker:
            broker.create_topic(self.topic, partitions=1)
            broker.create_group(self.topic, self.group)

    def publish(self, count: int) -> None:
        """Publish *count* messages of one key."""
        with self.broker() as broker, closing(broker.sink()) as sink:
            made = [Message.new(self.topic, b"%d" % n, key=b"k") for n in range(count)]
            assert [one.error for one in sink.publish(made)] == [None] * count

    def lag(self, *more: str) -> dict[str, Any]:
        """Return what the command tells of the one partition; topics are named where needed."""
        words = ["lag", "--broker", self.url, "--group", self.group, "--json", "--window", "2s"]
        if not self.has_offsets:
            words += ["--topic", self.topic]
        done = shell(*words, *more, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        [lane] = json.loads(done.stdout)
        assert (lane["topic"], lane["partition"]) == (self.topic, 0)
        found: dict[str, Any] = lane
        return found


@pytest.fixture(params=BROKERS)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    """Return a shop on each broker, the real server of it."""
    kind: str = request.param
    if kind.startswith("kafka"):
        url = f"{kind}://{request.getfixturevalue('kafka').address}"
        made = Shop(url=url, short=url, folder=tmp_path, quick=QUICK[kind], steady=STEADY[kind])
    elif kind == "rabbitmq":
        url = f"{request.getfixturevalue(kind).url}?maturity=0&prefetch=1"
        made = Shop(url=url, short=url, folder=tmp_path, has_offsets=False)
    else:
        is_file = kind == "sqlite"
        base = f"sqlite:///{tmp_path}/b.db" if is_file else request.getfixturevalue(kind).url
        short = "?session=2&lease=2" if kind == "nats" else "?session=2"
        made = Shop(url=f"{base}?session=120", short=f"{base}{short}", folder=tmp_path)
    made.open()
    return made


@pytest.mark.programs
def test_what_a_killed_member_left_is_its_lag_and_the_group_is_stopped(shop: Shop) -> None:
    """Of five messages it had settled two: three are left, from the third on."""
    shop.publish(5)
    command = [
        sys.executable, "-m", "holdfast.testing.member", shop.short, shop.topic,
        shop.group, str(shop.folder / "log"), "--moment", "accepted", "--nth", "2",
        "--settings", json.dumps(shop.quick),
    ]  # fmt: skip
    assert subprocess.run(command, timeout=2 * SECONDS, check=False).returncode == -9
    wait_until(lambda: shop.lag()["verdict"] == "stopped", deadline=SECONDS, what="it is gone")
    lane = shop.lag()
    assert (lane["lag"], lane["members"]) == (3, 0)
    if not shop.has_offsets:
        assert (lane["current"], lane["end"], lane["lag_seconds"]) == (None, None, None)
        return
    assert 0 < lane["lag_seconds"] < 10 * SECONDS
    with (
        closing(connect(shop.short)) as broker,
        closing(broker.source([shop.topic], group=shop.group, **shop.quick)) as source,
    ):
        came: list[Any] = []

        def has_come() -> bool:
            came.extend(source.poll(10, 0.2))
            return bool(came)

        wait_until(has_come, deadline=SECONDS, what="the next member gets the third")
        assert (came[0].body, came[0].position) == (b"2", lane["current"])


def test_a_member_that_settles_nothing_is_stalled_and_one_that_does_is_not(shop: Shop) -> None:
    """It polls and is a member all the time; once it works the lag is gone."""
    holds, may_settle, done = threading.Event(), threading.Event(), threading.Event()

    def live() -> None:
        with shop.broker() as broker:
            source = broker.source([shop.topic], group=shop.group, **shop.steady)
            held: list[Any] = []
            while not done.is_set():
                held += source.poll(10, 0.1)
                if held:
                    holds.set()
                if may_settle.is_set() and held:
                    source.accept(held)
                    source.flush()
                    held.clear()
            source.close()

    member = threading.Thread(target=live)
    member.start()
    try:
        wait_until(lambda: shop.lag()["members"] == 1, deadline=SECONDS, what="it is a member")
        shop.publish(5)
        assert holds.wait(SECONDS)
        lane = shop.lag()
        # A queue does not tell what another connection holds: one message, by the prefetch.
        assert lane["lag"] == (5 if shop.has_offsets else 4)
        assert (lane["verdict"], lane["members"], lane["lag_change"]) == ("stalled", 1, 0)
        may_settle.set()
        wait_until(lambda: shop.lag()["lag"] == 0, deadline=SECONDS, what="all is settled")
        lane = shop.lag()
        assert (lane["verdict"], lane["lag_seconds"], lane["current"]) == ("ok", 0.0, lane["end"])
    finally:
        done.set()
        member.join()


@pytest.mark.parametrize("scheme", ["kafka", "kafka+confluent"])
def test_kafka_tells_when_retention_will_delete_what_is_not_settled(
    scheme: str, kafka: Kafka, tmp_path: Path
) -> None:
    """The record at the committed offset is 54 minutes old, and the topic keeps an hour."""
    url = f"{scheme}://{kafka.address}?topic.retention.ms=3600000"
    shop = Shop(url=url, short=url, folder=tmp_path, steady=STEADY[scheme])
    shop.open()
    producer = Producer({"bootstrap.servers": kafka.address})
    for minutes in (55, 54, 1):
        stored = int((time.time() - 60 * minutes) * 1000)
        producer.produce(shop.topic, b"old", partition=0, timestamp=stored)
    assert producer.flush(SECONDS) == 0
    with shop.broker() as broker:
        source = broker.source([shop.topic], group=shop.group, **shop.steady)
        came: list[Any] = []

        def has_come() -> bool:
            came.extend(source.poll(10, 0.2))
            return len(came) == 3

        wait_until(has_come, deadline=SECONDS, what="all three come")
        source.accept(came[:1])
        source.close()
        assert BrokerPowers.of(broker).retention([shop.topic]) == {shop.topic: 3600.0}
    lane = shop.lag()
    assert (lane["current"], lane["end"], lane["lag"]) == (1, 3, 2)
    assert 54 * 60 <= lane["lag_seconds"] < 59 * 60
    assert lane["retention_left_seconds"] == pytest.approx(3600 - lane["lag_seconds"])
    assert (lane["is_near_retention"], lane["deleted"]) == (True, 0)
    shown = shell("lag", "--broker", shop.url, "--group", shop.group, cwd=tmp_path).stdout
    assert "DATA LOSS AHEAD" in shown
    admin = AdminClient({"bootstrap.servers": kafka.address})
    [deleted] = admin.delete_records([TopicPartition(shop.topic, 0, 2)]).values()
    assert deleted.result(SECONDS).low_watermark == 2
    lane = shop.lag()
    assert (lane["lag"], lane["deleted"], lane["is_near_retention"]) == (1, 1, False)


def test_nats_tells_the_age_at_which_its_stream_deletes(nats: Any) -> None:
    """`max_age` of the stream is the retention of the topic."""
    topic = f"orders-{new_id()[-12:]}"
    with closing(connect(nats.url, stream={"max_age": 7_200_000_000_000})) as broker:
        broker.create_topic(topic)
        with closing(broker.source([topic], group="billing")) as source:
            source.poll(1, 0.1)
            found = BrokerPowers.of(broker).progress("billing", [topic])
        assert found.retention == BrokerPowers.of(broker).retention([topic]) == {topic: 7200.0}
