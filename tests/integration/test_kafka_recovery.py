"""A member of a group on Kafka comes back whatever its client does, and tells the truth."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import confluent_kafka
import pytest

from holdfast.brokers.kafka import KafkaBroker
from holdfast.clock import SYSTEM_CLOCK
from holdfast.consumer import Consumer
from holdfast.consumer.monitoring import HealthChecks
from holdfast.errors import BrokerDown
from holdfast.ids import new_id
from holdfast.message import Message
from holdfast.testing import wait_until
from holdfast.urls import BrokerUrl
from tests.consuming import running
from tests.kafka.members import QUICK, SCHEMES
from tests.servers import Fleet, Kafka

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from holdfast.ports import Delivery, Lane

    Opened = Callable[..., KafkaBroker]


@pytest.fixture(scope="module")
def kafka(servers: Fleet) -> Iterator[Kafka]:
    """Offer a server that may be killed."""
    server = servers.open(Kafka)
    yield server
    servers.close(server)


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def opened(closing: ExitStack, kafka: Kafka) -> Opened:
    """Offer a function that returns a broker, closed after the test."""

    def connect(scheme: str, **native: Any) -> KafkaBroker:
        broker = KafkaBroker(BrokerUrl.parse(f"{scheme}://{kafka.address}"), **native)
        closing.callback(broker.close)
        return broker

    return connect


class Hearing:
    """A listener that notes the kinds of news."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def assigned(self, _lanes: Iterable[Lane]) -> None:
        self.kinds.append("assigned")

    def revoked(self, _lanes: Iterable[Lane]) -> None:
        self.kinds.append("revoked")

    def lost(self, _lanes: Iterable[Lane]) -> None:
        self.kinds.append("lost")


class Reading:
    """A member that reads a topic of its own, one message at a time."""

    def __init__(self, broker: KafkaBroker, scheme: str, closing: ExitStack) -> None:
        self.broker = broker
        self.topic = f"back-{new_id()[-12:]}"
        broker.create_topic(self.topic, partitions=2)
        self.hearing = Hearing()
        self.source: Any = broker.source(
            [self.topic], group="g-" + self.topic, listener=self.hearing, **QUICK[scheme]
        )
        closing.callback(self.source.close)
        self._number = 0

    def polled(self) -> list[Delivery]:
        try:
            got: list[Delivery] = self.source.poll(10, 0.05)
        except BrokerDown:
            return []
        self.source.accept(got)
        return got

    def reads_on(self, deadline: float = 45) -> None:
        """Publish one message to each lane, and wait for it."""
        self._number += 1
        bodies = {b"%d of %d" % (self._number, n) for n in range(8)}
        sink = self.broker.sink()
        sink.publish([Message.new(self.topic, body, key=body[5:]) for body in bodies])
        sink.close()

        def is_read() -> bool:
            bodies.difference_update(d.body for d in self.polled() if d.body is not None)
            return not bodies

        wait_until(is_read, deadline=deadline, what="what was published is read", every=0.0)


