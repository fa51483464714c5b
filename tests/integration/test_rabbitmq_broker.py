"""What the RabbitMQ adapter promises, against real servers."""

from __future__ import annotations

import os
import shlex
import signal
import ssl
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

import pika
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.brokers.rabbitmq import RabbitBroker, names
from holdfast.brokers.rabbitmq.connection import ConnectionThread
from holdfast.brokers.rabbitmq.group import FairShare, TopicCounts
from holdfast.brokers.rabbitmq.lane import ConsumerPhase, LaneConsumer
from holdfast.brokers.rabbitmq.settings import RabbitSettings
from holdfast.brokers.rabbitmq.topology import Topology, delay_step
from holdfast.brokers.rabbitmq.wire import content_identity
from holdfast.clock import SYSTEM_CLOCK
from holdfast.errors import (
    BrokerDown,
    ConfigurationError,
    InvalidMessage,
    InvalidUrl,
    MessageTooLarge,
    UnknownTopic,
    Unsupported,
)
from holdfast.ids import new_id
from holdfast.message import Message
from holdfast.ports import Delivery, Lane
from holdfast.testing.conformance import BrokerConformance
from holdfast.testing.observed import check_nothing_lost, check_order_per_key
from holdfast.testing.proxy import FaultProxy
from holdfast.testing.waiting import wait_until
from holdfast.urls import BrokerUrl
from tests.publishing import Passage
from tests.servers.install import program
from tests.servers.ports import free_port
from tests.servers.rabbitmq import RabbitMQ

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from holdfast.ports import Broker, Source
    from tests.servers.fleet import Fleet
    from tests.servers.processes import Command

_SERVER_LIMIT = 1_000_000


class TlsRabbitMQ(RabbitMQ):
    """A node that also listens with TLS, takes small messages only, and obeys rabbitmqctl."""

    def __init__(self) -> None:
        super().__init__()
        self.tls_port = free_port()

    def prepare(self) -> None:
        super().prepare()
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        files = ["-keyout", self.folder / "key.pem", "-out", self.folder / "cert.pem"]
        make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        subprocess.run([*make, *subject, *files], check=True, capture_output=True)
        (self.folder / "rabbitmq.conf").write_text(
            f"listeners.ssl.1 = 127.0.0.1:{self.tls_port}\n"
            f"ssl_options.certfile = {self.folder / 'cert.pem'}\n"
            f"ssl_options.keyfile = {self.folder / 'key.pem'}\n"
            f"max_message_size = {_SERVER_LIMIT}\n"
        )

    def command(self) -> Command:
        command = super().command()
        env = {**command.env, "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq")}
        return type(command)(argv=command.argv, env=env)

    def ctl(self, *words: str) -> None:
        argv = [
            str(program("rabbitmq-server").with_name("rabbitmqctl")),
            "--erlang-cookie",
            "holdfast",
            *words,
        ]
        env = {**os.environ, **self.command().env}
        subprocess.run(argv, check=True, capture_output=True, env=env)


@pytest.fixture(scope="module")
def own_server(servers: Fleet) -> Iterator[TlsRabbitMQ]:
    """Start a server of this module alone, to be killed and starved."""
    server = servers.open(TlsRabbitMQ)
    yield server
    servers.close(server)


def broker_at(url: str, **native: Any) -> RabbitBroker:
    """Return the broker at *url*, which trusts new queues at once."""
    return RabbitBroker(BrokerUrl.parse(url), **{"maturity": 0, **native})


@pytest.fixture
def topic() -> str:
    return f"orders-{new_id()[-12:]}"


@pytest.fixture
def broker(rabbitmq: RabbitMQ) -> Iterator[RabbitBroker]:
    broker = broker_at(rabbitmq.url)
    yield broker
    broker.close()


@pytest.fixture
def own_broker(own_server: TlsRabbitMQ) -> Iterator[RabbitBroker]:
    broker = broker_at(own_server.url)
    yield broker
    broker.close()


class TestConformance(BrokerConformance):
    settle_in = 90.0
    lanes = 3

    @pytest.fixture
    def url(self, rabbitmq: RabbitMQ) -> str:
        return f"{rabbitmq.url}?maturity=0"

    @pytest.fixture
    def broker(self, rabbitmq: RabbitMQ) -> Iterator[RabbitBroker]:
        with FaultProxy(rabbitmq.host, rabbitmq.port) as self.proxy:
            broker = broker_at(f"amqp://guest:guest@{self.proxy.address}/")
            yield broker
            broker.close()

    def break_publishing(self, broker: Broker) -> AbstractContextManager[object]:
        del broker

        @contextmanager
        def broken() -> Iterator[None]:
            self.proxy.cut()
            yield
            self.proxy.heal()

        return broken()


class Reader:
    """A member that remembers what it was handed."""

    def __init__(self, broker: Broker, *topics: str, group: str = "billing", **native: Any) -> None:
        self.source: Source = broker.source(topics, group=group, **native)
        self.came: list[Delivery] = []

    def until(self, condition: Callable[[], object], what: str, deadline: float = 90.0) -> None:
        def is_met() -> object:
            self.came += self.source.poll(50, 0.02)
            return condition()

        wait_until(is_met, deadline=deadline, what=what, every=0.0)

    def take(self, count: int) -> list[Delivery]:
        start = len(self.came)
        self.until(lambda: len(self.came) - start >= count, f"{count} messages come")
        return self.came[start:]

    def owns(self, count: int) -> None:
        self.until(lambda: len(self.source.assignment()) == count, f"{count} lanes are owned")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.source.close()


@contextmanager
def sink_of(broker: Broker, **native: Any) -> Iterator[Callable[..., list[Any]]]:
    """Yield a function that publishes bodies, or messages, and returns the errors."""
    sink = broker.sink(**native)

    def send(topic: str, *bodies: Any, key: bytes | None = b"k") -> list[Any]:
        messages = [
            body if isinstance(body, Message) else Message.new(topic, body, key=key)
            for body in bodies
        ]
        return [result.error for result in sink.publish(messages)]

    yield send
    sink.close()


