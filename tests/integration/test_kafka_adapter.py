"""What the Kafka adapter promises of its own, beside the port's promises, by both drivers."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import confluent_kafka
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.brokers.kafka import KafkaBroker
from holdfast.brokers.kafka.broker import KafkaSettings
from holdfast.brokers.kafka.offsets import FULL, KafkaLane
from holdfast.brokers.kafka.source import KafkaSource
from holdfast.clock import SYSTEM_CLOCK
from holdfast.consumer import Consumer
from holdfast.errors import (
    BrokerDown,
    ConfigurationError,
    InvalidMessage,
    InvalidUrl,
    MessageTooLarge,
    MissingExtra,
    Transient,
    UnknownTopic,
)
from holdfast.ids import new_id
from holdfast.message import Message
from holdfast.outbox.rows import Row, staged, values
from holdfast.ports import Delivery, Lane
from holdfast.spark_jobs.sources import SourceSpec
from holdfast.spark_jobs.topics import kafka_ends
from holdfast.testing import check_nothing_lost, check_order_per_key, wait_until
from holdfast.urls import BrokerUrl
from tests.kafka.members import QUICK, SCHEMES, STEADY
from tests.servers import Fleet, Kafka
from tests.servers.install import program
from tests.servers.ports import free_port
from tests.servers.processes import Command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from holdfast.ports import Source
    from tests.servers.fixtures import PrivateServer

# -- the watermark ---------------------------------------------------------------------

LANE = Lane("t", 0)


def _delivery(offset: int) -> Delivery:
    return Delivery(lane=LANE, position=offset, key=None, body=b"", epoch=1, receipt=0)


@given(
    gaps=st.lists(st.integers(1, 3), min_size=1, max_size=20),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 19)), max_size=60),
)
def test_the_watermark_never_passes_an_unsettled_message(
    gaps: list[int], steps: list[tuple[bool, int]]
) -> None:
    """Whatever is settled, released and handed out again in whatever order, with gaps."""
    offsets = [sum(gaps[: place + 1]) for place in range(len(gaps))]
    state = KafkaLane(LANE, 1)
    held = {offset: _delivery(offset) for offset in offsets}
    state.launch(list(held.values()))
    unsettled = set(offsets)
    for is_settled, number in steps:
        delivery = held[offsets[number % len(offsets)]]
        if not state.holds(delivery):
            continue
        if is_settled:
            del state.open[int(delivery.position)]
            unsettled.discard(int(delivery.position))
        else:
            state.put_back(delivery)
            [again] = state.relaunch(5)
            held[int(again.position)] = again
            assert not state.holds(delivery)
        assert state.position(None) == min(unsettled, default=offsets[-1] + 1)


def test_markers_behind_the_last_message_are_committed_with_it() -> None:
    """A client that has read further than it hands out says so, and nothing waits for it."""
    state = KafkaLane(LANE, 1)
    assert state.position(None) is None
    assert state.position(2) == 2
    state.launch([_delivery(3)])
    assert state.position(7) == 3
    state.open.clear()
    assert state.position(7) == 7
    assert state.position(None) == 4


# -- fixtures --------------------------------------------------------------------------


class GuardedKafka(Kafka):
    """Kafka with two more listeners: one asks for a password, one speaks TLS."""

    user_name, password = "ann", "s3cret-word"

    def __init__(self) -> None:
        super().__init__()
        self.sasl = f"{self.host}:{free_port()}"
        self.tls = f"{self.host}:{free_port()}"

    @property
    def certificate(self) -> Path:
        return self.folder / "certificate.pem"

    def prepare(self) -> None:
        """Add the listeners to the settings; in such a file the last word counts."""
        super().prepare()
        keytool = str(program("java").with_name("keytool"))
        store = (
            "-alias",
            "kafka",
            "-keystore",
            str(self.folder / "key.p12"),
            "-storepass",
            "123456",
        )
        names = ("-dname", "CN=localhost", "-ext", f"san=ip:{self.host},dns:localhost")
        make = (keytool, "-genkeypair", "-keyalg", "RSA", "-storetype", "PKCS12")
        self._processes.run(Command(argv=(*make, *store, *names)))
        export = (keytool, "-exportcert", "-rfc", "-file", str(self.certificate))
        self._processes.run(Command(argv=(*export, *store)))
        with (self.folder / "server.properties").open("a") as settings:
            settings.write(self._more_settings())

    def _more_settings(self) -> str:
        module = "org.apache.kafka.common.security.plain.PlainLoginModule"
        user = f'user_{self.user_name}="{self.password}"'
        controller = f"CONTROLLER://{self.host}:{self._controller_port}"
        kinds = "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,GUARD:SASL_PLAINTEXT,TLS:SSL"
        listeners = f"PLAINTEXT://{self.address},GUARD://{self.sasl},TLS://{self.tls}"
        return f"""
