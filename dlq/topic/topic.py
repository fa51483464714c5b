"""The broker topic as a home of dead letters, `<topic>.<group>.dlq`.

The envelope on a broker: raw body and key, everything else in bounded headers.

`x-dlq-envelope` is JSON. When it would grow beyond the limit it is made smaller step by
step, by whole parts and never by cutting JSON text, down to who failed on what; so it can
always be read back. `x-dlq-id`, `x-dlq-error` and the like repeat what people look for.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.db.text import plain
from holdfast.dlq.letter import (
    SCHEMA_VERSION,
    Class,
    Coordinates,
    DeadLetter,
    ExceptionInfo,
    FailedConsumer,
    Failure,
    FailureStage,
    Governance,
    KnownFacts,
    LetterHistory,
    Occurrence,
    ReplayHistory,
    dead_letter_id,
    dlq_topic,
)
from holdfast.dlq.metrics import METRICS
from holdfast.dlq.protection.redaction import pattern
from holdfast.dlq.store.rows import fingerprint_of
from holdfast.errors import (
    BrokerDown,
    DependencyDown,
    HoldfastError,
    MessageTooLarge,
    PoisonMessage,
)
from holdfast.headers import Headers
from holdfast.ids import derived_id
from holdfast.ports import BrokerPowers
from holdfast.tracing.messaging import counted
from holdfast.tracing.switch import system_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection

    from holdfast.dlq.destination import DeadLetterDestination
    from holdfast.message import Message
    from holdfast.ports import Broker, Published, Sink


PREFIX: Final = "x-dlq-"
ENVELOPE: Final = "x-dlq-envelope"
MOST_BYTES: Final = 16_384
"""How large the envelope may become in a header; brokers with a lower limit get less."""
_LEAST_BYTES = 2_048
_MOST_NAME = 200
_MOST_ID = 36
_MOST_HINTS = 8
_MOST_SEALED = 500  # characters


class Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What travels in `x-dlq-envelope`."""

    schema_version: int
    dlq_id: str
    topic: str
    coordinates: Coordinates
    culprit: FailedConsumer
    failure: Failure
    history: LetterHistory
    lineage: ReplayHistory = ReplayHistory()
    governance: Governance = Governance()


class _Version(msgspec.Struct):
    schema_version: int
    dlq_id: str = ""


_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(Wire).decode
_version = msgspec.json.Decoder(_Version).decode


def to_topic(letter: DeadLetter, *, most: int = MOST_BYTES, topic: str | None = None) -> Message:
    """Return the message that carries *letter* on its dead-letter topic.

    Body, key and the message's own headers are the original's.
    """
    failure, culprit = letter.failure, letter.culprit
    marks: list[tuple[str, bytes]] = [
        ("x-dlq-id", letter.dlq_id.encode()),
        ("x-dlq-group", _short(culprit.group)),
        ("x-dlq-handler", _short(culprit.handler)),
        ("x-dlq-topic", _short(letter.message.topic)),
        ("x-dlq-class", failure.kind.value.encode()),
        ("x-dlq-error", _short(failure.root.type)),
        (ENVELOPE, packed(letter, most=most)),
    ]
    own = tuple(pair for pair in letter.message.headers if not pair[0].startswith(PREFIX))
    return letter.message.with_(
        topic=topic or dlq_topic(letter.message.topic, culprit.group),
        headers=Headers.received((*own, *marks)),
    )


def packed(letter: DeadLetter, *, most: int = MOST_BYTES) -> bytes:
    """Return the envelope of *letter* as JSON of at most *most* bytes."""
    if letter.newer is not None:
        return _encode(letter.newer)
    wire = Wire(
        schema_version=SCHEMA_VERSION,
        dlq_id=letter.dlq_id,
        topic=plain(letter.message.topic),
        coordinates=letter.coordinates,
        culprit=letter.culprit,
        failure=letter.failure,
        history=letter.history,
        lineage=letter.lineage,
        governance=letter.governance,
    )
    most = max(most, _LEAST_BYTES)
    for step in range(7):
        text = _encode(_smaller(wire, step))
        if len(text) <= most:
            break
    return text


