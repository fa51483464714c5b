"""Message headers: ordered, multi-valued, binary safe, immutable; and the marks of a replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from holdfast.errors import InvalidMessage

if TYPE_CHECKING:
    from typing import Self

HeaderValue = bytes | None
Pair = tuple[str, HeaderValue]
HeaderInput = Mapping[str, "str | bytes | None"] | Iterable[tuple[str, "str | bytes | None"]]

_LONGEST_NAME = 255  # what AMQP allows; the tightest of the brokers served

REPLAY_GROUP: Final = "x-replay-group"
"""The consumer group that failed; every other group lets a replayed message pass."""
REPLAY_PLAN: Final = "x-replay-plan"
REPLAY_DLQ_ID: Final = "x-replay-dlq-id"
REPLAY_TOPIC: Final = "x-replay-topic"
"""The topic that the message was first published to."""
REPLAY_COUNT: Final = "x-replay-count"
"""How many times it has been replayed, this time included."""
REPLAY_COMMUTATIVE: Final = "x-replay-commutative"
"""There if the operator said that order does not matter."""
REPLAY_MARKS: Final = (
    REPLAY_GROUP,
    REPLAY_PLAN,
    REPLAY_DLQ_ID,
    REPLAY_TOPIC,
    REPLAY_COUNT,
    REPLAY_COMMUTATIVE,
)
"""What a replay writes onto the messages that it sends, and nobody onto any other."""
_MARKS = frozenset(REPLAY_MARKS)
_MOST_ID = 36


class Headers:
    """An ordered list of (name, bytes) pairs; names may repeat, values may be None.

    Built from a mapping or pairs, text is stored as UTF-8 and bad names or values are
    refused. What arrived from a broker is kept as it is (`Headers.received`).
    """

    __slots__ = ("_pairs",)
    _pairs: tuple[Pair, ...]

    def __init__(self, source: HeaderInput = ()) -> None:
        pairs: Any = source.items() if isinstance(source, Mapping) else source
        if isinstance(pairs, str | bytes):
            raise _shapeless(source)
        try:
            self._pairs = tuple([_checked(name, value) for name, value in pairs])
        except InvalidMessage:
            raise
        except (TypeError, ValueError) as error:
            raise _shapeless(source) from error

    @classmethod
    def received(cls, pairs: Iterable[Pair]) -> Self:
        """Keep *pairs* exactly as a broker delivered them, without any check."""
        headers = cls.__new__(cls)
        headers._pairs = tuple(pairs)
        return headers

    def get(self, name: str) -> HeaderValue:
        """Return the last value of *name*, or None."""
        for own, value in reversed(self._pairs):
            if own == name:
                return value
        return None

    def text(self, name: str) -> str | None:
        """Return the last value of *name* as text; undecodable bytes are replaced."""
        value = self.get(name)
        return None if value is None else value.decode("utf-8", "replace")

    def all(self, name: str) -> list[HeaderValue]:
        """Return every value of *name*, in order."""
        return [value for own, value in self._pairs if own == name]

    def with_(self, extra: HeaderInput) -> Headers:
        """Return a copy in which *extra* replaces the headers of the same names."""
        added = Headers(extra)
        names = {name for name, _ in added}
        return Headers.received((*(p for p in self._pairs if p[0] not in names), *added))

    def without(self, names: Iterable[str]) -> Headers:
        """Return a copy that lacks *names*."""
        gone = set(names)
        return Headers.received(p for p in self._pairs if p[0] not in gone)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """All pairs, in order."""
        return self._pairs

    @property
    def size(self) -> int:
        """Bytes of all names and values."""
        return sum(len(name.encode()) + len(value or b"") for name, value in self._pairs)

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._pairs)

    def __contains__(self, name: object) -> bool:
        for own, _ in self._pairs:  # noqa: SIM110 - asked for every message, so without a generator
            if own == name:
                return True
        return False

    def __len__(self) -> int:
        return len(self._pairs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Headers) and self._pairs == other._pairs

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __repr__(self) -> str:
        return f"Headers({list(self._pairs)!r})"


def _shapeless(source: object) -> InvalidMessage:
    return InvalidMessage(
        f"headers are a {type(source).__name__} that is no mapping and no list of pairs: write "
        "headers={'name': 'value'}"
    )


def _checked(name: object, value: object) -> Pair:
    if not isinstance(name, str) or not name:
        raise InvalidMessage(f"header name {name!r}: use a non-empty string")
    if not (name.isascii() and name.isprintable()) or ":" in name or " " in name:
        raise InvalidMessage(f"header name {name!r}: use printable ASCII without space or colon")
    if len(name) > _LONGEST_NAME:
        raise InvalidMessage(f"header name {name[:20]!r}… has {len(name)} characters, at most 255")
    if value is None or isinstance(value, bytes):
        return name, value
    if isinstance(value, str):
        try:
            return name, value.encode()
        except UnicodeEncodeError as error:
            raise InvalidMessage(f"header {name!r} is no UTF-8 text: pass bytes") from error
    raise InvalidMessage(
        f"header {name!r} has a {type(value).__name__}: pass str, bytes or None, e.g. str(value)"
    )


EMPTY = Headers()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayHeaders:
    """What the headers of a replayed message say."""

    group: str
    plan: str
    dlq_id: str
    topic: str
    count: int = 1
    commutative: bool = False

    @classmethod
    def of(cls, headers: Headers) -> ReplayHeaders | None:
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
        stamp = ReplayStamp(
            group=self.group, plan=self.plan, topic=self.topic, commutative=self.commutative
        )
        # Not checked again: names and ids are ours.
        return Headers.received(stamp.on(headers.pairs, self.dlq_id, self.count))


class ReplayStamp:
    """Puts marks on the messages of one plan, topic and group; what they share is made once."""

    __slots__ = ("_ends", "_group", "_more", "_plan")

    def __init__(self, *, group: str, plan: str, topic: str, commutative: bool = False) -> None:
        self._group = (REPLAY_GROUP, group)
        self._plan = (REPLAY_PLAN, plan)
        self._more: tuple[tuple[str, str], ...] = ((REPLAY_TOPIC, topic),)
        if commutative:
            self._more += ((REPLAY_COMMUTATIVE, "yes"),)
        self._ends: dict[int, tuple[tuple[str, str], ...]] = {}
        """The marks behind the letter's id, by the number of the replay: that is hardly above 3."""

    def on(self, own: tuple[Pair, ...], dlq_id: str, count: int) -> tuple[Pair, ...]:
        """Return the headers *own* with marks in place of any older ones."""
        if own and any(name in _MARKS for name, _ in own):
            own = tuple(pair for pair in own if pair[0] not in _MARKS)
        return (
            *own,
            *((name, text.encode()) for name, text in self.texts(dlq_id, count)),
        )

    def texts(self, dlq_id: str, count: int) -> tuple[tuple[str, str], ...]:
        """Return the marks as text."""
        ends = self._ends.get(count)
        if ends is None:
            ends = self._ends[count] = (*self._more, (REPLAY_COUNT, str(count)))
        return (self._group, self._plan, (REPLAY_DLQ_ID, dlq_id), *ends)


def is_id(text: str | None) -> TypeGuard[str]:
    """Whether *text* can be the id of a plan or a letter: anybody may write a header."""
    return text is not None and 0 < len(text) <= _MOST_ID and text.isascii() and text.isprintable()


def replay_topic(topic: str, group: str) -> str:
    """Return the topic that only *group* reads replayed messages of *topic* from."""
    return f"{topic}.{group}.replay"
