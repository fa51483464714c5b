"""The NATS JetStream adapter against a real server."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import nats as library
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.brokers.nats import NatsBroker
from holdfast.brokers.nats.ack_tokens import ACK
from holdfast.brokers.nats.fetch import Arrival
from holdfast.brokers.nats.lane import NatsLane
from holdfast.brokers.nats.streams import name_of, token
from holdfast.clock import SYSTEM_CLOCK, SystemClock
from holdfast.errors import (
    BrokerDown,
    ConfigurationError,
    HoldfastError,
    InvalidUrl,
    MessageTooLarge,
    UnknownTopic,
)
from holdfast.headers import REPLAY_GROUP
from holdfast.ids import new_id
from holdfast.message import Message
from holdfast.ports import Lane
from holdfast.testing import FaultProxy, check_nothing_lost, check_order_per_key, wait_until
from holdfast.testing.conformance import BrokerConformance
from holdfast.urls import BrokerUrl
from tests.publishing import Passage
from tests.servers.nats import Nats
from tests.servers.processes import Command

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from nats.aio.client import Client

    from holdfast.ports import Broker, Delivery, Sink, Source
    from tests.servers.fixtures import PrivateServer

SHORT = {"session": 2.0, "lease": 2.0}
"""For tests that wait for the end of either: as long as a busy machine may stand still."""


def connect(url: str, **native: Any) -> NatsBroker:
    """Return the adapter for *url*; nobody is taken for dead by mistake."""
    patient = {"session": 90.0, "lease": 90.0, "timeout": 20.0, "partitions": 1}
    return NatsBroker(BrokerUrl.parse(url), **{**patient, **native})


def raw(url: str, work: Callable[[Client], Awaitable[Any]]) -> Any:
    """Return what *work* does with a client of the library's own."""

    async def run() -> Any:
        client = await library.connect(url)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


def take(source: Source, count: int, seconds: float = 45.0) -> list[Delivery]:
    """Poll until *count* deliveries came; a lost connection is waited out."""
    got: list[Delivery] = []

    def is_enough() -> bool:
        with suppress(BrokerDown):
            got.extend(source.poll(count - len(got), 0.1))
        return len(got) >= count

    wait_until(is_enough, deadline=seconds, what=f"{count} deliveries")
    return got


def bodies(deliveries: Iterable[Delivery]) -> list[bytes | None]:
    """Return the bodies of *deliveries*."""
    return [delivery.body for delivery in deliveries]


class TestNats(BrokerConformance):
    session = 2.0
    quiet = 0.15

    @pytest.fixture
    def url(self, nats: Nats, expires: bool) -> str:
        terms = f"session={self.session}&lease=1.2" if expires else "session=90&lease=90"
        return f"{nats.url}?{terms}&timeout=5"

    @pytest.fixture
    def broker(self, url: str, nats: Nats) -> Iterator[NatsBroker]:
        self._server = nats
        with closing(NatsBroker(BrokerUrl.parse(url))) as broker:
            yield broker

    def break_publishing(self, broker: Broker) -> AbstractContextManager[object]:
        del broker
        return self._killed()

    @contextmanager
    def _killed(self) -> Iterator[None]:
        self._server.kill()
        try:
            yield
        finally:
            self._server.start()


# -- what the adapter promises of its own ----------------------------------------------------


@pytest.fixture
def topic() -> str:
    """Name a topic that no other test uses."""
    return f"t-{new_id()}"


@pytest.fixture
def broker(nats: Nats) -> Iterator[NatsBroker]:
    """Return an adapter of the shared server."""
    with closing(connect(nats.url)) as broker:
        yield broker


@pytest.fixture
def sink(broker: NatsBroker) -> Iterator[Sink]:
    """Return a sink of the adapter."""
    with closing(broker.sink()) as sink:
        yield sink


@pytest.fixture
def member(broker: NatsBroker, topic: str) -> Iterator[Callable[..., Source]]:
    """Offer a function that makes members of the group `g`; they are closed after."""
    sources: list[Source] = []

    def source(**options: Any) -> Source:
        sources.append(broker.source([topic], **{"group": "g", **options}))
        return sources[-1]

    yield source
    for each in sources:
        each.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Close with the test whatever it enters here."""
    with ExitStack() as stack:
        yield stack


@contextmanager
def short_lived(nats: Nats, topic: str) -> Iterator[Source]:
    """Yield a member of the group `g` whose leases are short."""
    with (
        closing(connect(nats.url, **SHORT)) as broker,
        closing(broker.source([topic], group="g")) as source,
    ):
        yield source


def publish(sink: Sink, topic: str, *payloads: bytes, key: bytes | None = b"k") -> list[Any]:
    """Store *payloads* and return their positions."""
    results = sink.publish([Message.new(topic, payload, key=key) for payload in payloads])
    assert [result.error for result in results] == [None] * len(payloads)
    return [result.position for result in results]


@given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40))
def test_every_name_has_a_legal_token_of_its_own(one: str, other: str) -> None:
    """No topic is refused for its characters, and none shares a stream with another."""
    written = token(one)
    assert not set(written) & set(" \t\r\n.*>/\\")
    assert written.isascii()
    assert not written.startswith(("KV_", "OBJ_", "$"))
    assert name_of(written) == one
    assert (token(other) == written) == (other == one)


@pytest.mark.parametrize("name", ["orders.eu", "a b/*>", "KV_holdfast", "été ✓", "=2E"])
def test_any_name_works_as_topic_and_group(broker: NatsBroker, sink: Sink, name: str) -> None:
    """What the server cannot be told as it is, it is told in another way."""
    own = f"{name} {new_id()}" if name != "KV_holdfast" else name
    publish(sink, own, b"a")
    with closing(broker.source([own], group=own)) as source:
        [delivery] = take(source, 1)
        assert delivery.lane.topic == own
        source.accept([delivery])


def test_all_processes_see_the_lanes_that_the_stream_has(
    nats: Nats, broker: NatsBroker, topic: str
) -> None:
    """The number of lanes is the topic's, whatever the settings say."""
    broker.create_topic(topic, partitions=3)
    broker.create_topic(topic, partitions=5)
    with (
        closing(connect(nats.url, partitions=7)) as other,
        closing(other.sink()) as sink,
        closing(other.source([topic], group="g")) as source,
    ):
        publish(sink, topic, b"a", key=b"k")
        wait_until(lambda: source.poll(1, 0.1) or source.assignment(), what="lanes")
        assert {lane.partition for lane in source.assignment()} == {0, 1, 2}