listeners={listeners},{controller}
advertised.listeners={listeners}
listener.security.protocol.map={kinds}
sasl.enabled.mechanisms=PLAIN
listener.name.guard.plain.sasl.jaas.config={module} required {user};
ssl.keystore.type=PKCS12
ssl.keystore.location={self.folder}/key.p12
ssl.keystore.password=123456
"""


@pytest.fixture(scope="module")
def guarded(servers: Fleet) -> Iterator[GuardedKafka]:
    server = servers.open(GuardedKafka)
    yield server
    servers.close(server)


@pytest.fixture(scope="module")
def kafka(guarded: GuardedKafka) -> Kafka:
    """One server serves all tests here."""
    return guarded


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


Opener = Any


@pytest.fixture
def connect(closing: ExitStack, kafka: Kafka) -> Opener:
    """Offer a function that returns a broker, closed after the test."""

    def opened(scheme: str, address: str | None = None, **native: Any) -> KafkaBroker:
        at = kafka.address if address is None else address
        broker = KafkaBroker(BrokerUrl.parse(f"{scheme}://{at}"), **native)
        closing.callback(broker.close)
        return broker

    return opened


@pytest.fixture
def broker(connect: Opener, scheme: str) -> KafkaBroker:
    made: KafkaBroker = connect(scheme)
    return made


@pytest.fixture
def topic(broker: KafkaBroker) -> str:
    return _topic(broker)


def _topic(broker: KafkaBroker, partitions: int = 4) -> str:
    name = f"own-{new_id()[-12:]}"
    broker.create_topic(name, partitions=partitions)
    return name


def _messages(topic: str, count: int, *, keys: int = 40) -> list[Message]:
    return [Message.new(topic, b"%d" % n, key=b"key %d" % (n % keys)) for n in range(count)]


def _take(source: Source, count: int, *, limit: int = 500) -> list[Delivery]:
    got: list[Delivery] = []

    def came() -> bool:
        got.extend(source.poll(min(limit, count - len(got)), 0.05))
        return len(got) >= count

    wait_until(came, deadline=90, what=f"{count} messages come", every=0.0)
    return got


def _publish(broker: KafkaBroker, messages: list[Message], **native: Any) -> list[Lane | None]:
    sink = broker.sink(**native)
    try:
        results = sink.publish(messages)
    finally:
        sink.close()
    assert [result.error for result in results] == [None] * len(messages)
    return [result.lane for result in results]


# -- publishing ------------------------------------------------------------------------


@pytest.mark.programs
def test_the_adapter_loads_where_warnings_are_errors() -> None:
    """A client library's own sins are not the user's."""
    code = "from holdfast.brokers import connect; connect('{}://localhost').close(); print('in')"
    for scheme in SCHEMES:
        command = [sys.executable, "-W", "error", "-c", code.format(scheme)]
        loaded = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert loaded.stdout == "in\n", loaded.stderr


def test_both_drivers_put_a_key_in_the_same_partition(connect: Opener) -> None:
    """The Java client's choice, for text, binary and empty keys alike."""
    brokers = [connect(scheme) for scheme in SCHEMES]
    topic = _topic(brokers[0], partitions=7)
    keys = [b"", b"\x00\xff", *(b"key %d" % n for n in range(100))]
    lanes = [
        _publish(broker, [Message.new(topic, b"a", key=key) for key in keys]) for broker in brokers
    ]
    assert lanes[0] == lanes[1]
    assert len(set(lanes[0])) == 7


def test_members_of_both_drivers_share_a_group(connect: Opener, closing: ExitStack) -> None:
    """A team can change the driver of one service after the other."""
    brokers = [connect(scheme) for scheme in SCHEMES]
    topic = _topic(brokers[0])
    sources = [
        broker.source([topic], group="mixed-" + topic, **STEADY[scheme])
        for scheme, broker in zip(SCHEMES, brokers, strict=True)
    ]
    for source in sources:
        closing.callback(source.close)

    def is_shared() -> bool:
        for source in sources:
            source.poll(1, 0.05)
        return [len(source.assignment()) for source in sources] == [2, 2]

    wait_until(is_shared, deadline=90, what="both have two lanes", every=0.0)


def _narrow_topic(server: Kafka, size: int) -> str:
    """Return a new topic that takes batches of *size* bytes."""
    from confluent_kafka.admin import AdminClient, NewTopic

    name = f"narrow-{new_id()[-12:]}"
    topic = NewTopic(name, num_partitions=1, config={"max.message.bytes": str(size)})
    admin = AdminClient({"bootstrap.servers": server.address})
    admin.create_topics([topic])[name].result()
    return name


def test_a_message_beyond_the_topics_own_limit_is_refused_alone(
    broker: KafkaBroker, kafka: Kafka
) -> None:
    """Kafka refuses whole batches; still each message that fits is stored, and in order."""
    topic = _narrow_topic(kafka, 2000)
    bodies = [b"%d" % n for n in range(30)]
    messages = [Message.new(topic, body, key=b"k") for body in bodies]
    messages.insert(7, Message.new(topic, bytes(3000), key=b"k"))
    sink = broker.sink()
    results = sink.publish(messages)
    sink.close()
    assert [place for place, result in enumerate(results) if result.error is not None] == [7]
    assert isinstance(results[7].error, MessageTooLarge)
    source = broker.source([topic], group="g-" + topic)
    assert [delivery.body for delivery in _take(source, 30)] == bodies
    source.close()


def test_only_the_refused_message_of_a_transaction_is_to_blame(
    broker: KafkaBroker, kafka: Kafka
) -> None:
    """The others of its batch are only rolled back, and pass without it."""
    topic = _narrow_topic(kafka, 2000)
    messages = _messages(topic, 6)
    sink = broker.sink(transactional_id="blame-" + topic)
    refused = sink.publish([*messages[:3], Message.new(topic, bytes(3000)), *messages[3:]])
    assert [type(result.error) for result in refused] == [
        *[Transient] * 3,
        MessageTooLarge,
        *[Transient] * 3,
    ]
    assert [result.error for result in sink.publish(messages)] == [None] * 6
    sink.close()


def test_a_transactional_batch_is_stored_whole_or_not_at_all(
    broker: KafkaBroker, topic: str
) -> None:
    """One refused message takes the others back; the next batch passes."""
    sink = broker.sink(transactional_id="whole-" + topic)
    refused = sink.publish(
        [Message.new(topic, b"lost"), Message.new(topic, bytes(2_000_000)), Message.new(topic, b"")]
    )
    assert [type(result.error) for result in refused] == [Transient, MessageTooLarge, Transient]
    stored = sink.publish(_messages(topic, 5))
    assert [result.error for result in stored] == [None] * 5
    sink.close()
    source = broker.source([topic], group="g-" + topic)
    assert {delivery.body for delivery in _take(source, 5)} == {b"%d" % n for n in range(5)}
    source.close()


def test_the_ends_of_the_lanes_grow_with_what_is_stored(broker: KafkaBroker, topic: str) -> None:
    """Every lane of the topic is there, the empty ones at their beginning."""
    assert broker.ends([topic]) == {Lane(topic, n): 0 for n in range(4)}
    lanes = _publish(broker, _messages(topic, 20))
    assert broker.ends([topic]) == {Lane(topic, n): lanes.count(Lane(topic, n)) for n in range(4)}


