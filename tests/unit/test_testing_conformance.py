"""The kit finds brokers that break their promises: each sabotage here fails its tests."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from holdfast.brokers import connect
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import HoldfastError, MessageTooLarge, Unsupported
from holdfast.headers import Headers
from holdfast.ports import BrokerPowers, Counts, GroupProgress, LaneProgress, Pause, Published
from holdfast.testing import VirtualClock
from holdfast.testing.conformance import BrokerConformance
from holdfast.testing.conformance.stage import ConformanceStage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from holdfast.message import Message
    from holdfast.ports import Broker, Delivery, Lane, Listener, Sink, Source

LEASE = 2.0
SESSION = 3.0
IN_REAL_TIME = {
    "test_wake_ends_a_waiting_poll",
    "test_an_empty_poll_returns_nothing_in_time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sabotage:
    """What a broker does wrong, and the tests of the kit that must find it."""

    what: str
    found_by: Sequence[str]
    claims: Mapping[str, Any] = field(default_factory=dict)
    """Capabilities that are declared and not true."""
    source: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    sink: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    broker: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Methods put in the place of the honest ones; the first argument is the `Wrapper`."""


class Wrapper:
    """Passes everything on, but for the methods that are sabotaged."""

    def __init__(
        self, inner: Any, broker: SabotagedBroker, methods: Mapping[str, Callable[..., Any]]
    ) -> None:
        self.inner = inner
        self.broker = broker
        self.caps = broker.caps
        self.methods = methods
        self.held: list[Delivery] = []
        self.notes: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name in self.methods:
            method = self.methods[name]
            return lambda *args, **kwargs: method(self, *args, **kwargs)
        return getattr(self.inner, name)

    def poll(self, limit: int, timeout: float) -> list[Delivery]:
        """Poll, and remember what came."""
        poll = self.methods.get("poll", Wrapper.honest_poll)
        got: list[Delivery] = poll(self, limit, timeout)
        self.held += got
        return got

    def honest_poll(self, limit: int, timeout: float) -> list[Delivery]:
        """Poll as the broker does."""
        got: list[Delivery] = self.inner.poll(limit, timeout)
        return got


class SabotagedBroker(BrokerPowers):
    """A broker in memory with a sabotage."""

    tells_progress = True

    def __init__(self, sabotage: Sabotage, clock: Clock) -> None:
        self.name = sabotage.what
        self.clock = clock
        self.inner: Any = connect("memory:", clock=clock, lease=LEASE, session=SESSION)
        self.caps = replace(self.inner.caps, **sabotage.claims)
        self.numbers = itertools.count()
        self.notes: dict[str, Any] = {}
        self._sabotage = sabotage

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        """Create the topic."""
        self.inner.create_topic(topic, partitions=partitions)

    def sink(self, **_: Any) -> Sink:
        """Return a sabotaged sink."""
        sink: Any = Wrapper(self.inner.sink(), self, self._sabotage.sink)
        return sink  # type: ignore[no-any-return]

    def source(
        self, topics: Sequence[str], *, group: str, listener: Listener | None = None
    ) -> Source:
        """Return a sabotaged source."""
        arguments = {"topics": topics, "group": group, "listener": listener}
        if (alter := self._sabotage.broker.get("source")) is not None:
            alter(self, arguments)
        source: Any = Wrapper(self.inner.source(**arguments), self, self._sabotage.source)
        return source  # type: ignore[no-any-return]

    def lag(self, group: str, topics: Sequence[str]) -> Mapping[Lane, int]:
        """Return the lag, or what the sabotage makes of it."""
        lag: Mapping[Lane, int] = self.inner.lag(group, topics)
        alter = self._sabotage.broker.get("lag")
        return lag if alter is None else alter(lag)

    def progress(self, group: str, topics: Sequence[str] | None = None) -> GroupProgress:
        """Return how far the group is, or what the sabotage makes of it."""
        ask = self._sabotage.broker.get("progress")
        found: GroupProgress = (
            self.inner.progress(group, topics) if ask is None else ask(self, group, topics)
        )
        return found

    def create_group(self, topic: str, group: str) -> None:
        """Create the group, or do what the sabotage does instead."""
        create = self._sabotage.broker.get("create_group")
        self.inner.create_group(topic, group)
        if create is not None:
            create(self, topic, group)

    def has_group(self, topic: str, group: str) -> bool:
        """Tell whether there is such a group, or what the sabotage says."""
        has = self._sabotage.broker.get("has_group", self.inner.has_group)
        return bool(has(topic, group))

    def prune(self, topics: Sequence[str], **options: Any) -> Mapping[str, int]:
        """Prune, or do what the sabotage does instead."""
        prune = self._sabotage.broker.get("prune")
        if prune is not None:
            prune(self)
        pruned: Mapping[str, int] = self.inner.prune(topics, **options)
        return pruned

    def abandon(self, source: Any) -> bool:
        """Abandon, or do what the sabotage does instead."""
        abandon = self._sabotage.broker.get("abandon")
        if abandon is None:
            self.inner.abandon(source.inner)
        else:
            abandon(self, source)
        return True


