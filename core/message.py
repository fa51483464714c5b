"""The message: a fact with an identity, apart from how it travels."""

from __future__ import annotations

import contextvars
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import msgspec

from holdfast.clock import SYSTEM_CLOCK
from holdfast.errors import InvalidMessage
from holdfast.headers import (
    EMPTY,
    REPLAY_GROUP,
    REPLAY_MARKS,
    HeaderInput,
    Headers,
    ReplayHeaders,
    replay_topic,
)
from holdfast.ids import new_id
from holdfast.trace_context import NO_TRACE, Trace, current_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Self

UNNAMED = "holdfast"
"""The source of messages whose producer gave none."""
_OF_TOPIC = "topic:"
"""How the source begins that a message without any gets when it is received."""
SOURCE_END = "\x1f"
"""What stands between source and id in an identity."""

P = ParamSpec("P")
R = TypeVar("R")

TRACE_STATE = "ce_tracestate"
"""The header in which a message carries the `tracestate` of its trace, as CloudEvents name it."""
_TRACE_STATES = (TRACE_STATE, "ce-tracestate", "cloudEvents:tracestate", "tracestate")


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An immutable message; `payload` None is a tombstone, which is not an empty payload."""

    id: str
    topic: str
    payload: bytes | None
    type: str = "message"
    source: str = UNNAMED
    key: bytes | None = None
    headers: Headers = EMPTY
    time: datetime
    correlation_id: str | None = None
    causation_id: str | None = None
    content_type: str | None = None
    schema: str | None = None
    traceparent: str | None = None
    replayed: bool = False
    """Whether it came by a replay and its marks were taken off; it is not sent along."""

    def __post_init__(self) -> None:
        if not self.topic:
            raise InvalidMessage("topic is empty: name the topic that the message goes to")
        if not self.id:
            raise InvalidMessage("id is empty: leave it out to have one made")
        if not isinstance(self.time, datetime):
            raise InvalidMessage(
                f"time is a {_kind(self.time)}: pass a datetime with a timezone, e.g. "
                "datetime.now(UTC)"
            )
        if self.time.tzinfo is None:
            raise InvalidMessage(
                f"time {self.time.isoformat()} is naive: attach a timezone, e.g. datetime.now(UTC)"
            )

    @classmethod
    def new(
        cls,
        topic: str,
        payload: bytes | None,
        *,
        key: str | bytes | None = None,
        type: str = "message",  # noqa: A002 - the name CloudEvents gives it
        source: str = UNNAMED,
        headers: HeaderInput = (),
        time: datetime | None = None,
        content_type: str | None = None,
        schema: str | None = None,
        ids: Callable[[], str] = new_id,
        now: Callable[[], datetime] = SYSTEM_CLOCK.now,
    ) -> Self:
        """Return a new message with a fresh id.

        While another message is being handled, the new one inherits its correlation and
        names it as its cause. Otherwise it has the correlation of the request that is served
        (`holdfast.tracing`), or starts one of its own. It belongs to the current OpenTelemetry
        span, or else to the trace of its cause or request. The marks of a replay are left out
        of *headers*: they are about another message.
        """
        if not (isinstance(topic, str) and isinstance(type, str) and isinstance(source, str)):
            _refuse_texts(topic=topic, type=type, source=source)  # type: ignore[unreachable]
        if payload is not None and not isinstance(payload, bytes):
            raise InvalidMessage(
                f"payload is a {_kind(payload)}: encode it to bytes first, e.g. with a Codec"
            )
        if key is not None and not isinstance(key, str | bytes):
            raise InvalidMessage(f"key is a {_kind(key)}: pass str or bytes, e.g. str(key)")
        own = ids()
        cause = _handling.get()
        if isinstance(headers, Headers):
            carried = headers
        else:
            carried = EMPTY if headers == () else Headers(headers)
        if carried.pairs and REPLAY_GROUP in carried:
            carried = carried.without(REPLAY_MARKS)
        trace = current_trace()
        origin = _origin.get() if cause is None else None
        if trace is NO_TRACE:
            if cause is not None:
                trace = Trace(cause.traceparent, cause.tracestate)
            elif origin is not None:
                trace = origin.trace
        if trace.state is not None:
            carried = carried.with_({TRACE_STATE: trace.state})
        return cls(
            id=own,
            topic=topic,
            payload=payload,
            key=_encoded(key) if isinstance(key, str) else key,
            type=type,
            source=source,
            headers=carried,
            time=now() if time is None else time,
            correlation_id=_correlation(own, cause, origin),
            causation_id=None if cause is None else cause.id,
            content_type=_optional("content_type", content_type),
            schema=_optional("schema", schema),
            traceparent=trace.parent,
        )

    @property
    def identity(self) -> str:
        """What makes it this message and no other: its source and id, as CloudEvents have it.

        One whose source was not given is known by its id alone.
        """
        source = self.source
        if source == UNNAMED or source.startswith(_OF_TOPIC):
            return self.id
        return f"{source}{SOURCE_END}{self.id}"

    @property
    def tracestate(self) -> str | None:
        """What tracing systems add to `traceparent`; it travels among the headers."""
        headers = self.headers
        for name, _ in headers.pairs:  # asked for every message, and few have it
            if name in _TRACE_STATES:
                break
        else:
            return None
        return next((text for name in _TRACE_STATES if (text := headers.text(name))), None)

    @property
    def key_text(self) -> str | None:
        """The key as text; undecodable bytes are replaced, so use it for people only."""
        return None if self.key is None else self.key.decode("utf-8", "replace")

    @property
    def size(self) -> int:
        """Bytes of payload, key and headers."""
        return len(self.payload or b"") + len(self.key or b"") + self.headers.size

    @property
    def is_replay(self) -> bool:
        """Whether an operator's replay sent this message again.

        By its marks, which anybody may write: only if they are complete, and it came by the
        topic that they name or by the replay topic of their group. A `Consumer` also asks its
        database whether the plan has it, and takes the marks off where they do not count.
        """
        if self.replayed:
            return True
        if not self.headers.pairs or REPLAY_GROUP not in self.headers:
            return False
        return counted(self) is not None

    def unmarked(self) -> Self:
        """Return it without the marks of its replay, which no message made from it may carry.

        Another group would let such a message pass, as one that is not meant for it.
        """
        if not self.headers.pairs or REPLAY_GROUP not in self.headers:
            return self
        headers = self.headers.without(REPLAY_MARKS)
        return self.with_(headers=headers, replayed=self.is_replay)

    def ordinary(self) -> Self:
        """Return it as no replay: without marks, which somebody copied or made up."""
        if not self.headers.pairs or REPLAY_GROUP not in self.headers:
            return self
        return self.with_(headers=self.headers.without(REPLAY_MARKS), replayed=False)

    def with_(self, **changes: Any) -> Self:
        """Return a copy with *changes*."""
        return msgspec.structs.replace(self, **changes)


class Origin(NamedTuple):
    """What messages belong to that no message caused: a request, a job."""

    correlation_id: str
    trace: Trace = NO_TRACE


def _correlation(own: str, cause: Message | None, origin: Origin | None) -> str:
    if cause is not None:
        return cause.correlation_id or cause.id
    return own if origin is None else origin.correlation_id


_origin: contextvars.ContextVar[Origin | None] = contextvars.ContextVar(
    "holdfast_origin", default=None
)
_since: contextvars.ContextVar[float | None] = contextvars.ContextVar(
    "holdfast_since", default=None
)
_listed: contextvars.ContextVar[tuple[Message, ...]] = contextvars.ContextVar(
    "holdfast_listed", default=()
)
_handling: contextvars.ContextVar[Message | None] = contextvars.ContextVar(
    "holdfast_handling", default=None
)


def current_message() -> Message | None:
    """Return the message being handled here, or None; one that was replayed, without its marks."""
    return _handling.get()


def current_origin() -> Origin | None:
    """Return the request or job that is served here, or None."""
    return _origin.get()


def begin_origin(origin: Origin) -> contextvars.Token[Origin | None]:
    """Let messages that are made here belong to *origin*; `end_origin` takes the token."""
    return _origin.set(origin)


def end_origin(token: contextvars.Token[Origin | None]) -> None:
    """Let it be as before `begin_origin`."""
    _origin.reset(token)


def handling_since() -> float | None:
    """Return when the handling of the current message began, by the monotonic clock.

    None where none is handled, or where nobody has asked for it with `note_handling_times`.
    """
    return _since.get()


def note_handling_times() -> None:
    """Note from now on when the handling of a message begins; before that it costs nothing."""
    global _is_timed  # noqa: PLW0603 - one switch for the process, turned once
    _is_timed = True


_is_timed = False


class handling:  # noqa: N801 - used like a function, and lighter than a generator for each message
    """Make *message* the cause of every message created inside, in this thread or task."""

    __slots__ = ("_message", "_timed", "_token")

    def __init__(self, message: Message) -> None:
        self._message = message

    def __enter__(self) -> Message:
        self._token = _handling.set(self._message.unmarked())
        self._timed = _since.set(monotonic()) if _is_timed else None
        return self._message

    def __exit__(self, *_: object) -> None:
        _handling.reset(self._token)
        if self._timed is not None:
            _since.reset(self._timed)


def begin_handling(message: Message) -> None:
    """Make *message* the cause of what follows, in a context that serves this message alone."""
    _handling.set(message.unmarked())
    if _is_timed:
        _since.set(monotonic())


def begin_list(messages: Iterable[Message]) -> None:
    """Let the list of *messages* be what is handled, in a context that serves it alone.

    Nothing is its cause alone; only logs ask for it, so it is noted if `note_handling_times` was.
    """
    if _is_timed:
        _listed.set(tuple(messages))
        _since.set(monotonic())


def current_list() -> tuple[Message, ...]:
    """Return the messages that are handled here as one list; nothing if there is no list."""
    return _listed.get()


def carry(function: Callable[P, R]) -> Callable[P, R]:
    """Bind *function* to the message being handled here, to run it in a thread of your own.

    asyncio tasks inherit the context by themselves; threads do not.
    """
    context = contextvars.copy_context()

    def carried(*args: P.args, **kwargs: P.kwargs) -> R:
        return context.copy().run(function, *args, **kwargs)

    return carried


def utc(moment: datetime) -> datetime:
    """Return *moment* in UTC; a naive one is refused."""
    if moment.tzinfo is None:
        raise InvalidMessage(f"time {moment.isoformat()} is naive: attach a timezone")
    return moment.astimezone(UTC)


def _refuse_texts(**texts: object) -> None:
    for name, value in texts.items():
        if not isinstance(value, str):
            raise InvalidMessage(f"{name} is a {_kind(value)}: pass a text, e.g. {name}='orders'")


def _encoded(key: str) -> bytes:
    try:
        return key.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(
            f"key {key!r} cannot be written as UTF-8: remove the lone surrogate"
        ) from error


def _optional(name: str, value: str | None) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidMessage(f"{name} is a {_kind(value)}: pass a text or None")
    return value


def _kind(value: object) -> str:
    return type(value).__name__


def counted(message: Message, came_by: str | None = None) -> ReplayHeaders | None:
    """Return the marks of *message* if they count; None for an ordinary one.

    They are only headers: they count when they are complete and it *came by* the topic that
    they name, or by the replay topic of their group. By default it came by its own topic.
    """
    marks = ReplayHeaders.of(message.headers)
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