def test_a_fresh_cluster_tells_the_lag_of_a_group_that_it_does_not_know(
    private_server: PrivateServer, connect: Opener
) -> None:
    """It has no coordinator yet: librdkafka's admin client crashes the process over that."""
    fresh = private_server(Kafka)
    for scheme in SCHEMES:
        broker = connect(scheme, fresh.address)
        topic = _topic(broker, 1)
        assert list(broker.lag(f"g-{topic}", [topic]).values()) == [0]


def test_lag_falls_to_nothing_behind_a_transaction(broker: KafkaBroker, topic: str) -> None:
    """The markers of a transaction are no messages: nobody waits for them for ever."""
    _publish(broker, _messages(topic, 20), transactional_id="lag-" + topic)
    source = broker.source([topic], group="g-" + topic)
    source.accept(_take(source, 20))

    def is_done() -> bool:
        source.poll(1, 0.05)
        source.flush()
        return not any(broker.lag("g-" + topic, [topic]).values())

    wait_until(is_done, what="no lag is left")
    source.close()


@pytest.mark.parametrize("ending", ["committed", "aborted", "read before", "both"])
def test_a_run_until_idle_ends_behind_the_marker_of_a_transaction(
    broker: KafkaBroker, kafka: Kafka, ending: str
) -> None:
    """Whether messages came before the marker, came and were taken back, or were read earlier."""
    topic = _topic(broker, partitions=2)
    sent = 0
    if ending != "aborted":
        sent = 20
        _publish(broker, _messages(topic, 20), transactional_id="idle-" + topic)
    if ending in {"aborted", "both"}:
        _abort(kafka, topic, [b"key %d" % n for n in range(40)])
    if ending == "read before":  # by one who left without having seen the marker
        source = broker.source([topic], group="g-" + topic)
        taken = _take(source, 20)
        source._member.reached = lambda _: None  # type: ignore[attr-defined]
        source.accept(taken)
        source.close()
        assert sum(broker.lag("g-" + topic, [topic]).values()) == 2
        sent = 0
    seen: list[str] = []
    consumer = Consumer(broker, group="g-" + topic)

    @consumer.on(topic)
    def handle(body: str) -> None:
        seen.append(body)

    run = threading.Thread(target=consumer.run, kwargs={"until_idle": True}, daemon=True)
    run.start()
    run.join(90)
    came_back = not run.is_alive()
    consumer.stop()
    run.join(90)
    assert came_back, f"it never came to rest, lag {broker.lag('g-' + topic, [topic])}"
    assert len(seen) == sent
    assert sum(broker.lag("g-" + topic, [topic]).values()) == 0


def _abort(kafka: Kafka, topic: str, keys: list[bytes]) -> None:
    """Leave nothing but markers and what nobody may read."""
    raw = confluent_kafka.Producer(
        {"bootstrap.servers": kafka.address, "transactional.id": "abort-" + topic}
    )
    raw.init_transactions(30)
    raw.begin_transaction()
    for key in keys:
        raw.produce(topic, b"never", key)
    raw.flush()
    raw.abort_transaction(30)


def test_a_transaction_that_is_still_open_is_not_lag(broker: KafkaBroker, kafka: Kafka) -> None:
    """Nobody can read it yet; it counts once it is committed."""
    topic = _topic(broker, partitions=1)
    raw = confluent_kafka.Producer(
        {"bootstrap.servers": kafka.address, "transactional.id": "open-" + topic}
    )
    raw.init_transactions(30)
    raw.begin_transaction()
    raw.produce(topic, b"x", b"k")
    raw.flush()
    assert broker.lag("g-" + topic, [topic]) == {Lane(topic, 0): 0}
    assert broker.ends([topic]) == {Lane(topic, 0): 1}
    raw.commit_transaction(30)
    wait_until(
        lambda: broker.lag("g-" + topic, [topic]) == {Lane(topic, 0): 2}, what="it can be read"
    )


def test_a_marker_is_committed_by_polling_alone(connect: Opener, scheme: str) -> None:
    """Also where the last message was settled before the marker was read: nobody is alarmed."""
    broker = connect(scheme, commit_every=0.05)
    topic = _topic(broker, partitions=1)
    _publish(broker, _messages(topic, 5), transactional_id="polling-" + topic)
    source = broker.source([topic], group="g-" + topic)
    source.accept(_take(source, 5))

    def is_committed() -> bool:
        source.poll(1, 0.02)
        return not any(broker.lag("g-" + topic, [topic]).values())

    wait_until(is_committed, what="the marker is committed", deadline=60)
    source.close()


def test_a_second_sink_of_a_transactional_id_fences_the_first_one_off(
    broker: KafkaBroker, topic: str
) -> None:
    """Two writers that believe to be one are a fault of the settings, and said so."""
    first = broker.sink(transactional_id="one-" + topic)
    _publish(broker, _messages(topic, 1), transactional_id="one-" + topic)
    with pytest.raises(ConfigurationError, match="transactional_id"):
        first.publish(_messages(topic, 1))
    first.close()


# -- consuming -------------------------------------------------------------------------


def test_records_of_others_are_taken(broker: KafkaBroker, topic: str, kafka: Kafka) -> None:
    """Without Holdfast's headers, a message gets the id that follows from its coordinates."""
    raw = confluent_kafka.Producer({"bootstrap.servers": kafka.address})
    headers: Any = [("id", b"11f0"), ("twice", b"1"), ("twice", None)]
    raw.produce(topic, b"{}", b"order-7", headers=headers)
    raw.produce(topic, None, b"order-7")
    raw.flush()
    source = broker.source([topic], group="g-" + topic)
    first, second = _take(source, 2)
    source.close()
    assert first.message.id == first.coordinates_id()
    assert first.message.headers.pairs == tuple(headers)
    assert (second.message.key, second.message.payload) == (b"order-7", None)
    assert first.message.id != second.message.id


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_records_of_others_are_taken(
    broker: KafkaBroker, topic: str, kafka: Kafka, codec: str
) -> None:
    """Whatever a producer elsewhere chose, in small batches and in large ones."""
    raw = confluent_kafka.Producer(
        {"bootstrap.servers": kafka.address, "compression.type": codec, "linger.ms": 50}
    )
    bodies = {b"%d " % n * 1000 for n in range(2000)}
    for body in bodies:
        raw.produce(topic, body, b"one key")
    raw.flush()
    source = broker.source([topic], group="g-" + topic)
    assert {delivery.body for delivery in _take(source, len(bodies))} == bodies
    source.close()


