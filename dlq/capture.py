"""Capture: a message and an error become a dead letter."""

from __future__ import annotations

import contextlib
import re
import socket
from typing import TYPE_CHECKING

import msgspec

from holdfast.classification import recognise
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.letter import (
    Class,
    Coordinates,
    Culprit,
    DeadLetter,
    Failure,
    History,
    Lineage,
    Occurrence,
    Stage,
    dead_letter_id,
    former_letter_ids,
    occurrence_id,
)
from holdfast.dlq.origin import NOWHERE, Origin, is_opaque, protected
from holdfast.dlq.raised import taken_apart, trace_of
from holdfast.dlq.redaction import values_at, without
from holdfast.dlq.replay.marks import Marks, counted
from holdfast.errors import DecodeFailed, Remedy
from holdfast.message import REPLAY_HEADER, REPLAY_MARKS
from holdfast.scrubbing import clean, text_of, type_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.message import Message
    from holdfast.ports import Delivery

_MOST_NAME = 255
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
    stage: Stage | str | None = None,
    clock: Clock = SYSTEM_CLOCK,
    origin: Origin = NOWHERE,
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
    message, lineage = (message, Lineage()) if marks is None else _original(message, marks)
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
        culprit=Culprit(
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
        history=History(
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


def scrubber(message: Message, origin: Origin) -> Callable[[str], str]:
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


def stage_of(error: BaseException) -> Stage:
    """Return how far a message came that failed with *error*."""
    if isinstance(error, DecodeFailed):
        return Stage.VALIDATE if error.position.startswith("$") else Stage.DESERIALIZE
    name = type_name(error)
    if name.endswith("ValidationError"):
        return Stage.VALIDATE
    return Stage.DESERIALIZE if name.endswith("DecodeError") else Stage.HANDLE


def _failure(
    error: BaseException, stage: Stage | str | None, redact: Callable[[str], str]
) -> Failure:
    chain, also = taken_apart(error, redact=redact)
    explicit, kind = None, Class.UNKNOWN
    with contextlib.suppress(Exception):  # an error with broken attributes is still a failure
        kind = class_of(error)
        explicit = getattr(error, "__holdfast_fingerprint__", None)
    return Failure(
        stage=stage_of(error) if stage is None else Stage(stage),
        kind=kind,
        chain=chain,
        also=also,
        explicit=clean(redact(explicit[:_MOST_NAME])) if isinstance(explicit, str) else None,
        trace=trace_of(chain),
    )


def _marks(message: Message, delivery: Delivery | None, group: str) -> Marks | None:
    """Return the marks of *message*, if a replay for *group* sent it."""
    if REPLAY_HEADER not in message.headers:
        return None
    marks = counted(message)
    if marks is None and delivery is not None:
        marks = counted(message, delivery.lane.topic)
    return marks if marks is not None and marks.group == group else None


def _original(message: Message, marks: Marks) -> tuple[Message, Lineage]:
    """Return *message* as it was first sent, and by which replay it came."""
    lineage = Lineage(replay_id=marks.plan, replay_count=marks.count)
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


__all__ = ["NOWHERE", "Origin", "capture", "class_of", "scrubber", "stage_of", "text_of"]