class Kit(BrokerConformance):
    """The kit, in a hurry to find what is broken."""

    session = SESSION

    def __init__(self, clock: Clock, settle_in: float) -> None:
        self.clock = clock
        self.settle_in = settle_in

    def abandon(self, broker: Any, source: Source) -> None:
        """Let the broker itself do it."""
        broker.abandon(source)

    def dead_letters(self, broker: Broker, topic: str, group: str) -> list[bytes | None]:
        """Find none."""
        return []


def run(sabotage: Sabotage, promise: str, folder: Path) -> None:
    """Run one test of the kit against a broker with *sabotage*."""
    clock: Clock = SYSTEM_CLOCK if promise in IN_REAL_TIME else VirtualClock(auto=True)
    kit = Kit(clock, settle_in=60.0 if sabotage is HONEST else 0.3)
    broker: Any = SabotagedBroker(sabotage, clock)
    stage = ConformanceStage(kit, broker, url=None, folder=folder)
    try:
        if promise == "test_a_released_message_is_handed_out_again":
            kit.test_a_released_message_is_handed_out_again(stage, blame=True)
        else:
            getattr(kit, promise)(stage)
    finally:
        with suppress(HoldfastError):
            stage.close()


def altered(deliveries: list[Delivery], **changes: Callable[[Any], Any]) -> list[Delivery]:
    """Return *deliveries* with *changes*."""
    return [
        msgspec.structs.replace(delivery, **{n: change(delivery) for n, change in changes.items()})
        for delivery in deliveries
    ]


def handing_out(**changes: Callable[[Any], Any]) -> dict[str, Callable[..., Any]]:
    """Return a poll that hands deliveries out with *changes*."""
    return {"poll": lambda me, limit, timeout: altered(me.honest_poll(limit, timeout), **changes)}


def storing(**changes: Callable[[Message], Any]) -> dict[str, Callable[..., Any]]:
    """Return a publish that stores messages with *changes*."""

    def publish(me: Wrapper, messages: Sequence[Message]) -> list[Published]:
        changed = [m.with_(**{n: change(m) for n, change in changes.items()}) for m in messages]
        return me.inner.publish(changed)  # type: ignore[no-any-return]

    return {"publish": publish}


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def accept_all_before(me: Wrapper, deliveries: Sequence[Delivery]) -> None:
    for last in deliveries:
        me.inner.accept([d for d in me.held if int(d.position) <= int(last.position)])


def close_with_late_accepts(me: Wrapper) -> None:
    me.inner.accept(me.notes.pop("accepted", []))
    me.inner.close()


def revive(me: Wrapper, delivery: Delivery, **_: Any) -> None:
    me.broker.inner.sink().publish([delivery.message])
    me.inner.accept([delivery])


def poll_extending(me: Wrapper, limit: int, timeout: float) -> list[Delivery]:
    for delivery in me.held:
        with suppress(HoldfastError):
            me.inner.extend(delivery, 100.0)
    return me.honest_poll(limit, timeout)


def poll_shortening(me: Wrapper, limit: int, timeout: float) -> list[Delivery]:
    got = me.honest_poll(limit, timeout)
    for delivery in got:
        until = delivery.lease_until
        me.inner.extend(delivery, LEASE / 4)
        delivery.lease_until = until
    return got


def close_blaming(me: Wrapper) -> None:
    for delivery in me.held:
        with suppress(HoldfastError):
            me.inner.release(delivery, blame=True)
    me.inner.close()


def poll_repeating(me: Wrapper, limit: int, timeout: float) -> list[Delivery]:
    return me.honest_poll(limit, timeout) or me.held[:limit]


def poll_oversleeping(me: Wrapper, limit: int, timeout: float) -> list[Delivery]:
    SYSTEM_CLOCK.sleep(0.3 if timeout >= 0.2 else 0.0)
    return me.honest_poll(limit, timeout)


