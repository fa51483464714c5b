"""Dead letters as rows and back; names too long for a column are cut, never refused."""

from __future__ import annotations

import hashlib
import re
from base64 import b64decode, b64encode
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.db.text import ascii_only, cut, document, plain
from holdfast.dlq.capture import fingerprint
from holdfast.dlq.letter import (
    Coordinates,
    DeadLetter,
    ExceptionInfo,
    FailedConsumer,
    Failure,
    Governance,
    LetterHistory,
    Occurrence,
    ReplayHistory,
)
from holdfast.dlq.store.schema import message as message_table
from holdfast.message import Message
from holdfast.stored_message import header_text, headers_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy.engine import RowMapping

    Row = Mapping[str, Any] | RowMapping

PENDING, CONFIRMED, DISCARDED, PARKED = "pending", "confirmed", "discarded", "parked"
CLOSED = (CONFIRMED, DISCARDED, PARKED)
_MOST_NUMBER = 2**31 - 1
_MOST_HINT, _MOST_HINTS = 200, 12
_WAYS = ("explicit", "stack", "message")
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_LAST_MOMENT = 253_402_300_799.0  # in the year 9999
_ATTRIBUTES = {
    "id": "message_id", "type": "type", "source": "source", "correlation_id": "correlation_id",
    "causation_id": "causation_id", "content_type": "content_type", "schema": "schema_ref",
    "traceparent": "traceparent",
}  # fmt: skip
"""What a message says of itself, and in which columns."""
_LENGTHS: dict[str, int | None] = {
    column.name: getattr(column.type, "length", None) for column in message_table.columns
}
_occurrences = msgspec.json.Decoder(tuple[Occurrence, ...]).decode


class LetterEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a dead letter that are kept as one document."""

    coordinates: Coordinates
    culprit: FailedConsumer
    failure: Failure
    governance: Governance = Governance()
    timeouts: int = 0
    """How many of its failures were timeouts."""
    newer: dict[str, Any] | None = None


_envelope = msgspec.json.Decoder(LetterEnvelope).decode


def fingerprint_of(failure: Failure) -> fingerprint.Fingerprint:
    """Return the fingerprint of *failure* by today's rules.

    One that came without all its frames has the fingerprint that it had with them.
    """
    known = failure.known
    if (
        known is not None
        and known.algorithm == fingerprint.ALGORITHM
        and _DIGEST.fullmatch(known.value)
    ):
        by = known.by if known.by in _WAYS else "message"
        hints = tuple(plain(hint[:_MOST_HINT]) for hint in known.hints[:_MOST_HINTS])
        return fingerprint.Fingerprint(known.value, "", by, hints)
    return fingerprint.fingerprint(
        [_error(raised) for raised in failure.chain],
        explicit=failure.explicit,
        also=[raised.type for raised in failure.also],
    )


def group_of(letter: DeadLetter, found: fingerprint.Fingerprint) -> str:
    """Return the id of the failure group of *letter*."""
    return fingerprint.group_id(
        found.value, letter.culprit.group, letter.message.topic, letter.culprit.handler
    )


def row_of(
    letter: DeadLetter, found: fingerprint.Fingerprint, *, now: float, plainly: bool = False
) -> dict[str, Any]:
    """Return the row of *letter*; *plainly*: in characters that every database has."""
    row = _row(letter, found, now)
    if plainly:
        for name, value in row.items():
            if isinstance(value, str) and not value.isascii():
                row[name] = ascii_only(value)[: _LENGTHS[name]]
        row["exact"] = _exact(letter.message, row)
    return row


def _row(letter: DeadLetter, found: fingerprint.Fingerprint, now: float) -> dict[str, Any]:
    message, failure, culprit = letter.message, letter.failure, letter.culprit
    history, governance = letter.history, letter.governance
    return {
        "dlq_id": letter.dlq_id,
        "group_id": group_of(letter, found),
        "state": PENDING,
        **message_columns(message),
        "broker": cut(letter.coordinates.broker, 64),
        "lane": whole(letter.coordinates.lane),
        "position": _position(letter.coordinates.position),
        "consumer_group": cut(culprit.group),
        "handler": cut(culprit.handler),
        "service_version": cut(culprit.service_version, 64),
        "stage": failure.stage.value,
        "class": failure.kind.value,
        "error_type": cut(failure.root.type),
        "error_text": plain(failure.root.text),
        "fingerprint": found.value,
        "envelope": document(
            LetterEnvelope(
                coordinates=letter.coordinates,
                culprit=culprit,
                failure=failure,
                governance=governance,
                timeouts=history.timeouts,
                newer=letter.newer,
            )
        ),
        "schema_version": whole(letter.schema_version),
        "origin": cut(letter.origin, 16),
        "tenant": cut(governance.tenant),
        "entity_ref": cut(governance.entity_ref),
        "subject": cut(governance.subject),
        "attempts": whole(history.attempts),
        "occurrences": max(1, len(history.failures)),
        "first_failed_at": _moment(history.first_failed_at),
        "last_failed_at": _moment(history.last_failed_at),
        "history": document(history.failures),
        "stored_at": now,
        "replay_count": whole(letter.lineage.replay_count),
        "revision": letter.lineage.revision,
        "replayable": letter.is_replayable,
        "verdict": "",
        "retries": 0,
        "due_at": None,
        "closed_at": None,
        "closed_by": None,
        "closed_reason": None,
        "expires_at": None if governance.expires_at is None else _moment(governance.expires_at),
    }


def message_columns(message: Message) -> dict[str, Any]:
    """Return the columns of *message* itself; `message_of` makes the same of them again."""
    row = {
        "message_id": cut(message.id),
        "topic": cut(message.topic),
        "type": cut(message.type),
        "source": plain(message.source),
        "message_key": message.key,
        "key_hash": key_hash(message.key),
        "payload": message.payload,
        "headers": header_text(message.headers),
        "event_at": min(message.time.timestamp(), _LAST_MOMENT),
        "correlation_id": cut(message.correlation_id),
        "causation_id": cut(message.causation_id),
        "content_type": cut(message.content_type),
        "schema_ref": None if message.schema is None else plain(message.schema),
        "traceparent": cut(message.traceparent),
        "shape": fingerprint.shape(message.payload, message.schema),
    }
    row["exact"] = _exact(message, row)
    return row


def letter_of(row: Row) -> DeadLetter:
    """Return the dead letter in *row*, with the original message."""
    envelope = _envelope(row["envelope"])
    return DeadLetter(
        dlq_id=row["dlq_id"],
        message=message_of(row),
        coordinates=envelope.coordinates,
        culprit=envelope.culprit,
        failure=envelope.failure,
        history=LetterHistory(
            attempts=row["attempts"],
            timeouts=envelope.timeouts,
            first_failed_at=row["first_failed_at"],
            last_failed_at=row["last_failed_at"],
            failures=occurrences(row["history"]),
        ),
        lineage=ReplayHistory(replay_count=row["replay_count"], revision=row["revision"]),
        governance=envelope.governance,
        schema_version=row["schema_version"],
        origin=row["origin"],
        newer=envelope.newer,
    )


def least(letter: DeadLetter, error: BaseException) -> DeadLetter:
    """Return of *letter* what is needed to send it again, and why the rest is not kept."""
    text = f"the database refused what was known of it: {type(error).__name__}"
    message = letter.message.with_(
        source="", correlation_id=None, causation_id=None, traceparent=None
    )
    failure = msgspec.structs.replace(
        letter.failure, chain=(ExceptionInfo(type="unstorable", text=text),), also=(),
        explicit=None, trace="", known=None,
    )  # fmt: skip
    history = msgspec.structs.replace(
        letter.history,
        failures=tuple(msgspec.structs.replace(one, error=text) for one in letter.history.failures),
    )
    return msgspec.structs.replace(letter, message=message, failure=failure, history=history)


def message_of(row: Row) -> Message:
    """Return the original message in *row*."""
    key, payload = row["message_key"], row["payload"]
    found = Message(
        id=row["message_id"],
        topic=row["topic"],
        payload=None if payload is None else bytes(payload),
        type=row["type"],
        source=row["source"],
        key=None if key is None else bytes(key),
        headers=headers_of(row["headers"]),
        time=moment(row["event_at"]),
        correlation_id=row["correlation_id"],
        causation_id=row["causation_id"],
        content_type=row["content_type"],
        schema=row["schema_ref"],
        traceparent=row["traceparent"],
    )
    return found if row["exact"] is None else found.with_(**exact_of(row["exact"]))


def exact_of(text: str) -> dict[str, str]:
    """Return what the column `exact` keeps: attributes that their own columns do not take."""
    found: dict[str, str] = msgspec.json.decode(text)
    return {
        name: b64decode(value).decode("utf-8", "surrogatepass") for name, value in found.items()
    }


def is_of(row: Row, message_id: str) -> bool:
    """Whether the letter in *row* is of the message *message_id*."""
    whole = None if row["exact"] is None else exact_of(row["exact"]).get("id")
    return row["message_id"] == cut(message_id) if whole is None else whole == message_id


def _exact(message: Message, row: Row) -> str | None:
    """Return the attributes of *message* that their columns in *row* have changed; None: none.

    A replay must carry the very id, or the dedup of its consumer does not know it.
    """
    changed = {
        name: b64encode(text.encode("utf-8", "surrogatepass")).decode()
        for name, column in _ATTRIBUTES.items()
        if (text := getattr(message, name)) != row[column]
    }
    return document(changed) if changed else None


def read_envelope(text: str) -> LetterEnvelope:
    """Return the parts kept in the column `envelope`."""
    return _envelope(text)


def occurrences(text: str) -> tuple[Occurrence, ...]:
    """Return the failures kept in the column `history`."""
    return _occurrences(text)


def key_hash(key: bytes | None) -> str | None:
    """Return what stands for *key* where keys are counted and searched."""
    return None if key is None else hashlib.sha256(key).hexdigest()[:32]


def moment(seconds: float) -> datetime:
    """Return the moment in the column `event_at`; the last one that has a date if it is later.

    As a number the last microseconds of the year 9999 are the year 10000.
    """
    return datetime.fromtimestamp(min(seconds, _LAST_MOMENT), UTC)


def _moment(seconds: float) -> float:
    """Return *seconds* as a moment that has a date: another's clock may say anything."""
    return max(0.0, min(seconds, _LAST_MOMENT)) if seconds == seconds else 0.0


def whole(number: int | None) -> int | None:
    """Return *number* as a column takes it: what somebody wrote into a header may be any."""
    return None if number is None else max(-_MOST_NUMBER, min(number, _MOST_NUMBER))


def _position(position: object) -> str | None:
    return None if position is None else cut(str(position), 64)


def _error(raised: ExceptionInfo) -> fingerprint.Error:
    calls = [
        fingerprint.FrameCall(frame.module, frame.function, frame.in_app) for frame in raised.frames
    ]
    return fingerprint.Error(raised.type, raised.text, calls)


def change_row(row: Any, kind: str, at: float, n: int = 1) -> dict[str, Any]:
    """Return one change of the figures of the group of *row*."""
    return {
        "group_id": row["group_id"],
        "kind": kind,
        "n": n,
        "at": at,
        "key_hash": row["key_hash"],
        "tenant": row["tenant"],
        "version": row["service_version"],
    }