def from_topic(message: Message, *, stored_at: float | None = None) -> DeadLetter:
    """Return the letter that *message* of a dead-letter topic carries.

    An envelope of a newer version is kept whole and flagged: it is not half-read, and counts
    as a failure of the moment when the broker *stored* it. `PoisonMessage` when there is no
    envelope, or none that can be read.
    """
    packed_envelope = message.headers.get(ENVELOPE)
    if packed_envelope is None:
        raise PoisonMessage(f"message {message.id} on {message.topic} has no {ENVELOPE} header")
    try:
        version = _version(packed_envelope)
        if version.schema_version > SCHEMA_VERSION:
            return _newer(message, version, packed_envelope, stored_at)
        wire = _decode(packed_envelope)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise PoisonMessage(
            f"the {ENVELOPE} header of message {message.id} cannot be read: {error}"
        ) from error
    own = (pair for pair in message.headers if not pair[0].startswith(PREFIX))
    original = message.with_(topic=wire.topic, headers=Headers.received(own))
    return DeadLetter(
        dlq_id=_identity(wire.dlq_id, wire.culprit, original),
        message=original,
        coordinates=wire.coordinates,
        culprit=wire.culprit,
        failure=wire.failure,
        history=wire.history,
        lineage=wire.lineage,
        governance=wire.governance,
        schema_version=wire.schema_version,
    )


def _newer(
    message: Message, version: _Version, packed_envelope: bytes, stored_at: float | None
) -> DeadLetter:
    """Return a letter that says only what the plain headers say, with the envelope beside it.

    It is one failure, which the envelope names: the same letter again changes nothing, and
    another one opens it and stops the replay that it came by.
    """
    headers, envelope = message.headers, msgspec.json.decode(packed_envelope)
    group = headers.text("x-dlq-group") or "unknown"
    handler = headers.text("x-dlq-handler") or "unknown"
    topic = headers.text("x-dlq-topic") or message.topic
    own = (pair for pair in headers if not pair[0].startswith(PREFIX))
    original = message.with_(topic=topic, headers=Headers.received(own))
    at = message.time.timestamp() if stored_at is None else stored_at
    text = f"an envelope of version {version.schema_version}: upgrade Holdfast to read it"
    error = (headers.text("x-dlq-error") or "unknown")[:_MOST_NAME]
    dlq_id = _identity(version.dlq_id, FailedConsumer(group=group, handler=handler), original)
    lineage = _lineage(envelope)
    digest = hashlib.sha256(packed_envelope).hexdigest()
    occurrence = Occurrence(
        id=derived_id("failure", dlq_id, digest),
        at=at,
        error=f"{error}: {text}",
        replay_id=lineage.replay_id,
    )
    return DeadLetter(
        dlq_id=dlq_id,
        message=original,
        coordinates=Coordinates(topic=topic),
        culprit=FailedConsumer(group=group, handler=handler),
        failure=Failure(
            stage=FailureStage.HANDLE,
            kind=Class.UNKNOWN,
            chain=(ExceptionInfo(type=error, text=text),),
        ),
        history=LetterHistory(first_failed_at=at, last_failed_at=at, failures=(occurrence,)),
        lineage=lineage,
        schema_version=version.schema_version,
        newer=envelope if isinstance(envelope, dict) else {"envelope": envelope},
    )


def _lineage(envelope: Any) -> ReplayHistory:
    """Return which replay sent the message, if *envelope* still says it as this version does."""
    try:
        return msgspec.convert(envelope["lineage"], ReplayHistory)
    except (msgspec.ValidationError, LookupError, TypeError):
        return ReplayHistory()