def poll_from_the_end(me: Wrapper, limit: int, timeout: float) -> list[Delivery]:
    if not me.notes.setdefault("began", []):
        me.notes["began"].append(True)
        me.inner.accept(me.inner.poll(1000, 0.0))
    return me.honest_poll(limit, timeout)


class Late:
    """A listener that hears of revoked lanes after another member has polled."""

    def __init__(self, broker: SabotagedBroker, listener: Listener) -> None:
        self.assigned = listener.assigned
        self.lost = listener.lost
        self._broker = broker
        self._listener = listener

    def revoked(self, lanes: Sequence[Lane]) -> None:
        self._broker.notes.setdefault("late", []).append(lambda: self._listener.revoked(lanes))


def poll_telling_late(me: Wrapper, limit: int, timeout: float) -> list[Delivery]:
    late = me.broker.notes.pop("late", [])
    got = me.honest_poll(limit, timeout)
    for tell in late:
        tell()
    return got


def close_accepting(me: Wrapper) -> None:
    with suppress(HoldfastError):
        me.inner.accept(me.held)
    me.inner.close()


def close_once(me: Wrapper) -> None:
    if me.notes.setdefault("closed", []):
        raise Unsupported("be closed twice", "this")
    me.notes["closed"].append(True)
    me.inner.close()


def close_after_a_poll(me: Wrapper) -> None:
    if not me.inner.assignment():
        raise Unsupported("close before its first poll", "this source")
    me.inner.close()


def poll_noting_holders(me: Wrapper, limit: int, timeout: float) -> list[Delivery]:
    got = me.honest_poll(limit, timeout)
    holders = me.broker.notes.setdefault("holders", {})
    holders.update({(d.lane, d.position): (me.inner, d) for d in got})
    return got


def accept_for_the_holder(me: Wrapper, deliveries: Sequence[Delivery]) -> None:
    for delivery in deliveries:
        source, now = me.broker.notes["holders"][delivery.lane, delivery.position]
        source.accept([now])


def extend_for_the_holder(me: Wrapper, delivery: Delivery, seconds: float) -> None:
    source, now = me.broker.notes["holders"][delivery.lane, delivery.position]
    source.extend(now, seconds)


def poll_resuming(me: Wrapper, limit: int, timeout: float) -> list[Delivery]:
    before = me.inner.assignment()
    got = me.honest_poll(limit, timeout)
    if before != me.inner.assignment():
        me.inner.resume(before)
    return got


def poll_unless_paused(me: Wrapper, limit: int, timeout: float) -> list[Delivery]:
    if me.notes.get("paused"):
        me.broker.clock.sleep(timeout)
        return []
    return me.honest_poll(limit, timeout)


def poll_keeping_its_place(me: Wrapper, limit: int, timeout: float) -> list[Delivery]:
    before = me.inner.assignment()
    got = me.honest_poll(limit, timeout)
    if before and before != me.inner.assignment():  # as if all held were behind the reader
        me.inner.accept(me.held)
    return got


def close_at_the_end(me: Wrapper) -> None:
    for lane in me.inner.assignment():
        me.inner.seek(lane, offset=me.notes.get("end", 0) + 1000)
    me.inner.close()


def publish_all_or_raise(me: Wrapper, messages: Sequence[Message]) -> list[Published]:
    for message in messages:
        if message.size > me.caps.max_message:  # type: ignore[operator]
            raise MessageTooLarge(message.size, me.caps.max_message or 0)
    return me.inner.publish(messages)  # type: ignore[no-any-return]


def publish_silently(me: Wrapper, messages: Sequence[Message]) -> list[Published]:
    me.inner.publish([m for m in messages if "unknown" not in m.topic])
    return [Published()] * len(messages)


def publish_once(me: Wrapper, messages: Sequence[Message]) -> list[Published]:
    known = me.broker.notes.setdefault("known", set())
    me.inner.publish([m for m in messages if m.id not in known])
    known.update(m.id for m in messages)
    return [Published()] * len(messages)


def publish_out_of_order(me: Wrapper, messages: Sequence[Message]) -> list[Published]:
    """Store every second batch late, and the batches of one key backwards."""
    kept = me.notes.pop("kept", None)
    if kept is None and len({m.key for m in messages}) == len(messages) > 1:
        me.notes["kept"] = messages
    else:
        me.inner.publish([*messages[::-1], *(kept or ())])
    return [Published()] * len(messages)


