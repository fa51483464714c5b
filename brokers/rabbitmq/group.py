"""How a member claims lanes and gives them up; what it owns then is in `OwnedLanes`.

How lanes are shared: decisions from what each member can see, without any talk among them.

A member's place in its group: who else is there, and what follows from it.
"""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.brokers.rabbitmq import names
from holdfast.brokers.rabbitmq.connection import Control
from holdfast.brokers.rabbitmq.errors import QueueNotFound
from holdfast.brokers.rabbitmq.lane import ConsumerPhase, LaneConsumer
from holdfast.brokers.rabbitmq.topology import Topology
from holdfast.ports import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from holdfast.brokers.groups.member import OwnedLanes
    from holdfast.brokers.rabbitmq.connection import ConnectionThread, Reply
    from holdfast.brokers.rabbitmq.settings import RabbitSettings
    from holdfast.clock import Clock, Randomness


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicCounts:
    """How things stand in one topic, as one member sees them."""

    topic: str
    lanes: int
    members: int
    """Members of the group in this topic, oneself included."""
    hungry: int
    """Other members that have less than their share."""
    owned: frozenset[int]

    @property
    def share(self) -> Fraction:
        """How many lanes each member should have; at least oneself is there."""
        return Fraction(self.lanes, max(self.members, 1))


@dataclass(frozen=True, slots=True)
class FairShare:
    """What one member should do; the topics are weighed together.

    A member keeps at most its share rounded up, and gives a lane above its share rounded
    down to a member that has less than that.
    """

    topics: Sequence[TopicCounts]

    @property
    def _share(self) -> Fraction:
        return sum((s.share for s in self.topics), Fraction(0))

    @property
    def _owned(self) -> int:
        return sum(len(s.owned) for s in self.topics)

    @property
    def is_hungry(self) -> bool:
        """Whether this member has less than its share rounded down."""
        return self._owned < math.floor(self._share)

    @property
    def room(self) -> int:
        """How many free lanes this member may take."""
        if not self.is_hungry and any(s.hungry for s in self.topics):
            return 0  # what is free now was given up for somebody else
        return max(math.ceil(self._share) - self._owned, 0)

    def surplus(self) -> list[Lane]:
        """Return the lanes to give up, from the topics where most is held above the share."""
        most, least = math.ceil(self._share), math.floor(self._share)
        count = max(self._owned - most, 0)
        if not count and self._owned > least and any(s.hungry and s.owned for s in self.topics):
            count = 1
        held = {s.topic: sorted(s.owned) for s in self.topics if s.members > 1 and s.owned}
        by_topic = {s.topic: s for s in self.topics}

        def need(topic: str) -> tuple[bool, Fraction]:
            standing = by_topic[topic]
            return standing.hungry > 0, len(held[topic]) - standing.share

        given: list[Lane] = []
        while len(given) < count and held:
            topic = max(held, key=need)
            given.append(Lane(topic, held[topic].pop()))
            if not held[topic]:
                del held[topic]
        return given


_QUICK, _CALM = 0.03, 0.5  # seconds between surveys while lanes move, and while they do not


class SurveyResult(NamedTuple):
    """What a survey has led to."""

    give: list[Lane]
    take: list[Lane]