def test_a_missing_codec_is_named_with_what_installs_it(
    connect: Opener, kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time it is polled, and other partitions' messages before it are not lost."""
    broker = connect("kafka")
    topic = _topic(broker, partitions=1)
    _publish(broker, _messages(topic, 3))
    raw = confluent_kafka.Producer(
        {"bootstrap.servers": kafka.address, "compression.type": "snappy"}
    )
    raw.produce(topic, b"x" * 1000)
    raw.flush()
    monkeypatch.setattr("kafka.codec.snappy", None)
    source = broker.source([topic], group="g-" + topic)
    source.accept(_take(source, 3))
    for _ in range(3):
        with pytest.raises(ConfigurationError, match=r"snappy.*pip install 'holdfast\[kafka\]'"):
            _poll_for_ever(source)
    source.close()
    assert sum(broker.lag("g-" + topic, [topic]).values()) == 1


def test_headers_of_staged_events_travel_whole(broker: KafkaBroker, topic: str) -> None:
    """Also those with a zero character, where a client would cut text, and raw bytes."""
    own: list[Any] = [("text", "ü"), ("zero", "a\x00b"), ("raw", b"\xff\x00"), ("none", None)]
    sent = [Message.new(topic, b"x", key="k", headers=[pair]) for pair in own]
    _publish(broker, [_staged(message) for message in sent])
    source = broker.source([topic], group="g-" + topic)
    found = [delivery.message for delivery in _take(source, len(sent))]
    source.close()
    assert [message.headers.pairs for message in found] == [m.headers.pairs for m in sent]
    assert [message.id for message in found] == [message.id for message in sent]


def _staged(message: Message) -> Message:
    """Return *message* as a relay reads it from the outbox."""
    row = values(message)
    row["headers"] = msgspec.json.encode(row["headers"]).decode()
    topic, key, shard = row.pop("aggregatetype"), row.pop("aggregateid"), row.pop("shard")
    return staged(Row(**{**row, "id": str(row["id"])}, seq=1, shard=shard, topic=topic, key=key))


def test_accepts_are_committed_by_polling_alone(connect: Opener, scheme: str) -> None:
    """Within `commit_every`, without a flush."""
    broker = connect(scheme, commit_every=0.05)
    topic = _topic(broker)
    _publish(broker, _messages(topic, 20))
    source = broker.source([topic], group="g-" + topic)
    source.accept(_take(source, 20))

    def is_committed() -> bool:
        source.poll(1, 0.05)
        return not any(broker.lag("g-" + topic, [topic]).values())

    wait_until(is_committed, what="the accepts are committed")
    source.close()


class _Hearing:
    """A listener that notes what it hears and where, and may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.heard: list[tuple[str, frozenset[Lane], threading.Thread]] = []
        self._error = error

    def assigned(self, lanes: Iterable[Lane]) -> None:
        self._hear("assigned", lanes)

    def revoked(self, lanes: Iterable[Lane]) -> None:
        self._hear("revoked", lanes)

    def lost(self, lanes: Iterable[Lane]) -> None:
        self._hear("lost", lanes)

    def _hear(self, kind: str, lanes: Iterable[Lane]) -> None:
        self.heard.append((kind, frozenset(lanes), threading.current_thread()))
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.heard]


def test_the_listener_runs_in_the_polling_thread(
    broker: KafkaBroker, topic: str, scheme: str
) -> None:
    """There it may use the connections of that thread, settle and commit."""
    hearing = _Hearing()
    source = broker.source([topic], group="g-" + topic, listener=hearing)
    wait_until(lambda: (source.poll(1, 0.05), hearing.heard)[1], what="lanes come", every=0.0)
    source.close()
    assert hearing.kinds() == ["assigned", "revoked"]
    assert {thread for _, _, thread in hearing.heard} == {threading.current_thread()}


def test_what_the_listener_raises_comes_out_of_poll(broker: KafkaBroker, topic: str) -> None:
    """Client libraries swallow or wrap it; and the member goes on after it."""
    _publish(broker, _messages(topic, 3))
    source = broker.source(
        [topic], group="g-" + topic, listener=_Hearing(LookupError("from the listener"))
    )
    with pytest.raises(LookupError, match="from the listener"):
        _poll_for_ever(source)
    assert len(_take(source, 3)) == 3
    source.close()


class _Prompt:
    """A client that assigns a lane and has its first record in one and the same call."""

    def __init__(self, rebalance: Any) -> None:
        self._rebalance = rebalance
        self._is_new = True

    def fetch(self, limit: int, timeout: float, lanes: dict[Lane, KafkaLane]) -> Any:
        if not self._is_new:
            return []
        self._is_new = False
        self._rebalance.assigned([LANE])
        return [[msgspec.structs.replace(_delivery(0), epoch=lanes[LANE].epoch)]]

    def commit(self, offsets: dict[Lane, int], seconds: float) -> None:
        """Take anything."""

    def pause(self, lanes: Iterable[Lane]) -> None:
        """Have nothing to pause."""

    def resume(self, lanes: Iterable[Lane]) -> None:
        """Have nothing to resume."""

    def reached(self, lane: Lane) -> int | None:
        """Know nothing."""

    def close(self) -> None:
        """Hold nothing."""


def test_what_was_fetched_while_the_listener_raised_is_not_lost() -> None:
    """It comes with the next poll."""
    settings = KafkaSettings(servers=("127.0.0.1:9092",))
    native: Any = (_Prompt, None, "g", None, SYSTEM_CLOCK, settings)
    source = KafkaSource(*native, _Hearing(LookupError("from the listener")))
    with pytest.raises(LookupError):
        source.poll(10, 0.0)
    assert [delivery.position for delivery in source.poll(10, 0.0)] == [0]
    source.close()


def _poll_for_ever(source: Source) -> None:
    until = SYSTEM_CLOCK.monotonic() + 20
    while SYSTEM_CLOCK.monotonic() < until:
        source.poll(1, 0.05)


def test_a_silent_member_hears_that_its_lanes_are_lost_and_commits_nothing(
    broker: KafkaBroker, topic: str, scheme: str, kafka: Kafka
) -> None:
    """Lost is not revoked: what it settled too late is handed to the next owner."""
    _publish(broker, _messages(topic, 20))
    hearing = _Hearing()
    first = broker.source([topic], group="g-" + topic, listener=hearing, **QUICK[scheme])
    held = _take(first, 20)
    wait_until(
        lambda: not _members(kafka, "g-" + topic), deadline=90, what="the silent member is out"
    )
    second = broker.source([topic], group="g-" + topic, **QUICK[scheme])
    again = _take(second, 20)
    first.accept(held)
    wait_until(
        lambda: (first.poll(1, 0.05), second.poll(1, 0.05), "lost" in hearing.kinds())[2],
        deadline=90,
        what="the first member hears of it",
        every=0.0,
    )
    assert hearing.kinds()[:2] == ["assigned", "lost"]
    assert {delivery.body for delivery in again} == {delivery.body for delivery in held}
    assert sum(broker.lag("g-" + topic, [topic]).values()) == 20
    first.close()
    second.close()


def _members(server: Kafka, group: str) -> list[Any]:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": server.address})
    [answer] = admin.describe_consumer_groups([group]).values()
    return list(answer.result().members)


def test_settling_what_was_handed_out_again_since_changes_nothing(
    broker: KafkaBroker, topic: str
) -> None:
    """Neither after a release nor after a seek does the old delivery settle the new one."""
    group = "g-" + topic
    _publish(broker, [Message.new(topic, b"a", key=b"k")])
    source = broker.source([topic], group=group)
    [first] = _take(source, 1)
    source.release(first, blame=False)
    [second] = _take(source, 1)
    source.accept([first])
    source.flush()
    assert sum(broker.lag(group, [topic]).values()) == 1
    source.seek(second.lane, offset=0)
    [third] = _take(source, 1)
    source.seek(second.lane, offset=0)
    [fourth] = _take(source, 1)
    source.accept([second, third])
    source.flush()
    assert sum(broker.lag(group, [topic]).values()) == 1
    source.accept([fourth])
    source.flush()
    assert sum(broker.lag(group, [topic]).values()) == 0
    source.close()


def test_what_is_accepted_while_a_lane_leaves_is_committed_before_it_leaves(
    broker: KafkaBroker, topic: str, scheme: str, closing: ExitStack
) -> None:
    """Without a flush of the listener's own, and through the other member's rebalance."""
    group = "g-" + topic
    _publish(broker, _messages(topic, 40))
    held: list[Delivery] = []

    class Settling(_Hearing):
        def revoked(self, lanes: Iterable[Lane]) -> None:
            first.accept(held)

    first = broker.source([topic], group=group, listener=Settling(), **STEADY[scheme])
    closing.callback(first.close)
    held += _take(first, 40)
    second = broker.source([topic], group=group, **STEADY[scheme])
    closing.callback(second.close)
    came: list[Delivery] = []

    def is_shared() -> bool:
        came.extend(first.poll(50, 0.05) + second.poll(50, 0.05))
        return len(first.assignment()) == len(second.assignment()) == 2

    wait_until(is_shared, deadline=90, what="both have two lanes", every=0.0)
    assert sum(broker.lag(group, [topic]).values()) == 0
    assert came == []


def test_a_lane_paused_through_a_rebalance_keeps_little(
    broker: KafkaBroker, scheme: str, closing: ExitStack
) -> None:
    """What waits of it is bounded, by size as well: a long pause does not fill the memory."""
    topic = _topic(broker, partitions=2)
    group = "g-" + topic
    first = broker.source([topic], group=group, **STEADY[scheme])
    closing.callback(first.close)
    second = broker.source([topic], group=group, **STEADY[scheme])

    def is_shared(*counts: int) -> bool:
        sources = (first, second)[: len(counts)]
        assert not any(source.poll(1, 0.05) for source in sources)
        return tuple(len(source.assignment()) for source in sources) == counts

    wait_until(lambda: is_shared(1, 1), deadline=90, what="each has a lane", every=0.0)
    lanes = [Lane(topic, 0), Lane(topic, 1)]
    first.pause(lanes)
    second.close()
    wait_until(lambda: is_shared(2), deadline=90, what="the first has both", every=0.0)
    _publish(broker, [Message.new(topic, b"x" * 900_000, key=f"k{n}") for n in range(40)])
    states = first._lanes.values()  # type: ignore[attr-defined]

    def are_choked() -> bool:
        assert first.poll(50, 0.05) == []
        return all(state.choked for state in states)

    wait_until(are_choked, deadline=90, what="enough of each lane waits", every=0.0)
    assert all(first.poll(50, 0.02) == [] for _ in range(10))
    assert [len(state.backlog) for state in states] == [10, 10]
    first.resume(lanes)
    assert len(_take(first, 40)) == 40


def test_a_lane_that_is_paused_for_a_moment_loses_nothing_that_was_fetched(
    broker: KafkaBroker, scheme: str, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is not told: it would fetch anew, and be long about it."""
    topic = _topic(broker, partitions=2)
    _publish(broker, _messages(topic, 2 * FULL))
    source = broker.source([topic], group="g-" + topic, **STEADY[scheme])
    closing.callback(source.close)
    came = _take(source, 100)
    told: list[Lane] = []
    monkeypatch.setattr(source._member, "pause", told.extend)  # type: ignore[attr-defined]
    source.pause(source.assignment())
    assert source.poll(50, 0.05) == []
    assert told == []
    source.resume(source.assignment())
    came += _take(source, 2 * FULL - 100)
    for lane in source.assignment():
        offsets = [delivery.position for delivery in came if delivery.lane == lane]
        assert offsets == list(range(len(offsets)))


def test_a_message_released_for_ever_does_not_fill_the_memory(broker: KafkaBroker) -> None:
    """What is fetched behind it is bounded, and comes in order once it is settled."""
    topic = _topic(broker, partitions=1)
    _publish(broker, _messages(topic, 3 * FULL))
    source = broker.source([topic], group="g-" + topic)
    for _ in range(2 * FULL):
        [delivery] = _take(source, 1, limit=1)
        assert delivery.body == b"0"
        source.release(delivery, blame=False)
    assert len(source._lanes[Lane(topic, 0)].backlog) <= FULL + 1  # type: ignore[attr-defined]
    assert [d.body for d in _take(source, 3 * FULL)] == [b"%d" % n for n in range(3 * FULL)]
    source.close()


def test_a_lane_that_fetched_nothing_more_when_it_left_is_read_when_it_comes_back(
    broker: KafkaBroker, scheme: str, closing: ExitStack
) -> None:
    """A full backlog pauses the client, which may keep that when the backlog goes."""
    topic = _topic(broker, partitions=1)
    _publish(broker, _messages(topic, 3 * FULL))
    hearing = _Hearing()
    first = broker.source([topic], group="g-" + topic, listener=hearing, **STEADY[scheme])
    closing.callback(first.close)
    lanes = first._lanes  # type: ignore[attr-defined]

    def is_choked() -> bool:
        for delivery in first.poll(1, 0.05):
            first.release(delivery, blame=False)
        return any(state.choked for state in lanes.values())

    wait_until(is_choked, deadline=90, what="the backlog is full", every=0.0)
    second = broker.source([topic], group="g-" + topic, **STEADY[scheme])
    wait_until(
        lambda: (first.poll(1, 0.05), second.poll(1, 0.05), "revoked" in hearing.kinds())[2],
        deadline=90,
        what="the lane leaves",
        every=0.0,
    )
    second.close()
    came: set[bytes | None] = set()
    wait_until(
        lambda: (came.update(d.body for d in first.poll(500, 0.05)), len(came) == 3 * FULL)[1],
        deadline=90,
        what="all of it is read",
        every=0.0,
    )


def test_lanes_that_stay_keep_their_deliveries_through_a_cooperative_rebalance(
    broker: KafkaBroker, topic: str, scheme: str, closing: ExitStack
) -> None:
    """Native assignors pass through, and only what moves becomes stale."""
    from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor

    name, assignor = {
        "kafka": ("partition_assignment_strategy", [CooperativeStickyAssignor]),
        "kafka+confluent": ("partition.assignment.strategy", "cooperative-sticky"),
    }[scheme]
    native = {**STEADY[scheme], name: assignor}
    _publish(broker, _messages(topic, 40))
    first = broker.source([topic], group="g-" + topic, **native)
    closing.callback(first.close)
    held = _take(first, 40)
    second = broker.source([topic], group="g-" + topic, **native)
    closing.callback(second.close)

    def is_shared() -> bool:
        assert not [d for d in first.poll(10, 0.05) if d.lane in {x.lane for x in held}]
        second.poll(1, 0.05)
        return len(first.assignment()) == len(second.assignment()) == 2

    wait_until(is_shared, deadline=90, what="both have two lanes", every=0.0)
    stayed = first.assignment()
    first.accept(held)

    def is_committed() -> bool:
        first.poll(1, 0.05)
        second.poll(1, 0.05)
        first.flush()
        lag = broker.lag("g-" + topic, [topic])
        return [lag[lane] for lane in stayed] == [0, 0]

    wait_until(is_committed, what="the lanes that stayed are settled", every=0.0)


# -- bad input -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("kafka://", "names no server"),
        ("kafka://host:port", "port"),
        ("kafka://host:0", "port from 1"),
        ("kafka://host:9092/orders", "has a path"),
    ],
)
def test_a_malformed_url_is_refused(url: str, why: str) -> None:
    """Before anything is sent, and with what to write instead."""
    with pytest.raises(InvalidUrl, match=why):
        KafkaBroker(BrokerUrl.parse(url))


