"""Long waits without a database: the broker keeps the message, across restarts and kills."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import BrokerDown, Message, Transient, new_id
from holdfast.brokers import connect
from holdfast.clock import SystemClock
from holdfast.consumer import Attempt, Consumer, Order
from holdfast.consumer.intake.retry_topics import TIERS, RetryHeaders, retry_topic, tier_of
from holdfast.dlq import dead_letter
from holdfast.retry import retry
from holdfast.testing import (
    Fault,
    ScriptedBroker,
    check_nothing_lost,
    check_order_per_key,
    fail,
    nth,
    wait_until,
)
from tests.consuming import running, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.ports import Broker, Delivery, Source
    from holdfast.testing.faults import FaultStep

# kafka-python reads its own schemas in a way that Python 3.11 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning")
ROOT = Path(__file__).parents[2]
LONG = 1.5
"""Longer than the consumer's patience below, and than it takes to look at what happens."""


class Steady:
    """A policy that waits the same each time."""

    def __init__(self, seconds: float, attempts: int = 5) -> None:
        self.seconds, self.attempts = seconds, attempts

    def delay(self, attempt: int, previous: float | None = None) -> float | None:
        """Return the wait, None once the attempts are spent."""
        del previous
        return self.seconds if attempt < self.attempts else None