class Membership:
    """Counts members and owners through the consumers of empty queues, and never waits.

    Every member is on the tally `members` of each topic, and on `hungry` while it has less
    than its share; a lane without an owner on its tally is free. Only fairness depends on
    these counts: that a lane has one owner is the broker's doing.
    """

    def __init__(
        self,
        control: Control,
        group: str,
        lanes: Mapping[str, int],
        clock: Clock,
        randomness: Randomness,
        notify: Callable[[], None],
    ) -> None:
        self._control = control
        self._group = group
        self._lanes = lanes
        self._clock = clock
        self._random = randomness
        self._notify = notify
        self._hunger: dict[str, Reply] = {}
        self._standing: list[Reply] = []
        self._counting: dict[str, tuple[Reply, Reply]] | None = None
        self._looking: dict[Lane, Reply] | None = None
        self._balance: FairShare | None = None
        self._pause = _QUICK
        self._due = clock.monotonic()
        for topic in lanes:
            self._standing.append(self._stand(names.members(topic, group)))

    @property
    def patience(self) -> float:
        """Seconds until the next survey is due; an answer that is awaited comes with a notice."""
        left = self._due - self._clock.monotonic()
        return left if left > 0 else _CALM

    def survey(self, owned: Iterable[Lane]) -> SurveyResult | None:
        """Take the survey one step on; return what to do once it is complete."""
        if self._looking is not None:
            return self._picked() if _all_done(self._looking.values()) else None
        if self._counting is not None:
            answers = [answer for pair in self._counting.values() for answer in pair]
            return self._counted(frozenset(owned)) if _all_done(answers) else None
        # Not before the broker has noted where this member stands, or it would err about others.
        if self._clock.monotonic() >= self._due and _all_done(self._standing):
            self._counting = {
                topic: (
                    self._tally(names.members(topic, self._group)),
                    self._tally(names.hungry(topic, self._group)),
                )
                for topic in self._lanes
            }
        return None

    def _counted(self, owned: frozenset[Lane]) -> SurveyResult | None:
        """Weigh the counts; look for free lanes if some may be taken."""
        counting, self._counting = self._counting or {}, None
        self._balance = balance = FairShare(
            [
                TopicCounts(
                    topic=topic,
                    lanes=self._lanes[topic],
                    members=members.value.consumer_count,
                    hungry=hungry.value.consumer_count - (topic in self._hunger),
                    owned=frozenset(lane.partition for lane in owned if lane.topic == topic),
                )
                for topic, (members, hungry) in counting.items()
            ]
        )
        if not balance.room:
            return self._decided(SurveyResult(balance.surplus(), []))
        self._looking = {
            lane: self._tally(names.owner(lane.topic, self._group, lane.partition))
            for topic, count in self._lanes.items()
            for lane in (Lane(topic, partition) for partition in range(count))
            if lane not in owned
        }
        return None

    def _picked(self) -> SurveyResult:
        looking, self._looking = self._looking or {}, None
        free = [lane for lane, answer in looking.items() if not answer.value.consumer_count]
        self._random.shuffle(free)  # members that come at once should not want the same lane
        room = 0 if self._balance is None else self._balance.room
        return self._decided(SurveyResult([], free[:room]))

    def _decided(self, decision: SurveyResult) -> SurveyResult:
        is_hungry = self._balance is not None and self._balance.is_hungry
        if is_hungry and len(decision.take) == 0:
            self._be_hungry()
        elif not is_hungry:
            self._be_content()
        moving = decision.give or decision.take or is_hungry
        self._pause = _QUICK if moving else min(self._pause * 2, _CALM)
        self._due = self._clock.monotonic() + self._pause * self._random.uniform(0.7, 1.0)
        return decision

    def _be_hungry(self) -> None:
        for topic in self._lanes:
            if topic not in self._hunger:
                self._hunger[topic] = answer = self._stand(names.hungry(topic, self._group))
                self._standing.append(answer)

    def _be_content(self) -> None:
        self._standing = [
            self._control.ask(
                "basic_cancel", notify=self._notify, consumer_tag=answer.value.consumer_tag
            )
            for answer in self._hunger.values()
        ]
        self._hunger.clear()

    def _stand(self, tally: str) -> Reply:
        """Be counted on *tally* from now on."""
        self._tally(tally)
        return self._control.ask(
            "basic_consume",
            notify=self._notify,
            queue=tally,
            on_message_callback=_ignore,
            auto_ack=True,
        )

    def _tally(self, name: str) -> Reply:
        declare = partial(self._control.ask, "queue_declare", notify=self._notify)
        return declare(queue=name, durable=True, arguments=names.TALLY)


def _all_done(answers: Iterable[Reply]) -> bool:
    """Whether all *answers* are there; raises the error of one that failed."""
    for answer in answers:
        if answer.error is not None:
            raise answer.error
        if not answer.done:
            return False
    return True


def _ignore(*_: Any) -> None:
    """No message ever comes to a tally."""


_log = logging.getLogger("holdfast.brokers.rabbitmq")
_epochs = itertools.count(1)


