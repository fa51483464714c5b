"""The marks of a replayed message: whom it is meant for, and which dead letter it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeGuard

from holdfast.headers import Headers
from holdfast.message import REPLAY_HEADER, REPLAY_MARKS

if TYPE_CHECKING:
    from holdfast.headers import Pair
    from holdfast.message import Message

REPLAY_GROUP: Final = REPLAY_HEADER
"""The consumer group that failed; every other group lets the message pass."""
REPLAY_PLAN: Final = "x-replay-plan"
REPLAY_DLQ_ID: Final = "x-replay-dlq-id"
REPLAY_TOPIC: Final = "x-replay-topic"
"""The topic that the message was first published to."""
REPLAY_COUNT: Final = "x-replay-count"
"""How many times it has been replayed, this time included."""
REPLAY_COMMUTATIVE: Final = "x-replay-commutative"
"""There if the operator said that order does not matter."""

NAMES: Final = REPLAY_MARKS
_NAMES = frozenset(NAMES)
_MOST_ID = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What the headers of a replayed message say."""

    group: str
    plan: str
    dlq_id: str
    topic: str
    count: int = 1
    commutative: bool = False

    @classmethod
    def of(cls, headers: Headers) -> Marks | None:
        """Return the marks in *headers*; None for a message that no plan sent."""
        group, plan = headers.text(REPLAY_GROUP), headers.text(REPLAY_PLAN)
        dlq_id, topic = headers.text(REPLAY_DLQ_ID), headers.text(REPLAY_TOPIC)
        if group is None or topic is None or not (is_id(plan) and is_id(dlq_id)):
            return None
        count = headers.text(REPLAY_COUNT) or ""
        return cls(
            group=group,
            plan=plan,
            dlq_id=dlq_id,
            topic=topic,
            count=int(count) if count.isascii() and count.isdigit() and len(count) < 10 else 1,
            commutative=REPLAY_COMMUTATIVE in headers,
        )

    def stamped(self, headers: Headers) -> Headers:
        """Return *headers* with these marks in place of any older ones."""
        stamp = Stamp(
            group=self.group, plan=self.plan, topic=self.topic, commutative=self.commutative
        )
        # Not checked again: names and ids are ours.
        return Headers.received(stamp.on(headers.pairs, self.dlq_id, self.count))


class Stamp:
    """Puts marks on the messages of one plan, topic and group; what they share is made once."""

    __slots__ = ("_group", "_more", "_plan")

    def __init__(self, *, group: str, plan: str, topic: str, commutative: bool = False) -> None:
        self._group = (REPLAY_GROUP, group)
        self._plan = (REPLAY_PLAN, plan)
        self._more: tuple[tuple[str, str], ...] = ((REPLAY_TOPIC, topic),)
        if commutative:
            self._more += ((REPLAY_COMMUTATIVE, "yes"),)

    def on(self, own: tuple[Pair, ...], dlq_id: str, count: int) -> tuple[Pair, ...]:
        """Return the headers *own* with marks in place of any older ones."""
        if own and any(name in _NAMES for name, _ in own):
            own = tuple(pair for pair in own if pair[0] not in _NAMES)
        return (
            *own,
            *((name, text.encode()) for name, text in self.texts(dlq_id, count)),
        )

    def texts(self, dlq_id: str, count: int) -> tuple[tuple[str, str], ...]:
        """Return the marks as text."""
        number = (REPLAY_COUNT, str(count))
        return (self._group, self._plan, (REPLAY_DLQ_ID, dlq_id), *self._more, number)


def is_id(text: str | None) -> TypeGuard[str]:
    """Whether *text* can be the id of a plan or a letter: anybody may write a header."""
    return text is not None and 0 < len(text) <= _MOST_ID and text.isascii() and text.isprintable()


def replay_topic(topic: str, group: str) -> str:
    """Return the topic that only *group* reads replayed messages of *topic* from."""
    return f"{topic}.{group}.replay"


def counted(message: Message, came_by: str | None = None) -> Marks | None:
    """Return the marks of *message* if they count; None for an ordinary one.

    They are only headers: they count when they are complete and it *came by* the topic that
    they name, or by the replay topic of their group. By default it came by its own topic.
    """
    marks = Marks.of(message.headers)
    if marks is None or message.replayed:
        return marks
    topic = message.topic if came_by is None else came_by
    return marks if topic in (marks.topic, replay_topic(marks.topic, marks.group)) else None


def is_for(message: Message, group: str) -> bool:
    """Whether *group* is to handle *message*; an ordinary message is for everybody.

    So is one whose marks do not count. Where the plan is in a database of yours, ask that
    (`admission.standing`): a service that copies headers sends on those of a replay.
    """
    marks = counted(message)
    return marks is None or marks.group == group


def original(message: Message) -> Message:
    """Return *message* under the topic it was first published to; the marks stay on it.

    Only one that came by the replay topic of that topic: a header chooses no other.
    """
    marks = counted(message)
    if marks is None or not marks.topic or marks.topic == message.topic:
        return message
    return message.with_(topic=marks.topic)


def unmarked(headers: Headers) -> Headers:
    """Return *headers* as they were before any replay."""
    return headers.without(NAMES)