def _identity(given: str, culprit: FailedConsumer, original: Message) -> str:
    """Return the id that the envelope says, or the letter's own if that is none."""
    if 0 < len(given) <= _MOST_ID and given.isascii() and given.isprintable():
        return given
    return dead_letter_id(culprit.group, culprit.handler, original)


def _smaller(wire: Wire, step: int) -> Wire:
    """Return *wire* with less of what can be missed, the more the higher *step*."""
    change = msgspec.structs.replace
    failure, history = wire.failure, wire.history
    if step >= 1:
        failure = change(failure, trace="")
    if step >= 2:
        # What is left may look like another problem: the fingerprint of the whole goes along.
        known = _known(failure, hints=step < 4)
        failure = change(
            failure, known=known, also=(), chain=tuple(_fewer(r, 12) for r in failure.chain)
        )
        history = change(history, failures=history.failures[-3:])
    if step >= 3:
        chain = failure.chain if len(failure.chain) < 3 else (failure.chain[0], failure.chain[-1])
        failure = change(failure, chain=tuple(_fewer(r, 6, 300) for r in chain))
    if step >= 4:
        failure = change(failure, chain=tuple(_fewer(r, 0, 100) for r in failure.chain[:1]))
        history = change(history, failures=tuple(_bare(one) for one in history.failures[-1:]))
    if step >= 5:
        wire = change(wire, governance=_needed(wire.governance))
    if step >= 6:
        wire = _names_cut(wire)
        failure = change(
            failure, chain=tuple(_fewer(r, 0, 0) for r in failure.chain), explicit=None
        )
    return change(wire, failure=failure, history=history)


def _known(failure: Failure, *, hints: bool) -> KnownFacts:
    found = fingerprint_of(failure)
    said = tuple(hint[:_MOST_NAME] for hint in found.hints[:_MOST_HINTS]) if hints else ()
    return KnownFacts(found.value, found.by, said, found.algorithm)


def _fewer(raised: ExceptionInfo, frames: int, text: int = 500) -> ExceptionInfo:
    kept = raised.frames[-frames:] if frames else ()
    return ExceptionInfo(type=raised.type[:_MOST_NAME], text=raised.text[:text], frames=kept)


def _bare(occurrence: Any) -> Any:
    return msgspec.structs.replace(occurrence, error="", host=occurrence.host[:50])


def _needed(governance: Governance) -> Governance:
    """Return what a replay must know: whose it is, what is sealed, and whether anything is gone.

    Sealed paths become patterns, which name at least as much; where those are too many as
    well the message counts as not replayable, for its fields could not be opened.
    """
    patterns = sorted(map(pattern, governance.sealed), key=len, reverse=True)  # the inner first
    patterns = list(dict.fromkeys(patterns))
    sealed = tuple(patterns) if sum(map(len, patterns)) <= _MOST_SEALED else ()
    lost = governance.redacted or (governance.sealed and not sealed)
    return Governance(
        subject=governance.subject,
        expires_at=governance.expires_at,
        redacted=("…",) if lost else (),
        sealed=sealed,
    )


def _names_cut(wire: Wire) -> Wire:
    culprit = wire.culprit
    short = {name: getattr(culprit, name)[:60] for name in ("service_version", "git_sha", "host")}
    return msgspec.structs.replace(
        wire, culprit=msgspec.structs.replace(culprit, **short, traceparent=None)
    )


def _short(text: str) -> bytes:
    return plain(text[:_MOST_NAME]).encode()


log = logging.getLogger("holdfast.dlq")


COLLECTOR = "holdfast-dlq-collector"
"""The group that collects dead letters, unless told otherwise."""


_ROOM = 32_768  # bytes that the envelope adds to a message, at most
_FRAMING = 1_024  # what brokers add to the bytes of a message, at most
_LIMITS = (
    "on Kafka max.message.bytes of the topic, and max_request_size (kafka-python) or "
    "message.max.bytes (confluent) in the broker's URL; on NATS max_payload, on RabbitMQ "
    "max_message_size"
)