def park(me: Wrapper, delivery: Delivery, **_: Any) -> None:
    me.notes.setdefault("parked", []).append(delivery.message)
    me.inner.accept([delivery])


def poll_parked_last(me: Wrapper, limit: int, timeout: float) -> list[Delivery]:
    got = me.honest_poll(limit, timeout)
    if not got and (parked := me.notes.pop("parked", None)):
        me.broker.inner.sink().publish(parked)
        got = me.honest_poll(limit, timeout)
    return got


def poll_accepting(me: Wrapper, limit: int, timeout: float) -> list[Delivery]:
    got = me.honest_poll(limit, timeout)
    me.inner.accept(got)
    return got


def become_a_zombie(me: SabotagedBroker, source: Wrapper) -> None:
    source.inner.pause(source.inner.assignment())
    me.notes.setdefault("zombies", []).append(source.inner)


def forget_the_group(me: SabotagedBroker, _: str, group: str) -> None:
    with me.inner._db.write() as db:
        db.execute("DELETE FROM hf_cursor WHERE grp = ?", (group,))


def forget_who_has_read_nothing(me: SabotagedBroker) -> None:
    with me.inner._db.write() as db:
        db.execute("DELETE FROM hf_cursor WHERE committed = 0")


def progress_of_lanes(
    change: Callable[[LaneProgress], LaneProgress],
) -> Callable[[SabotagedBroker, str, Sequence[str] | None], GroupProgress]:
    """Return an answer in which every lane is changed."""

    def ask(me: SabotagedBroker, group: str, topics: Sequence[str] | None) -> GroupProgress:
        found: GroupProgress = me.inner.progress(group, topics)
        return replace(found, lanes={lane: change(one) for lane, one in found.lanes.items()})

    return ask


def progress_of_everybody(
    me: SabotagedBroker, _: str, topics: Sequence[str] | None
) -> GroupProgress:
    counts = me.inner.lag("nobody", me.inner.topics() if topics is None else topics)
    lanes = {lane: LaneProgress(unsettled=count) for lane, count in counts.items()}
    return GroupProgress(lanes=lanes, members={lane.topic: 1 for lane in lanes})


def poll_with_zombies(me: Wrapper, limit: int, timeout: float) -> list[Delivery]:
    for zombie in me.broker.notes.get("zombies", []):
        zombie.poll(1, 0.0)
    return me.honest_poll(limit, timeout)