class Place:
    """A broker with one topic of its own, and what a consumer without a database did."""

    def __init__(self, url: str, native: dict[str, Any]) -> None:
        self.url, self.native = url, native
        self.topic, self.group = f"t{new_id()[-12:]}", f"g{new_id()[-12:]}"
        self.broker: Broker = connect(url, **native)
        self.broker.create_topic(self.topic)
        self.broker.source([self.topic], group=self.group).close()  # queues keep what follows
        self.seen: list[tuple[str, int]] = []

    def consumer(self, *, ordered: bool, fails: int, attempts: int = 5, **options: Any) -> Consumer:
        """Return a consumer that fails the message 'bad' so many times."""
        made = Consumer(connect(self.url, **self.native), group=self.group, patience=0.1, **options)

        @made.on(self.topic, ordered=ordered)
        @dead_letter()
        @retry(Steady(LONG, attempts))
        def handle(order: str, attempt: Attempt, message: Message) -> None:
            self.seen.append((f"{order} {message.id[-4:]}", attempt.number))
            if order == "bad" and attempt.number <= fails:
                raise Transient("not yet")

        return made

    def send(self, *bodies: str, key: str | None = "k") -> list[str]:
        """Publish; return how the messages will be seen."""
        messages = [Message.new(self.topic, body.encode(), key=key) for body in bodies]
        with closing(self.broker.sink()) as sink:
            assert not [result.error for result in sink.publish(messages) if result.error]
        return [f"{body} {message.id[-4:]}" for body, message in zip(bodies, messages, strict=True)]

    @property
    def lag(self) -> int:
        """How many messages of the topic itself are not acknowledged."""
        return sum(self.broker.lag(self.group, [self.topic]).values())

    @property
    def waiting(self) -> int:
        """How many messages wait in the tiers."""
        topics = [retry_topic(self.topic, self.group, tier) for tier in TIERS]
        return sum(self.broker.lag(self.group, topics).values())


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Offer the broker that the test names."""
    server, _, killed = request.param.partition(" ")
    # A slow machine must not lose its membership; one that was killed should, soon.
    seconds = 2.5 if killed else 30.0
    if server == "memory":
        found = Place("memory:", {})
    elif server == "sqlite":
        found = Place(f"sqlite:///{tmp_path}/b.db?session={seconds}", {})
    else:
        started = request.getfixturevalue(server)
        native: dict[str, Any] = {
            "kafka": {"session_timeout_ms": int(seconds * 1000), "heartbeat_interval_ms": 250},
            "redis": {"session": seconds, "prefix": new_id()},
            "nats": {"session": seconds, "lease": seconds},
        }.get(server, {})
        url = f"kafka://{started.address}" if server == "kafka" else started.url
        found = Place(url, native)
    yield found
    found.broker.close()


NATIVE = ["sqlite", "redis"]
TIERED = ["kafka", "rabbitmq", "nats"]


@pytest.mark.parametrize("place", NATIVE, indirect=True)
def test_a_native_delay_keeps_the_key_in_order_and_nothing_in_memory(place: Place) -> None:
    """The broker holds the message and what comes after it under its key; others go on."""
    bad, after = place.send("bad", "after")
    (other,) = place.send("other", key="o")
    consumer = place.consumer(ordered=True, fails=2)
    with running(consumer):
        until(lambda: (bad, 1) in place.seen and (other, 1) in place.seen, "the first attempt")
        assembly = consumer.running
        assert assembly is not None
        until(assembly.lanes.is_empty, "nothing in hand while it waits")
        until(lambda: place.lag <= 2, "the other key acknowledged")
        until(lambda: place.lag == 0, "everything acknowledged")
    assert [one for one in place.seen if one[0] != other] == [
        (bad, 1),
        (bad, 2),
        (bad, 3),
        (after, 1),
    ]
    assert consumer.tally.delayed == 2


@pytest.mark.parametrize("place", NATIVE, indirect=True)
def test_a_native_delay_outlives_the_consumer_and_goes_on_counting(place: Place) -> None:
    """Another process takes the message up when it is due, as the next attempt."""
    bad, after = place.send("bad", "after")
    first = place.consumer(ordered=True, fails=999, attempts=1000)
    with running(first):
        until(lambda: first.tally.delayed >= 1, "the message delayed")
    failed = [(bad, n + 1) for n in range(len(place.seen))]
    assert place.seen == failed  # once, or more often where the stop took its time
    with running(place.consumer(ordered=True, fails=0, attempts=1000)):
        until(lambda: place.lag == 0, "everything acknowledged")
    assert place.seen == [*failed, (bad, len(failed) + 1), (after, 1)]


@pytest.mark.parametrize("outage", [False, True], ids=["at once", "after an outage"])
@pytest.mark.parametrize("place", ["memory", *NATIVE], indirect=True)
def test_a_key_stays_closed_until_the_broker_has_its_delayed_message_back(
    place: Place, *, outage: bool
) -> None:
    """What a poll under way hands out of it meanwhile goes back behind it."""
    entered, go = threading.Event(), threading.Event()
    held_up: list[bool] = []

    def poll(step: FaultStep) -> list[Delivery]:
        """Return the later message only once the earlier one has begun its long wait."""
        batch: list[Delivery] = step.go()
        if not held_up and any(delivery.body == b"after" for delivery in batch):
            held_up.append(True)
            go.set()
            until(lambda: consumer.tally.delayed == 1, "the earlier message put off")
            assembly = consumer.running
            assert assembly is not None
            until(lambda: not assembly.lanes.running(), "its verdict taken")
        return batch

    faults = [Fault(point="poll", effect=poll)]
    if outage:
        faults.append(Fault(point="release", effect=fail(BrokerDown), when=nth(1, 2)))
    scripted = ScriptedBroker(*faults, broker=place.broker)
    consumer = Consumer(scripted, group=place.group, patience=0.1)

    @consumer.on(place.topic)
    @retry(Steady(LONG))
    def handle(order: str, attempt: Attempt) -> None:
        place.seen.append((order, attempt.number))
        if (order, attempt.number) == ("bad", 1):
            entered.set()
            go.wait(90)
            raise Transient("not yet")

    place.send("bad")
    with running(consumer):
        assert entered.wait(90)
        place.send("after")
        until(lambda: place.lag == 0, "everything acknowledged")
    assert place.seen == [("bad", 1), ("bad", 2), ("after", 1)]
    scripted.history.check_order_per_key(place.group)


@pytest.mark.parametrize("place", ["memory", *NATIVE, *TIERED], indirect=True)
def test_keys_keep_their_order_through_many_long_waits(place: Place) -> None:
    """While more is published all the time, and also where the broker keeps what waits."""
    chance = random.Random(7)
    consumer = Consumer(place.broker, group=place.group, patience=0.02, workers=4)
    seen: list[tuple[str, str]] = []

    @consumer.on(place.topic)
    @retry(Steady(0.1, attempts=9))
    def handle(order: str, attempt: Attempt, message: Message) -> None:
        if attempt.number <= int(order.partition(" ")[2]):
            raise Transient("not yet")
        seen.append((message.key_text or "", message.id))

    sent: list[tuple[str, str]] = []
    with running(consumer), closing(place.broker.sink()) as sink:
        for n in range(60):
            fails = chance.choice([0, 0, 1, 2])
            message = Message.new(place.topic, f"{n} {fails}".encode(), key=f"k{n % 3}")
            sent.append((f"k{n % 3}", message.id))
            assert sink.publish([message])[0].error is None
            wait_until(lambda n=n: len(seen) >= n // 2, deadline=60, what="half of it handled")  # type: ignore[misc]
        until(lambda: place.lag == 0, "everything acknowledged")
    check_nothing_lost(sent, seen)
    check_order_per_key(sent, seen)


class StallingClock(SystemClock):
    """Stands for a process that loses the processor: time jumps at one chosen reading."""

    ahead = 0.0
    _readings = 0

    def stall(self, reading: int, seconds: float) -> None:
        """Let *seconds* pass just before the clock is read for the *reading*th time from now."""
        self._readings, self._seconds = reading, seconds

    def monotonic(self) -> float:  # type: ignore[override]
        """Return the machine's monotonic seconds, and those that were jumped."""
        self._readings -= 1
        if self._readings == 0:
            self.ahead += self._seconds
        return super().monotonic() + self.ahead