def test_what_others_publish_is_handed_out(
    nats: Nats, broker: NatsBroker, topic: str, member: Callable[..., Source]
) -> None:
    """Neither our headers nor any headers at all are needed; CloudEvents are understood."""
    broker.create_topic(topic)
    event = {"Ce-Id": "7", "Ce-Type": "t", "Ce-Partitionkey": "k%201", "other": "x", "Status": "9"}

    async def send(client: Client) -> None:
        stream = client.jetstream()
        await stream.publish(f"{topic}.0", b"bare")
        await stream.publish(f"{topic}.0", b"event", headers=event)
        with pytest.raises(library.js.errors.NoStreamResponseError):
            await stream.publish(f"{topic}.1", b"a lane that nobody reads")

    raw(nats.url, send)
    bare, sent = take(member(), 2)
    assert (bare.body, bare.key, bare.headers) == (b"bare", None, [])
    assert bare.message.id == bare.coordinates_id()
    assert (sent.message.id, sent.message.type, sent.key) == ("7", "t", b"k 1")
    assert sent.message.headers.text("other") == "x"
    assert sent.message.headers.text("Status") == "9"


def test_the_wire_form_is_the_documented_one(
    nats: Nats, broker: NatsBroker, sink: Sink, topic: str
) -> None:
    """Plain headers travel as they are; what NATS cannot carry travels packed, all of it."""
    del broker
    plain = Message.new(topic, b"1", key=b"k", headers={"x-plain": "a b"}, content_type="a/b")
    packed = Message.new(
        topic, None, headers=[("x", b"\xff"), ("Nats-Rollup", b"all"), ("y", b"2")]
    )
    sink.publish([plain, packed])

    async def read(client: Client) -> list[Any]:
        stream = client.jetstream()
        return [await stream.get_msg(topic, seq) for seq in (1, 2)]

    first, second = raw(nats.url, read)
    assert first.headers["Nats-Msg-Id"] == first.headers["ce-id"] == plain.id
    assert first.headers["x-plain"] == "a b"
    assert first.headers["content-type"] == "a/b"
    assert first.headers["ce-partitionkey"] == "k"
    assert second.headers["Holdfast-Body"] == "null"
    assert (
        second.headers["Holdfast-Headers"] == '[["x","/w=="],["Nats-Rollup","YWxs"],["y","Mg=="]]'
    )
    assert "Nats-Rollup" not in second.headers


def test_topics_are_told_with_their_lanes_and_streams_of_others_are_not(nats: Nats) -> None:
    """Under the names that they were made by, whatever the server calls them."""
    with closing(connect(nats.url)) as broker:
        broker.create_topic("told.orders eu", partitions=3)
        raw(nats.url, lambda client: client.jetstream().add_stream(name="foreign", subjects=["f"]))
        known = broker.topics()
    assert known["told.orders eu"] == 3
    assert "foreign" not in known


def test_a_replay_is_stored_although_its_id_was(
    sink: Sink, topic: str, member: Callable[..., Source]
) -> None:
    """Publishing twice by mistake is one message; an operator's replay is another."""
    message = Message.new(topic, b"a", key=b"k")
    replay = message.with_(headers=message.headers.with_({REPLAY_GROUP: "g"}))
    first, again, replayed = sink.publish([message, message, replay])
    assert first.position == again.position != replayed.position
    deliveries = take(member(), 2)
    assert [delivery.message.id for delivery in deliveries] == [message.id, message.id]


def test_what_went_elsewhere_comes_back_before_what_follows_it(
    nats: Nats, sink: Sink, topic: str, stack: ExitStack
) -> None:
    """A message that a stranger pulled from our consumer is not overtaken by its key's next."""
    source = stack.enter_context(short_lived(nats, topic))
    publish(sink, topic, b"0")
    source.accept(take(source, 1))
    source.flush()
    [lane] = source.assignment()
    source.pause([lane])

    async def steal(client: Client) -> bytes:
        pull = await client.jetstream().pull_subscribe_bind("g_0", topic)
        [message] = await pull.fetch(1, timeout=5)
        return bytes(message.data)

    # Our own request for messages must end first, or it would get this one.
    wait_until(lambda: source.poll(1, 0.05) or not _waiting(nats, topic), what="no request waits")
    publish(sink, topic, b"1", b"2", b"3")
    assert raw(nats.url, steal) == b"1"
    source.resume([lane])
    came: list[bytes | None] = []
    while len(came) < 3:
        batch = take(source, 1)
        source.accept(batch)
        came += bodies(batch)
    assert came == [b"1", b"2", b"3"]


def test_what_comes_again_comes_in_order(
    nats: Nats, sink: Sink, topic: str, member: Callable[..., Source]
) -> None:
    """The server hands out again in the order of giving back; the next owner sorts it."""
    first = member()
    first.poll(1, 0.1)  # makes the consumer
    first.close()
    publish(sink, topic, b"1", b"2", b"3")

    async def give_back(client: Client) -> None:
        pull = await client.jetstream().pull_subscribe_bind("g_0", topic)
        for message in reversed(await pull.fetch(3, timeout=5)):
            await message.nak()
        await client.flush()

    raw(nats.url, give_back)
    publish(sink, topic, b"4")
    source = member()
    assert bodies(take(source, 4)) == [b"1", b"2", b"3", b"4"]