def test_a_client_that_reads_nothing_is_made_anew(
    opened: Opened, scheme: str, closing: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever keeps it, here a pause that nobody asked for; what it had is read again."""
    reading = Reading(opened(scheme, renew_after=1.5), scheme, closing)
    reading.reads_on()
    source = reading.source
    source._member.pause(source.assignment())
    reading.reads_on()
    assert reading.hearing.kinds[:3] == ["assigned", "lost", "assigned"]
    assert "stands still and is made anew" in caplog.text


def test_a_client_whose_thread_hangs_is_made_anew(opened: Opened, closing: ExitStack) -> None:
    """Nothing waits for it for ever: neither the poll nor the end of the test."""
    reading = Reading(opened("kafka", renew_after=1.5, timeout=1.0), "kafka", closing)
    reading.reads_on()
    gate = threading.Event()
    closing.callback(gate.set)
    old = reading.source._member
    old._network.loop.call_soon_threadsafe(lambda: gate.wait(60) and None)
    reading.reads_on(deadline=90)
    assert reading.source._member is not old


def test_a_client_that_has_nothing_to_read_is_left_alone(
    opened: Opened, kafka: Kafka, scheme: str, closing: ExitStack
) -> None:
    """At the end, behind a marker, before a transaction still open, or paused with much to read."""
    reading = Reading(opened(scheme, renew_after=0.3), scheme, closing)
    reading.reads_on()
    source = reading.source
    member = source._member
    raw = confluent_kafka.Producer(
        {"bootstrap.servers": kafka.address, "transactional.id": reading.topic}
    )
    raw.init_transactions(30)
    raw.begin_transaction()
    raw.produce(reading.topic, b"never", partition=0)
    raw.flush()
    raw.abort_transaction(30)
    raw.begin_transaction()
    raw.produce(reading.topic, b"not yet", partition=0)
    raw.flush()
    [_, paused] = sorted(source.assignment())
    source.pause([paused])
    raw_too = confluent_kafka.Producer({"bootstrap.servers": kafka.address})
    raw_too.produce(reading.topic, b"later", partition=1)
    raw_too.flush()
    until = SYSTEM_CLOCK.monotonic() + 3
    while SYSTEM_CLOCK.monotonic() < until:
        assert reading.polled() == []
    assert source._member is member
    raw.commit_transaction(30)
    source.resume([paused])
    came: set[bytes | None] = set()
    wait_until(
        lambda: (came.update(d.body for d in reading.polled()), len(came) == 2)[1],
        deadline=90,
        what="both are read",
        every=0.0,
    )
    assert source._member is member
    assert reading.hearing.kinds == ["assigned"]


def test_a_join_whose_reason_has_passed_is_made_all_the_same(
    opened: Opened, closing: ExitStack
) -> None:
    """While a server restarts, a topic may be unknown for a moment, and the first join may fail.

    kafka-python gives its lanes up, and forgets that it wanted to join.
    """
    reading = Reading(opened("kafka"), "kafka", closing)
    reading.reads_on()
    from kafka.errors import CoordinatorLoadInProgressError  # loaded by now, with its warnings

    coordinator = reading.source._member._client._coordinator
    join, known = coordinator._do_join_and_sync_async, coordinator._metadata_snapshot

    async def refused() -> None:
        coordinator._do_join_and_sync_async = join
        coordinator._metadata_snapshot = known
        raise CoordinatorLoadInProgressError

    coordinator._do_join_and_sync_async = refused
    coordinator._metadata_snapshot = {}
    wait_until(
        lambda: (reading.polled(), "revoked" in reading.hearing.kinds)[1],
        what="its lanes are given up",
        every=0.0,
    )
    reading.reads_on(deadline=90)


@pytest.mark.timeout(600)
def test_the_broker_counts_as_down_until_it_has_answered(
    opened: Opened, kafka: Kafka, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    """For logs, probes and metrics alike; and the log is not flooded meanwhile."""
    broker = opened(scheme, timeout=3.0)
    topic = f"down-{new_id()[-12:]}"
    broker.create_topic(topic)
    seen: list[str] = []
    consumer = Consumer(broker, group="g-" + topic)

    @consumer.on(topic)
    def handle(body: str) -> None:
        seen.append(body)

    _publish(broker, topic, b"before")
    vitals = HealthChecks(consumer)
    caplog.set_level(logging.WARNING)

    def said(*words: str) -> int:
        ours = [record for record in caplog.records if record.name.startswith("holdfast.")]
        return sum(any(word in record.getMessage() for word in words) for record in ours)

    with running(consumer):
        wait_until(lambda: seen == ["before"], deadline=90, what="it consumes")
        kafka.kill()
        try:
            wait_until(lambda: "is down" in vitals.ready().why, deadline=90, what="it is noticed")
            verdicts = []
            until = SYSTEM_CLOCK.monotonic() + 8
            while SYSTEM_CLOCK.monotonic() < until:
                verdicts.append(vitals.ready().good)
                SYSTEM_CLOCK.sleep(0.05)  # pacing: probes, for several rounds of reconnecting
            assert not any(verdicts), f"ready in {sum(verdicts)} of {len(verdicts)} probes"
            assert (said("the broker is down"), said("the broker answers again")) == (1, 0)
            assert said("Connect", "brokers are down") <= 2, caplog.text
            theirs = [one.getMessage() for one in caplog.records if one.name.startswith("kafka.")]
            tries = [one for one in theirs if "ConnectionError" in one or "No node avail" in one]
            assert len(tries) <= 10, tries  # kafka-python's own, of which there are ten a second
        finally:
            kafka.start()
        wait_until(lambda: vitals.ready().good, deadline=90, what="it is ready again")
        _publish(broker, topic, b"after")
        wait_until(lambda: "after" in seen, deadline=90, what="it consumes again")
    # Once, unless a server that has just started is so slow that it counts as down once more.
    assert said("the broker answers again") >= 1


def test_what_was_fetched_before_the_broker_fell_is_no_answer_of_it(
    opened: Opened, kafka: Kafka, closing: ExitStack
) -> None:
    """What is handed out then says nothing; with kafka-python the client's own answers count."""
    broker = opened("kafka+confluent", timeout=3.0)
    topic = f"fell-{new_id()[-12:]}"
    broker.create_topic(topic)
    sink = broker.sink()
    sink.publish([Message.new(topic, b"%d" % n, key="k") for n in range(30)])
    sink.close()
    source: Any = broker.source([topic], group="g-" + topic)
    closing.callback(source.close)
    came: list[Delivery] = []
    wait_until(lambda: (came.extend(source.poll(1, 0.05)), came)[1], deadline=90, what="the first")
    kafka.pause()
    try:
        source._member.doubt("another client has found it out")
        wait_until(
            lambda: (came.extend(source.poll(1, 0.2)), len(came) == 30)[1],
            what="all that was fetched is handed out",
            every=0.0,
        )
        with pytest.raises(BrokerDown):
            source.poll(1, 0.05)
    finally:
        kafka.resume()
    wait_until(lambda: not source.poll(1, 0.05), deadline=90, what="it answers again")


def _publish(broker: KafkaBroker, topic: str, body: bytes) -> None:
    sink = broker.sink()
    wait_until(
        lambda: sink.publish([Message.new(topic, body, key="k")])[0].error is None,
        deadline=90,
        what="it is published",
    )
    sink.close()
