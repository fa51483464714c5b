"""The Redis Streams adapter against a real Redis."""

from __future__ import annotations

import logging
import random
import socket
import subprocess
import threading
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import redis as client

from holdfast.brokers.redis import RedisBroker, wakeup
from holdfast.brokers.redis.errors import translation
from holdfast.brokers.redis.scripts import TAKE
from holdfast.clock import SYSTEM_CLOCK
from holdfast.errors import BrokerDown, ConfigurationError, UnknownTopic, Unsupported
from holdfast.ids import new_id
from holdfast.message import Message
from holdfast.ports import Lane
from holdfast.testing import (
    FaultProxy,
    check_nothing_lost,
    check_order_per_key,
    wait_until,
)
from holdfast.testing.conformance import BrokerConformance
from holdfast.urls import BrokerUrl
from tests.servers import Redis, Valkey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from holdfast.ports import Broker, Delivery, Listener, Sink, Source
    from tests.servers.fixtures import PrivateServer

SESSION = 3.0
"""For tests that wait for its end: longer than a busy machine stands still."""


def connect(url: str, **native: Any) -> RedisBroker:
    """Return the adapter for *url*; nobody is taken for dead by mistake."""
    return RedisBroker(BrokerUrl.parse(url), **{"session": 90.0, "partitions": 1, **native})


def raw(server: Redis, **settings: Any) -> client.Redis:
    """Return redis-py's own client."""
    return client.Redis(host=server.host, port=server.port, protocol=2, **settings)


def take(source: Source, count: int, seconds: float = 45.0) -> list[Delivery]:
    """Poll until *count* deliveries came."""
    got: list[Delivery] = []
    wait_until(
        lambda: got.extend(source.poll(count - len(got), 0.1)) or len(got) >= count,
        deadline=seconds,
        what=f"{count} deliveries",
    )
    return got


def settle_in(*sources: Source, lanes: int) -> None:
    """Let *sources* poll, handing out nothing, until they share *lanes* lanes."""

    def is_shared() -> bool:
        for source in sources:
            source.poll(0, 0.0)
        parts = [source.assignment() for source in sources]
        return all(parts) and sum(map(len, parts)) == lanes == len(frozenset().union(*parts))

    wait_until(is_shared, what=f"{len(sources)} members share {lanes} lanes")


class TestRedisStreams(BrokerConformance):
    session = 2.0
    quiet = 0.15

    @pytest.fixture
    def url(self, redis: Redis, expires: bool) -> str:
        return f"{redis.url}?session={self.session if expires else 90}"

    @pytest.fixture
    def broker(self, url: str, redis: Redis) -> Iterator[RedisBroker]:
        self._server = redis
        with closing(RedisBroker(BrokerUrl.parse(url))) as broker:
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


class TestValkey(TestRedisStreams):
    """Valkey keeps every promise through the same adapter."""

    @pytest.fixture
    def redis(self, valkey: Valkey) -> Redis:
        return valkey


# -- the adapter's own promises ------------------------------------------------------------


@pytest.fixture
def broker(redis: Redis) -> Iterator[RedisBroker]:
    """Return an adapter whose keys no other test uses."""
    with closing(connect(redis.url, prefix=new_id())) as broker:
        yield broker


@pytest.fixture
def opened(broker: RedisBroker) -> Iterator[Callable[..., Any]]:
    """Offer a function that makes sources of `t` for the group `g`; they are closed after."""
    sources: list[Source] = []

    def source(**options: Any) -> Source:
        sources.append(broker.source(["t"], group="g", **options))
        return sources[-1]

    yield source
    for each in sources:
        each.close()


@pytest.fixture
def sink(broker: RedisBroker) -> Iterator[Sink]:
    """Return a sink of the adapter."""
    with closing(broker.sink()) as sink:
        yield sink


def publish(sink: Sink, *bodies: bytes, key: bytes | None = b"k") -> list[str]:
    """Store *bodies* in the topic `t` and return their positions."""
    results = sink.publish([Message.new("t", body, key=key) for body in bodies])
    assert [result.error for result in results] == [None] * len(bodies)
    return [str(result.position) for result in results]


