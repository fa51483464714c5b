"""The scripted broker fails where it is told to, and tells what really happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.errors import BrokerDown, MessageTooLarge
from holdfast.message import Message
from holdfast.testing import (
    Crash,
    EventHistory,
    Fault,
    ScriptedBroker,
    Violation,
    VirtualClock,
    check_effects_once,
    check_nothing_lost,
    check_order_per_key,
    crash_after,
    crash_before,
    crash_midway,
    duplicate,
    every,
    every_crash,
    fail,
    fail_after,
    nth,
    on_key,
    rebalance,
    refuse,
    reorder,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from holdfast.ports import Broker, Delivery, Lane, Source
    from holdfast.testing.faults import Point

TOPIC, GROUP = "orders", "billing"


def scripted(*faults: Fault) -> ScriptedBroker:
    broker = ScriptedBroker(*faults, clock=VirtualClock(auto=True))
    broker.create_topic(TOPIC, partitions=2)
    return broker


def fill(broker: Broker, count: int = 6, keys: int = 3) -> list[Message]:
    messages = [Message.new(TOPIC, b"%d" % n, key=b"key %d" % (n % keys)) for n in range(count)]
    broker.sink().publish(messages)
    return messages


def joined(broker: Broker) -> Source:
    return broker.source([TOPIC], group=GROUP)


def bodies(deliveries: Sequence[Delivery]) -> set[bytes | None]:
    return {delivery.body for delivery in deliveries}


def test_without_faults_it_is_the_broker_it_wraps() -> None:
    """Everything passes, and all of it is in the history."""
    broker = scripted()
    messages = fill(broker)
    source = joined(broker)
    deliveries = source.poll(10, 0)
    source.accept(deliveries)
    source.flush()
    source.close()
    assert bodies(deliveries) == {message.payload for message in messages}
    assert broker.calls == {"publish": 1, "poll": 1, "accept": 1, "flush": 1, "close": 1}
    assert [event.id for event in broker.history.of("published")] == [m.id for m in messages]
    assert len(broker.history.of("handed out", "accepted", group=GROUP)) == 2 * len(messages)
    assert len(broker.history.of("assigned")) == len(broker.history.of("revoked")) == 2
    broker.history.check_nothing_lost(GROUP)
    broker.history.check_order_per_key(GROUP)


def test_a_crash_before_an_accept_leaves_the_message_unsettled() -> None:
    """The next member gets what the dead one held."""
    broker = scripted(Fault(point="accept", when=nth(2), effect=crash_before))
    fill(broker)
    source = joined(broker)
    first, *rest = source.poll(10, 0)
    source.accept([first])
    with pytest.raises(Crash, match="accept 2"):
        source.accept(rest)
    assert bodies(joined(broker).poll(10, 0)) == bodies(rest)


def test_a_crash_after_an_accept_leaves_the_message_settled() -> None:
    """The dead member never learned that it had succeeded."""
    broker = scripted(Fault(point="accept", effect=crash_after))
    fill(broker)
    source = joined(broker)
    with pytest.raises(Crash):
        source.accept(source.poll(10, 0))
    assert joined(broker).poll(10, 0) == []


def test_a_crash_midway_settles_the_first_half() -> None:
    """A batch can be torn."""
    broker = scripted(Fault(point="accept", effect=crash_midway))
    fill(broker)
    source = joined(broker)
    deliveries = source.poll(10, 0)
    with pytest.raises(Crash):
        source.accept(deliveries)
    assert bodies(joined(broker).poll(10, 0)) == bodies(deliveries[3:])


def test_a_crash_kills_everything_of_the_process() -> None:
    """Sinks and sources that were open raise whatever is called; new ones work."""
    broker = scripted(Fault(point="flush", effect=crash_before))
    sink, source = broker.sink(), joined(broker)
    source.poll(1, 0)
    with pytest.raises(Crash):
        source.flush()
    calls: list[Callable[[], object]] = [
        lambda: source.poll(1, 0),
        lambda: source.accept([]),
        source.flush,
        source.close,
        source.assignment,
        source.lag,
        lambda: source.pause([]),
        lambda: sink.publish([]),
        sink.close,
    ]
    for call in calls:
        with pytest.raises(Crash):
            call()
    fill(broker)
    assert len(joined(broker).poll(10, 0)) == 6


def test_nothing_swallows_a_crash() -> None:
    """It passes through `except Exception`, as a kill would."""
    assert not issubclass(Crash, Exception)


def test_two_scripted_brokers_are_two_processes_of_one_broker() -> None:
    """A crash of one leaves the other alive, and both are in one history."""
    history = EventHistory()
    first = ScriptedBroker(clock=VirtualClock(auto=True), history=history)
    first.create_topic(TOPIC, partitions=2)
    second = ScriptedBroker(broker=first.wrapped, history=history)
    fill(first)
    doomed, survivor = joined(first), joined(second)
    doomed.poll(10, 0)
    first.crash()
    came: list[Delivery] = []
    while len(came) < 6:
        came += survivor.poll(10, 0)
    survivor.accept(came)
    history.check_nothing_lost(GROUP)


def test_a_failed_call_was_not_made() -> None:
    """`fail` raises before the broker hears of it, so the call may be repeated."""
    broker = scripted(Fault(point="publish", when=nth(1), effect=fail(BrokerDown)))
    message = Message.new(TOPIC, b"a")
    sink = broker.sink()
    with pytest.raises(BrokerDown, match="scripted failure of publish 1"):
        sink.publish([message])
    assert broker.history.published() == []
    sink.publish([message])
    assert [id_ for _, id_ in broker.history.published()] == [message.id]


def test_a_lost_answer_hides_a_call_that_was_made() -> None:
    """`fail_after` raises although the message is stored, so repeating it stores it twice."""
    lost = BrokerDown("the answer is lost")
    broker = scripted(Fault(point="publish", when=nth(1), effect=fail_after(lost)))
    message = Message.new(TOPIC, b"a")
    sink = broker.sink()
    with pytest.raises(BrokerDown, match="the answer is lost"):
        sink.publish([message])
    sink.publish([message])
    assert len(joined(broker).poll(10, 0)) == 2


def test_a_part_of_a_batch_can_be_refused() -> None:
    """Each message has its own result, in its own place."""
    error = MessageTooLarge(2, 1)
    effect = refuse(error, lambda message: message.key == b"key 1")
    broker = scripted(Fault(point="publish", effect=effect))
    messages = [Message.new(TOPIC, b"%d" % n, key=b"key %d" % (n % 2)) for n in range(4)]
    results = broker.sink().publish(messages)
    assert [result.error for result in results] == [None, error, None, error]
    assert bodies(joined(broker).poll(10, 0)) == {b"0", b"2"}


def test_a_duplicate_is_handed_out_beside_the_first() -> None:
    """Either copy settles the message, and the other one then changes nothing."""
    broker = scripted(Fault(point="poll", effect=duplicate))
    fill(broker, count=1)
    source = joined(broker)
    first, second = source.poll(10, 0)
    assert first is not second
    assert first.message.id == second.message.id
    source.accept([second])
    source.release(first, blame=True)
    assert source.poll(10, 0) == []


def test_a_duplicate_publish_stores_twice() -> None:
    """As a producer's retry does when the first answer was lost."""
    broker = scripted(Fault(point="publish", effect=duplicate))
    fill(broker, count=2)
    assert len(joined(broker).poll(10, 0)) == 4


