"""The envelope on a broker: raw body and key, everything else in bounded headers.

`x-dlq-envelope` is JSON. When it would grow beyond the limit it is made smaller step by
step, by whole parts and never by cutting JSON text, down to who failed on what; so it can
always be read back. `x-dlq-id`, `x-dlq-error` and the like repeat what people look for.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.columns import plain
from holdfast.dlq.fields import pattern
from holdfast.dlq.letter import (
    SCHEMA_VERSION,
    Class,
    Coordinates,
    Culprit,
    DeadLetter,
    Failure,
    Governance,
    History,
    Known,
    Lineage,
    Occurrence,
    Raised,
    Stage,
    dead_letter_id,
    dlq_topic,
)
from holdfast.dlq.rows import fingerprint_of
from holdfast.errors import PoisonMessage
from holdfast.headers import Headers
from holdfast.ids import derived_id

if TYPE_CHECKING:
    from holdfast.message import Message

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
    culprit: Culprit
    failure: Failure
    history: History
    lineage: Lineage = Lineage()
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
    dlq_id = _identity(version.dlq_id, Culprit(group=group, handler=handler), original)
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
        culprit=Culprit(group=group, handler=handler),
        failure=Failure(
            stage=Stage.HANDLE, kind=Class.UNKNOWN, chain=(Raised(type=error, text=text),)
        ),
        history=History(first_failed_at=at, last_failed_at=at, failures=(occurrence,)),
        lineage=lineage,
        schema_version=version.schema_version,
        newer=envelope if isinstance(envelope, dict) else {"envelope": envelope},
    )


def _lineage(envelope: Any) -> Lineage:
    """Return which replay sent the message, if *envelope* still says it as this version does."""
    try:
        return msgspec.convert(envelope["lineage"], Lineage)
    except (msgspec.ValidationError, LookupError, TypeError):
        return Lineage()


def _identity(given: str, culprit: Culprit, original: Message) -> str:
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


def _known(failure: Failure, *, hints: bool) -> Known:
    found = fingerprint_of(failure)
    said = tuple(hint[:_MOST_NAME] for hint in found.hints[:_MOST_HINTS]) if hints else ()
    return Known(found.value, found.by, said, found.algorithm)


def _fewer(raised: Raised, frames: int, text: int = 500) -> Raised:
    kept = raised.frames[-frames:] if frames else ()
    return Raised(type=raised.type[:_MOST_NAME], text=raised.text[:text], frames=kept)


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