def test_what_a_dead_member_held_comes_before_what_follows_it(
    nats: Nats, proxy: FaultProxy, sink: Sink, topic: str
) -> None:
    """Its lane is taken over at once, but hands out nothing until its messages are back."""
    publish(sink, topic, b"1", b"2")
    with (
        closing(connect(f"nats://{proxy.address}", timeout=3.0, **SHORT)) as distant,
        closing(connect(nats.url, **SHORT)) as near,
    ):
        dying = distant.source([topic], group="g")
        assert bodies(take(dying, 2)) == [b"1", b"2"]
        proxy.cut()
        publish(sink, topic, b"3")
        with closing(near.source([topic], group="g")) as heir:
            came = take(heir, 3)
            assert bodies(came) == [b"1", b"2", b"3"]
            assert [delivery.count for delivery in came] == [2, 2, 1]
            with pytest.raises(BrokerDown):
                dying.close()


def test_a_server_that_is_late_is_waited_for() -> None:
    """New messages wait until all that is out has come again, or for half a lease and more."""

    def arrival(position: int, number: int, count: int) -> Arrival:
        return Arrival(position, number, count, 0, "reply", 0.0, 100.0, None)

    def lane() -> NatsLane:
        state = NatsLane(Lane("t", 0), 1, "t", "g_0", 10.0, 0)
        state.gather(1, 5, now=0.0, patiently=True)
        state.arrive(arrival(6, 1, count=1), now=0.1)
        assert list(state.take(9, now=0.2)) == []
        return state

    late, never = lane(), lane()
    late.arrive(arrival(5, 2, count=2), now=0.3)
    assert [came.position for came, _ in late.take(9, now=0.4)] == [5, 6]
    never.nothing_comes(now=5.9)
    assert list(never.take(9, now=5.9)) == []
    never.nothing_comes(now=6.1)
    assert [came.position for came, _ in never.take(9, now=6.1)] == [6]


def _waiting(server: Nats, topic: str) -> int:
    async def ask(client: Client) -> int:
        info = await client.jetstream().consumer_info(topic, "g_0")
        return info.num_waiting or 0

    return int(raw(server.url, ask))


def test_what_waits_for_a_paused_lane_is_kept(
    nats: Nats, sink: Sink, topic: str, stack: ExitStack
) -> None:
    """Messages that came before the pause are not counted as delivered again after it."""
    source = stack.enter_context(short_lived(nats, topic))
    publish(sink, topic, b"0")
    source.accept(take(source, 1))
    publish(sink, topic, b"1", b"2")  # these come by the request that already waits
    source.pause(source.assignment())
    until = SYSTEM_CLOCK.monotonic() + 1.5 * SHORT["lease"]
    wait_until(
        lambda: source.poll(9, 0.05) or SYSTEM_CLOCK.monotonic() > until, what="the lease is over"
    )
    source.resume(source.assignment())
    assert [(d.body, d.count) for d in take(source, 2)] == [(b"1", 1), (b"2", 1)]


def test_a_seek_leaves_nothing_to_settle_of_what_was_handed_out(
    sink: Sink, topic: str, member: Callable[..., Source]
) -> None:
    """Old deliveries settle nothing in the group's new place, before or after its restart."""
    source = member()
    first, _ = publish(sink, topic, b"1", b"2")
    old = take(source, 2)
    source.seek(old[0].lane, offset=first)
    source.accept(old)
    assert bodies(take(source, 2)) == [b"1", b"2"]
    source.close()
    assert bodies(take(member(), 2)) == [b"1", b"2"]


def test_a_deleted_consumer_is_made_again(
    nats: Nats, sink: Sink, topic: str, member: Callable[..., Source], caplog: Any
) -> None:
    """The group starts over rather than stop; the log says so."""
    source = member()
    publish(sink, topic, b"1")
    source.accept(take(source, 1))

    async def delete(client: Client) -> None:
        await client.jetstream().delete_consumer(topic, "g_0")

    raw(nats.url, delete)
    publish(sink, topic, b"2")
    with caplog.at_level(logging.WARNING):
        assert bodies(take(source, 2)) == [b"1", b"2"]
    assert "entering it again" in caplog.text


def test_a_deleted_topic_is_reported(
    nats: Nats, sink: Sink, topic: str, member: Callable[..., Source]
) -> None:
    """Polling raises `UnknownTopic`; publishing makes the topic anew, or says that it cannot."""
    source = member()
    publish(sink, topic, b"1")
    take(source, 1)

    async def delete(client: Client) -> None:
        await client.jetstream().delete_stream(topic)

    raw(nats.url, delete)
    wait_until(lambda: _refuses(source), what="the poll that finds the topic gone")
    [result] = sink.publish([Message.new(topic, b"2")])
    assert isinstance(result.error, BrokerDown)
    publish(sink, topic, b"2")


def _refuses(source: Source) -> bool:
    try:
        source.poll(1, 0.1)
    except UnknownTopic:
        return True
    return False


# -- faults ----------------------------------------------------------------------------------


@pytest.fixture
def proxy(nats: Nats) -> Iterator[FaultProxy]:
    """Put a proxy before the shared server."""
    with FaultProxy(nats.host, nats.port) as proxy:
        yield proxy