@contextmanager
def plain_channel(server: RabbitMQ) -> Iterator[Any]:
    """Yield a channel of pika's own, as a foreign program has one."""
    connection = pika.BlockingConnection(pika.URLParameters(server.url))
    yield connection.channel()
    connection.close()


# -- reaching the server ---------------------------------------------------------------


@pytest.mark.parametrize("make", [RabbitBroker.sink, lambda b: b.source(["t"], group="g")])
def test_a_wrong_password_is_a_configuration_error_that_does_not_show_it(
    rabbitmq: RabbitMQ, make: Callable[[RabbitBroker], object]
) -> None:
    """The remedy is in the settings, and the secret stays secret."""
    broker = broker_at(rabbitmq.url.replace("guest:guest", "guest:hunter2"))
    with pytest.raises(ConfigurationError, match="'guest'") as caught:
        make(broker)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in broker.name


def test_a_wrong_virtual_host_is_a_configuration_error(rabbitmq: RabbitMQ) -> None:
    """The message names the host that is missing."""
    with pytest.raises(ConfigurationError, match="'nowhere'"):
        broker_at(rabbitmq.url + "nowhere").sink()


def test_a_port_where_nobody_listens_is_an_outage() -> None:
    """Somebody may start the server later."""
    with pytest.raises(BrokerDown, match="cannot be reached"):
        broker_at(f"amqp://guest:guest@127.0.0.1:{free_port()}/").sink()


def test_plain_text_to_a_tls_port_says_so(own_server: TlsRabbitMQ) -> None:
    """The remedy is to write amqps."""
    with pytest.raises(ConfigurationError, match="amqps://"):
        broker_at(f"amqp://guest:guest@127.0.0.1:{own_server.tls_port}/").sink()


def test_tls_to_a_plain_port_says_so(rabbitmq: RabbitMQ) -> None:
    """The remedy is to write amqp."""
    with pytest.raises(ConfigurationError, match="amqp://"):
        broker_at(rabbitmq.url.replace("amqp:", "amqps:")).sink()


def test_tls_works_with_the_right_certificates_and_not_without(
    own_server: TlsRabbitMQ, topic: str
) -> None:
    """Pika's own TLS settings pass through; an unknown authority is refused."""
    url = f"amqps://guest:guest@127.0.0.1:{own_server.tls_port}/"
    with pytest.raises(ConfigurationError, match="CERTIFICATE_VERIFY_FAILED"):
        broker_at(url).sink()
    context = ssl.create_default_context(cafile=str(own_server.folder / "cert.pem"))
    broker = broker_at(url, ssl_options=pika.SSLOptions(context, "127.0.0.1"))
    with Reader(broker, topic) as reader, sink_of(broker) as send:
        assert send(topic, b"a") == [None]
        reader.source.accept(reader.take(1))


def test_the_next_host_is_tried_when_one_is_down(rabbitmq: RabbitMQ, topic: str) -> None:
    """Hosts are separated by commas."""
    url = f"amqp://guest:guest@127.0.0.1:{free_port()},{rabbitmq.address}/"
    broker = broker_at(url)
    with suppress(BrokerDown):
        broker.create_topic(topic)
    broker.create_topic(topic)
    broker.close()


@pytest.mark.parametrize(
    "query", ["prefetch=0", "prefetch=70000", "partitions=x", "nonsense=1", "auto_create=maybe"]
)
def test_a_nonsensical_setting_is_refused_at_once(query: str) -> None:
    """Nothing is sent before the settings are understood."""
    with pytest.raises(ConfigurationError, match=query.partition("=")[0]):
        broker_at(f"amqp://localhost/?{query}")


def test_a_malformed_url_is_refused_at_once() -> None:
    """Pika's complaint is passed on."""
    with pytest.raises(InvalidUrl):
        broker_at("amqp://localhost:port/")