@pytest.mark.parametrize(
    ("scheme", "native"),
    [
        ("kafka", {"driver": "java"}),
        ("kafka", {"timeout": 0}),
        ("kafka", {"publish_within": "soon"}),
        ("kafka", {"commit_every": -1}),
        ("kafka", {"no_such_setting": 1}),
        ("kafka", {"acks": 1}),
        ("kafka", {"enable_idempotence": False}),
        ("kafka", {"enable_auto_commit": True}),
        ("kafka", {"group_id": "g"}),
        ("kafka+confluent", {"acks": "1"}),
        ("kafka+confluent", {"enable.idempotence": "false"}),
        ("kafka+confluent", {"enable.auto.commit": True}),
        ("kafka+confluent", {"enable.auto.offset.store": True}),
        ("kafka+confluent", {"transactional.id": "t"}),
        ("kafka+java", {}),
    ],
)
def test_settings_that_would_break_a_promise_are_refused(
    scheme: str, native: dict[str, Any]
) -> None:
    """Losing acknowledged or unfinished messages is not a matter of taste."""
    with pytest.raises(ConfigurationError):
        KafkaBroker(BrokerUrl.parse(f"{scheme}://127.0.0.1:1"), **native)


@pytest.mark.parametrize(
    ("scheme", "native"),
    [
        ("kafka", {"max_in_flight_requests_per_connection": 6}),
        ("kafka", {"retries": 0}),
        ("kafka", {"no_such_setting": 1}),
        ("kafka+confluent", {"max.in.flight": 6}),
        ("kafka+confluent", {"no.such.setting": 1}),
    ],
)
def test_settings_that_would_end_idempotence_are_refused(
    connect: Opener, scheme: str, native: dict[str, Any]
) -> None:
    """kafka-python alone would only log that it goes on without."""
    with pytest.raises(ConfigurationError):
        connect(scheme).sink(**native)