def test_silence_is_never_taken_for_success(
    proxy: FaultProxy, broker: NatsBroker, topic: str, member: Callable[..., Source]
) -> None:
    """A batch cut off in the middle is not stored for its publisher; again, it is, in order."""
    broker.create_topic(topic)
    batch = [Message.new(topic, b"%d" % n, key=b"k") for n in range(200)]
    with (
        closing(connect(f"nats://{proxy.address}", timeout=0.5)) as distant,
        closing(distant.sink()) as sink,
    ):
        for then in ("cut", "black_hole"):
            proxy.stop_after(20_000, "to_server", then=then)
            with pytest.raises(BrokerDown):
                sink.publish(batch)
            proxy.heal()
        results = wait_until(lambda: sink.publish(batch), what="the batch is stored")
    assert [result.error for result in results] == [None] * 200
    source = member()
    assert bodies(take(source, 200)) == [message.payload for message in batch]


@pytest.mark.parametrize("window", [1, 5])
def test_no_more_messages_of_a_key_are_on_their_way_than_its_window(
    proxy: FaultProxy, broker: NatsBroker, topic: str, window: int
) -> None:
    """While nothing is confirmed, so many are sent, and none behind them."""
    broker.create_topic(topic)
    with (
        closing(connect(f"nats://{proxy.address}", key_window=window)) as distant,
        closing(distant.sink()) as sink,
    ):
        first = [Message.new(topic, b"the first of a lane goes alone", key=b"k")]
        wait_until(lambda: sink.publish(first), what="it is stored")
        proxy.black_hole()
        with pytest.raises(BrokerDown):
            publish(sink, topic, *(b"%d" % n for n in range(20)))
        proxy.heal()  # what was sent arrives now

        def stored() -> int:
            return sum(broker.lag("g", [topic]).values())

        wait_until(lambda: stored() >= 1 + window, what="what was sent is stored")
        assert stored() == 1 + window


def test_nobody_waits_for_the_answer_of_a_dead_connection(proxy: FaultProxy, topic: str) -> None:
    """`BrokerDown` comes with the loss, not when the patience with the server ends."""
    with closing(connect(f"nats://{proxy.address}", timeout=60.0)) as distant:
        distant.create_topic(topic)
        proxy.black_hole()
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                distant.lag("g", [topic])
            except BrokerDown as error:
                errors.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(0.2)
        assert asking.is_alive()
        proxy.cut()
        asking.join(50)
        assert errors


def test_a_lost_connection_loses_no_lane_and_no_order(
    proxy: FaultProxy, broker: NatsBroker, sink: Sink, topic: str
) -> None:
    """Messages cut off on their way come first; nobody is told of a rebalance."""
    broker.create_topic(topic)
    heard: list[str] = []

    class Ear:
        def assigned(self, lanes: Iterable[Lane]) -> None:
            heard.append(f"assigned {len(list(lanes))}")

        def revoked(self, lanes: Iterable[Lane]) -> None:
            heard.append(f"revoked {len(list(lanes))}")

        def lost(self, lanes: Iterable[Lane]) -> None:
            heard.append(f"lost {len(list(lanes))}")

    publish(sink, topic, *(b"%d" % n for n in range(300)))
    came: list[bytes | None] = []
    with (
        closing(connect(f"nats://{proxy.address}", lease=2.0)) as distant,
        closing(distant.source([topic], group="g", listener=Ear())) as source,
    ):
        cuts = [40, 120]
        while len(came) < 300:
            if cuts and len(came) >= cuts[0]:
                proxy.stop_after(3000, "to_client")
                del cuts[0]
            try:
                batch = source.poll(20, 0.1)
                came += bodies(batch)
                source.accept(batch)
            except BrokerDown:
                proxy.heal()
        proxy.heal()
        assert heard == ["assigned 1"]
    check_order_per_key([(0, b"%d" % n) for n in range(300)], [(0, body) for body in came])


def test_a_delayed_release_stays_delayed_over_a_crash_of_the_server(
    private_server: PrivateServer,
) -> None:
    """Not even a second is forgotten."""
    server = private_server(Nats)
    with (
        closing(connect(server.url, lease=2.0)) as broker,
        closing(broker.sink()) as sink,
        closing(broker.source(["t"], group="g")) as source,
    ):
        publish(sink, "t", b"1")
        released = SYSTEM_CLOCK.monotonic()
        source.release(take(source, 1)[0], blame=False, delay=1.5)
        server.kill()
        server.start()
        assert bodies(take(source, 1)) == [b"1"]
        assert SYSTEM_CLOCK.monotonic() - released >= 1.5


def test_what_was_accepted_stays_accepted_over_a_crash_of_the_server(
    private_server: PrivateServer,
) -> None:
    """What the server had not yet written down it is told again, before anybody gets it."""
    server = private_server(Nats)
    with (
        closing(connect(server.url)) as broker,
        closing(broker.sink()) as sink,
        closing(broker.source(["t"], group="g")) as source,
    ):
        publish(sink, "t", *(b"%d" % n for n in range(50)))
        source.accept(take(source, 50))
        server.kill()
        server.start()
        publish_again = Message.new("t", b"last", key=b"k")
        wait_until(lambda: sink.publish([publish_again]), what="the server is back")
        assert bodies(take(source, 1)) == [b"last"]
        wait_until(lambda: source.poll(1, 0.05) or source.flush() is None, what="all is settled")
        assert broker.lag("g", ["t"]) == {("t", 0): 1}


def test_a_flush_settles_again_what_a_crashed_server_forgot(
    private_server: PrivateServer,
) -> None:
    """Without a poll, even of a paused lane; what nobody can hand out again is not waited for."""
    server = private_server(Nats)
    with (
        closing(connect(server.url)) as broker,
        closing(broker.sink()) as sink,
        closing(broker.source(["t"], group="g")) as source,
    ):
        publish(sink, "t", *(b"%d" % n for n in range(200)))
        source.accept(take(source, 200))
        source.pause(source.assignment())
        server.kill()
        server.start()
        source.flush()
        assert sum(broker.lag("g", ["t"]).values()) == 0