@pytest.mark.parametrize("seed", range(5))
def test_reordering_keeps_each_keys_order_unless_told(seed: int) -> None:
    """By default only keys are mixed; a broker without order mixes everything."""
    kept = scripted(Fault(point="poll", effect=reorder(seed)))
    messages = fill(kept, count=20)
    sent = [(m.key, m.payload) for m in messages]
    came = [(d.key, d.body) for d in joined(kept).poll(50, 0)]
    assert came != sent
    check_order_per_key(sent, came)
    mixed = scripted(Fault(point="poll", effect=reorder(seed, within_keys=True)))
    fill(mixed, count=20)
    with pytest.raises(Violation):
        check_order_per_key(sent, [(d.key, d.body) for d in joined(mixed).poll(50, 0)])


def test_a_rebalance_takes_lanes_away_and_gives_them_back() -> None:
    """What was held becomes stale and comes again; the listener hears of it."""
    broker = scripted(Fault(point="poll", when=nth(2), effect=rebalance))
    heard: list[tuple[str, set[Lane]]] = []

    class Listener:
        def assigned(self, lanes: Iterable[Lane]) -> None:
            heard.append(("assigned", set(lanes)))

        def revoked(self, lanes: Iterable[Lane]) -> None:
            heard.append(("revoked", set(lanes)))

        def lost(self, lanes: Iterable[Lane]) -> None:
            heard.append(("lost", set(lanes)))

    messages = fill(broker, keys=6)
    source = broker.source([TOPIC], group=GROUP, listener=Listener())
    before = source.poll(10, 0)
    after = source.poll(10, 0)
    moved = next(lanes for kind, lanes in heard if kind == "revoked")
    assert moved
    assert source.assignment() == {delivery.lane for delivery in before}
    stale = [delivery for delivery in before if delivery.lane in moved]
    assert bodies(after) == bodies(stale)
    source.accept([d for d in before if d.lane not in moved])
    source.accept(stale)
    assert sum(source.lag().values()) == len(stale)
    source.accept(after)
    assert sum(source.lag().values()) == 0
    check_nothing_lost([m.id for m in messages], [id_ for _, id_ in broker.history.settled(GROUP)])


