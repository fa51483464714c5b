"""Capture: a message and an error become a dead letter.

Origin: what is the same for every failure of one consumer, and how it protects data.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.classification import recognise
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.capture.exceptions import taken_apart, trace_of
from holdfast.dlq.letter import (
    Class,
    Coordinates,
    DeadLetter,
    FailedConsumer,
    Failure,
    FailureStage,
    Governance,
    LetterHistory,
    Occurrence,
    ReplayHistory,
    dead_letter_id,
    former_letter_ids,
    occurrence_id,
)
from holdfast.dlq.protection.redaction import SCRUBBED, Redaction, values_at, within, without
from holdfast.errors import ConfigurationError, DecodeFailed, Remedy
from holdfast.headers import REPLAY_GROUP, REPLAY_MARKS, ReplayHeaders
from holdfast.message import counted
from holdfast.scrubbing import clean, text_of, type_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.dlq.protection.vault import Vault
    from holdfast.message import Message
    from holdfast.ports import Delivery


log = logging.getLogger("holdfast.dlq")
_MOST_NAME = 255
UNKNOWN = "(unknown)"
"""The subject of fields in messages that do not say whose they are."""
_RULES = ("tenant", "entity", "subject", "retention")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """What is the same for every failure of one consumer: who it is, and how it protects data.

    *tenant*, *entity* and *subject* name the header, or with a leading `$.` the payload
    field, that says whose message it is. *fields* are encrypted by the *vault* with the
    subject's own key; with that of `(unknown)` in a message that does not say. A payload that
    is not JSON is encrypted whole, or removed where there are only fields to redact.
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
    """Seconds after its failure from which on a message may go, once it is closed; None: as
    long after its closing as the store says."""

    def __post_init__(self) -> None:
        if self.fields and self.vault is None:
            raise ConfigurationError("fields are to be encrypted, but no vault holds the keys")
        if self.fields and self.subject is None:
            raise ConfigurationError("fields are encrypted per subject: say where it is, subject=…")

    @property
    def hidden(self) -> tuple[str, ...]:
        """The paths whose values are removed or encrypted."""
        return self.redaction.paths + self.fields

    def rules(self, handler: str = "") -> str:
        """Return how it protects data, for those who make a letter in its place.

        They find the name of the *handler* there too, where it is not that of the topic.
        """
        said = {"paths": self.hidden, **{name: getattr(self, name) for name in _RULES}}
        said["handler"] = handler
        return msgspec.json.encode({name: one for name, one in said.items() if one}).decode()

    @classmethod
    def by(cls, rules: str | None) -> CaptureSettings:
        """Return an origin with these *rules*; without the vault what it encrypts is removed."""
        said: dict[str, Any] = {} if rules is None else msgspec.json.decode(rules)
        said.pop("handler", None)
        paths = tuple(said.pop("paths", ()))
        return cls(redaction=Redaction(paths=paths), **said)

    @staticmethod
    def handler_by(rules: str | None) -> str | None:
        """Return the handler that these *rules* name; None: it has the name of its topic."""
        said: dict[str, Any] = {} if rules is None else msgspec.json.decode(rules)
        return said.get("handler")

    def over(self, other: CaptureSettings) -> CaptureSettings:
        """Return this origin with what *other* says wherever it says nothing itself."""
        silent = {
            field.name: getattr(other, field.name)
            for field in fields(self)
            if getattr(self, field.name) == field.default
        }
        return replace(self, **silent)


NOWHERE = CaptureSettings()


def is_opaque(payload: bytes | None, origin: CaptureSettings) -> bool:
    """Whether *payload* holds fields to hide that cannot be told apart."""
    return within(payload, origin.hidden) != origin.hidden


def protected(message: Message, origin: CaptureSettings) -> tuple[Message, Governance]:
    """Return *message* as it may be kept, and what was done to it."""
    known = _Fields(message)
    subject = known.find(origin.subject)
    payload = message.payload
    redacted: tuple[str, ...] = ()
    sealed: tuple[str, ...] = ()
    opaque = is_opaque(payload, origin)
    if opaque:
        log.warning("message %s is not JSON, its fields cannot be told apart: all of it is %s",
                    message.id, "encrypted" if origin.fields else "removed")  # fmt: skip
    if not (opaque and origin.fields):  # what a key can open is better than nothing
        payload, redacted = origin.redaction.apply(payload)
    if origin.vault is not None and origin.fields:
        # A message that lacks its subject is just the kind that fails: it has secrets too.
        whose = UNKNOWN if subject is None else subject
        payload, sealed, gone = origin.vault.seal_or_remove(
            payload, origin.fields, whose, made=message.time, message_id=message.id
        )
        redacted += gone
        if subject is None and sealed:
            log.warning("message %s does not say whose it is (%s): its fields are encrypted for %s",
                        message.id, origin.subject, UNKNOWN)  # fmt: skip
            subject = UNKNOWN
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


_WITHHELD = "(withheld: the payload is not JSON, so what must be hidden cannot be told apart)"
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