def test_a_blocked_poll_returns_as_soon_as_a_message_is_stored(
    opened: Callable[[], Source], sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the next look at the stream."""
    monkeypatch.setattr(wakeup, "_BLOCK", 170.0)
    source = opened()
    settle_in(source, lanes=1)
    started = SYSTEM_CLOCK.monotonic()
    came: list[Delivery] = []
    thread = threading.Thread(target=lambda: came.extend(source.poll(1, 170.0)))
    thread.start()
    publish(sink, b"a")
    thread.join()
    assert [delivery.body for delivery in came] == [b"a"]
    assert SYSTEM_CLOCK.monotonic() - started < 60.0


def test_the_count_is_the_one_that_redis_shows(
    redis: Redis, broker: RedisBroker, opened: Callable[[], Source], sink: Sink
) -> None:
    """XPENDING tells an operator how often a message has failed, and nothing else."""
    [position] = publish(sink, b"a")
    source = opened()
    counts = []
    for blame in (True, False, True):
        [delivery] = take(source, 1)
        counts.append(delivery.count)
        source.release(delivery, blame=blame)
    [delivery] = take(source, 1)
    stream = broker.keys.stream(Lane("t", 0))
    with closing(raw(redis)) as direct:
        [pending] = direct.xpending_range(stream, "g", "-", "+", 10)
    assert (counts, delivery.count) == ([1, 2, 2], 3)
    assert (pending["message_id"].decode(), pending["times_delivered"]) == (position, 3)


def test_a_delayed_message_waits_and_holds_its_key_back_under_its_next_owner(
    opened: Callable[[], Source], sink: Sink
) -> None:
    """Delay, count and order are Redis's to keep, not the member's."""
    publish(sink, b"a1", b"a2", key=b"a")
    first = opened()
    [delivery] = take(first, 1)
    released = SYSTEM_CLOCK.monotonic()
    first.release(delivery, blame=True, delay=1.5)
    publish(sink, b"b1", key=b"b")
    [other] = take(first, 1)
    assert other.body == b"b1"
    first.accept([other])
    first.close()
    second = opened()
    came = take(second, 2)
    assert SYSTEM_CLOCK.monotonic() - released >= 1.5
    assert [(d.body, d.count) for d in came] == [(b"a1", 2), (b"a2", 1)]


def test_waiting_behind_a_delayed_message_costs_no_work(
    redis: Redis, opened: Callable[[], Source], sink: Sink
) -> None:
    """A member whose messages all wait asks the server a few times, not all the time."""
    publish(sink, b"a1", b"a2")
    source = opened()
    [delivery] = take(source, 1)
    source.release(delivery, blame=False, delay=30.0)
    assert source.poll(1, 0.1) == []
    with closing(raw(redis)) as direct:
        before = direct.info("stats")["total_commands_processed"]
        assert source.poll(1, 0.5) == []
        assert direct.info("stats")["total_commands_processed"] - before < 200


def test_an_outage_is_no_failure_of_any_message(private_server: PrivateServer) -> None:
    """After an outage longer than the session, members keep their lanes and nothing counts."""
    server = private_server(Redis)
    with closing(connect(server.url, partitions=2, session=SESSION)) as broker:
        with closing(broker.sink()) as sink:
            bodies = [b"%d" % n for n in range(8)]
            assert not any(
                r.error for r in sink.publish([Message.new("t", b, key=b) for b in bodies])
            )
        first = broker.source(["t"], group="g")
        second = broker.source(["t"], group="g")
        with closing(first), closing(second):
            settle_in(first, second, lanes=2)
            owned = {source: source.assignment() for source in (first, second)}
            held = {source: source.poll(50, 0.5) for source in (first, second)}
            server.kill()
            down = SYSTEM_CLOCK.monotonic()
            wait_until(
                lambda: SYSTEM_CLOCK.monotonic() - down > 1.2 * SESSION, what="the sessions end"
            )
            server.start()
            with closing(broker.source(["t"], group="g")) as newcomer:
                assert newcomer.poll(50, 0.0) == [], "the silent are not dead"
            for source in (first, second):
                with suppress(BrokerDown):
                    source.poll(50, 0.0)
                wait_until(lambda s=source: s.poll(0, 0.1) == [], what="a poll that works")
            for source, deliveries in held.items():
                assert source.assignment() == owned[source]
                assert source.poll(50, 0.1) == []
                source.release(deliveries[0], blame=False)
                [again] = take(source, 1)
                assert again.count == 1
                source.accept([*deliveries[1:], again])
        assert sum(broker.lag("g", ["t"]).values()) == 0


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_a_broken_connection_never_stores_a_message_twice(redis: Redis, direction: Any) -> None:
    """Whether the command or its answer is lost, nothing is sent again unasked."""
    prefix = new_id()
    with FaultProxy(redis.host, redis.port) as proxy, closing(raw(redis)) as direct:
        broker = connect(f"redis://{proxy.address}/0", prefix=prefix)
        with closing(broker), closing(broker.sink()) as sink:
            message = Message.new("t", b"x" * 1000, key=b"k")
            assert sink.publish([message])[0].error is None
            stream = broker.keys.stream(Lane("t", 0))
            proxy.stop_after(100 if direction == "to_server" else 3, direction)
            healing = threading.Thread(target=_heal_once_cut, args=(proxy,))
            healing.start()  # whoever tries again by itself would succeed
            with pytest.raises(BrokerDown):
                sink.publish([message])
            healing.join()
            assert direct.xlen(stream) == (1 if direction == "to_server" else 2)
            assert sink.publish([message])[0].error is None
            assert direct.xlen(stream) == (2 if direction == "to_server" else 3)


def _heal_once_cut(proxy: FaultProxy) -> None:
    wait_until(lambda: proxy.connections == 0, what="the proxy cuts its connections")
    proxy.heal()


def test_messages_whose_delivery_was_lost_on_the_way_come_again_without_blame(
    redis: Redis, broker: RedisBroker, sink: Sink
) -> None:
    """Redis has them as handed out; the member finds that nobody ever got them."""
    positions = publish(sink, *(b"%d" % n for n in range(20)))
    with FaultProxy(redis.host, redis.port) as proxy:
        far = connect(f"redis://{proxy.address}/0", prefix=broker.keys.prefix)
        with closing(far), closing(far.source(["t"], group="g")) as source:
            settle_in(source, lanes=1)
            proxy.stop_after(200, "to_client")
            with pytest.raises(BrokerDown):
                source.poll(50, 0.0)
            proxy.heal()
            came = take(source, 20)
    assert [(d.position, d.count) for d in came] == [(p, 1) for p in positions]


def test_a_read_that_reaches_redis_after_its_sender_gave_it_up_takes_nothing(
    redis: Redis, broker: RedisBroker, sink: Sink
) -> None:
    """What it read nobody would hand out, and later messages of the key would go ahead."""
    with FaultProxy(redis.host, redis.port) as proxy:
        url = f"redis://{proxy.address}/0?socket_timeout=1"
        far = connect(url, prefix=broker.keys.prefix)
        with closing(far), closing(far.source(["t"], group="g")) as source:
            settle_in(source, lanes=1)
            proxy.delay(6.0)  # for what is sent from now on, over the connection of now
            with pytest.raises(BrokerDown):
                source.poll(9, 0.0)
            proxy.delay(0.0)
            wait_until(lambda: not outage(lambda: source.poll(0, 0.0)), what="a connection anew")
            settle_in(source, lanes=1)
            first = publish(sink, b"a")
            wait_until(lambda: proxy.connections == 1, what="the end of the old connection")
            later = publish(sink, b"b")
            assert [d.position for d in take(source, 2)] == first + later


def outage(work: Callable[[], object]) -> bool:
    """Whether *work* finds the broker down."""
    try:
        work()
    except BrokerDown:
        return True
    return False


def test_a_black_hole_is_reported_and_logged_within_the_socket_timeout(
    redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that takes everything and answers nothing hangs nobody."""
    with FaultProxy(redis.host, redis.port) as proxy:
        url = f"redis://{proxy.address}/0?socket_timeout=1"
        with (
            closing(connect(url, prefix=new_id())) as broker,
            closing(broker.sink()) as sink,
            closing(broker.source(["t"], group="g")) as source,
        ):
            settle_in(source, lanes=1)
            proxy.black_hole()
            with caplog.at_level(logging.WARNING), pytest.raises(BrokerDown):
                sink.publish([Message.new("t", b"a")])
            with pytest.raises(BrokerDown):
                source.poll(1, 0.0)
            assert "does not answer" in caplog.text
            proxy.heal()
            wait_until(
                lambda: sink.publish([Message.new("t", b"b")])[0].error is None,
                what="publishing again",
            )
            wait_until(lambda: source.poll(1, 0.1), what="polling again")


def test_a_full_server_takes_all_of_a_batch_or_nothing_and_lets_consumers_go_on(
    private_server: PrivateServer,
) -> None:
    """Out of memory is an outage for producers; what is stored can still be handled."""
    server = private_server(Redis)
    with (
        closing(connect(server.url, session=SESSION)) as broker,
        closing(raw(server)) as direct,
        closing(broker.sink()) as sink,
        closing(broker.source(["t"], group="g")) as source,
    ):
        publish(sink, b"a", b"b")
        settle_in(source, lanes=1)
        used = direct.info("memory")["used_memory"]
        direct.config_set("maxmemory", used)
        with pytest.raises(BrokerDown, match="out of memory"):
            sink.publish([Message.new("t", bytes(9000), key=b"k") for _ in range(50)])
        source.accept(take(source, 2))
        end = SYSTEM_CLOCK.monotonic() + 1.5 * SESSION
        while SYSTEM_CLOCK.monotonic() < end:  # renewing needs no memory either
            assert source.poll(1, 0.05) == []
        assert source.assignment() == {Lane("t", 0)}
        direct.config_set("maxmemory", 0)
        wait_until(lambda: publish(sink, b"c"), what="publishing again")
        assert [d.body for d in take(source, 1)] == [b"c"]


def test_a_batch_stays_whole_when_memory_runs_out_within_it(private_server: PrivateServer) -> None:
    """The first message decides for all, so none overtakes an earlier one of its key."""
    server = private_server(Redis)
    with (
        closing(connect(server.url)) as broker,
        closing(raw(server)) as direct,
        closing(broker.sink()) as sink,
    ):
        publish(sink, b"a")
        direct.config_set("maxmemory", direct.info("memory")["used_memory"] + (1 << 20))
        stream, batches = broker.keys.stream(Lane("t", 0)), 0
        with suppress(BrokerDown):
            while batches < 50:
                sink.publish([Message.new("t", bytes(2000), key=b"k") for _ in range(40)])
                batches += 1
        assert batches < 50
        assert direct.xlen(stream) == 1 + 40 * batches


class Chronicle:
    """Who owned which lane when, as told to the listeners of all members."""

    def __init__(self) -> None:
        self._owners: dict[Lane, int] = {}
        self._lock = threading.Lock()
        self.conflicts: list[Lane] = []

    def listener(self, member: int) -> Listener:
        """Return the listener of *member*."""
        return _Heard(self, member)

    def note(self, member: int, lanes: Iterable[Lane], *, owned: bool) -> None:
        """Note that *member* has or had *lanes*."""
        with self._lock:
            for lane in lanes:
                if owned and self._owners.setdefault(lane, member) != member:
                    self.conflicts.append(lane)
                elif not owned and self._owners.get(lane) == member:
                    del self._owners[lane]


class _Heard:
    def __init__(self, chronicle: Chronicle, member: int) -> None:
        self._chronicle = chronicle
        self._member = member

    def assigned(self, lanes: Iterable[Lane]) -> None:
        self._chronicle.note(self._member, lanes, owned=True)

    def revoked(self, lanes: Iterable[Lane]) -> None:
        self._chronicle.note(self._member, lanes, owned=False)

    lost = revoked


def test_members_that_join_and_leave_at_once_never_share_a_lane(redis: Redis) -> None:
    """A lane is taken in one step on the server, whatever members believe."""
    chronicle = Chronicle()
    with closing(connect(redis.url, prefix=new_id(), session=30.0)) as broker:
        broker.create_topic("t", partitions=8)
        barrier = threading.Barrier(6)
        failures: list[BaseException] = []

        def live(member: int) -> None:
            for _ in range(3):
                barrier.wait(120.0)
                listener = chronicle.listener(member)
                with closing(broker.source(["t"], group="g", listener=listener)) as source:
                    for _ in range(5):
                        source.poll(1, 0.0)

        threads = [
            threading.Thread(target=_noting(failures, threading.Event(), partial(live, number)))
            for number in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert chronicle.conflicts == []


def test_a_leased_lane_cannot_be_taken(
    redis: Redis, broker: RedisBroker, opened: Callable[[], Source]
) -> None:
    """The server decides it, for a member whose view of the group is outdated."""
    source = opened()
    settle_in(source, lanes=1)
    stream, state, lease, _ = broker.keys.lane(Lane("t", 0), "g")
    with closing(raw(redis)) as direct:
        rival = [TAKE.sha, 3, stream, state, lease, "rival", "g", 1000, 0]
        assert direct.evalsha(*rival) is None
        owner = direct.hget(state, "owner")
    assert source.poll(1, 0.0) == []
    source.close()
    with closing(raw(redis)) as direct:
        assert direct.evalsha(*rival) == int(owner.split()[0]) + 1


def test_a_newcomer_gets_its_share_while_the_others_wait_for_messages(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members hear of one another at once, not with their next heartbeat or question."""
    monkeypatch.setattr(wakeup, "_BLOCK", 170.0)
    with closing(connect(redis.url, prefix=new_id(), session=300.0)) as broker:
        broker.create_topic("t", partitions=4)
        first, second = (broker.source(["t"], group="g") for _ in range(2))
        with closing(first), closing(second):
            settle_in(first, lanes=4)
            stop = threading.Event()
            thread = threading.Thread(target=lambda: [first.poll(1, 170.0), stop.set()])
            thread.start()
            wait_until(
                lambda: second.poll(1, 0.1) == [] and len(second.assignment()) == 2,
                deadline=60.0,  # less than the server lets a question wait
                what="the newcomer has its share",
            )
            first.wake()
            thread.join()


def test_a_member_taken_for_dead_reads_and_changes_nothing(
    redis: Redis, sink: Sink, broker: RedisBroker
) -> None:
    """Even one that knows nothing of it yet: the server refuses what its epoch is over for."""
    patient = {"prefix": broker.keys.prefix, "session": 300.0}
    publish(sink, b"a", b"b")
    with closing(connect(redis.url, **patient)) as other, closing(raw(redis)) as direct:
        first, second = (other.source(["t"], group="g") for _ in range(2))
        with closing(first), closing(second):
            old, late = take(first, 2)
            stream, state, lease, due = broker.keys.lane(Lane("t", 0), "g")
            direct.delete(lease, broker.keys.group("g").members)  # as if its session had ended
            direct.hset(state, "owner", "")
            new = take(second, 2)
            assert [d.count for d in new] == [2, 2], "its owner seemed to have died with it"
            publish(sink, b"c")
            first.accept([old])
            first.release(late, blame=True, delay=9.0)
            pending = direct.xpending_range(stream, "g", "-", "+", 10)
            assert [entry["times_delivered"] for entry in pending] == [2, 2]
            assert direct.zcard(due) == 0
            assert first.poll(10, 0.0) == []
            assert [d.body for d in take(second, 1)] == [b"c"]


def test_pruning_keeps_what_any_group_has_not_settled(
    broker: RedisBroker, opened: Callable[[], Source], sink: Sink, redis: Redis
) -> None:
    """Neither unread nor pending messages of the slowest group go; settled ones do."""
    assert broker.prune(["t"], older_than=0.0) == {}
    positions = publish(sink, *(b"%d" % n for n in range(300)))
    assert broker.prune(["t"], older_than=0.0) == {}, "no group has read it yet"
    source = opened()
    came = take(source, 200)
    source.accept(came[:50] + came[51:])
    assert broker.prune(["t"], older_than=3600.0) == {}
    assert broker.prune(["t"], older_than=0.0, dry_run=True) == {"t": 50}
    assert broker.prune(["t"], older_than=0.0) == {"t": 50}
    with closing(raw(redis)) as direct:
        [(first, _)] = direct.xrange(broker.keys.stream(Lane("t", 0)), count=1)
    assert first.decode() == positions[50]
    source.accept([came[50]])
    assert broker.prune(["t"], older_than=0.0) == {"t": 149}
    assert [d.position for d in take(source, 100)] == positions[200:]
    assert broker.lag("g", ["t"]) == {Lane("t", 0): 100}


def test_the_lag_is_counted_where_the_server_cannot_tell_it(
    redis: Redis, broker: RedisBroker, opened: Callable[[], Source], sink: Sink
) -> None:
    """Deleted entries make Redis forget the lag; it is counted then."""
    positions = publish(sink, *(b"%d" % n for n in range(250)))
    source = opened()
    take(source, 1)
    with closing(raw(redis)) as direct:
        stream = broker.keys.stream(Lane("t", 0))
        direct.xdel(stream, positions[100])
        assert direct.xinfo_groups(stream)[0].get("lag") is None
    assert broker.lag("g", ["t"]) == {Lane("t", 0): 249}
    assert broker.lag("nobody", ["t", "unknown"]) == {Lane("t", 0): 249}


def test_a_deleted_message_does_not_hold_up_its_lane(
    redis: Redis, broker: RedisBroker, opened: Callable[[], Source], sink: Sink
) -> None:
    """What somebody deleted while it waited is settled, and the others come."""
    positions = publish(sink, b"a", b"b")
    source = opened()
    for delivery in take(source, 2):
        source.release(delivery, blame=False)
    with closing(raw(redis)) as direct:
        direct.xdel(broker.keys.stream(Lane("t", 0)), positions[0])
    [delivery] = take(source, 1)
    source.accept([delivery])
    assert delivery.body == b"b"
    assert broker.lag("g", ["t"]) == {Lane("t", 0): 0}


@pytest.mark.parametrize("harm", ["group", "stream", "everything", "scripts"])
def test_a_member_recovers_from_what_an_operator_deletes(
    harm: str, private_server: PrivateServer
) -> None:
    """Groups, streams, all keys or the loaded scripts: they are made again, not waited for."""
    server = private_server(Redis)
    with (
        closing(connect(server.url)) as broker,
        closing(raw(server)) as direct,
        closing(broker.sink()) as sink,
        closing(broker.source(["t"], group="g")) as source,
    ):
        publish(sink, b"a")
        source.accept(take(source, 1))
        stream = broker.keys.stream(Lane("t", 0))
        match harm:
            case "group":
                direct.xgroup_destroy(stream, "g")
            case "stream":
                direct.delete(stream)
            case "everything":
                direct.flushall()
            case "scripts":
                direct.script_flush()
        broker.create_topic("t")
        wait_until(lambda: publish(sink, b"b"), what="publishing again")
        bodies: set[bytes | None] = set()
        wait_until(
            lambda: bodies.update(d.body for d in source.poll(10, 0.1)) or b"b" in bodies,
            what="the new message",
        )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"data": b"\xffx"}, (None, b"\xffx", [])),
        ({"key": "7", "body": "{}", "type": "t"}, (b"7", b"{}", [("type", b"t")])),
        ({"key": "7"}, (b"7", None, [])),
        (
            {"id": "7", "name": b"\xff"},
            (
                None,
                '{"id":"7","name":"\ufffd"}'.encode(),
                [("content-type", b"application/json"), ("id", b"7"), ("name", b"\xff")],
            ),
        ),
        ({"body": "x", "headers": "junk"}, (None, b"x", [("headers", b"junk")])),
        ({"body": "x", "headers": b"\x91\x92\xa1a\xa1b"}, (None, b"x", [("a", b"b")])),
        ({"body": b"y" * 70_000}, (None, b"y" * 70_000, [])),
    ],
    ids=["one field", "our fields", "tombstone", "a record", "junk", "text headers", "long"],
)
def test_entries_that_others_added_are_messages_too(
    fields: dict[Any, Any],
    expected: tuple[Any, ...],
    redis: Redis,
    broker: RedisBroker,
    opened: Callable[[], Source],
) -> None:
    """Whatever is in the stream is handed out, decoded as far as it can be."""
    broker.create_topic("t")
    with closing(raw(redis)) as direct:
        direct.xadd(broker.keys.stream(Lane("t", 0)), fields)
    source = opened()
    [delivery] = take(source, 1)
    assert (delivery.key, delivery.body, list(delivery.headers)) == expected
    assert delivery.message.id == delivery.coordinates_id()
    source.accept([delivery])


def test_a_batch_beyond_one_step_is_stored_whole_and_in_order(
    opened: Callable[[], Source], sink: Sink
) -> None:
    """Long batches and large messages are stored and handed out in parts."""
    many = [b"%d" % n for n in range(10_050)]
    large = [b"%d" % n + bytes(1_000_000) for n in range(40)]
    publish(sink, *many)
    publish(sink, *large)
    source = opened()
    came: list[bytes | None] = []
    while len(came) < len(many) + len(large):
        batch = take(source, 1)
        batch += source.poll(5000, 0.0)
        came += [delivery.body for delivery in batch]
        source.accept(batch)
    assert came == many + large


def test_a_topic_that_may_not_be_made_is_unknown(redis: Redis) -> None:
    """Without auto_create a misspelt topic is refused for producers and consumers."""
    with closing(connect(redis.url, prefix=new_id(), auto_create=False)) as broker:
        with closing(broker.sink()) as sink:
            [result] = sink.publish([Message.new("tpyo", b"a")])
            assert isinstance(result.error, UnknownTopic)
        with pytest.raises(UnknownTopic):
            broker.source(["tpyo"], group="g")


def test_whoever_creates_a_topic_first_decides_its_lanes(redis: Redis) -> None:
    """Two processes that create it at once agree on where a key belongs."""
    prefix = new_id()
    with (
        closing(connect(redis.url, prefix=prefix)) as one,
        closing(connect(redis.url, prefix=prefix)) as two,
    ):
        one.create_topic("t", partitions=3)
        two.create_topic("t", partitions=5)
        assert len(one.lag("g", ["t"])) == len(two.lag("g", ["t"])) == 3


def test_seek_takes_positions_and_the_beginning(opened: Callable[[], Source], sink: Sink) -> None:
    """A position is what deliveries carry; nonsense is refused."""
    publish(sink, b"a", b"b")
    source = opened()
    source.accept(take(source, 2))
    source.seek(Lane("t", 0), offset=0)
    assert [d.body for d in take(source, 2)] == [b"a", b"b"]
    for nonsense in ("x", "1-x", -1):
        with pytest.raises(ConfigurationError):
            source.seek(Lane("t", 0), offset=nonsense)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        source.seek(Lane("t", 1), offset=0)


def test_what_is_closed_says_so(broker: RedisBroker) -> None:
    """Using a closed sink or source is a mistake, not an outage."""
    sink, source = broker.sink(), broker.source(["t"], group="g")
    sink.close()
    source.close()
    with pytest.raises(Unsupported):
        sink.publish([])
    with pytest.raises(Unsupported):
        source.poll(1, 0.0)


# -- bad input -----------------------------------------------------------------------------


def refusal(url: str, **native: Any) -> str:
    """Return what connecting to *url* is refused with, as the user's mistake."""
    with pytest.raises(ConfigurationError) as caught:
        connect(url, **native).sink()
    return str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://localhost/orders", "no database number"),
        ("redis://a:1,b:2/0", "name one server"),
        ("redis:///0", "name one server"),
        ("redis://localhost/0?session=soon", "write a number"),
        ("redis://localhost/0?session=0", "above 0"),
        ("redis://localhost/0?auto_create=maybe", "true or false"),
        ("redis://localhost/0?sokcet_timeout=1", "sokcet_timeout"),
        ("redis://localhost/0?socket_timeout=soon", "socket_timeout"),
    ],
)
def test_a_malformed_url_says_what_to_write(url: str, words: str) -> None:
    """Mistakes show before anything is sent."""
    with pytest.raises(ConfigurationError, match=words):
        RedisBroker(BrokerUrl.parse(url))


def test_wrong_credentials_are_the_users_mistake(private_server: PrivateServer) -> None:
    """No, wrong and insufficient credentials are told apart, and no secret is shown."""
    server = private_server(Redis)
    with closing(raw(server)) as direct:
        direct.config_set("requirepass", "s3cret")
        direct.execute_command("AUTH", "s3cret")
        direct.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+@read")
    assert "Authentication required" in refusal(server.url)
    wrong = refusal(f"redis://:guess@{server.address}/0")
    assert "refuses these credentials" in wrong
    assert "guess" not in wrong
    assert "does not let this user" in refusal(f"redis://reader:pw@{server.address}/0")
    with closing(connect(f"redis://:s3cret@{server.address}/0")) as broker:
        broker.sink().close()


def test_a_database_that_does_not_exist_is_the_users_mistake(redis: Redis) -> None:
    """Redis has sixteen unless told otherwise."""
    assert "no database" in refusal(f"redis://{redis.address}/99")


def test_another_protocol_on_the_port_is_the_users_mistake() -> None:
    """A web server is not Redis."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        words = refusal(f"redis://127.0.0.1:{server.getsockname()[1]}/0")
        thread.join()
    assert "does not speak the Redis protocol" in words


def test_nobody_on_the_port_is_an_outage() -> None:
    """The server may be starting: that is worth waiting for."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(BrokerDown, match="does not answer"):
        connect(f"redis://127.0.0.1:{port}/0").sink()


def test_tls_where_the_server_speaks_plain_is_the_users_mistake(redis: Redis) -> None:
    """The error says which scheme to write."""
    url = f"rediss://{redis.address}/0"
    assert "write redis://" in refusal(url, socket_connect_timeout=0.3, socket_timeout=0.3)


def test_tls_works_and_plain_is_refused_where_the_server_speaks_tls(
    private_server: PrivateServer, tmp_path: Path
) -> None:
    """Certificates are checked, settings of redis-py pass through."""
    server = private_server(Redis)
    port = _speak_tls(server, tmp_path)
    assert "write rediss://" in refusal(f"redis://127.0.0.1:{port}/0")
    assert "certificate" in refusal(f"rediss://127.0.0.1:{port}/0")
    url = f"rediss://127.0.0.1:{port}/0"
    with (
        closing(connect(url, ssl_ca_certs=str(tmp_path / "cert.pem"))) as broker,
        closing(broker.sink()) as sink,
        closing(broker.source(["t"], group="g")) as source,
    ):
        publish(sink, b"a")
        assert [d.body for d in take(source, 1)] == [b"a"]
        assert source.poll(1, 0.05) == []


def _speak_tls(server: Redis, folder: Path) -> int:
    """Make *server* speak TLS on a second port, which is returned."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert), "-days", "1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *files, *names]
    subprocess.run(command, check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    with closing(raw(server)) as direct:
        settings = {"tls-cert-file": cert, "tls-key-file": key, "tls-ca-cert-file": cert}
        pairs = [str(part) for pair in settings.items() for part in pair]
        direct.config_set(*pairs, "tls-auth-clients", "no", "tls-port", port)
    return port


def test_a_key_that_something_else_uses_is_the_users_mistake(
    redis: Redis, broker: RedisBroker, sink: Sink
) -> None:
    """The messages of that topic are refused, others are stored."""
    broker.create_topic("used")
    with closing(raw(redis)) as direct:
        direct.set(broker.keys.stream(Lane("used", 0)), "a string")
    first, second = sink.publish([Message.new("used", b"a"), Message.new("t", b"b")])
    assert isinstance(first.error, ConfigurationError)
    assert "used by something else" in str(first.error)
    assert second.error is None
    with (
        closing(broker.source(["used"], group="g")) as source,
        pytest.raises(ConfigurationError, match="used by something else"),
    ):
        source.poll(1, 0.0)


def test_a_server_that_may_delete_messages_by_itself_is_refused(
    private_server: PrivateServer,
) -> None:
    """A cache drops what was not read for long: that would be silent loss."""
    server = private_server(Redis)
    with closing(raw(server)) as direct:
        direct.config_set("maxmemory", 1 << 30)
        direct.config_set("maxmemory-policy", "allkeys-lru")
        assert "noeviction" in refusal(server.url)
        direct.config_set("maxmemory-policy", "noeviction")
    with closing(connect(server.url)) as broker:
        broker.sink().close()


def test_a_server_that_forgets_messages_is_warned_of(
    private_server: PrivateServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody finds out after the crash that nothing was kept."""
    server = private_server(Redis)
    with closing(raw(server)) as direct, closing(connect(server.url)) as broker:
        broker.sink().close()
        assert not caplog.text
        direct.config_set("appendonly", "no")
        broker.sink().close()
    assert "appendonly yes" in caplog.text


def test_a_replica_is_an_outage_until_it_is_promoted(private_server: PrivateServer) -> None:
    """A failover passes; what is published meanwhile is known not to be stored."""
    server = private_server(Redis)
    with (
        closing(connect(server.url)) as broker,
        closing(raw(server)) as direct,
        closing(broker.sink()) as sink,
        closing(broker.source(["t"], group="g")) as source,
    ):
        settle_in(source, lanes=1)
        direct.replicaof("127.0.0.1", "1")
        with pytest.raises(BrokerDown, match="replica"):
            sink.publish([Message.new("t", b"lost?")])
        with pytest.raises(BrokerDown, match="replica"):
            source.poll(1, 0.0)
        direct.replicaof("NO", "ONE")
        wait_until(lambda: publish(sink, b"a"), what="publishing again")
        wait_until(lambda: source.poll(1, 0.1), what="polling again")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("LOADING Redis is loading the dataset in memory", BrokerDown),
        ("MISCONF Redis is configured to save RDB snapshots, but is unable to", BrokerDown),
        ("NOREPLICAS Not enough good replicas to write.", BrokerDown),
        ("ERR max number of clients reached", BrokerDown),
        ("ERR Error running script (call to f_1): @user_script:1: OOM command", BrokerDown),
        ("MOVED 3999 127.0.0.1:6381", ConfigurationError),
        ("CROSSSLOT Keys in request don't hash to the same slot", ConfigurationError),
        ("ERR unknown command 'XADD', with args beginning with:", ConfigurationError),
        ("ERR Protocol error: invalid bulk length", ConfigurationError),
    ],
)
def test_every_refusal_of_the_server_states_its_remedy(text: str, kind: type[Exception]) -> None:
    """Refusals that cannot be had from a test server cheaply are read by their words."""
    assert type(translation(client.ResponseError(text), "redis://x")) is kind


