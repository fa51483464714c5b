"""The dead letter: a message that failed, whole, and everything known about the failure."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.dlq.protection.redaction import without_fields
from holdfast.ids import derived_id
from holdfast.message import UNNAMED, Message
from holdfast.ports import Position  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA_VERSION = 1
"""The envelope that this version writes; newer ones are kept and flagged, never half-read."""

MOST_FAILURES = 10
"""How many past failures an envelope carries; the latest are kept."""


class FailureStage(Enum):
    """How far the message came."""

    DESERIALIZE = "deserialize"
    VALIDATE = "validate"
    HANDLE = "handle"
    PUBLISH = "publish"
    CRASH = "crash"


class Class(Enum):
    """What kind of failure it was, which decides what may help."""

    POISON = "poison"
    TRANSIENT = "transient"
    DEPENDENCY = "dependency"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One call on the stack, as it was: never parsed from text."""

    module: str
    function: str
    line: int = 0
    in_app: bool = False


class ExceptionInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One exception of a chain."""

    type: str
    text: str
    frames: tuple[Frame, ...] = ()


class Coordinates(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the broker had it."""

    broker: str = ""
    topic: str
    lane: int | None = None
    position: Position | None = None
    stored_at: float | None = None
    count: int | None = None


class FailedConsumer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who failed: the consumer at that moment."""

    group: str
    handler: str
    service_version: str = ""
    git_sha: str = ""
    host: str = ""
    traceparent: str | None = None
    function: str = ""
    """The handler's name in the code, for people; empty in letters of earlier versions."""
    commutative: bool = False
    """Whether the handler was declared so: its messages of a key may take effect in any order."""


class KnownFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fingerprint of a failure that is not told in full, by the rules of *algorithm*."""

    value: str
    by: str
    hints: tuple[str, ...]
    algorithm: str


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How it failed; `chain` has the root cause first, `also` the other members of a group."""

    stage: FailureStage
    kind: Class
    chain: tuple[ExceptionInfo, ...]
    also: tuple[ExceptionInfo, ...] = ()
    explicit: str | None = None
    trace: str = ""
    known: KnownFacts | None = None
    """Its fingerprint when it was captured, if frames or texts were left out since."""

    @property
    def root(self) -> ExceptionInfo:
        """The first cause."""
        return self.chain[0] if self.chain else ExceptionInfo(type="unknown", text="")


class Occurrence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One time that it was dead-lettered."""

    id: str
    at: float
    error: str
    attempts: int = 1
    host: str = ""
    replay_id: str | None = None


class LetterHistory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How often and since when it fails."""

    attempts: int = 1
    timeouts: int = 0
    first_failed_at: float
    last_failed_at: float
    failures: tuple[Occurrence, ...] = ()


class ReplayHistory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How it was sent again: by which replay, how often, and as which edit."""

    replay_count: int = 0
    replay_id: str | None = None
    edit_of: str | None = None
    revision: int = 0


class Governance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whose data it is and what was done to protect it."""

    tenant: str | None = None
    entity_ref: str | None = None
    subject: str | None = None
    expires_at: float | None = None
    redacted: tuple[str, ...] = ()
    """Paths whose values are gone for good: the message cannot be replayed as it was."""
    sealed: tuple[str, ...] = ()
    """Paths that are encrypted with the subject's key."""


class ThreadedDestination:
    """A destination says by inheriting this that its `put` may run in a thread of its own.

    An `async def` handler then does not block the event loop while its letter is written. One
    that does not inherit it is called where the handler runs: threads may not share a sink.
    """

    in_thread: bool = True


def puts_in_thread(destination: object) -> bool:
    """Whether the letters of `async def` handlers are put into *destination* in a thread."""
    return isinstance(destination, ThreadedDestination) and destination.in_thread


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A failed message with its original bytes, key and headers, and its envelope."""

    dlq_id: str
    message: Message
    coordinates: Coordinates
    culprit: FailedConsumer
    failure: Failure
    history: LetterHistory
    lineage: ReplayHistory = ReplayHistory()
    governance: Governance = Governance()
    schema_version: int = SCHEMA_VERSION
    origin: str = "captured"
    """captured, collected, quarantine or imported."""
    newer: dict[str, Any] | None = None
    """The envelope of a newer version, kept as it came; the other parts are then bare."""
    formerly: tuple[str, ...] = ()
    """Under what ids an earlier version would have stored it; it does not travel."""

    @property
    def is_replayable(self) -> bool:
        """Whether the stored bytes are what was sent: nothing was redacted away."""
        return not self.governance.redacted and self.newer is None


def dead_letter_id(group: str, handler: str, message: Message, hidden: tuple[str, ...] = ()) -> str:
    """Return the identity of *message* as a dead letter of *handler* in *group*.

    The same message published twice is one dead letter; the same id with other content, or of
    another source, is another one. The fields at the *hidden* paths have no part in it: from an
    id that covers them their values could be guessed. A foreign message has an id that follows
    from its coordinates.
    """
    payload = without_fields(message.payload, hidden)[0] if hidden else message.payload
    digest = "null" if payload is None else hashlib.sha256(payload).hexdigest()
    return derived_id("dead-letter", group, handler, message.identity, digest)


def former_letter_ids(
    group: str,
    handler: str,
    names: Sequence[str],
    message: Message,
    hidden: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """Return the ids that earlier versions gave: by the handler's *names* in code, no source."""
    bare = message.with_(source=UNNAMED)
    own = dead_letter_id(group, handler, message, hidden)
    ids = dict.fromkeys(dead_letter_id(group, name, bare, hidden) for name in (handler, *names))
    return tuple(one for one in ids if one != own)


def own_id(letter: DeadLetter) -> str:
    """Return the identity of *letter* by what is kept of its message."""
    kept = letter.governance
    hidden = kept.redacted + kept.sealed
    return dead_letter_id(letter.culprit.group, letter.culprit.handler, letter.message, hidden)


def renamed(letter: DeadLetter, dlq_id: str) -> DeadLetter:
    """Return *letter* under another id; those of its failures follow from that."""
    failures = tuple(
        msgspec.structs.replace(
            one,
            id=occurrence_id(dlq_id, datetime.fromtimestamp(one.at, UTC), one.host, one.replay_id),
        )
        for one in letter.history.failures
    )
    history = msgspec.structs.replace(letter.history, failures=failures)
    return msgspec.structs.replace(letter, dlq_id=dlq_id, history=history)


def occurrence_id(dlq_id: str, at: datetime, host: str, replay_id: str | None) -> str:
    """Return the identity of one failure: putting it again changes nothing."""
    return derived_id("failure", dlq_id, at.isoformat(), host, replay_id or "")


def dlq_topic(topic: str, group: str) -> str:
    """Return the name of the dead-letter topic of *group* for *topic*."""
    return f"{topic}.{group}.dlq"