@pytest.mark.parametrize("place", ["memory", *NATIVE], indirect=True)
def test_a_message_that_falls_due_during_a_poll_is_not_overtaken(place: Place) -> None:
    """Wherever in it the process stands still meanwhile: what is new of its key comes after it."""
    clock, wait = StallingClock(), 10.0
    place.broker.close()
    place.broker = connect(place.url, clock=clock, **place.native)
    place.broker.create_topic(place.topic)
    with closing(place.broker.source([place.topic], group=place.group)) as source:
        for reading in range(1, 30):
            place.send("bad")
            [bad] = taken(source, 1)
            source.release(bad, blame=True, delay=wait)
            place.send("after")
            clock.stall(reading, wait)
            came = taken(source, 2)
            assert [one.body for one in came] == [b"bad", b"after"], f"at reading {reading}"
            source.accept(came)


def taken(source: Source, count: int) -> list[Delivery]:
    """Poll until *count* deliveries came."""
    came: list[Delivery] = []
    until(lambda: came.extend(source.poll(9, 0.0)) or len(came) >= count, f"{count} deliveries")
    return came


@pytest.mark.parametrize("place", TIERED, indirect=True)
def test_a_tier_keeps_an_unordered_message_across_restarts(place: Place) -> None:
    """It is acknowledged, waits under its own id, and the counter travels with it."""
    bad, after = place.send("bad", "after")
    first = place.consumer(ordered=False, fails=2)
    with running(first):
        until(lambda: first.tally.delayed >= 1 and (after, 1) in place.seen, "the message delayed")
        until(lambda: place.lag == 0, "the original acknowledged")
    with running(place.consumer(ordered=False, fails=2)):
        until(lambda: (bad, 3) in place.seen, "the third attempt")
        until(lambda: place.waiting == 0, "nothing waiting any more")
    assert [one for one in place.seen if one[0] == bad] == [(bad, 1), (bad, 2), (bad, 3)]
    assert place.seen.count((after, 1)) == 1


@pytest.mark.parametrize("place", ["nats"], indirect=True)
def test_a_tier_keeps_a_message_without_a_key_also_of_an_ordered_handler(place: Place) -> None:
    """There is no order to keep: its retry need not wait in memory."""
    (bad,) = place.send("bad", key=None)
    consumer = place.consumer(ordered=True, fails=1)
    with running(consumer):
        until(lambda: place.seen == [(bad, 1), (bad, 2)], "the second attempt")
    assert consumer.tally.delayed == 1


@pytest.mark.parametrize("place", ["kafka"], indirect=True)
def test_a_tier_that_is_not_due_is_paused_while_the_consumer_polls_on(place: Place) -> None:
    """Its partition waits; the topic itself is served meanwhile."""
    consumer = place.consumer(ordered=False, fails=1)
    (bad,) = place.send("bad")
    with running(consumer):
        until(lambda: consumer.tally.delayed == 1, "the message delayed")
        fresh = [place.send(f"fresh {n}")[0] for n in range(5)]
        until(lambda: all((one, 1) in place.seen for one in fresh), "the topic served")
        until(lambda: (bad, 2) in place.seen, "the second attempt")