class Assignment:
    """What one connection holds in the group; it ends with the connection.

    The listener is told in the thread of whoever polls: of a lane that comes once the
    claim is granted, of one that is given up before its channel is closed.
    """

    def __init__(
        self,
        link: ConnectionThread,
        group: str,
        topics: Iterable[str],
        settings: RabbitSettings,
        clock: Clock,
        randomness: Randomness,
        owned: OwnedLanes[LaneConsumer],
        notify: Callable[[], None],
    ) -> None:
        self.link = link
        self.topology = Topology(link, settings, clock)
        self.lanes = owned.lanes
        self.has_lost_settles = False
        """Whether lanes have gone before what was settled in them was safe."""
        self._group = group
        self._settings = settings
        self._clock = clock
        self._random = randomness
        self._owned = owned
        self._notify = notify
        self._claims: dict[Lane, LaneConsumer] = {}
        self._membership: Membership | None = None
        # At once, not with the first poll: what is published from now on is for this group.
        self._lanes: Mapping[str, int] = self.topology.create_group(topics, group)

    def attend(self) -> float:
        """Keep up with the group; return how many seconds nothing needs to be done."""
        self._notice_losses()
        for inlet in self.lanes.values():
            if inlet.deferred:
                inlet.accept_deferred(self._clock.monotonic())
        if self._claims:
            self._notice_claims()
        membership = self._membership or self._join()
        if not self._claims and (decision := membership.survey(self.lanes)) is not None:
            if decision.give:
                self.give_up(decision.give)
            for lane in decision.take:
                self._claims[lane] = LaneConsumer(
                    self.link,
                    lane,
                    self._group,
                    next(_epochs),
                    self._settings,
                    self._notify,
                )
        return membership.patience

    def _join(self) -> Membership:
        self._membership = membership = Membership(
            # A channel of its own: where others ask for what may be missing, answers get lost.
            Control(self.link, self._clock, self._settings.patience),
            self._group,
            self._lanes,
            self._clock,
            self._random,
            self._notify,
        )
        return membership

    def _notice_claims(self) -> None:
        decided = [
            inlet for inlet in self._claims.values() if inlet.stage is not ConsumerPhase.ASKED
        ]
        for inlet in decided:
            del self._claims[inlet.lane]
        for inlet in decided:
            if inlet.failure is not None:
                _log.warning("cannot claim %s: %s", inlet.lane, inlet.failure)
        if any(isinstance(inlet.failure, QueueNotFound) for inlet in decided):
            self.topology.create_group(self._lanes, self._group)  # somebody has deleted a queue
        granted = {inlet.lane: inlet for inlet in decided if inlet.stage is ConsumerPhase.OWNED}
        self.lanes.update(granted)
        self._owned.announce()

    def _notice_losses(self) -> None:
        gone = [lane for lane, inlet in self.lanes.items() if inlet.stage is ConsumerPhase.GONE]
        for lane in gone:
            _log.warning("lost %s of group %s: %s", lane, self._group, self.lanes[lane].failure)
        if gone:
            self.lose(gone)

    def lose(self, lanes: Iterable[Lane]) -> None:
        """Drop *lanes*, which have gone already."""
        lanes = list(lanes)
        self.has_lost_settles |= any(self.lanes[lane].is_unflushed for lane in lanes)
        self._owned.lose(lanes)

    def give_up(self, lanes: Iterable[Lane]) -> None:
        """Let the listener settle, make that safe, and leave the rest of *lanes* to others."""
        lanes = sorted(lanes)
        try:
            self._owned.revoke(lanes)
            for lane in lanes:
                self.lanes[lane].accept_deferred(math.inf)
            self.flush(lanes)
        finally:
            for inlet in self._owned.remove(lanes):
                inlet.close()

    def flush(self, lanes: Iterable[Lane]) -> None:
        """Return once all that was settled in *lanes* is safe on the broker."""
        barriers = [
            inlet.barrier()
            for inlet in (self.lanes.get(lane) for lane in lanes)
            if inlet is not None and inlet.is_unflushed
        ]
        for barrier in barriers:
            barrier.get(self._clock, self._settings.patience, "whether accepts are safe")