# -- restarts ------------------------------------------------------------------------------


def test_kills_of_the_server_lose_nothing_and_keep_the_order(
    private_server: PrivateServer,
) -> None:
    """The server dies three times while everybody works; every message is handled, in order."""
    Soak(private_server(Redis), batches=100, kills=3, deaths=1, seed=1).run()


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(6))
def test_many_kills_of_the_server_lose_nothing_and_keep_the_order(
    private_server: PrivateServer, seed: int
) -> None:
    """The server dies twenty times, and ten members fall silent, while everybody works."""
    Soak(private_server(Redis), batches=2000, kills=20, deaths=10, seed=seed).run()


class Soak:
    """A publisher and two members at work while the server is killed and members vanish."""

    def __init__(self, server: Redis, *, batches: int, kills: int, deaths: int, seed: int) -> None:
        self._server = server
        self._batches = batches
        chance = random.Random(seed)
        faults = ["kill"] * kills + ["death"] * deaths
        chance.shuffle(faults)
        marks = sorted(chance.sample(range(1, batches), len(faults)))
        self._faults = list(zip(marks, faults, strict=True))
        self._broker = connect(server.url, socket_timeout=1.0, session=SESSION)
        self._broker.create_topic("t", partitions=4)
        self._sent: list[tuple[bytes, bytes]] = []
        self._seen: list[tuple[bytes | None, bytes | None]] = []
        self._stop = threading.Event()
        self._dying = threading.Event()
        self._failures: list[BaseException] = []
        self._graves: list[Source] = []

    def run(self) -> None:
        """Run to the end and compare what was seen with what was sent."""
        works = (self._publish, self._consume, self._consume)
        threads = [
            threading.Thread(target=_noting(self._failures, self._stop, work)) for work in works
        ]
        for thread in threads:
            thread.start()
        try:
            for mark, fault in self._faults:
                self._await(lambda m=mark: len(self._sent) >= m * 10, "progress")
                if fault == "death":
                    self._dying.set()
                else:
                    self._server.kill()
                    self._server.start()
            self._await(lambda: len(self._sent) == self._batches * 10, "all is published")
            self._await(lambda: set(self._sent) <= set(self._seen), "all is handled")
            lag = lambda: sum(self._broker.lag("g", ["t"]).values())  # noqa: E731
            self._await(lambda: lag() == 0, "all is settled")
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
            for source in self._graves:
                source.close()
            self._broker.close()
        assert not self._failures, self._failures
        check_nothing_lost(self._sent, self._seen)
        check_order_per_key(self._sent, self._seen)

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(lambda: self._failures or condition(), deadline=90.0, what=what)
        assert not self._failures, self._failures

    def _publish(self) -> None:
        """Publish batch after batch, each again until it is known to be stored."""
        with closing(self._until_up(self._broker.sink)) as sink:
            for batch in range(self._batches):
                pairs = [(b"key %d" % n, b"%d of %d" % (batch, n)) for n in range(10)]
                messages = [Message.new("t", body, key=key) for key, body in pairs]
                results = self._until_up(lambda m=messages: sink.publish(m))
                assert [result.error for result in results] == [None] * len(messages)
                self._sent += pairs

    def _consume(self) -> None:
        """Handle and accept until told to stop; once told to die, vanish and be replaced."""
        while not self._stop.is_set():
            source = self._until_up(lambda: self._broker.source(["t"], group="g"))
            self._graves.append(source)
            while not self._stop.is_set():
                batch = self._until_up(lambda s=source: s.poll(25, 0.05))
                self._seen += [(delivery.key, delivery.body) for delivery in batch]
                if batch and self._dying.is_set():
                    self._dying.clear()
                    break
                self._until_up(lambda s=source, b=batch: s.accept(b))

    def _until_up(self, call: Callable[[], Any]) -> Any:
        while True:
            try:
                return call()
            except BrokerDown:
                if self._stop.wait(0.01):
                    raise


def _noting(
    failures: list[BaseException], stop: threading.Event, work: Callable[[], None]
) -> Callable[[], None]:
    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the test reports it
            if not stop.is_set():
                failures.append(error)
            stop.set()

    return run