@pytest.mark.programs
def test_the_module_can_be_imported_without_pika() -> None:
    """The missing extra is named when the broker is asked for."""
    program = (
        "import sys; sys.modules['pika'] = None\n"
        "from holdfast.brokers.rabbitmq import RabbitBroker\n"
        "from holdfast.errors import MissingExtra\n"
        "from holdfast.urls import BrokerUrl\n"
        "try: RabbitBroker(BrokerUrl.parse('amqp://localhost'))\n"
        "except MissingExtra as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert b"holdfast[rabbitmq]" in ran.stdout


# -- topics and groups -----------------------------------------------------------------


def test_what_no_group_would_get_is_refused_and_not_stored(
    broker: RabbitBroker, topic: str
) -> None:
    """A message is never dropped for want of a reader; with a group it is kept."""
    broker.create_topic(topic, partitions=2)
    with sink_of(broker) as send:
        [error] = send(topic, b"lost?")
        assert isinstance(error, UnknownTopic)
        assert "create_group" in str(error)
        broker.create_group(topic, "billing")
        assert send(topic, b"kept") == [None]
    with Reader(broker, topic) as reader:
        assert [d.body for d in reader.take(1)] == [b"kept"]


def test_nothing_that_reaches_the_exchange_of_a_topic_is_dropped(
    broker: RabbitBroker, rabbitmq: RabbitMQ, topic: str
) -> None:
    """What others publish under a routing key that is no lane comes to every group, too."""
    broker.create_topic(topic, partitions=2)
    broker.create_group(topic, "billing")
    broker.create_group(topic, "audit")
    keys = ["", "somewhere.else", "7", "1"]
    with plain_channel(rabbitmq) as channel:
        channel.confirm_delivery()
        for key in keys:
            channel.basic_publish(topic, key, key.encode(), mandatory=True)
    for group in ("billing", "audit"):
        with Reader(broker, topic, group=group) as reader:
            assert {d.body for d in reader.take(len(keys))} == {key.encode() for key in keys}


def test_an_exchange_of_an_earlier_time_goes_on_and_a_policy_keeps_what_is_no_lane(
    own_broker: RabbitBroker,
    own_server: TlsRabbitMQ,
    topic: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It cannot be declared anew, so the fix is told: one command, and nothing is dropped."""
    with plain_channel(own_server) as channel:
        channel.exchange_declare(topic, durable=True)
    own_broker.create_topic(topic, partitions=2)
    own_broker.create_group(topic, "billing")
    with sink_of(own_broker) as send:
        assert send(topic, b"goes on") == [None]
    [told] = [record.getMessage() for record in caplog.records if "set_policy" in record.msg]
    own_server.ctl(*shlex.split(told.partition("rabbitmqctl ")[2]))

    def is_kept() -> bool:
        with plain_channel(own_server) as channel:
            channel.confirm_delivery()
            try:
                channel.basic_publish(topic, "somewhere.else", b"foreign", mandatory=True)
            except pika.exceptions.UnroutableError:
                return False
        return True

    wait_until(is_kept, deadline=60, what="the policy takes effect")
    with Reader(own_broker, topic) as reader:
        assert {d.body for d in reader.take(2)} == {b"goes on", b"foreign"}


def test_without_auto_create_a_missing_topic_is_unknown(rabbitmq: RabbitMQ, topic: str) -> None:
    """Neither side makes it, and both say so."""
    broker = broker_at(f"{rabbitmq.url}?auto_create=false")
    with sink_of(broker) as send:
        [error] = send(topic, b"a")
        assert isinstance(error, UnknownTopic)
        with pytest.raises(UnknownTopic):
            broker.source([topic], group="billing")
        broker.create_topic(topic)
        broker.create_group(topic, "billing")
        assert send(topic, b"a") == [None]
    broker.close()


def test_a_topic_deleted_under_a_sink_is_unknown_or_made_again(
    broker: RabbitBroker, rabbitmq: RabbitMQ, topic: str
) -> None:
    """Made again by its sink, it keeps what no lane is bound for yet; other topics go on."""
    with (
        Reader(broker, topic) as reader,
        Reader(broker, topic + "2") as other,
        sink_of(broker) as send,
    ):
        assert send(topic, b"a") == [None]
        with plain_channel(rabbitmq) as channel:
            channel.exchange_delete(topic)
        batch = [Message.new(topic, b"b"), Message.new(topic + "2", b"c", key=b"k")]
        assert send(topic, *batch) == [None, None]
        assert {d.body for d in reader.take(2)} == {b"a", b"b"}
        assert other.take(1)[0].body == b"c"


def test_all_processes_agree_on_the_number_of_lanes(rabbitmq: RabbitMQ, topic: str) -> None:
    """Whoever creates a topic at the same time with other numbers gets the same one."""
    plain = RabbitSettings()
    [parameters] = plain.parameters(BrokerUrl.parse(rabbitmq.url))
    links = [ConnectionThread(parameters, SYSTEM_CLOCK) for _ in range(6)]
    start = threading.Barrier(len(links))
    counts: list[int] = []

    def create(number: int, link: ConnectionThread) -> None:
        topology = Topology(link, plain, SYSTEM_CLOCK)
        start.wait()
        counts.append(topology.create(topic, number))

    threads = [threading.Thread(target=create, args=pair) for pair in enumerate(links, start=1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    late = Topology(links[0], plain, SYSTEM_CLOCK)
    assert {*counts, late.lanes(topic)} == {counts[0]}
    assert len(counts) == len(links)
    for link in links:
        link.close()


def test_a_number_of_lanes_that_somebody_tampered_with_is_found_again(
    broker: RabbitBroker, rabbitmq: RabbitMQ, topic: str
) -> None:
    """The messages in the queue are a hint; its argument, which nobody can change, decides."""
    broker.create_topic(topic, partitions=5)
    with plain_channel(rabbitmq) as channel:
        channel.basic_get(names.lanes(topic), auto_ack=True)
        assert len(broker.lag("billing", [topic])) == 5
        channel.queue_purge(names.lanes(topic))
        assert len(broker.lag("billing", [topic])) == 5
        assert channel.queue_declare(names.lanes(topic), passive=True).method.message_count == 5


def test_what_waits_for_a_group_is_in_quorum_queues(
    broker: RabbitBroker, rabbitmq: RabbitMQ, topic: str
) -> None:
    """Asked for as a classic queue the same queue is refused: they survive the loss of a node."""
    broker.create_topic(topic, partitions=1)
    with Reader(broker, topic) as reader:
        reader.owns(1)
        queue = names.lane_queue(topic, "billing", 0)
        classic = {**names.LANE, "x-queue-type": "classic"}
        with (
            plain_channel(rabbitmq) as channel,
            pytest.raises(pika.exceptions.ChannelClosedByBroker, match="x-queue-type"),
        ):
            channel.queue_declare(queue, durable=True, arguments=classic)


def test_names_with_separators_never_meet() -> None:
    """Topic and group are told apart in every name."""
    pairs = [("a", "b:c"), ("a:b", "c"), ("a%3Ab", "c"), ("a", "b"), ("a", "lanes")]
    made = [names.lane_queue(*pair, 0) for pair in pairs] + [names.lanes(t) for t, _ in pairs[:3]]
    assert len(set(made)) == len(made)


def test_a_name_too_long_for_amqp_is_refused(broker: RabbitBroker) -> None:
    """The error says which and how long it may be."""
    with pytest.raises(ConfigurationError, match="255"):
        broker.create_topic("t" * 260)
    with sink_of(broker) as send:
        [error] = send("t" * 260, b"a")
    assert isinstance(error, ConfigurationError)


# -- sharing ---------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    lanes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    members=st.integers(1, 6),
    seed=st.randoms(use_true_random=False),
)
def test_members_that_only_count_come_to_fair_shares(
    lanes: list[int], members: int, seed: Any
) -> None:
    """Whatever the order of their looks, all lanes end up owned and nobody lacks its share."""
    topics = {f"t{n}": count for n, count in enumerate(lanes)}
    owned: list[set[Lane]] = [set() for _ in range(members)]
    hungry: set[int] = set()

    def look(me: int) -> bool:
        balance = FairShare(
            [
                TopicCounts(
                    topic=topic,
                    lanes=count,
                    members=members,
                    hungry=len(hungry - {me}),
                    owned=frozenset(n for t, n in owned[me] if t == topic),
                )
                for topic, count in topics.items()
            ]
        )
        taken = set().union(*owned)
        free = [(t, n) for t, c in topics.items() for n in range(c) if (t, n) not in taken]
        seed.shuffle(free)
        give, take = set(balance.surplus()), free[: balance.room]
        owned[me] = (owned[me] - give) | set(take)  # type: ignore[arg-type]
        was_hungry = me in hungry
        hungry.discard(me)
        if balance.is_hungry and not take:
            hungry.add(me)
        return bool(give or take or was_hungry != (me in hungry))

    for _ in range(60):
        order = list(range(members))
        seed.shuffle(order)
        moves = [look(me) for me in order]
        if not any(moves):
            break
    else:
        raise AssertionError(f"lanes still move: {owned}")
    total = sum(lanes)
    assert sum(map(len, owned)) == len(set().union(*owned)) == total
    assert min(map(len, owned)) >= total // members


def test_a_lane_has_one_owner_even_among_members_that_do_not_look(
    broker: RabbitBroker, rabbitmq: RabbitMQ, topic: str
) -> None:
    """A claim to an owned lane is refused; of two at once at most one is granted."""
    broker.create_topic(topic, partitions=1)
    broker.create_group(topic, "billing")
    url = BrokerUrl.parse(rabbitmq.url)
    [parameters] = RabbitSettings().parameters(url)
    links = [ConnectionThread(parameters, SYSTEM_CLOCK) for _ in range(2)]

    def claim(link: ConnectionThread) -> LaneConsumer:
        return LaneConsumer(link, Lane(topic, 0), "billing", 1, RabbitSettings(), lambda: None)

    def decided(*inlets: LaneConsumer) -> list[ConsumerPhase]:
        wait_until(lambda: all(inlet.stage is not ConsumerPhase.ASKED for inlet in inlets))
        return [inlet.stage for inlet in inlets]

    def won() -> LaneConsumer | None:
        inlet = claim(links[0])
        if decided(inlet) == [ConsumerPhase.OWNED]:
            return inlet
        inlet.close()
        return None

    for _ in range(5):
        both = [claim(link) for link in links]
        assert decided(*both).count(ConsumerPhase.OWNED) <= 1
        for inlet in both:
            inlet.close()
        wait_until(won, what="the lane is free again").close()
    wait_until(won, what="the lane is free again")
    assert decided(claim(links[1])) == [ConsumerPhase.TAKEN]
    for link in links:
        link.close()


@pytest.mark.parametrize("way", ["closes", "is silent"])
def test_a_lane_goes_on_in_order_when_its_owner(
    broker: RabbitBroker, rabbitmq: RabbitMQ, topic: str, way: str
) -> None:
    """What it held comes before what was never delivered, even to one who waits already."""
    broker.create_topic(topic, partitions=1)
    with Reader(broker, topic, prefetch=3, session=0.5) as owner, sink_of(broker) as send:
        send(topic, *(b"%d" % n for n in range(6)))
        owner.take(1)
        with plain_channel(rabbitmq) as channel:
            came: list[bytes] = []
            queue = names.lane_queue(topic, "billing", 0)
            channel.basic_consume(queue, lambda *given: came.append(given[3]))
            if way == "closes":
                owner.source.close()
            wait_until(
                lambda: (channel.connection.process_data_events(0.01), len(came) >= 6)[1],
                what="all messages come",
            )
        assert came == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_a_member_that_does_not_poll_loses_its_lanes_after_the_session(
    broker: RabbitBroker, topic: str
) -> None:
    """Its messages go to a member that polls; the late one comes back and goes on."""
    broker.create_topic(topic, partitions=1)
    with Reader(broker, topic, session=0.6) as silent, sink_of(broker) as send:
        send(topic, b"a")
        held = silent.take(1)
        with Reader(broker, topic) as other:
            assert other.take(1)[0].body == b"a"
            silent.source.accept(held)
            other.source.accept(other.came)
        send(topic, b"b")
        assert [d.body for d in silent.take(1)] == [b"b"]


def test_a_slow_caller_keeps_its_connection_and_its_messages(
    rabbitmq: RabbitMQ, topic: str
) -> None:
    """Heartbeats are answered while nobody polls, and the accept that comes late holds."""
    with FaultProxy(rabbitmq.host, rabbitmq.port) as proxy:
        broker = broker_at(f"amqp://guest:guest@{proxy.address}/?heartbeat=2&partitions=1")
        with Reader(broker, topic) as slow, sink_of(broker) as send:
            send(topic, b"a")
            held = slow.take(1)
            connections = proxy.accepted
            beats = {way: count + 5 * 8 for way, count in proxy.bytes.items()}
            wait_until(
                lambda: all(proxy.bytes[way] >= beats[way] for way in beats),
                what="heartbeats went both ways for longer than the server waits",
            )
            slow.source.accept(held)
            slow.source.flush()
            assert proxy.accepted == connections
            assert slow.source.poll(1, 0.2) == []


def test_no_more_than_the_prefetch_is_unsettled(broker: RabbitBroker, topic: str) -> None:
    """What is held bounds what comes; settling makes room."""
    broker.create_topic(topic, partitions=1)
    with Reader(broker, topic, prefetch=5) as reader, sink_of(broker) as send:
        send(topic, *(b"%d" % n for n in range(12)))
        reader.take(5)
        assert reader.source.poll(10, 0.3) == []
        reader.source.accept(reader.came[2:4])
        assert [d.body for d in reader.take(2)] == [b"5", b"6"]
        reader.source.accept(reader.came)
        reader.take(5)


# -- content ---------------------------------------------------------------------------


def test_foreign_messages_are_accepted(
    broker: RabbitBroker, rabbitmq: RabbitMQ, topic: str
) -> None:
    """What others publish comes with all it says, in properties or in headers of any type."""
    broker.create_topic(topic, partitions=1)
    headers = {"n": 7, "big": 2**40, "f": [b"\xff", "x"], "yes": True, "none": None, "t": {"a": 1}}
    properties = pika.BasicProperties(
        headers=headers, message_id="theirs", correlation_id="c", content_type="text/plain"
    )
    with Reader(broker, topic) as reader:
        with plain_channel(rabbitmq) as channel:
            channel.basic_publish(topic, "0", b"hello", properties)
            channel.basic_publish(topic, "0", b"")
        full, bare = reader.take(2)
        message = full.message
        assert (message.id, message.correlation_id) == ("theirs", "c")
        assert (message.content_type, message.payload) == ("text/plain", b"hello")
        assert message.headers.all("f") == [b"\xff", b"x"]
        assert message.headers.get("n") == b"7"
        assert message.headers.get("big") == b"%d" % 2**40
        assert (message.headers.get("yes"), message.headers.get("none")) == (b"true", None)
        assert bare.body == b""
        assert bare.key is None
        reader.source.accept([full, bare])


def test_a_foreign_message_without_id_keeps_its_identity_over_redeliveries(
    broker: RabbitBroker, rabbitmq: RabbitMQ, topic: str
) -> None:
    """Released, delayed, or left by a member that closed: whoever gets it knows it again."""
    broker.create_topic(topic, partitions=1)
    table = {"z": 1, "a": [b"\xff", {"y": None, "b": True}], "n": 2**40}
    said = {"timestamp": 1_700_000_000, "type": "tick", "app_id": "theirs"}
    with Reader(broker, topic) as reader:
        with plain_channel(rabbitmq) as channel:
            channel.basic_publish(topic, "0", b"x", pika.BasicProperties(headers=table, **said))
        ids = set()
        for delay in (None, 0.05, None):
            [delivery] = reader.take(1)
            ids.add(delivery.message.id)
            reader.source.release(delivery, blame=True, delay=delay)
        ids.add(reader.take(1)[0].message.id)
    with Reader(broker, topic) as reader:
        [last] = reader.take(1)
        assert ids == {last.message.id}
        reader.source.accept([last])


def test_the_content_of_a_foreign_message_cannot_be_tried_out_against_its_id(
    broker: RabbitBroker, rabbitmq: RabbitMQ, topic: str
) -> None:
    """With a key the id is the group's secret: the same at every delivery, guessed by nobody."""
    broker.create_topic(topic, partitions=1)
    with Reader(broker, topic, identity_key="s3cr3t") as reader, plain_channel(rabbitmq) as channel:
        for body in (b"phone 0151", b"phone 0152"):
            channel.basic_publish(topic, "0", body)
        ids = [delivery.message.id for delivery in reader.take(2)]
    with Reader(broker, topic, identity_key="s3cr3t") as reader:
        again = reader.take(2)
        reader.source.accept(again)
    assert [delivery.message.id for delivery in again] == ids
    assert len(set(ids)) == 2

    def tried(delivery: Delivery, key: bytes) -> str:
        """Return the id that whoever knows *key* works out of the content."""
        body = delivery.body or b""
        position = content_identity(pika.BasicProperties(), body, key)
        return Delivery(lane=delivery.lane, position=position, key=None, body=body).message.id

    assert [tried(delivery, b"s3cr3t") for delivery in again] == ids
    assert not set(ids) & {tried(one, key) for one in again for key in (b"", b"another")}


def test_foreign_messages_that_differ_in_anything_have_identities_of_their_own(
    broker: RabbitBroker, rabbitmq: RabbitMQ, topic: str
) -> None:
    """By content only messages alike in everything are one; by delivery not even those."""
    broker.create_topic(topic, partitions=1)
    kinds: list[dict[str, Any]] = [
        {}, {"timestamp": 1}, {"timestamp": 2}, {"type": "t"}, {"headers": {"a": 1}},
        {"headers": {"a": "1"}}, {"correlation_id": "c"},
    ]  # fmt: skip
    with Reader(broker, topic) as reader, plain_channel(rabbitmq) as channel:
        for kind in kinds:
            for body in (b"x", b"y"):
                channel.basic_publish(topic, "0", body, pika.BasicProperties(**kind))
        came = reader.take(2 * len(kinds))
        assert len({delivery.message.id for delivery in came}) == 2 * len(kinds)
        channel.basic_publish(topic, "0", b"x")
        [again] = reader.take(1)
        assert again.message.id == came[0].message.id
        reader.source.accept([*came, again])
    with Reader(broker, topic, identity="delivery") as reader, plain_channel(rabbitmq) as channel:
        for _ in range(2):
            channel.basic_publish(topic, "0", b"x")
        first, second = reader.take(2)
        assert first.message.id != second.message.id
        reader.source.accept([first, second])


def test_headers_keep_their_order_over_redeliveries_and_delays(
    broker: RabbitBroker, topic: str
) -> None:
    """RabbitMQ sorts them when it delivers again; a reserved name comes back as it was."""
    pairs = [("z", b"1"), ("a", None), ("z", b"\xff"), ("x-death", b"d"), ("ce_id", b"other")]
    sent = Message.new(topic, None, key=b"", headers=pairs, content_type="a/b")
    with Reader(broker, topic) as reader, sink_of(broker) as send:
        assert send(topic, sent) == [None]
        for delay in (None, 0.05, None):
            [delivery] = reader.take(1)
            assert delivery.message == sent
            assert delivery.message.headers.pairs == tuple(pairs)
            reader.source.release(delivery, blame=True, delay=delay)
        [last] = reader.take(1)
        assert last.message == sent
        assert last.count == 4


# -- delays ----------------------------------------------------------------------------


@settings(deadline=None)
@given(st.floats(min_value=0.0, max_value=28 * 86_400.0))
def test_a_delay_is_rounded_up_by_a_quarter_at_most(seconds: float) -> None:
    """No delay is cut short, and few queues serve all."""
    step = delay_step(seconds)
    assert seconds * 1000 < step <= max(seconds * 1250 + 3, 4)
    assert step < 2**32


def test_a_short_delay_does_not_wait_behind_a_long_one(broker: RabbitBroker, topic: str) -> None:
    """Each delay has a queue of its own."""
    broker.create_topic(topic, partitions=1)
    with Reader(broker, topic) as reader, sink_of(broker) as send:
        send(topic, b"long", b"short")
        long, short = reader.take(2)
        reader.source.release(long, blame=True, delay=3600.0)
        reader.source.release(short, blame=True, delay=0.1)
        assert [d.body for d in reader.take(1)] == [b"short"]


def test_a_message_in_a_new_delay_is_kept_twice_until_the_delay_is_safe(
    rabbitmq: RabbitMQ, broker: RabbitBroker, topic: str
) -> None:
    """RabbitMQ may forget a new queue if it is killed, so the original stays for a while."""
    broker_at(rabbitmq.url, partitions=1, maturity=0.01).create_group(topic, "billing")
    with FaultProxy(rabbitmq.host, rabbitmq.port) as proxy:
        shaky = broker_at(f"amqp://guest:guest@{proxy.address}/", maturity=60)
        with Reader(shaky, topic) as reader, sink_of(broker) as send:
            send(topic, b"a")
            [first] = reader.take(1)
            reader.source.release(first, blame=True, delay=777.0)
            reader.source.accept([first])
            reader.source.flush()
            proxy.cut()
            proxy.heal()
            _go_on(reader, lambda: len(reader.came) == 2)
            [_, again] = reader.came
            assert again.body == b"a"
            reader.source.release(again, blame=True, delay=777.0)
    assert sum(broker.lag("billing", [topic]).values()) == 0, "left in order, it is safe enough"


def test_a_delay_longer_than_declared_is_refused(broker: RabbitBroker, topic: str) -> None:
    """The message stays with its owner."""
    with Reader(broker, topic) as reader, sink_of(broker) as send:
        send(topic, b"a")
        [delivery] = reader.take(1)
        with pytest.raises(Unsupported, match="28 days"):
            reader.source.release(delivery, blame=False, delay=1e9)
        reader.source.accept([delivery])
        assert sum(reader.source.lag().values()) == 0


# -- what the server refuses -----------------------------------------------------------


def test_headers_that_fill_the_limit_fit_into_their_frame(broker: RabbitBroker, topic: str) -> None:
    """Many small headers cost more on the wire than their bytes, and still fit."""
    limit = broker.caps.max_headers or 0
    small = [(f"h{n:04}", b"") for n in range(limit // 13 - 60)]
    with Reader(broker, topic) as reader, sink_of(broker) as send:
        assert send(topic, Message.new(topic, b"a", headers=small)) == [None]
        assert reader.take(1)[0].message.headers.pairs == tuple(small)
        [error] = send(topic, Message.new(topic, b"a", headers=[("big", bytes(limit + 1))]))
        assert isinstance(error, MessageTooLarge)


def test_a_message_above_the_servers_own_limit_is_refused_and_the_rest_is_stored(
    own_broker: RabbitBroker, topic: str
) -> None:
    """RabbitMQ closes the channel over it; the sink finds out which one it was."""
    with Reader(own_broker, topic) as reader, sink_of(own_broker) as send:
        errors = send(topic, b"a", bytes(_SERVER_LIMIT + 1), b"b")
        assert errors[0] is None
        assert isinstance(errors[1], InvalidMessage)
        assert errors[2] is None
        reader.until(lambda: {d.body for d in reader.came} == {b"a", b"b"}, "the others are stored")


def test_a_full_queue_stores_nothing_behind_a_refused_message_of_its_key(
    own_broker: RabbitBroker, own_server: TlsRabbitMQ, topic: str
) -> None:
    """With `reject-publish` it refuses one message and takes the next: order holds all the same."""
    own_broker.create_topic(topic, partitions=1)
    own_broker.create_group(topic, "billing")
    tight = '{"max-length":100,"overflow":"reject-publish"}'
    own_server.ctl("set_policy", topic, f"^{topic}:billing:", tight, "--apply-to", "queues")
    messages = [Message.new(topic, b"%04d" % n, key=b"k") for n in range(2500)]
    passage, came, done = Passage(list(messages)), list[bytes | None](), threading.Event()

    def drain() -> None:
        with Reader(own_broker, topic, prefetch=100) as reader:
            while not (done.is_set() and own_broker.lag("billing", [topic])[Lane(topic, 0)] == 0):
                batch = reader.source.poll(100, 0.05)
                came.extend(delivery.body for delivery in batch)
                reader.source.accept(batch)

    sink = own_broker.sink()
    wait_until(lambda: passage.step(sink) or passage.refused, deadline=60, what="a full queue")
    thread = threading.Thread(target=drain)
    thread.start()
    try:
        wait_until(lambda: passage.step(sink) or not passage.left, deadline=90, what="all stored")
    finally:
        done.set()
        thread.join()
        sink.close()
    assert passage.overtaken == []
    assert list(dict.fromkeys(came)) == [message.payload for message in messages]


def test_a_memory_alarm_is_an_outage_for_publishers_only(
    own_server: TlsRabbitMQ, own_broker: RabbitBroker, topic: str
) -> None:
    """Publishing fails within its bound and says why; consuming goes on; then all is well."""
    with Reader(own_broker, topic) as reader, sink_of(own_broker, patience=2.0) as send:
        assert send(topic, b"before") == [None]
        own_server.ctl("set_vm_memory_high_watermark", "0.000001")
        try:
            for _ in range(2):
                with pytest.raises(BrokerDown, match="blocked publishers because of low on memory"):
                    send(topic, b"during")
            reader.source.accept(reader.take(1))
            reader.source.flush()
        finally:
            own_server.ctl("set_vm_memory_high_watermark", "0.4")
        wait_until(lambda: send(topic, b"after") == [None], what="publishing works again")
        reader.until(lambda: b"after" in [d.body for d in reader.came], "it comes")


# -- faults ----------------------------------------------------------------------------


def test_settling_after_a_lost_connection_changes_nothing(
    rabbitmq: RabbitMQ, broker: RabbitBroker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Old tags mean nothing on a new channel; the messages come again, and the log tells."""
    with FaultProxy(rabbitmq.host, rabbitmq.port) as proxy:
        shaky = broker_at(f"amqp://guest:guest@{proxy.address}/?partitions=1")
        with Reader(shaky, topic) as reader, sink_of(broker) as send:
            send(topic, b"a", b"b")
            old = reader.take(2)
            reader.source.accept(old[:1])
            proxy.cut()
            with pytest.raises(BrokerDown):
                _poll_while_assigned(reader.source)
            with pytest.raises(BrokerDown, match="before the last accepts were safe"):
                reader.source.flush()
            proxy.heal()
            for settle in (reader.source.reject, lambda d: reader.source.accept([d])):
                settle(old[1])
            reader.until(
                lambda: reader.came[-1] is not old[1] and reader.came[-1].body == b"b",
                "the message comes again",
            )
            assert reader.came[-1].count == 2
            reader.source.release(old[1], blame=True)
            reader.source.accept([reader.came[-1]])
            reader.source.flush()
            assert sum(broker.lag("billing", [topic]).values()) == 0
    assert any("lost RabbitMQ" in record.getMessage() for record in caplog.records)
    assert not any("guest:guest" in record.getMessage() for record in caplog.records)


def _poll_while_assigned(source: Source) -> None:
    while source.assignment():
        source.poll(1, 0.05)


def test_a_queue_deleted_under_a_member_is_made_again(
    broker: RabbitBroker, rabbitmq: RabbitMQ, topic: str
) -> None:
    """What was in it is gone by the operator's will; what follows comes."""
    broker.create_topic(topic, partitions=1)
    with Reader(broker, topic) as reader, sink_of(broker) as send:
        reader.owns(1)
        with plain_channel(rabbitmq) as channel:
            channel.queue_delete(names.lane_queue(topic, "billing", 0))
        wait_until(
            lambda: (reader.source.poll(1, 0.05), send(topic, b"a") == [None])[1],
            what="messages can be stored again",
        )
        assert reader.take(1)[0].body == b"a"


def test_a_flush_that_cannot_know_says_so(
    rabbitmq: RabbitMQ, broker: RabbitBroker, topic: str
) -> None:
    """It returns once the broker has the accepts, and not before."""
    with FaultProxy(rabbitmq.host, rabbitmq.port) as proxy:
        shaky = broker_at(f"amqp://guest:guest@{proxy.address}/?partitions=1")
        with Reader(shaky, topic, patience=1.0) as reader, sink_of(broker) as send:
            send(topic, b"a")
            held = reader.take(1)
            proxy.black_hole()
            reader.source.accept(held)
            for _ in range(2):
                with pytest.raises(BrokerDown, match="not answered"):
                    reader.source.flush()
            proxy.heal()
            wait_until(lambda: reader.source.flush() is None, what="the flush is answered")
    with Reader(broker, topic) as other:
        assert other.source.poll(1, 0.5) == []


def test_a_silent_server_is_an_outage_within_the_patience(rabbitmq: RabbitMQ, topic: str) -> None:
    """Nothing hangs; what is published again comes after its first attempt, in order."""
    with FaultProxy(rabbitmq.host, rabbitmq.port) as proxy:
        shaky = broker_at(f"amqp://guest:guest@{proxy.address}/?patience=2")
        with Reader(shaky, topic, patience=20) as reader, sink_of(shaky) as send:
            assert send(topic, b"0") == [None]
            proxy.black_hole()
            for _ in range(2):
                with pytest.raises(BrokerDown, match="confirmed nothing"):
                    send(topic, b"1", b"2")
            proxy.heal()
            wait_until(lambda: send(topic, b"1", b"2", b"3") == [None] * 3, what="it goes on")
            bodies = [d.body for d in reader.take(5)]
            assert list(dict.fromkeys(bodies)) == [b"0", b"1", b"2", b"3"]
            bodies += [d.body for d in reader.source.poll(9, 0.3)]
            assert len(bodies) == 5, "what cannot be sent piled up"


@pytest.mark.parametrize("window", [1, 5])
def test_no_more_messages_of_a_key_are_on_their_way_than_its_window(
    rabbitmq: RabbitMQ, broker: RabbitBroker, topic: str, window: int
) -> None:
    """While nothing is confirmed, so many are sent, and none behind them."""
    broker.create_topic(topic, partitions=1)
    broker.create_group(topic, "billing")

    def stored() -> int:
        return sum(broker.lag("billing", [topic]).values())

    with FaultProxy(rabbitmq.host, rabbitmq.port) as proxy:
        url = f"amqp://guest:guest@{proxy.address}/?patience=2&key_window={window}"
        with sink_of(broker_at(url)) as send:
            wait_until(lambda: send(topic, b"first") == [None], what="the sink is at work")
            before = stored()
            proxy.black_hole()
            with pytest.raises(BrokerDown):
                send(topic, *(b"%d" % n for n in range(20)))
            proxy.heal()  # what was sent arrives now
            wait_until(lambda: stored() >= before + window, what="what was sent is stored")
            assert stored() == before + window


@pytest.mark.parametrize("limit", [32, 1], ids=["as it is", "with a channel that stashes"])
def test_a_flushed_accept_survives_the_death_of_the_server(
    own_server: TlsRabbitMQ, topic: str, limit: int
) -> None:
    """AMQP confirms no acknowledgement; flush waits until the queue's log has it.

    A channel that waits for *limit* answers of the queue stashes further acknowledgements, and
    lets whatever else it is asked for pass them.
    """
    own_server.ctl("eval", f"application:set_env(rabbit, quorum_commands_soft_limit, {limit}).")
    broker = broker_at(own_server.url, partitions=1, maturity=3)
    count = 400
    with Reader(broker, topic, prefetch=count) as reader, sink_of(broker) as send:
        send(topic, *(b"%d" % n for n in range(count + 1)))
        held = reader.take(count)
        for delivery in held[::2]:  # one by one, so that many frames are under way
            reader.source.accept([delivery])
        reader.source.flush()
        os.kill(own_server.pid, signal.SIGKILL)  # at once
        own_server.kill()
        own_server.start()
        safe = {delivery.body for delivery in held[::2]}
        start = len(reader.came)
        with suppress(BrokerDown):
            reader.source.poll(1, 0.0)
        _go_on(reader, lambda: len(reader.came) - start >= count + 1 - len(safe))
        assert not safe & {delivery.body for delivery in reader.came[start:]}
        reader.source.accept(reader.came[start:])
    broker.close()


def _go_on(reader: Reader, condition: Callable[[], object]) -> None:
    def is_met() -> object:
        reader.came += reader.source.poll(50, 0.05)  # an outage counts as "not yet"
        return condition()

    wait_until(is_met, deadline=120.0, what="the member goes on after the restart")


@pytest.mark.timeout(500)
def test_nothing_is_lost_and_keys_keep_their_order_while_the_server_is_killed(
    own_server: TlsRabbitMQ, topic: str, record_property: Callable[[str, object], None]
) -> None:
    """Producers and members go on by themselves after each restart."""
    record_property("verdict", _soak(own_server, topic, restarts=2))


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_nothing_is_lost_over_many_restarts(
    own_server: TlsRabbitMQ, topic: str, record_property: Callable[[str, object], None]
) -> None:
    """The same for a long time."""
    record_property("verdict", _soak(own_server, topic, restarts=25))


class Soak:
    """Publishes and consumes in threads until told to stop, whatever happens to the server."""

    def __init__(self, url: str, topic: str) -> None:
        self.sent: list[tuple[bytes, bytes]] = []
        self.seen: list[tuple[bytes | None, bytes | None]] = []
        self.stopping = threading.Event()
        self.leaving = threading.Event()
        self.outages = 0
        self.errors: list[BaseException] = []
        self._url = url
        self._topic = topic

    def produce(self) -> None:
        broker = broker_at(self._url, patience=3.0)
        sink = broker.sink()
        while not self.stopping.is_set():
            first = len(self.sent)
            pairs = [(b"k%d" % (n % 7), b"%d" % n) for n in range(first, first + 20)]
            batch = [Message.new(self._topic, body, key=key) for key, body in pairs]
            while not self.leaving.is_set():
                try:
                    results = sink.publish(batch)
                except BrokerDown:
                    self.outages += 1
                    continue
                assert [r.error for r in results] == [None] * len(batch)
                self.sent += pairs
                break
        sink.close()

    def consume(self, source: Source) -> None:
        while not self.leaving.is_set():
            try:
                batch = source.poll(30, 0.1)
                self.seen += [(d.key, d.body) for d in batch]
                source.accept(batch)
            except BrokerDown:
                self.outages += 1
        source.close()

    def work_goes_on(self) -> None:
        goal = len(self.seen) + 400
        wait_until(lambda: len(self.seen) > goal or self.errors, deadline=120, what="work goes on")
        assert not self.errors

    def is_drained(self) -> bool:
        return set(self.sent) <= set(self.seen)

    def run(self, work: Callable[..., None], *args: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                work(*args)
            except BaseException as error:  # noqa: BLE001 - reported by the test
                self.errors.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread


def _soak(server: RabbitMQ, topic: str, *, restarts: int) -> str:
    broker = broker_at(server.url, partitions=4, maturity=3)
    soak = Soak(server.url, topic)
    members = [broker.source([topic], group="billing") for _ in range(2)]
    threads = [soak.run(soak.produce), *(soak.run(soak.consume, member) for member in members)]
    try:
        for _ in range(restarts):
            soak.work_goes_on()
            server.kill()
            server.start()
        soak.work_goes_on()
        soak.stopping.set()
        threads[0].join(120.0)
        wait_until(soak.is_drained, deadline=120.0, what="everything comes")
    finally:
        soak.stopping.set()
        soak.leaving.set()
        for thread in threads:
            thread.join(90)
        broker.close()
    assert not soak.errors
    check_nothing_lost(soak.sent, soak.seen)
    check_order_per_key(soak.sent, soak.seen)
    twice = len(soak.seen) - len(set(soak.seen))
    return (
        f"{len(soak.sent)} sent, 0 lost, {twice} seen twice, order per key kept over "
        f"{restarts} kills and {soak.outages} reported outages"
    )