def test_without_idempotence_one_request_in_flight_keeps_the_order(connect: Opener) -> None:
    """For servers that lack it; the settings may come with the URL."""
    for url in (
        "kafka://{}?enable_idempotence=false&max_in_flight_requests_per_connection=1",
        "kafka+confluent://{}?enable.idempotence=false&max.in.flight=1",
    ):
        scheme, _, rest = url.partition("://{}")
        broker = connect(scheme, _address(connect) + rest)
        _publish(broker, _messages(_topic(broker), 20))


def _address(connect: Opener) -> str:
    return str(connect("kafka").name.partition("://")[2])


def test_a_missing_driver_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """At connect, not at import."""
    for module, scheme in (("kafka", "kafka"), ("confluent_kafka", "kafka+confluent")):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, "holdfast.brokers.kafka.kafka_python", raising=False)
        with pytest.raises(MissingExtra, match="pip install"):
            KafkaBroker(BrokerUrl.parse(f"{scheme}://127.0.0.1:9092"))


def test_a_wrong_port_is_said_to_be_closed_within_the_bound(connect: Opener, scheme: str) -> None:
    """Sink, source and admin alike: `BrokerDown` with the address and the reason."""
    broker = connect(scheme, f"127.0.0.1:{free_port()}", timeout=0.5)
    started = SYSTEM_CLOCK.monotonic()
    for use in (
        broker.sink,
        lambda: broker.source(["t"], group="g"),
        lambda: broker.create_topic("t"),
        lambda: broker.lag("g", ["t"]),
    ):
        with pytest.raises(BrokerDown, match=r"127\.0\.0\.1:\d+: .*refused"):
            use()
    assert SYSTEM_CLOCK.monotonic() - started < 30.0  # not the minutes of the clients' own