def test_faults_can_be_chosen_by_call_and_key() -> None:
    """`every`, `nth` and `on_key` pick the calls; others pass."""
    broker = scripted(
        Fault(point="release", when=on_key(b"key 1"), effect=fail(BrokerDown)),
        Fault(point="poll", when=every(3), effect=fail(BrokerDown)),
    )
    fill(broker, keys=2)
    source = joined(broker)
    deliveries = source.poll(10, 0)
    for delivery in deliveries:
        if delivery.key == b"key 1":
            with pytest.raises(BrokerDown):
                source.release(delivery, blame=False)
        else:
            source.release(delivery, blame=False)
    source.poll(10, 0)
    with pytest.raises(BrokerDown):
        source.poll(10, 0)


def test_the_first_of_several_faults_is_outermost() -> None:
    """Faults on one call are a fold, as read."""
    broker = scripted()
    broker.inject(
        Fault(point="publish", effect=fail_after(BrokerDown)),
        Fault(point="publish", effect=duplicate),
    )
    with pytest.raises(BrokerDown):
        fill(broker, count=1)
    assert len(joined(broker).poll(10, 0)) == 2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Fault(point="commit", effect=duplicate), "use one of publish, poll"),  # type: ignore[arg-type]
        (lambda: nth(0), "numbered from 1"),
        (nth, "numbered from 1"),
        (lambda: every(0), "1 or more"),
    ],
)
def test_nonsense_is_refused_when_it_is_written(make: Callable[[], object], said: str) -> None:
    """A script with a mistake does not run silently without its fault."""
    with pytest.raises(ValueError, match=said):
        make()


def test_an_effect_at_the_wrong_point_is_refused() -> None:
    """Only a poll can be rebalanced or reordered, only a publish refused in part."""
    broker = scripted(Fault(point="flush", effect=rebalance))
    with pytest.raises(ValueError, match="'poll', not for 'flush'"):
        joined(broker).flush()


def simulate(*faults: Fault) -> ScriptedBroker:
    """Run a producer and a deduplicating consumer to the end, restarting after each crash."""
    broker = scripted(*faults)
    messages = [Message.new(TOPIC, b"%d" % n, key=b"key %d" % (n % 3)) for n in range(6)]
    effects: list[tuple[bytes | None, str]] = []

    def process() -> None:
        sink = broker.sink()
        stored = {id_ for _, id_ in broker.history.published()}
        if not {m.id for m in messages} <= stored:
            sink.publish(messages)
        source = joined(broker)
        while len({id_ for _, id_ in broker.history.settled(GROUP)}) < len(messages):
            for delivery in source.poll(2, 0.1):
                effect = (delivery.key, delivery.message.id)
                if effect not in effects:
                    effects.append(effect)
                source.accept([delivery])
            source.flush()
        source.close()

    for _ in range(3):
        try:
            process()
            break
        except Crash:
            continue
    sent = [(m.key, m.id) for m in messages]
    check_nothing_lost(sent, effects)
    check_effects_once(effects)
    check_order_per_key(sent, effects)
    return broker


def test_a_consumer_survives_a_crash_at_every_call() -> None:
    """One run counts the calls; then one run each with a crash before and after it."""
    calls: dict[Point, int] = dict(simulate().calls)
    faults = list(every_crash(calls))
    assert len(faults) == 2 * sum(calls.values())
    for fault in faults:
        simulate(fault)


def test_a_broken_consumer_does_not_survive() -> None:
    """The checks find a message that was accepted and never took effect."""
    broker = scripted()
    messages = fill(broker)
    source = joined(broker)
    seen = [delivery.message.id for delivery in source.poll(10, 0)][:-1]
    with pytest.raises(Violation, match="nothing is lost"):
        check_nothing_lost([message.id for message in messages], seen)
    with pytest.raises(Violation, match="nothing is lost"):
        broker.history.check_nothing_lost(GROUP)