def test_what_is_accepted_after_a_crash_of_the_server_is_settled(
    private_server: PrivateServer,
) -> None:
    """The server does not know that it had handed it out; a flush comes to an end all the same."""
    server = private_server(Nats)
    with (
        closing(connect(server.url)) as broker,
        closing(broker.sink()) as sink,
        closing(broker.source(["t"], group="g")) as source,
    ):
        publish(sink, "t", *(b"%d" % n for n in range(200)))
        held = take(source, 200)
        server.kill()
        server.start()
        wait_until(lambda: source.accept(held) is None, what="the server is back")
        source.flush()
        assert sum(broker.lag("g", ["t"]).values()) == 0


def test_what_a_server_never_heard_before_it_crashed_is_told_again(
    private_server: PrivateServer,
) -> None:
    """It stops, is told of everything, and dies: it knows neither the words nor the deliveries."""
    server = private_server(Nats)
    with (
        closing(connect(server.url)) as broker,
        closing(broker.sink()) as sink,
        closing(broker.source(["t"], group="g")) as source,
    ):
        publish(sink, "t", *(b"%d" % n for n in range(200)))
        held = take(source, 200)
        server.pause()
        source.accept(held)
        server.kill()
        server.start()
        source.flush()
        assert sum(broker.lag("g", ["t"]).values()) == 0


def test_a_crashed_server_that_lost_a_settled_message_for_good_is_not_waited_for(
    private_server: PrivateServer,
) -> None:
    """The message is gone from its stream when the server asks itself what to hand out again."""
    server = private_server(Nats)
    with (
        closing(connect(server.url)) as broker,
        closing(broker.sink()) as sink,
        closing(broker.source(["t"], group="g")) as source,
    ):
        publish(sink, "t", *(b"%d" % n for n in range(50)))
        source.accept(take(source, 50))
        server.kill()
        server.start()
        wait_until(
            lambda: raw(server.url, lambda client: client.jetstream().purge_stream("t")),
            what="the server is back",
        )
        source.flush()


def test_a_position_that_was_given_away_again_is_another_message() -> None:
    """A machine that lost power may hand a new message out in the place of a settled one."""
    state = NatsLane(Lane("t", 0), 1, "t", "c", 10.0, 0)

    def arrival(stored: int, number: int) -> Arrival:
        reply = f"$JS.ACK.t.c.1.7.{number}.{stored}.0"
        return Arrival(7, number, 1, 0, reply, stored / 1e9, 99.0, None)

    state.arrive(arrival(1_000, 1), 0.0)
    assert len(list(state.take(1, 0.0))) == 1
    state.settle(7)
    answer = state.arrive(arrival(1_000, 2), 0.0)
    assert answer is not None
    assert answer[1] == ACK
    assert state.arrive(arrival(2_000, 3), 0.0) is None
    assert len(list(state.take(1, 0.0))) == 1


def test_what_was_told_of_a_lost_lane_is_not_waited_for(private_server: PrivateServer) -> None:
    """A crashed server confirms nothing that it forgot, and nobody tells it again."""
    server = private_server(Nats)
    with (
        closing(connect(server.url, session=0.5, lease=1.0, timeout=2.0)) as broker,
        closing(broker.sink()) as sink,
        closing(broker.source(["t"], group="g")) as first,
    ):
        publish(sink, "t", *(b"%d" % n for n in range(100)))
        held = take(first, 100)
        wait_until(first.assignment, what="it has lanes")
        with closing(broker.source(["t"], group="g")) as second:
            first.accept(held)
            server.kill()
            server.start()
            wait_until(lambda: second.poll(1, 0.1) is not None and second.assignment(), what="lost")

            def is_flushed() -> bool:
                first.poll(1, 0.05)
                first.flush()
                return True

            wait_until(is_flushed, what="a flush succeeds")


def test_what_was_given_back_comes_first_even_if_the_server_forgot_it(
    private_server: PrivateServer,
) -> None:
    """A restart between two owners makes the second wait for what the first one gave back."""
    server = private_server(Nats)
    with (
        closing(connect(server.url, lease=2.0)) as broker,
        closing(broker.sink()) as sink,
    ):
        publish(sink, "t", b"1", b"2")
        first = broker.source(["t"], group="g")
        take(first, 2)
        first.close()
        server.restart()
        wait_until(lambda: publish(sink, "t", b"3"), what="the server is back")
        with closing(broker.source(["t"], group="g")) as second:
            assert bodies(take(second, 3)) == [b"1", b"2", b"3"]


def test_closing_without_a_server_says_so_and_leaves_nothing_behind(
    private_server: PrivateServer,
) -> None:
    """The listener is not needed any more, the threads are gone, the caller knows."""
    server = private_server(Nats)
    before = threading.active_count()
    broker = connect(server.url, timeout=0.3)
    source, sink = broker.source(["t"], group="g"), broker.sink()
    publish(sink, "t", b"1")
    source.accept(take(source, 1))
    server.kill()
    with pytest.raises(BrokerDown):
        source.flush()
    with pytest.raises(BrokerDown):
        source.close()
    with pytest.raises(BrokerDown):
        sink.publish([Message.new("t", b"2")])
    sink.close()
    broker.close()
    assert threading.active_count() == before


# -- bad input -------------------------------------------------------------------------------


class Special(Nats):
    """A server with a configuration of its own."""

    config = ""

    def command(self) -> Command:
        path = self.folder / "special.conf"
        path.write_text(self.config.replace("FOLDER", str(self.folder)))
        argv = super().command().argv
        if "no jetstream" in self.config:
            argv = argv[: argv.index("--jetstream")]
        return Command(argv=(*argv, "--config", str(path)))

    def answers(self) -> bool:
        with self.connect() as connection, connection.makefile("rb") as lines:
            return lines.readline().startswith(b"INFO ")