def test_a_port_that_is_not_kafkas_is_not_kafka(connect: Opener, scheme: str) -> None:
    """Something that listens and never answers is down, and the text says what was seen."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        broker = connect(scheme, f"127.0.0.1:{silent.getsockname()[1]}", timeout=0.5)
        with pytest.raises((BrokerDown, ConfigurationError), match="port is open"):
            broker.sink()


def test_bad_topics_groups_and_partitions_are_refused(broker: KafkaBroker, topic: str) -> None:
    """Each with its own error, and at once."""
    for name in ("", "..", "ö", "a b", "x" * 250):
        with pytest.raises(InvalidMessage):
            broker.create_topic(name)
    with pytest.raises(ConfigurationError):
        broker.create_topic(topic, partitions=0)
    for topics, group in (("orders", "g"), ([], "g"), ([topic], "")):
        with pytest.raises(ConfigurationError):
            broker.source(topics, group=group)
    with pytest.raises(UnknownTopic):
        broker.lag("g", ["own-unknown"])
    sink = broker.sink()
    bad, good = sink.publish([Message.new("a b", b"a"), Message.new(topic, b"b")])
    sink.close()
    assert isinstance(bad.error, InvalidMessage)
    assert good.error is None


def test_a_seek_to_nowhere_is_refused(broker: KafkaBroker, topic: str) -> None:
    """Neither beyond the end, where Kafka would start at the beginning, nor elsewhere."""
    lane = Lane(topic, 0)
    source = broker.source([topic], group="g-" + topic)
    with pytest.raises(ConfigurationError, match="not assigned"):
        source.seek(lane, offset=0)
    wait_until(lambda: (source.poll(1, 0.05), source.assignment())[1], what="lanes", every=0.0)
    for where in ({}, {"offset": -1}, {"offset": 1}, {"offset": "0"}):
        with pytest.raises(ConfigurationError):
            source.seek(lane, **where)  # type: ignore[arg-type]
    source.seek(lane, offset=0)
    source.close()


def test_a_broker_may_be_closed_before_its_sinks_and_sources(
    broker: KafkaBroker, topic: str
) -> None:
    """They stay open and can still ask what they need to know."""
    sink, source = broker.sink(), broker.source([topic], group="g-" + topic)
    broker.close()
    assert sink.publish(_messages(topic, 3))[0].error is None
    source.accept(_take(source, 3))
    assert sum(source.lag().values()) == 0
    source.close()
    sink.close()


# -- a server of our own: listeners with TLS and passwords, and restarts -----------------


PLAIN_SASL = {
    "kafka": {"security_protocol": "SASL_PLAINTEXT"},
    "kafka+confluent": {"security.protocol": "SASL_PLAINTEXT"},
}
TLS = {
    "kafka": {"security_protocol": "SSL"},
    "kafka+confluent": {"security.protocol": "SSL"},
}


def test_a_password_in_the_url_opens_the_door_and_is_never_shown(
    connect: Opener, scheme: str, guarded: GuardedKafka
) -> None:
    """Messages pass through a guarded listener; the broker's name masks the password."""
    at = f"{guarded.user_name}:{guarded.password}@{guarded.sasl}"
    broker = connect(scheme, at, **PLAIN_SASL[scheme])
    topic = _topic(broker)
    _publish(broker, _messages(topic, 3))
    source = broker.source([topic], group="g-" + topic)
    assert len(_take(source, 3)) == 3
    source.close()
    assert guarded.password not in broker.name