@pytest.mark.parametrize("place", ["kafka"], indirect=True)
def test_an_ordered_key_without_native_delay_waits_in_memory(place: Place) -> None:
    """Nothing overtakes it: neither its key nor its acknowledgement."""
    bad, after = place.send("bad", "after")
    consumer = place.consumer(ordered=True, fails=1)
    with running(consumer):
        until(lambda: place.lag == 0, "everything acknowledged")
    assert place.seen == [(bad, 1), (bad, 2), (after, 1)]
    assert consumer.tally.delayed == 0


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_partition_order_is_not_broken_by_a_delay(place: Place) -> None:
    """With order per partition the whole partition waits, in memory."""
    bad, after = place.send("bad", "after")
    consumer = place.consumer(ordered=True, fails=1, order=Order.LANE)
    with running(consumer):
        until(lambda: place.lag == 0, "everything acknowledged")
    assert place.seen == [(bad, 1), (bad, 2), (after, 1)]
    assert consumer.tally.delayed == 0


@pytest.mark.parametrize("place", NATIVE + TIERED, indirect=True)
def test_retries_that_are_spent_end_in_one_dead_letter(place: Place) -> None:
    """However long it waited on the broker, the attempts are counted as one row."""
    (bad,) = place.send("bad")
    consumer = place.consumer(ordered=False, fails=99)
    with running(consumer):
        until(lambda: consumer.tally.dead_lettered == 1, "the message dead")
    assert place.seen == [(bad, n) for n in range(1, 6)]


WORKER = """
import json, sys, time
from holdfast.brokers import connect
from holdfast.consumer import Attempt, Consumer
from holdfast.retry import retry
from tests.integration.test_consumer_delays import Steady
url, native, group, topic, ordered = sys.argv[1:]
consumer = Consumer(connect(url, **json.loads(native)), group=group, patience=0.1)

@consumer.on(topic, ordered=ordered == "ordered")
@retry(Steady(1.5))
def handle(order: str, attempt: Attempt) -> None:
    raise ConnectionError("not now")

import threading
def tell():
    while not consumer.tally.delayed:
        time.sleep(0.01)  # pacing: a look at a counter in another process
    print("delayed", flush=True)
threading.Thread(target=tell, daemon=True).start()
consumer.run()
"""


@pytest.mark.programs
@pytest.mark.parametrize("place", ["sqlite killed", "kafka killed"], indirect=True)
def test_a_kill_while_a_message_waits_on_the_broker_loses_nothing(place: Place) -> None:
    """`kill -9` at the moment of handing over: it comes again, at most one time too many."""
    ordered = place.url.startswith("sqlite")
    (bad,) = place.send("bad")
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, place.url, json.dumps(place.native), place.group,
         place.topic, "ordered" if ordered else "unordered"],
        stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"delayed\n"
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    with running(place.consumer(ordered=ordered, fails=0)):
        until(lambda: bool(place.seen), "the message handled")
        until(lambda: place.lag == 0, "everything acknowledged")
    assert {one for one, _ in place.seen} == {bad}


def test_a_ticket_travels_with_its_message_and_leaves_no_trace() -> None:
    """The id and the user's headers are as they were; an unreadable ticket is due at once."""
    message = Message.new("orders", b"x", key="k", headers=[("tenant", b"a")])
    sent = RetryHeaders(123.5, 4).stamped(message, "orders.g.retry.1m")
    _, taken = RetryHeaders.taken_from(sent)
    again = RetryHeaders(200.0, 5, 90.5).stamped(taken, "orders.g.retry.1m")
    assert len({message.id, sent.id, again.id}) == 3  # or a broker would drop it as known
    ticket, bare = RetryHeaders.taken_from(again)
    assert ticket == RetryHeaders(200.0, 5, 90.5)
    assert bare.with_(topic="orders") == message
    assert RetryHeaders.taken_from(message)[0] == RetryHeaders(0.0, 1)
    broken = message.with_(headers=type(message.headers)([("x-retry-due", b"soon")]))
    assert RetryHeaders.taken_from(broken)[0] == RetryHeaders(0.0, 1)
    assert [tier_of(seconds) for seconds in (1, 5, 6, 61, 601, 9999)] == [
        "5s", "5s", "1m", "10m", "1h", "1h",
    ]  # fmt: skip