SABOTAGES = [
    # -- settling
    Sabotage(
        what="accept covers earlier messages",
        source={"accept": accept_all_before},
        found_by=[
            "a_later_accept_never_covers_an_unfinished_message",
            "a_death_after_later_accepts_brings_back_the_unfinished",
        ],
    ),
    Sabotage(
        what="accept does nothing",
        source={"accept": nothing},
        found_by=[
            "an_accepted_message_is_not_handed_out_again",
            "messages_may_be_accepted_in_any_order",
            "lag_counts_what_is_not_settled",
            "a_flushed_accept_survives_its_member",
            "work_can_be_settled_while_the_member_closes",
            "a_settled_message_stays_settled_whatever_follows",
        ],
    ),
    Sabotage(
        what="accept waits for close",
        source={
            "accept": lambda me, ds: me.notes.setdefault("accepted", []).extend(ds),
            "close": close_with_late_accepts,
        },
        found_by=[
            "a_flushed_accept_survives_its_member",
            "a_member_killed_on_receipt_loses_nothing",
        ],
    ),
    Sabotage(
        what="flush accepts everything",
        source={"flush": lambda me: me.inner.accept(me.held)},
        found_by=["accepting_nothing_is_harmless"],
    ),
    Sabotage(
        what="release revives what is settled",
        source={"release": revive},
        found_by=["a_settled_message_stays_settled_whatever_follows"],
    ),
    Sabotage(
        what="release loses the message",
        source={"release": lambda me, d, **_: me.inner.accept([d])},
        found_by=[
            "a_released_message_is_handed_out_again",
            "a_release_leaves_other_messages_alone",
        ],
    ),
    Sabotage(
        what="release ignores its delay",
        source={"release": lambda me, d, blame, delay=None: me.inner.release(d, blame=blame)},
        found_by=[
            "a_delayed_release_waits_at_least_its_delay",
            "a_delay_beyond_the_longest_is_refused",
        ],
    ),
    Sabotage(
        what="delay works undeclared",
        claims={"delay": None},
        found_by=[
            "a_delayed_release_waits_at_least_its_delay",
            "a_delay_beyond_the_longest_is_refused",
        ],
    ),
    Sabotage(
        what="delay has no bound",
        claims={"delay": 30.0},
        found_by=["a_delay_beyond_the_longest_is_refused"],
    ),
    Sabotage(
        what="reject releases",
        source={"reject": lambda me, d: me.inner.release(d, blame=True)},
        found_by=["a_rejected_message_is_never_handed_out_again"],
    ),
    Sabotage(
        what="dead letters vanish",
        claims={"native_dlq": True},
        found_by=["a_rejected_message_is_where_native_dlq_says"],
    ),
    # -- leases and counts
    Sabotage(
        what="extend does nothing",
        source={"extend": nothing},
        found_by=[
            "extend_keeps_a_message_beyond_its_lease",
            "what_is_settled_cannot_be_extended",
        ],
    ),
    Sabotage(
        what="the lease is not declared",
        claims={"lease": None},
        found_by=[
            "extend_keeps_a_message_beyond_its_lease",
            "lease_until_is_set_as_declared",
            "what_is_settled_cannot_be_extended",
        ],
    ),
    Sabotage(
        what="the lease never ends",
        source={"poll": poll_extending},
        found_by=["an_unsettled_message_comes_again_after_its_lease"],
    ),
    Sabotage(
        what="a lost message leaves its successors in hand",
        source={
            "poll": poll_noting_holders,
            "accept": accept_for_the_holder,
            "extend": extend_for_the_holder,
        },
        found_by=["what_follows_a_lost_message_of_its_key_goes_back_with_it"],
    ),
    Sabotage(
        what="the lease ends early",
        source={"poll": poll_shortening},
        found_by=["an_unsettled_message_comes_again_after_its_lease"],
    ),
    Sabotage(
        what="the lease's end is not told",
        source=handing_out(lease_until=nothing),
        found_by=["lease_until_is_set_as_declared"],
    ),
    Sabotage(
        what="the count is missing",
        source=handing_out(count=nothing),
        found_by=["a_first_delivery_counts_one", "leaving_blames_nobody"],
    ),
    Sabotage(
        what="the count is always one",
        source=handing_out(count=lambda _: 1),
        found_by=["a_blamed_release_counts", "a_member_killed_on_receipt_loses_nothing"],
    ),
    Sabotage(
        what="every release blames",
        source={"release": lambda me, d, **_: me.inner.release(d, blame=True)},
        found_by=["a_blameless_release_counts_only_where_it_must"],
    ),
    Sabotage(
        what="failures are declared as deliveries",
        claims={"counts": Counts.DELIVERY, "blameless_release": False},
        found_by=["a_blameless_release_counts_only_where_it_must", "leaving_blames_nobody"],
    ),
    Sabotage(
        what="close blames",
        source={"close": close_blaming},
        found_by=["leaving_blames_nobody"],
    ),
    # -- polling
    Sabotage(
        what="poll returns too much",
        source={"poll": lambda me, limit, timeout: me.honest_poll(limit + 5, timeout)},
        found_by=["a_poll_returns_at_most_what_it_was_asked_for"],
    ),
    Sabotage(
        what="poll repeats what is held",
        source={"poll": poll_repeating},
        found_by=["what_is_published_is_handed_out_once"],
    ),
    Sabotage(
        what="poll oversleeps",
        source={"poll": poll_oversleeping},
        found_by=["an_empty_poll_returns_nothing_in_time"],
    ),
    Sabotage(
        what="wake is not heard",
        source={"wake": nothing},
        found_by=["wake_ends_a_waiting_poll"],
    ),
    Sabotage(
        what="only the first topic is read",
        broker={"source": lambda _, given: given.update(topics=given["topics"][:1])},
        found_by=["one_source_reads_several_topics"],
    ),
    Sabotage(
        what="all groups are one",
        broker={"source": lambda _, given: given.update(group="one")},
        found_by=["each_group_gets_everything"],
    ),
    Sabotage(
        what="groups start at the end",
        source={"poll": poll_from_the_end},
        found_by=[
            "a_group_gets_what_was_published_while_it_had_no_member",
            "creating_a_topic_again_changes_nothing",
            "a_created_group_gets_what_is_published_before_its_first_member",
            "a_late_group_gets_what_was_published_before_it_only_as_declared",
        ],
    ),
    Sabotage(
        what="late groups are served undeclared",
        claims={"late_groups": False},
        found_by=[
            "a_late_group_gets_what_was_published_before_it_only_as_declared",
            "has_group_tells_whether_messages_are_kept_for_a_group",
        ],
    ),
    Sabotage(
        what="no group is ever there",
        broker={"has_group": lambda topic, group: False},
        found_by=[
            "has_group_tells_whether_messages_are_kept_for_a_group",
            "a_source_makes_its_group",
        ],
    ),
    Sabotage(
        what="pruning deletes what is not settled",
        broker={"prune": forget_who_has_read_nothing},
        found_by=["pruning_deletes_what_every_group_settled_and_nothing_else"],
    ),
    Sabotage(
        what="a group that is created again begins anew",
        broker={"create_group": forget_the_group},
        found_by=["creating_a_group_again_changes_nothing"],
    ),
    Sabotage(
        what="lag is always zero",
        broker={"lag": lambda lag: dict.fromkeys(lag, 0)},
        found_by=["lag_counts_what_is_not_settled"],
    ),
    Sabotage(
        what="all that was published counts, for any group",
        broker={"progress": progress_of_everybody},
        found_by=[
            "progress_agrees_with_what_was_settled",
            "progress_counts_what_was_published_since",
            "the_topics_of_a_group_are_found",
            "a_group_or_topic_that_does_not_exist_is_an_error",
        ],
    ),
    Sabotage(
        what="the committed position is the end",
        broker={"progress": progress_of_lanes(lambda one: replace(one, committed=one.end))},
        found_by=["progress_agrees_with_what_was_settled"],
    ),
    Sabotage(
        what="the age of the lag is that of the newest message",
        broker={"progress": progress_of_lanes(lambda one: replace(one, oldest=1e9))},
        found_by=["progress_agrees_with_what_was_settled"],
    ),
    # -- membership
    Sabotage(
        what="members do not share",
        broker={
            "source": lambda me, given: given.update(group=f"{next(me.numbers)}"),
        },
        found_by=["two_members_share_the_work", "work_can_be_settled_while_a_lane_moves"],
    ),
    Sabotage(
        what="the listener is not told",
        broker={"source": lambda _, given: given.update(listener=None)},
        found_by=[
            "a_lone_member_is_assigned_every_lane",
            "work_can_be_settled_while_the_member_closes",
            "work_can_be_settled_while_a_lane_moves",
        ],
    ),
    Sabotage(
        what="revoked comes after the lane has moved",
        broker={
            "source": lambda me, given: given.update(listener=Late(me, given["listener"])),
        },
        source={"poll": poll_telling_late},
        found_by=[
            "work_can_be_settled_while_a_lane_moves",
            "two_members_share_the_work",
            "order_per_key_holds_while_members_come_and_go",
        ],
    ),
    Sabotage(
        what="a rebalance skips what is held",
        source={"poll": poll_keeping_its_place},
        found_by=["unsettled_work_of_a_lane_that_stays_is_not_skipped"],
    ),
    Sabotage(
        what="close accepts what is held",
        source={"close": close_accepting},
        found_by=[
            "what_a_closed_member_held_goes_to_the_next",
            "unsettled_work_goes_with_its_lane",
            "settling_after_close_changes_nothing",
        ],
    ),
    Sabotage(
        what="close never leaves",
        source={"close": nothing},
        found_by=["the_lanes_of_a_leaving_member_go_to_the_rest"],
    ),
    Sabotage(
        what="close refuses to be repeated",
        source={"close": close_once},
        sink={"close": close_once},
        found_by=["closing_twice_is_closing_once", "a_closed_sink_may_be_closed_again"],
    ),
    Sabotage(
        what="close needs a poll before",
        source={"close": close_after_a_poll},
        found_by=["a_member_that_never_polled_can_close"],
    ),
    Sabotage(
        what="whoever accepts, accepts for the holder",
        source={"poll": poll_noting_holders, "accept": accept_for_the_holder},
        found_by=[
            "settling_after_close_changes_nothing",
            "settling_after_the_lane_moved_changes_nothing",
            "a_silent_member_settles_too_late",
        ],
    ),
    # -- pausing and seeking
    Sabotage(
        what="pause does nothing",
        source={"pause": nothing},
        found_by=["pause_stops_the_paused_lanes_and_no_others", "a_rebalance_does_not_resume"],
    ),
    Sabotage(
        what="pause stops everything",
        source={"pause": lambda me, _: me.inner.pause(me.inner.assignment())},
        found_by=["pause_stops_the_paused_lanes_and_no_others"],
    ),
    Sabotage(
        what="resume does nothing",
        source={"resume": nothing},
        found_by=["pause_stops_the_paused_lanes_and_no_others", "a_rebalance_does_not_resume"],
    ),
    Sabotage(
        what="a rebalance resumes",
        source={"poll": poll_resuming},
        found_by=[
            "a_rebalance_does_not_resume",
            "what_is_paused_and_resumed_around_a_rebalance_is_read_again",
        ],
    ),
    Sabotage(
        what="lanes that are not there are not resumed",
        source={
            "resume": lambda me, lanes: me.inner.resume(set(lanes) & me.inner.assignment()),
        },
        found_by=["what_is_paused_and_resumed_around_a_rebalance_is_read_again"],
    ),
    Sabotage(
        what="a part is paused although all or nothing is declared",
        claims={"pause": Pause.ALL},
        found_by=["a_part_of_the_lanes_is_paused_only_as_declared"],
    ),
    Sabotage(
        what="pause works undeclared",
        claims={"pause": Pause.NONE},
        found_by=[
            "pause_stops_the_paused_lanes_and_no_others",
            "a_part_of_the_lanes_is_paused_only_as_declared",
            "a_rebalance_does_not_resume",
            "what_is_paused_and_resumed_around_a_rebalance_is_read_again",
        ],
    ),
    Sabotage(
        what="a paused member falls silent",
        source={
            "pause": lambda me, lanes: me.notes.update(paused=lanes),
            "poll": poll_unless_paused,
        },
        found_by=["polling_keeps_the_membership_while_all_is_paused"],
    ),
    Sabotage(
        what="seek does nothing",
        source={"seek": nothing},
        found_by=[
            "seek_to_an_offset_hands_out_from_there",
            "seek_to_a_time_hands_out_what_was_stored_since",
        ],
    ),
    Sabotage(
        what="seek works undeclared",
        claims={"replay": False},
        found_by=[
            "seek_to_an_offset_hands_out_from_there",
            "seek_to_a_time_hands_out_what_was_stored_since",
            "seek_moves_the_group_and_not_just_the_member",
        ],
    ),
    Sabotage(
        what="seek goes to the beginning",
        source={"seek": lambda me, lane, **_: me.inner.seek(lane, offset=0)},
        found_by=[
            "seek_to_an_offset_hands_out_from_there",
            "seek_to_a_time_hands_out_what_was_stored_since",
        ],
    ),
    Sabotage(
        what="seek goes beyond the end",
        source={"seek": lambda me, lane, **_: me.inner.pause([lane])},
        found_by=["seek_beyond_the_end_skips_nothing"],
    ),
    Sabotage(
        what="seek is forgotten on close",
        source={"close": close_at_the_end},
        found_by=["seek_moves_the_group_and_not_just_the_member"],
    ),
    # -- publishing and content
    Sabotage(
        what="there is one result for all",
        sink={"publish": lambda me, messages: me.inner.publish(messages)[:1]},
        found_by=["publish_returns_one_result_per_message"],
    ),
    Sabotage(
        what="results name another place",
        sink={
            "publish": lambda me, messages: [
                Published(None, result.lane, 99) for result in me.inner.publish(messages)
            ]
        },
        found_by=["a_result_says_where_the_message_is"],
    ),
    Sabotage(
        what="one bad message spoils its batch",
        sink={"publish": publish_all_or_raise},
        found_by=["a_too_large_message_is_refused_and_the_rest_of_its_batch_is_stored"],
    ),
    Sabotage(
        what="refusals and unknown topics are swallowed",
        sink={"publish": publish_silently},
        found_by=[
            "a_too_large_message_is_refused_and_the_rest_of_its_batch_is_stored",
            "an_unknown_topic_is_refused_or_made_and_never_swallowed",
            "a_source_of_an_unknown_topic_says_so_or_waits_for_it",
        ],
    ),
    Sabotage(
        what="the limits are not kept",
        claims={"max_message": 10_000, "max_headers": 4096},
        found_by=[
            "a_too_large_message_is_refused_and_the_rest_of_its_batch_is_stored",
            "too_large_headers_are_refused",
        ],
    ),
    Sabotage(
        what="the declared limit is too high",
        claims={"max_message": 2 << 20},
        found_by=["a_message_just_under_the_limit_is_stored_whole"],
    ),
    Sabotage(
        what="dedup is pretended",
        claims={"publish_dedup": 60.0},
        found_by=["an_id_published_twice_is_stored_as_often_as_declared"],
    ),
    Sabotage(
        what="dedup is secret",
        sink={"publish": publish_once},
        found_by=["an_id_published_twice_is_stored_as_often_as_declared"],
    ),
    Sabotage(
        what="nothing is stored",
        sink={"publish": lambda _, messages: [Published()] * len(messages)},
        found_by=[
            "an_unreachable_broker_is_reported_and_publishing_again_works",
            "sinks_and_sources_outlive_the_broker_object",
            "what_is_published_is_handed_out_once",
        ],
    ),
    Sabotage(
        what="batches change their order",
        sink={"publish": publish_out_of_order},
        found_by=[
            "threads_with_a_sink_each_keep_the_order_per_key",
            "a_key_comes_in_the_order_published",
            "a_lane_comes_in_the_order_published",
        ],
    ),
    Sabotage(
        what="headers are a mapping",
        sink=storing(headers=lambda m: Headers(dict(m.headers.pairs))),
        found_by=["headers_keep_their_order_repeats_and_bytes"],
    ),
    Sabotage(
        what="headers lose None",
        sink=storing(headers=lambda m: Headers([(name, v or b"") for name, v in m.headers])),
        found_by=["headers_keep_their_order_repeats_and_bytes"],
    ),
    Sabotage(
        what="tombstones are empty",
        sink=storing(payload=lambda m: m.payload or b""),
        found_by=["no_payload_is_not_an_empty_payload"],
    ),
    Sabotage(
        what="keys are text",
        sink=storing(key=lambda m: m.key and m.key.decode("utf-8", "replace").encode()),
        found_by=["keys_are_bytes_or_none"],
    ),
    Sabotage(
        what="times are whole seconds",
        sink=storing(time=lambda m: m.time.replace(microsecond=0)),
        found_by=["a_message_comes_out_as_it_went_in"],
    ),
    Sabotage(
        what="timestamps are in milliseconds",
        source=handing_out(timestamp=lambda d: 1000 * d.timestamp),
        found_by=["a_delivery_says_where_and_when_it_was_stored"],
    ),
    # -- order and crashes
    Sabotage(
        what="released messages go to the end",
        source={"release": park, "poll": poll_parked_last},
        found_by=[
            "a_released_message_is_overtaken_only_as_declared",
            "a_delayed_release_is_overtaken_only_as_declared",
            "a_message_handed_out_again_has_the_same_coordinates",
        ],
    ),
    Sabotage(
        what="polls come backwards",
        source={"poll": lambda me, limit, timeout: me.honest_poll(limit, timeout)[::-1]},
        found_by=[
            "a_key_comes_in_the_order_published",
            "members_in_threads_share_the_work",
            "order_per_key_holds_while_members_come_and_go",
        ],
    ),
    Sabotage(
        what="handing out accepts",
        source={"poll": poll_accepting},
        found_by=[
            "a_member_killed_on_receipt_loses_nothing",
            "a_member_killed_before_it_accepts_loses_nothing",
        ],
    ),
    Sabotage(
        what="the dead keep their lanes",
        broker={"abandon": become_a_zombie},
        source={"poll": poll_with_zombies},
        found_by=["a_living_member_takes_over_from_a_killed_one"],
    ),
]

