"""A member's place in its group: who else is there, and what follows from it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.brokers.rabbitmq import names
from holdfast.brokers.rabbitmq.sharing import Balance, Standing
from holdfast.ports import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from holdfast.brokers.rabbitmq.answer import Answer
    from holdfast.brokers.rabbitmq.control import Control
    from holdfast.clock import Clock, Randomness

_QUICK, _CALM = 0.03, 0.5  # seconds between surveys while lanes move, and while they do not


class Decision(NamedTuple):
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
        self._hunger: dict[str, Answer] = {}
        self._standing: list[Answer] = []
        self._counting: dict[str, tuple[Answer, Answer]] | None = None
        self._looking: dict[Lane, Answer] | None = None
        self._balance: Balance | None = None
        self._pause = _QUICK
        self._due = clock.monotonic()
        for topic in lanes:
            self._standing.append(self._stand(names.members(topic, group)))

    @property
    def patience(self) -> float:
        """Seconds until the next survey is due; an answer that is awaited comes with a notice."""
        left = self._due - self._clock.monotonic()
        return left if left > 0 else _CALM

    def survey(self, owned: Iterable[Lane]) -> Decision | None:
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

    def _counted(self, owned: frozenset[Lane]) -> Decision | None:
        """Weigh the counts; look for free lanes if some may be taken."""
        counting, self._counting = self._counting or {}, None
        self._balance = balance = Balance(
            [
                Standing(
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
            return self._decided(Decision(balance.surplus(), []))
        self._looking = {
            lane: self._tally(names.owner(lane.topic, self._group, lane.partition))
            for topic, count in self._lanes.items()
            for lane in (Lane(topic, partition) for partition in range(count))
            if lane not in owned
        }
        return None

    def _picked(self) -> Decision:
        looking, self._looking = self._looking or {}, None
        free = [lane for lane, answer in looking.items() if not answer.value.consumer_count]
        self._random.shuffle(free)  # members that come at once should not want the same lane
        room = 0 if self._balance is None else self._balance.room
        return self._decided(Decision([], free[:room]))

    def _decided(self, decision: Decision) -> Decision:
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

    def _stand(self, tally: str) -> Answer:
        """Be counted on *tally* from now on."""
        self._tally(tally)
        return self._control.ask(
            "basic_consume",
            notify=self._notify,
            queue=tally,
            on_message_callback=_ignore,
            auto_ack=True,
        )

    def _tally(self, name: str) -> Answer:
        declare = partial(self._control.ask, "queue_declare", notify=self._notify)
        return declare(queue=name, durable=True, arguments=names.TALLY)


def _all_done(answers: Iterable[Answer]) -> bool:
    """Whether all *answers* are there; raises the error of one that failed."""
    for answer in answers:
        if answer.error is not None:
            raise answer.error
        if not answer.done:
            return False
    return True


def _ignore(*_: Any) -> None:
    """No message ever comes to a tally."""
