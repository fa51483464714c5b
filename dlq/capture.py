"""Capture: a message and an error become a dead letter."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.classification import recognise
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.letter import (
    Class,
    Coordinates,
    Culprit,
    DeadLetter,
    Failure,
    Governance,
    History,
    Lineage,
    Occurrence,
    Stage,
    dead_letter_id,
    occurrence_id,
)
from holdfast.dlq.raised import clean, taken_apart, text_of, trace_of, type_name
from holdfast.dlq.redaction import SCRUBBED, Redaction
from holdfast.errors import ConfigurationError, DecodeFailed, Remedy
from holdfast.message import REPLAY_HEADER

if TYPE_CHECKING:
    from holdfast.dlq.vault import Vault
    from holdfast.message import Message
    from holdfast.ports import Delivery

PLAN_HEADER = "x-replay-plan"
COUNT_HEADER = "x-replay-count"
TOPIC_HEADER = "x-replay-topic"
_MOST_NAME = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What is the same for every failure of one consumer: who it is, and how it protects data.

    *tenant*, *entity* and *subject* name the header, or with a leading `$.` the payload
    field, that says whose message it is. *fields* are encrypted by the *vault* with the
    subject's own key.
    """

    service_version: str = ""
    git_sha: str = ""
    host: str = ""
    broker: str = ""
    tenant: str | None = None
    entity: str | None = None
    subject: str | None = None
    redaction: Redaction = SCRUBBED
    vault: Vault | None = None
    fields: tuple[str, ...] = ()
    commutative: bool = False
    """Whether the handler's messages of one key may take effect in any order."""
    retention: float | None = None
    """Seconds for which a closed message is kept; None: as long as the store says."""

    def __post_init__(self) -> None:
        if self.fields and self.vault is None:
            raise ConfigurationError("fields are to be encrypted, but no vault holds the keys")
        if self.fields and self.subject is None:
            raise ConfigurationError("fields are encrypted per subject: say where it is, subject=…")


NOWHERE = Origin()


def capture(
    message: Message,
    error: BaseException,
    *,
    group: str,
    handler: str,
    delivery: Delivery | None = None,
    attempts: int = 1,
    stage: Stage | str | None = None,
    clock: Clock = SYSTEM_CLOCK,
    origin: Origin = NOWHERE,
) -> DeadLetter:
    """Return the dead letter of *message*, which *handler* in *group* failed to handle.

    Nothing about *message* or *error* makes this fail: texts are cut, cycles end, secrets
    are taken out. An attribute `__holdfast_fingerprint__` of the error groups it explicitly.
    """
    message, lineage = _original(message)
    at = clock.now()
    host = origin.host or _host()
    dlq_id = dead_letter_id(group, handler, message)
    failure = _failure(error, stage, origin.redaction)
    seconds = at.timestamp()
    occurrence = Occurrence(
        id=occurrence_id(dlq_id, at, host, lineage.replay_id),
        at=seconds,
        error=f"{failure.root.type}: {failure.root.text[:200]}",
        attempts=attempts,
        host=host,
        replay_id=lineage.replay_id,
    )
    kept, governance = _protected(message, origin)
    if origin.retention is not None:
        expires = seconds + origin.retention
        governance = msgspec.structs.replace(governance, expires_at=expires)
    return DeadLetter(
        dlq_id=dlq_id,
        message=kept,
        coordinates=_coordinates(message, delivery, origin.broker),
        culprit=Culprit(
            group=group,
            handler=handler,
            service_version=origin.service_version,
            git_sha=origin.git_sha,
            host=host,
            traceparent=message.traceparent,
            commutative=origin.commutative,
        ),
        failure=failure,
        history=History(
            attempts=attempts,
            timeouts=int(failure.kind is Class.TIMEOUT),
            first_failed_at=seconds,
            last_failed_at=seconds,
            failures=(occurrence,),
        ),
        lineage=lineage,
        governance=governance,
    )