def special(text: str) -> type[Special]:
    """Return a kind of server with *text* as its configuration."""
    return type("Configured", (Special,), {"config": text})


def test_a_wrong_password_is_a_wrong_setting(private_server: PrivateServer) -> None:
    """It shows when a sink or a source is asked for, and no password shows with it."""
    server = private_server(special('authorization { user: "u", password: "right" }'))
    with pytest.raises(ConfigurationError, match="refused the login") as caught:
        connect(f"nats://u:wr0ng@{server.address}").sink()
    assert "wr0ng" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="refused the login"):
        connect(f"nats://{server.address}").source(["t"], group="g")
    with closing(connect(f"nats://u:right@{server.address}").sink()) as sink:
        publish(sink, "t", b"1")


def test_a_token_is_a_user_without_password(private_server: PrivateServer) -> None:
    """As in the URLs of the client library."""
    server = private_server(special('authorization { token: "s3cret" }'))
    with closing(connect(f"nats://s3cret@{server.address}").sink()) as sink:
        publish(sink, "t", b"1")


def test_a_port_that_nobody_listens_on_is_an_outage(nats: Nats) -> None:
    """It may be back later, so it is `BrokerDown`, at once."""
    with socket.socket() as free:
        free.bind((nats.host, 0))
        broker = connect(f"nats://{nats.host}:{free.getsockname()[1]}")
        with pytest.raises(BrokerDown, match="cannot connect"):
            broker.sink()
        with pytest.raises(BrokerDown, match="cannot connect"):
            broker.source(["t"], group="g")
        with pytest.raises(BrokerDown, match="cannot connect"):
            broker.create_topic("t")
        broker.close()


def test_a_full_stream_stores_nothing_behind_a_refused_message_of_its_key(
    nats: Nats, topic: str
) -> None:
    """It refuses one message and takes the next once there is room: order holds all the same."""
    done = threading.Event()

    async def make_room(client: Client) -> None:
        while not done.is_set():
            await client.request(f"$JS.API.STREAM.PURGE.{token(topic)}", b"", timeout=5)

    full = {"max_msgs": 50, "discard": "new"}
    with closing(connect(nats.url, stream=full)) as broker, closing(broker.sink()) as sink:
        broker.create_topic(topic)
        messages = [Message.new(topic, b"%d" % n, key=b"k") for n in range(2000)]
        passage = Passage(messages)
        wait_until(lambda: passage.step(sink) or passage.refused, deadline=60, what="it is full")
        thread = threading.Thread(target=raw, args=(nats.url, make_room))
        thread.start()
        try:
            wait_until(lambda: passage.step(sink) or not passage.left, deadline=60, what="stored")
        finally:
            done.set()
            thread.join()
    assert passage.overtaken == []


class Sleeper(SystemClock):
    """The clock of a machine that may sleep: its monotonic time stands still meanwhile."""

    def __init__(self) -> None:
        self.slept = 0.0
        self.since: float | None = None

    def monotonic(self) -> float:
        now = super().monotonic() if self.since is None else self.since
        return now - self.slept

    def sleep_until(self, condition: Callable[[], object]) -> None:
        """Sleep, as a suspended machine does, until *condition* holds elsewhere."""
        self.since = super().monotonic()
        wait_until(condition, deadline=90, what="what happens meanwhile")
        since, self.since = self.since, None
        self.slept += super().monotonic() - since


def test_a_member_whose_clock_is_off_since_it_connected_stays_in_its_group(
    nats: Nats, topic: str
) -> None:
    """It asks the server for the time again and again: else the others would bury it for ever."""
    clock, heard = Sleeper(), Heard()
    slow = {"session": 1.5, "lease": 5.0, "timeout": 2.0}
    with (
        closing(NatsBroker(BrokerUrl.parse(nats.url), clock=clock, **slow)) as theirs,
        closing(connect(nats.url, **slow)) as ours,
    ):
        ours.create_topic(topic, partitions=2)
        sleeper = theirs.source([topic], group="g", listener=heard)
        other = ours.source([topic], group="g")

        def is_shared() -> bool:
            sleeper.poll(1, 0.01)
            other.poll(1, 0.01)
            return len(sleeper.assignment()) == len(other.assignment()) == 1

        wait_until(is_shared, deadline=90, what="a lane each")

        def is_alone() -> bool:
            other.poll(1, 0.01)
            return len(other.assignment()) == 2

        clock.sleep_until(is_alone)
        wait_until(is_shared, deadline=90, what="a lane each again")

        def stays() -> bool:  # tried again after a stall of the machine, which costs a session
            heard.lost_lanes.clear()
            until = SYSTEM_CLOCK.monotonic() + 2 * slow["session"]
            while SYSTEM_CLOCK.monotonic() < until:
                if not is_shared():
                    return False
            return heard.lost_lanes == []

        wait_until(stays, deadline=90, what="a lane each for two sessions")
        sleeper.close()
        other.close()


class Heard:
    """A listener that remembers the lanes that were lost."""

    def __init__(self) -> None:
        self.lost_lanes: list[Lane] = []

    def assigned(self, lanes: Iterable[Lane]) -> None:
        """Pass over what came."""

    def revoked(self, lanes: Iterable[Lane]) -> None:
        """Pass over what was given up."""

    def lost(self, lanes: Iterable[Lane]) -> None:
        """Remember what was lost."""
        self.lost_lanes += lanes


def test_a_server_without_jetstream_is_a_wrong_setting(private_server: PrivateServer) -> None:
    """The message says how to enable it."""
    server = private_server(special("# no jetstream"))
    broker = connect(server.url)
    for ask in (broker.sink, lambda: broker.source(["t"], group="g")):
        with pytest.raises(ConfigurationError, match="--jetstream"):
            ask()
    broker.close()