HONEST = Sabotage(what="nothing is broken", found_by=[])
PROMISES = sorted({name for name in dir(BrokerConformance) if name.startswith("test_")})


@pytest.mark.parametrize(
    ("sabotage", "promise"),
    [
        pytest.param(sabotage, f"test_{promise}", id=f"{sabotage.what}-{promise}")
        for sabotage in SABOTAGES
        for promise in sabotage.found_by
    ],
)
def test_a_broken_promise_is_found(sabotage: Sabotage, promise: str, tmp_path: Path) -> None:
    """The sabotage fails the test of the kit that guards the promise."""
    with pytest.raises((AssertionError, pytest.fail.Exception, HoldfastError)) as it:
        run(sabotage, promise, tmp_path)
    assert "pytest-timeout" not in str(it.value)


@pytest.mark.parametrize("promise", PROMISES)
def test_an_honest_wrapper_keeps_every_promise(promise: str, tmp_path: Path) -> None:
    """What fails above fails by its sabotage and not by the wrapping."""
    run(HONEST, promise, tmp_path)


def test_every_promise_is_broken_by_some_sabotage() -> None:
    """A test of the kit that nothing can fail proves nothing."""
    broken = {f"test_{promise}" for sabotage in SABOTAGES for promise in sabotage.found_by}
    assert broken == set(PROMISES)