def class_of(error: BaseException) -> Class:
    """Return the class of *error*, as triage sees it."""
    if any("Timeout" in base.__name__ for base in type(error).__mro__):
        return Class.TIMEOUT
    match recognise(error):
        case Remedy.DEAD_LETTER | Remedy.FIX:
            return Class.POISON
        case Remedy.PAUSE:
            return Class.DEPENDENCY
        case Remedy.RETRY:
            return Class.TRANSIENT
        case _:
            return Class.UNKNOWN


def stage_of(error: BaseException) -> Stage:
    """Return how far a message came that failed with *error*."""
    if isinstance(error, DecodeFailed):
        return Stage.VALIDATE if error.position.startswith("$") else Stage.DESERIALIZE
    name = type_name(error)
    if name.endswith("ValidationError"):
        return Stage.VALIDATE
    return Stage.DESERIALIZE if name.endswith("DecodeError") else Stage.HANDLE


def _failure(error: BaseException, stage: Stage | str | None, redaction: Redaction) -> Failure:
    chain, also = taken_apart(error, redact=redaction.scrub)
    explicit = getattr(error, "__holdfast_fingerprint__", None)
    try:
        kind = class_of(error)
    except Exception:  # noqa: BLE001 - an error with broken attributes is still a failure
        kind = Class.UNKNOWN
    return Failure(
        stage=stage_of(error) if stage is None else Stage(stage),
        kind=kind,
        chain=chain,
        also=also,
        explicit=clean(explicit[:_MOST_NAME]) if isinstance(explicit, str) else None,
        trace=trace_of(chain),
    )


def _original(message: Message) -> tuple[Message, Lineage]:
    """Return *message* as it was first sent, and by which replay it came."""
    headers = message.headers
    if REPLAY_HEADER not in headers:
        return message, Lineage()
    count = headers.text(COUNT_HEADER) or ""
    lineage = Lineage(
        replay_id=headers.text(PLAN_HEADER), replay_count=int(count) if count.isdecimal() else 1
    )
    marks = {name for name, _ in headers if name.startswith("x-replay-")}
    topic = headers.text(TOPIC_HEADER) or message.topic
    return message.with_(headers=headers.without(marks), topic=topic), lineage


def _coordinates(message: Message, delivery: Delivery | None, broker: str) -> Coordinates:
    if delivery is None:
        return Coordinates(broker=broker, topic=message.topic)
    return Coordinates(
        broker=broker,
        topic=delivery.lane.topic,
        lane=delivery.lane.partition,
        position=delivery.position,
        stored_at=delivery.timestamp,
        count=delivery.count,
    )


def _protected(message: Message, origin: Origin) -> tuple[Message, Governance]:
    """Return *message* as it may be kept, and what was done to it."""
    known = _Fields(message)
    subject = known.find(origin.subject)
    payload, redacted = origin.redaction.apply(message.payload)
    sealed: tuple[str, ...] = ()
    if origin.vault is not None and origin.fields and subject is not None:
        payload, sealed, gone = origin.vault.seal_or_remove(payload, origin.fields, subject)
        redacted += gone
    if payload is not message.payload:
        message = message.with_(payload=payload)
    return message, Governance(
        tenant=known.find(origin.tenant),
        entity_ref=known.find(origin.entity),
        subject=subject,
        redacted=redacted,
        sealed=sealed,
    )


class _Fields:
    """Looks up what a header or a payload field says; decodes the payload at most once."""

    def __init__(self, message: Message) -> None:
        self._message = message
        self._body: Any = None

    def find(self, name: str | None) -> str | None:
        """Return the text of *name*, or None."""
        if name is None:
            return None
        if not name.startswith("$."):
            text = self._message.headers.text(name)
            return None if text is None else clean(text)[:_MOST_NAME]
        if self._body is None:
            self._body = {}
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self._body = msgspec.json.decode(self._message.payload or b"{}")
        value = self._body
        for part in name[2:].split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return None if value is None else clean(str(value))[:_MOST_NAME]


def _host() -> str:
    return socket.gethostname()


__all__ = ["NOWHERE", "Origin", "capture", "class_of", "stage_of", "text_of"]