def test_spark_jobs_ask_a_guarded_server_where_its_topics_end(
    connect: Opener, guarded: GuardedKafka
) -> None:
    """By the user in the URL and by the trust that Spark's own client is told."""
    at = f"{guarded.user_name}:{guarded.password}@{guarded.sasl}"
    broker = connect("kafka", at, **PLAIN_SASL["kafka"])
    topic = _topic(broker)
    _publish(broker, _messages(topic, 3))
    by_password = f"kafka://{at}?topic={topic}&kafka.security.protocol=SASL_PLAINTEXT"
    by_trust = (
        f"kafka://{guarded.tls}?topic={topic}&kafka.security.protocol=SSL"
        f"&kafka.ssl.truststore.type=PEM&kafka.ssl.truststore.location={guarded.certificate}"
    )
    for source in (by_password, by_trust):
        ends = kafka_ends(SourceSpec.parse(source))
        assert sum(ends[topic].values()) == 3


def test_a_wrong_password_is_a_configuration_error(
    connect: Opener, scheme: str, guarded: GuardedKafka
) -> None:
    """It never gets better by waiting, and is not repeated in the text."""
    broker = connect(scheme, f"ann:wr0ng-word@{guarded.sasl}", timeout=3.0, **PLAIN_SASL[scheme])
    with pytest.raises(ConfigurationError) as caught:
        broker.sink()
    assert "wr0ng-word" not in str(caught.value)


@pytest.fixture
def leaky() -> Iterator[None]:
    """Collect the sockets that kafka-python drops unclosed after a failed TLS handshake."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.mark.usefixtures("leaky")
def test_tls_works_and_the_wrong_one_of_tls_and_plain_text_is_a_configuration_error(
    connect: Opener, scheme: str, guarded: GuardedKafka
) -> None:
    """With the server's certificate messages pass; either mismatch names the right setting."""
    trust = {"kafka": "ssl_cafile", "kafka+confluent": "ssl.ca.location"}[scheme]
    secure = connect(scheme, guarded.tls, **TLS[scheme], **{trust: str(guarded.certificate)})
    _publish(secure, _messages(_topic(secure), 3))

    def refusal(address: str, **native: Any) -> str:
        """Return what is wrong; a server too busy to answer in time is asked again."""
        try:
            connect(scheme, address, timeout=1.0, **native).sink()
        except ConfigurationError as error:
            return str(error)
        raise AssertionError("it was taken")

    for words, address, native in (
        ("SSL or SASL_SSL", guarded.tls, {}),
        ("PLAINTEXT or SASL_PLAINTEXT", guarded.address, TLS[scheme]),
        ("certificate", guarded.tls, TLS[scheme]),
    ):
        ask = partial(refusal, address, **native)
        assert words.lower() in wait_until(ask, deadline=90, what="the refusal").lower()


# -- restarts --------------------------------------------------------------------------


@dataclass
class Traffic:
    """One driver's producer and consumer, which work on whatever happens to the server."""

    broker: KafkaBroker
    topic: str
    scheme: str
    sent: list[tuple[bytes | None, bytes | None]] = field(default_factory=list)
    seen: list[tuple[bytes | None, bytes | None]] = field(default_factory=list)
    outages: int = 0
    failures: list[BaseException] = field(default_factory=list)
    published_all: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> list[threading.Thread]:
        threads = [
            threading.Thread(target=self._safely, args=(f,)) for f in (self._send, self._see)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _safely(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the test's own thread reports it
            self.failures.append(error)
            self.stop.set()

    def _send(self) -> None:
        sink = self.broker.sink()
        number = 0
        while not self.stop.is_set():
            batch = [
                Message.new(self.topic, b"%d" % n, key=b"key %d" % (n % 10))
                for n in range(number, number + 20)
            ]
            number += 20
            while not self._stored(sink, batch):
                self.outages += 1
            self.sent += [(message.key, message.payload) for message in batch]
        self.published_all.set()
        sink.close()

    @staticmethod
    def _stored(sink: Any, batch: list[Message]) -> bool:
        try:
            results = sink.publish(batch)
        except BrokerDown:
            return False
        assert [result.error for result in results] == [None] * len(batch)
        return True

    def _see(self) -> None:
        source = self.broker.source([self.topic], group="soak", **QUICK[self.scheme])
        while not (self.published_all.is_set() and set(self.sent) <= set(self.seen)):
            if self.failures:
                break
            try:
                deliveries = source.poll(50, 0.2)
            except BrokerDown:
                self.outages += 1
                continue
            self.seen += [(delivery.key, delivery.body) for delivery in deliveries]
            source.accept(deliveries)
        with suppress(BrokerDown):  # it may be down even now; then some of it comes again
            source.close()


def _survive_restarts(server: Kafka, connect: Opener, restarts: int) -> None:
    flows = []
    for scheme in SCHEMES:
        broker = connect(scheme, server.address, timeout=3.0, publish_within=2.0, commit_every=0.2)
        flows.append(Traffic(broker=broker, topic=_topic(broker), scheme=scheme))
    threads = [thread for flow in flows for thread in flow.start()]
    try:
        for number in range(1, restarts + 1):
            marks = [(len(flow.sent) + 100, len(flow.seen) + 100) for flow in flows]
            wait_until(
                lambda marks=marks: all(
                    flow.failures or (len(flow.sent) >= sent and len(flow.seen) >= seen)
                    for flow, (sent, seen) in zip(flows, marks, strict=True)
                ),
                deadline=120,
                what=f"traffic flows before restart {number}",
            )
            server.kill()
            server.start()
    finally:
        for flow in flows:
            flow.stop.set()
        for thread in threads:
            thread.join(150)
    for flow in flows:
        if flow.failures:
            raise flow.failures[0]
        assert len(flow.sent) >= 100 * restarts
        check_nothing_lost(flow.sent, flow.seen)
        check_order_per_key(flow.sent, flow.seen)


@pytest.mark.timeout(400)
def test_nothing_is_lost_and_keys_keep_their_order_while_the_server_is_killed(
    guarded: GuardedKafka, connect: Opener
) -> None:
    """SIGKILL in the middle of publishing and consuming, twice, with both drivers at once."""
    _survive_restarts(guarded, connect, restarts=2)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_nothing_is_lost_in_many_restarts(guarded: GuardedKafka, connect: Opener) -> None:
    """The same, for long."""
    _survive_restarts(guarded, connect, restarts=25)