def ready(broker: Broker, topic: str, group: str = COLLECTOR, *, like: str | None = None) -> None:
    """Make sure that *topic* exists and keeps what is published before anybody collects it.

    RabbitMQ stores nothing for which there is no group, so the collector's is made at once.
    Where the adapter can, a new topic has room for an envelope beside the largest message
    of *like*, the topic of the originals.
    """
    if like is None:
        broker.create_topic(topic)
    else:
        try:
            BrokerPowers.of(broker).create_larger(topic, like=like, more=_ROOM)
        except BrokerDown:
            raise
        except HoldfastError as error:
            log.warning("topic %s has no room for large messages: %s", topic, error)
            broker.create_topic(topic)
    broker.create_group(topic, group)


class DeadLetterTopic:
    """Publishes dead letters to a topic of the broker that the message came from.

    When that fails the letter goes to *quarantine*, the database if there is one; without
    one the error goes out, and the message must not be acknowledged. *prepare* is called
    with the name of a dead-letter topic before its first use; `DeadLetterTopic.on(broker)` does
    what every broker needs.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        quarantine: DeadLetterDestination | None = None,
        prepare: Callable[[str], object] | None = None,
        most_header_bytes: int | None = None,
    ) -> None:
        self._sink = sink
        self._system = system_of(sink)
        self._quarantine = quarantine
        self._ready: Callable[[str, str], object] | None = None
        if prepare is not None:
            self._ready = lambda topic, _like: prepare(topic)
        self._prepared: set[str] = set()
        self._lock = threading.Lock()  # handlers run in threads, which do not share a sink
        limit = sink.caps.max_headers
        if most_header_bytes is None:
            most_header_bytes = MOST_BYTES if limit is None else min(MOST_BYTES, limit // 2)
        self._most = most_header_bytes

    @classmethod
    def on(
        cls, broker: Broker, *, quarantine: DeadLetterDestination | None = None
    ) -> DeadLetterTopic:
        """Return a home on *broker* that makes its topics ready by itself."""
        home = cls(BrokerPowers.of(broker).larger_sink(_ROOM), quarantine=quarantine)
        home._ready = lambda topic, like: ready(broker, topic, like=like)
        return home

    def put(self, letter: DeadLetter, connection: Connection | None = None) -> None:
        """Return once the broker has taken *letter*, or the quarantine has."""
        try:
            self._publish(letter)
        except HoldfastError as error:
            METRICS.write_failed("topic")
            if self._quarantine is None:
                raise DependencyDown(
                    f"dead letter {letter.dlq_id} cannot be published: {error}"
                ) from error
            log.warning("dead letter %s goes to quarantine: %s", letter.dlq_id, error)
            kept = msgspec.structs.replace(letter, origin="quarantine")
            self._quarantine.put(kept, connection)
        else:
            METRICS.put(letter)

    def close(self) -> None:
        """Release the sink."""
        self._sink.close()

    def _publish(self, letter: DeadLetter) -> None:
        message = to_topic(letter, most=self._most)
        with self._lock:
            if self._ready is not None and message.topic not in self._prepared:
                self._ready(message.topic, letter.message.topic)
                self._prepared.add(message.topic)
            (result,) = self._sent(message)
            if isinstance(result.error, MessageTooLarge):
                # A message near the broker's limit leaves no room for more than the least.
                message = to_topic(letter, most=0)
                (result,) = self._sent(message)
        if isinstance(result.error, MessageTooLarge):
            raise _no_room(message, result.error) from result.error
        if result.error is not None:
            raise result.error

    def _sent(self, message: Message) -> list[Published]:
        return counted(self._system, [message], lambda: self._sink.publish([message]))


def _no_room(message: Message, error: MessageTooLarge) -> DependencyDown:
    return DependencyDown(
        f"it does not fit on {message.topic}: raise the limit to {error.size + _FRAMING:,} bytes "
        f"or more ({_LIMITS}), or give the home a quarantine=DeadLetterStore(engine)"
    )