def test_a_password_is_not_sent_in_clear_when_tls_was_asked_for() -> None:
    """`tls://` to a server without TLS is refused before anything is said to it."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(b'INFO {"max_payload": 1048576, "headers": true}\r\n')
                        connection.settimeout(2)
                        heard.append(connection.recv(4096))

        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        with pytest.raises(ConfigurationError, match="does not offer TLS"):
            connect(f"tls://u:p@127.0.0.1:{port}").sink()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert set(heard) == {b""}


def test_tls_works_with_the_right_certificate_only(
    private_server: PrivateServer, tmp_path: Path
) -> None:
    """An unknown certificate is a wrong setting; the library's `tls=` passes through."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"),
            *("-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    server = private_server(special(f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}'))
    for scheme in ("tls", "nats"):
        with pytest.raises(ConfigurationError, match="check certificates"):
            connect(f"{scheme}://{server.address}").sink()
    trusting = ssl.create_default_context(cafile=str(certificate))
    with closing(connect(f"tls://{server.address}", tls=trusting).sink()) as sink:
        publish(sink, "t", b"1")


def test_a_denied_subject_is_a_wrong_setting(private_server: PrivateServer) -> None:
    """The server's own words are in the error, although it only whispers them."""
    denied = 'permissions: { publish: { deny: ["t.0"] } }'
    server = private_server(
        special(f'authorization {{ users: [{{ user: "u", password: "p", {denied} }}] }}')
    )
    with (
        closing(connect(f"nats://u:p@{server.address}", timeout=0.5).sink()) as sink,
        pytest.raises(ConfigurationError, match="permissions violation"),
    ):
        sink.publish([Message.new("t", b"1")])


def test_the_servers_own_limit_is_kept(private_server: PrivateServer) -> None:
    """A larger message would end the connection, so it is refused before."""
    server = private_server(special("max_payload: 4096"))
    with closing(connect(server.url).sink()) as sink:
        assert sink.caps.max_message == 4096
        small, large, after = sink.publish(
            [Message.new("t", bytes(size), key=b"k") for size in (1000, 4000, 1000)]
        )
        assert (small.error, after.error) == (None, None)
        assert isinstance(large.error, MessageTooLarge)


def test_a_streams_own_limit_refuses_one_message(nats: Nats, topic: str) -> None:
    """`max_msg_size` of the stream is the server's to check."""
    broker = connect(nats.url, stream={"max_msg_size": 2000})
    with closing(broker), closing(broker.sink()) as sink:
        small, large = sink.publish([Message.new(topic, bytes(size)) for size in (100, 3000)])
        assert small.error is None
        assert isinstance(large.error, MessageTooLarge)


def test_a_full_topic_refuses_and_forgets_nothing(
    nats: Nats, topic: str, member: Callable[..., Source]
) -> None:
    """What has no error is stored, in order, and the error says that the topic is full."""
    broker = connect(nats.url, stream={"max_bytes": 100_000})
    batch = [Message.new(topic, b"%04d" % n + bytes(1000), key=b"k") for n in range(2000)]
    with closing(broker), closing(broker.sink()) as sink:
        results = sink.publish(batch)
    stored = [m.payload for m, result in zip(batch, results, strict=True) if result.error is None]
    refused = [result.error for result in results if result.error is not None]
    assert all(isinstance(error, BrokerDown) for error in refused)
    assert "maximum bytes exceeded" in str(refused[0])
    assert "stay behind" in str(refused[-1])
    assert stored == [message.payload for message in batch[: len(stored)]]
    source = member()
    came: list[bytes | None] = []
    while len(came) < len(stored):
        deliveries = take(source, 1)
        source.accept(deliveries)
        came += bodies(deliveries)
    assert came == stored


def test_a_lane_that_is_not_ready_is_tried_with_one_message(nats: Nats, topic: str) -> None:
    """Else those sent while it becomes ready would be stored before those sent earlier."""

    async def create(client: Client) -> None:
        lacking = {"name": topic, "subjects": [f"{topic}.0"], "metadata": {"holdfast-lanes": "1"}}
        await client.jetstream().add_stream(**lacking, duplicate_window=120)
        await client.jetstream().update_stream(**(lacking | {"subjects": [f"{topic}.9"]}))

    raw(nats.url, create)
    with closing(connect(nats.url)) as broker, closing(broker.sink()) as sink:
        results = sink.publish([Message.new(topic, b"%d" % n, key=b"k") for n in range(50)])
    first, *others = (str(result.error) for result in results)
    assert first.startswith("NATS has no stream")
    assert all("stay behind" in error for error in others)


def test_a_topic_is_not_made_where_that_is_not_allowed(nats: Nats, topic: str) -> None:
    """`auto_create=false` refuses unknown topics, for sources and message by message."""
    broker = connect(f"{nats.url}?auto_create=false")
    with closing(broker), closing(broker.sink()) as sink:
        [result] = sink.publish([Message.new(topic, b"1")])
        assert isinstance(result.error, UnknownTopic)
        with pytest.raises(UnknownTopic):
            broker.source([topic], group="g")
        with pytest.raises(UnknownTopic):
            broker.lag("g", [topic])


def test_a_stream_of_somebody_else_is_not_taken_over(nats: Nats, topic: str) -> None:
    """Its subjects are not ours; the error says what is missing."""

    async def create(client: Client) -> None:
        await client.jetstream().add_stream(name=topic, subjects=[f"{topic}.>"])

    raw(nats.url, create)
    broker = connect(nats.url)
    with closing(broker), pytest.raises(ConfigurationError, match="holdfast-lanes"):
        broker.source([topic], group="g")


def test_a_shorter_memory_of_ids_than_declared_is_refused(nats: Nats, topic: str) -> None:
    """`publish_dedup` is never less than it says."""
    with closing(connect(nats.url, dedup=10.0)) as short:
        short.create_topic(topic)
    with closing(connect(nats.url)) as broker, pytest.raises(ConfigurationError, match="dedup=10"):
        broker.source([topic], group="g")


@pytest.mark.parametrize(
    ("url", "native", "error"),
    [
        ("nats://h:4222/path", {}, InvalidUrl),
        ("nats:", {}, InvalidUrl),
        ("nats://h:4222?lease=long", {}, ConfigurationError),
        ("nats://h:4222?lease=0", {}, ConfigurationError),
        ("nats://h:4222?auto_create=perhaps", {}, ConfigurationError),
        ("nats://h:4222?typo=1", {}, ConfigurationError),
        ("nats://h:4222", {"allow_reconnect": True}, ConfigurationError),
    ],
)
def test_nonsense_is_refused_before_anything_is_sent(
    url: str, native: dict[str, Any], error: type[HoldfastError]
) -> None:
    """The message names the setting and the fix."""
    with pytest.raises(error):
        NatsBroker(BrokerUrl.parse(url), **native)


def test_an_unknown_client_setting_is_named(nats: Nats) -> None:
    """It reaches the client library, which refuses it."""
    with pytest.raises(ConfigurationError, match="no_such_setting"):
        connect(nats.url, no_such_setting=1).sink()


@pytest.mark.programs
def test_the_adapter_loads_without_its_library() -> None:
    """Only connecting needs the extra, and says which."""
    code = (
        "import sys; sys.modules['nats'] = None\n"
        "from holdfast.brokers.nats import NatsBroker\n"
        "from holdfast.errors import MissingExtra\n"
        "from holdfast.urls import BrokerUrl\n"
        "try: NatsBroker(BrokerUrl.parse('nats://h'))\n"
        "except MissingExtra as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "holdfast[nats]" in done.stdout


# -- restarts --------------------------------------------------------------------------------


class Soak:
    """A publisher and members that go on while their server is killed and restarted."""

    KEYS = 13
    BATCH = 40

    def __init__(self, server: Nats, members: int) -> None:
        self._server = server
        self._broker = connect(server.url, session=2.0, lease=1.0, partitions=4)
        self.sent: list[tuple[bytes | None, bytes | None]] = []
        self.handled: list[tuple[bytes | None, bytes | None]] = []
        self._errors: list[BaseException] = []
        self._stop = threading.Event()
        self._is_over = threading.Event()
        self._publisher = threading.Thread(target=self._guarded, args=(self._publish,))
        self._members = [
            threading.Thread(target=self._guarded, args=(self._consume,)) for _ in range(members)
        ]

    def run(self, restarts: int, chance: random.Random) -> None:
        """Kill the server *restarts* times, each time after some more messages."""
        for thread in (self._publisher, *self._members):
            thread.start()
        try:
            for _ in range(restarts):
                self._grow(chance.randrange(200, 600))
                self._server.kill()
                self._server.start()
            self._grow(200)
            self._stop.set()
            self._publisher.join()
            wait_until(self._is_done, deadline=120, what="everything is handled")
        finally:
            self._stop.set()
            self._is_over.set()
            for thread in (self._publisher, *self._members):
                thread.join()
            self._broker.close()
        assert self._errors == []

    def _grow(self, count: int) -> None:
        goal = len(self.sent) + count, len(self.handled) + count // 2
        wait_until(
            lambda: self._errors or (len(self.sent) >= goal[0] and len(self.handled) >= goal[1]),
            deadline=120,
            what="the publisher and the members go on",
        )

    def _is_done(self) -> bool:
        return bool(self._errors) or len(set(self.handled)) >= len(self.sent)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self._errors.append(error)

    def _publish(self) -> None:
        number = 0
        with closing(self._broker.sink()) as sink:
            while not self._stop.is_set():
                keys = [b"%d" % (n % self.KEYS) for n in range(number, number + self.BATCH)]
                batch = [Message.new("t", b"%d" % (number + n), key=k) for n, k in enumerate(keys)]
                number += self.BATCH
                while not self._is_stored(sink, batch):
                    pass
                self.sent += [(message.key, message.payload) for message in batch]

    @staticmethod
    def _is_stored(sink: Sink, batch: list[Message]) -> bool:
        with suppress(BrokerDown):
            return all(result.error is None for result in sink.publish(batch))
        return False

    def _consume(self) -> None:
        source = self._broker.source(["t"], group="g")
        try:
            while not self._is_over.is_set():
                batch: list[Delivery] = []
                with suppress(BrokerDown):
                    batch = source.poll(25, 0.1)
                for delivery in batch:
                    self.handled.append((delivery.key, delivery.body))
                    with suppress(BrokerDown):  # then it comes again
                        source.accept([delivery])
        finally:
            source.close()


def test_restarts_of_the_server_lose_nothing_and_keep_the_order(
    private_server: PrivateServer,
) -> None:
    """SIGKILL in the middle of publishing and consuming, again and again."""
    soak = Soak(private_server(Nats), members=2)
    soak.run(3, random.Random(7))
    check_nothing_lost(soak.sent, soak.handled)
    check_order_per_key(soak.sent, soak.handled)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(10))
def test_many_restarts_lose_nothing_and_keep_the_order(
    private_server: PrivateServer, seed: int
) -> None:
    """The same for long, with members that share the lanes."""
    soak = Soak(private_server(Nats), members=1 + seed % 3)
    soak.run(20, random.Random(seed))
    check_nothing_lost(soak.sent, soak.handled)
    check_order_per_key(soak.sent, soak.handled)