def capture(
    message: Message,
    error: BaseException,
    *,
    group: str,
    handler: str,
    delivery: Delivery | None = None,
    attempts: int = 1,
    stage: FailureStage | str | None = None,
    clock: Clock = SYSTEM_CLOCK,
    origin: CaptureSettings = NOWHERE,
    function: str = "",
    formerly: Sequence[str] = (),
) -> DeadLetter:
    """Return the dead letter of *message*, which *handler* in *group* failed to handle.

    *function* is what the handler is called in the code, *formerly* what it may have been: by
    those names earlier versions knew it.

    Nothing about *message* or *error* makes this fail: texts are cut, cycles end, secrets
    are taken out. An attribute `__holdfast_fingerprint__` of the error groups it explicitly.
    """
    marks = _marks(message, delivery, group)
    message, lineage = (message, ReplayHistory()) if marks is None else _original(message, marks)
    at = clock.now()
    host = origin.host or _host()
    # An edited payload or a renamed handler would give a replay another identity: it is the same.
    known = marks.dlq_id if marks is not None and _UUID.fullmatch(marks.dlq_id) else None
    dlq_id = known or dead_letter_id(group, handler, message, origin.hidden)
    failure = _failure(error, stage, scrubber(message, origin))
    seconds = at.timestamp()
    occurrence = Occurrence(
        id=occurrence_id(dlq_id, at, host, lineage.replay_id),
        at=seconds,
        error=f"{failure.root.type}: {failure.root.text[:200]}",
        attempts=attempts,
        host=host,
        replay_id=lineage.replay_id,
    )
    kept, governance = protected(message, origin)
    if origin.retention is not None:
        expires = seconds + origin.retention
        governance = msgspec.structs.replace(governance, expires_at=expires)
    return DeadLetter(
        dlq_id=dlq_id,
        message=kept,
        coordinates=_coordinates(message, delivery, origin.broker),
        culprit=FailedConsumer(
            group=group,
            handler=handler,
            service_version=origin.service_version,
            git_sha=origin.git_sha,
            host=host,
            traceparent=message.traceparent,
            function=function,
            commutative=origin.commutative,
        ),
        failure=failure,
        history=LetterHistory(
            attempts=attempts,
            timeouts=int(failure.kind is Class.TIMEOUT),
            first_failed_at=seconds,
            last_failed_at=seconds,
            failures=(occurrence,),
        ),
        lineage=lineage,
        governance=governance,
        formerly=()
        if known or not formerly
        else former_letter_ids(group, handler, formerly, message, origin.hidden),
    )


def scrubber(message: Message, origin: CaptureSettings) -> Callable[[str], str]:
    """Return how a text about *message* is rid of what must not be kept."""
    if is_opaque(message.payload, origin):
        return lambda _: _WITHHELD
    hidden = values_at(message.payload, origin.hidden)
    return lambda text: without(origin.redaction.scrub(text), hidden)


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


def stage_of(error: BaseException) -> FailureStage:
    """Return how far a message came that failed with *error*."""
    if isinstance(error, DecodeFailed):
        return FailureStage.VALIDATE if error.position.startswith("$") else FailureStage.DESERIALIZE
    name = type_name(error)
    if name.endswith("ValidationError"):
        return FailureStage.VALIDATE
    return FailureStage.DESERIALIZE if name.endswith("DecodeError") else FailureStage.HANDLE


def _failure(
    error: BaseException, stage: FailureStage | str | None, redact: Callable[[str], str]
) -> Failure:
    chain, also = taken_apart(error, redact=redact)
    explicit, kind = None, Class.UNKNOWN
    with contextlib.suppress(Exception):  # an error with broken attributes is still a failure
        kind = class_of(error)
        explicit = getattr(error, "__holdfast_fingerprint__", None)
    return Failure(
        stage=stage_of(error) if stage is None else FailureStage(stage),
        kind=kind,
        chain=chain,
        also=also,
        explicit=clean(redact(explicit[:_MOST_NAME])) if isinstance(explicit, str) else None,
        trace=trace_of(chain),
    )


def _marks(message: Message, delivery: Delivery | None, group: str) -> ReplayHeaders | None:
    """Return the marks of *message*, if a replay for *group* sent it."""
    if REPLAY_GROUP not in message.headers:
        return None
    marks = counted(message)
    if marks is None and delivery is not None:
        marks = counted(message, delivery.lane.topic)
    return marks if marks is not None and marks.group == group else None


def _original(message: Message, marks: ReplayHeaders) -> tuple[Message, ReplayHistory]:
    """Return *message* as it was first sent, and by which replay it came."""
    lineage = ReplayHistory(replay_id=marks.plan, replay_count=marks.count)
    own = message.headers.without(REPLAY_MARKS)
    return message.with_(headers=own, topic=marks.topic, replayed=False), lineage


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


def _host() -> str:
    return socket.gethostname()


__all__ = ["NOWHERE", "CaptureSettings", "capture", "class_of", "scrubber", "stage_of", "text_of"]
