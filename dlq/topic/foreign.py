"""Dead letters that other tools wrote: Kafka Connect, Spring, and Kafka's own (KIP-1191)."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from holdfast.dlq.capture.exceptions import MOST_TRACE
from holdfast.dlq.letter import (
    Class,
    Coordinates,
    DeadLetter,
    ExceptionInfo,
    FailedConsumer,
    Failure,
    FailureStage,
    LetterHistory,
    Occurrence,
    dead_letter_id,
    occurrence_id,
)
from holdfast.dlq.store.rows import moment
from holdfast.headers import Headers
from holdfast.ids import derived_id
from holdfast.scrubbing import MOST_TEXT, clean, scrubbed

if TYPE_CHECKING:
    from datetime import datetime

    from holdfast.message import Message

CONNECT, SPRING, KAFKA = "__connect.errors.", "kafka_dlt-", "__dlq.errors."
PREFIXES = (CONNECT, SPRING, KAFKA)
_SPRING_CAUSE = "exception-cause-fqcn"
_FIRST = ("original-topic", "original-partition", "original-offset", "original-timestamp")
_TIMEOUTS = ("TimeoutException", "SocketTimeoutException")
_STAGES = {
    "KEY_CONVERTER": FailureStage.DESERIALIZE,
    "VALUE_CONVERTER": FailureStage.DESERIALIZE,
    "HEADER_CONVERTER": FailureStage.DESERIALIZE,
    "TRANSFORMATION": FailureStage.VALIDATE,
    "KAFKA_PRODUCE": FailureStage.PUBLISH,
    "TASK_PUT": FailureStage.HANDLE,
}


def is_foreign(message: Message) -> bool:
    """Whether another tool dead-lettered *message*."""
    return any(name.startswith(PREFIXES) for name, _ in message.headers)


def imported(message: Message, *, stored_at: float | None = None) -> DeadLetter:
    """Return the letter that the headers of another tool describe.

    Body, key and the application's own headers are the original's; identity follows from
    the coordinates that the tool noted. It failed when the broker *stored* the letter.
    """
    prefix = next(p for p in PREFIXES if any(n.startswith(p) for n, _ in message.headers))
    said = _said(message, prefix)
    coordinates, group, handler = _whence(message, prefix, said)
    own = (pair for pair in message.headers if not pair[0].startswith(prefix))
    original = message.with_(
        id=_original_id(message, coordinates),
        topic=coordinates.topic,
        headers=Headers.received(own),
        time=_event_time(message, said),
    )
    failure = _failure(prefix, said)
    dlq_id = dead_letter_id(group, handler, original)
    failed = message.time if stored_at is None else moment(max(stored_at, 0.0))
    at = failed.timestamp()
    attempts = _number(said.get("delivery.count"), text=True) or 1
    occurrence = Occurrence(
        id=occurrence_id(dlq_id, failed, prefix, None),
        at=at,
        error=f"{failure.root.type}: {failure.root.text[:200]}",
        attempts=attempts,
    )
    return DeadLetter(
        dlq_id=dlq_id,
        message=original,
        coordinates=coordinates,
        culprit=FailedConsumer(group=group, handler=handler),
        failure=failure,
        history=LetterHistory(
            attempts=attempts, first_failed_at=at, last_failed_at=at, failures=(occurrence,)
        ),
        origin="imported",
    )


def _said(message: Message, prefix: str) -> dict[str, bytes]:
    """Return what the tool noted, by name.

    Of several values the last, which is the latest failure; but where the message came from
    first stays: Spring adds its topics for retries behind the original one.
    """
    said: dict[str, bytes] = {}
    for name, value in message.headers:
        if name.startswith(prefix) and value is not None:
            own = name[len(prefix) :]
            if not own.startswith(_FIRST) or own not in said:
                said[own] = value
    return said


def _whence(message: Message, prefix: str, said: dict[str, bytes]) -> tuple[Coordinates, str, str]:
    """Return coordinates, group and handler; Spring writes its numbers in binary."""
    spring = prefix == SPRING
    head = "original-" if spring else ""
    coordinates = Coordinates(
        broker="kafka",
        topic=_text(said.get(f"{head}topic")) or message.topic,
        lane=_number(said.get(f"{head}partition"), text=not spring),
        position=_number(said.get(f"{head}offset"), text=not spring),
    )
    if spring:
        return coordinates, _text(said.get("original-consumer-group")) or "unknown", "spring"
    if prefix == KAFKA:
        return coordinates, _text(said.get("group")) or "unknown", "share-group"
    connector = _text(said.get("connector.name")) or "unknown"
    return coordinates, f"connect-{connector}", f"connector.{connector}"


def _failure(prefix: str, said: dict[str, bytes]) -> Failure:
    if prefix == SPRING:
        kind = _text(said.get(_SPRING_CAUSE)) or _text(said.get("exception-fqcn"))
        text, trace = said.get("exception-message"), said.get("exception-stacktrace")
        outer = _text(said.get("exception-fqcn"))
        stage = (
            FailureStage.DESERIALIZE
            if "Deserialization" in f"{kind}{outer}"
            else FailureStage.HANDLE
        )
    elif prefix == CONNECT:
        kind = _text(said.get("exception.class.name"))
        text, trace = said.get("exception.message"), said.get("exception.stacktrace")
        outer = kind
        stage = _STAGES.get(_text(said.get("stage")), FailureStage.HANDLE)
    else:
        kind = outer = "share-group"
        text, trace = said.get("message"), None
        stage = FailureStage.HANDLE
    root = ExceptionInfo(type=(kind or "unknown")[:255], text=_safe(text, MOST_TEXT))
    chain = (root,) if outer in (kind, "") else (root, ExceptionInfo(type=outer[:255], text=""))
    return Failure(
        stage=stage, kind=_class(kind, stage), chain=chain, trace=_safe(trace, MOST_TRACE)
    )


def _class(kind: str, stage: FailureStage) -> Class:
    if kind.endswith(_TIMEOUTS):
        return Class.TIMEOUT
    if stage in (FailureStage.DESERIALIZE, FailureStage.VALIDATE):
        return Class.POISON
    return Class.UNKNOWN


def _original_id(message: Message, coordinates: Coordinates) -> str:
    """Return the message's own id; one derived from the dead-letter topic is derived anew."""
    if message.source != f"topic:{message.topic}" or coordinates.position is None:
        return message.id
    return derived_id(coordinates.topic, str(coordinates.lane), str(coordinates.position))


def _event_time(message: Message, said: dict[str, bytes]) -> datetime:
    """Return when it happened; a message that does not say has the time of its dead letter."""
    given = _number(said.get("original-timestamp"), text=False)
    if given is None or given < 0 or message.source != f"topic:{message.topic}":
        return message.time
    return moment(given / 1000)


def _safe(value: bytes | None, most: int) -> str:
    text = "" if value is None else value[: most * 4].decode("utf-8", "replace")
    return clean(scrubbed(text))[:most]


def _text(value: bytes | None) -> str:
    return "" if value is None else clean(value[:1000].decode("utf-8", "replace"))


def _number(value: bytes | None, *, text: bool) -> int | None:
    """Return a number written as *text*, or else big-endian in 4 or 8 bytes."""
    if value is None:
        return None
    if not text and len(value) in (4, 8):
        number: int = struct.unpack(">i" if len(value) == 4 else ">q", value)[0]
        return number
    if value.removeprefix(b"-").isdigit() and len(value) < 20:
        return int(value)
    return None
