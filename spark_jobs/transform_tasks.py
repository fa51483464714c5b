"""What the tasks of a transform do on executors: apply it, number its lanes, publish a round.

A message travels as the fields of a record that belong to the message itself, so that dead letters
and topics are transformed alike. One that the transform refuses goes on with the reason, never
without: it is put aside at the end.
"""

from __future__ import annotations

import logging
import sys
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.backoff import Backoff
from holdfast.brokers import connect
from holdfast.clock import SYSTEM_CLOCK
from holdfast.dlq.replay.edits import Transform
from holdfast.dlq.replay.simulation import loaded
from holdfast.dlq.store.rows import message_columns, message_of, read_envelope
from holdfast.errors import (
    ConfigurationError,
    DependencyDown,
    InvalidMessage,
    PoisonMessage,
    Transient,
)
from holdfast.scrubbing import told
from holdfast.spark_jobs import records
from holdfast.spark_jobs.decoding import delivery_of
from holdfast.spark_jobs.secrets import revealed
from holdfast.upcast import Upcasters, default

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

    from holdfast.clock import Clock
    from holdfast.errors import HoldfastError
    from holdfast.message import Message
    from holdfast.ports import Sink

log = logging.getLogger("holdfast.spark")
HEADER = "holdfast-transform"
"""The header that says what made the message: `shop.fixes:cents@2`."""
MESSAGE = (
    "message_id", "topic", "type", "source", "key", "key_hash", "payload", "headers", "event_at",
    "correlation_id", "causation_id", "content_type", "schema_ref", "traceparent", "exact", "shape",
)  # fmt: skip
"""The fields of a record that are the message."""
COORDINATES = ("seq", "lane", "position")
"""The fields that say where it was."""
_OWN = "`transform` string, `reason` string"
_PLACE = "`_lane` int, `_number` bigint, `kind` string, `round` int"
MADE, REFUSED = "made", "refused"
_CHUNK = 500
_MOST_REASON = 300


class MessageTransform(Protocol):
    """What is done to one message; raises for one that it refuses."""

    def __call__(self, message: Message) -> Message:
        """Return *message* as it shall be."""
        ...


def fields(*, as_letters: bool) -> tuple[str, ...]:
    """Return the fields of what comes out: of whole dead letters, or of messages."""
    return records.NAMES if as_letters else (*MESSAGE, *COORDINATES)


def made_ddl(*, as_letters: bool) -> str:
    """Return what `ApplyTransform` yields, as Spark's DDL."""
    return f"{records.ddl(fields(as_letters=as_letters))}, {_OWN}"


def staged_ddl(*, as_letters: bool) -> str:
    """Return what `NumberLane` yields, as Spark's DDL."""
    return f"{made_ddl(as_letters=as_letters)}, {_PLACE}"


def load_work(text: str) -> MessageTransform:
    """Return the transform called *text*: `module:function@version`, or a registry of upcasters.

    `shop.events:upcast@3` is the registry that the module got by `from holdfast import upcast`.
    """
    name, _, version = text.partition("@")
    found = loaded(name)
    if found is sys.modules[Upcasters.__module__] or found == default.upcast:
        found = default
    if not isinstance(found, Upcasters):
        return _Function(Transform.load(text))
    if not version:
        raise ConfigurationError(
            f"{text!r} has no version: write {name}@1, so that each message says what made it"
        )
    return found.apply


class _Function:
    """A function of the payload, held to what makes sense of one."""

    def __init__(self, transform: Transform) -> None:
        self._transform = transform

    def __call__(self, message: Message) -> Message:
        before = message.payload
        if before is None:
            return message  # a tombstone has nothing to transform
        after = self._transform.applied(before)
        if after is None:
            raise InvalidMessage(
                "it returned None, which would delete the message: return a payload, or raise"
            )
        opening = before.lstrip()[:1]
        if opening in (b"{", b"[") and after.lstrip()[:1] != opening and _is_json(before):
            raise InvalidMessage(
                f"it returned {after[:40]!r} for {before[:40]!r}: return the whole payload"
            )
        return message.with_(payload=after)


def _is_json(payload: bytes) -> bool:
    try:
        msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyTransform:
    """Applies a transform to what is read, one row out for each row in."""

    transform: str
    topic: str | None
    """Where the messages go; None: their topic stays."""
    is_raw: bool
    """Whether rows are what lies on a topic; else they are fields of records."""
    as_letters: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield what the transform makes, and what it refuses with the reason."""
        import pyarrow

        work = load_work(self.transform)
        names = fields(as_letters=self.as_letters)
        text = pyarrow.string()
        schema = records.arrow_schema(names)
        schema = schema.append(pyarrow.field("transform", text))
        schema = schema.append(pyarrow.field("reason", text))
        for batch in batches:
            rows = [self.made(row, work) for row in batch.to_pylist()]
            yield pyarrow.RecordBatch.from_pylist(rows, schema=schema)

    def made(self, row: dict[str, Any], work: MessageTransform) -> dict[str, Any]:
        """Return what *work* makes of *row*; the original with the reason if it refuses."""
        if self.is_raw:
            delivery = delivery_of(row)
            before = delivery.message.ordinary()
            row = _columns(before) | {
                "seq": None, "lane": delivery.lane.partition, "position": str(delivery.position)
            }  # fmt: skip
        else:
            before = message_in(row).ordinary()
        row = row | {"transform": self.transform, "reason": None}
        try:
            _require_whole(row)
            after = work(before)
            after = after.with_(
                topic=before.topic if self.topic is None else self.topic,
                headers=after.headers.without((HEADER,)).with_({HEADER: self.transform}),
            )
            return row | _columns(after)
        except (DependencyDown, Transient):
            raise  # nobody's fault: the task is begun again
        except Exception as error:  # noqa: BLE001 - somebody else's function
            return row | {"reason": told(error)[:_MOST_REASON]}


def _require_whole(row: Mapping[str, Any]) -> None:
    """Refuse a dead letter that does not hold what was sent."""
    if row.get("replayable") is False:
        raise InvalidMessage("its payload is not what was sent: something in it was redacted")
    envelope = row.get("envelope")
    if envelope is not None and read_envelope(envelope).governance.sealed:
        raise InvalidMessage("fields of its payload are encrypted: replay it with the vault's key")


def _columns(message: Message) -> dict[str, Any]:
    """Return *message* as the fields of a record."""
    row = message_columns(message)
    row["key"], row["event_at"] = row.pop("message_key"), records.moment(row["event_at"])
    return row


def message_in(row: Mapping[str, Any]) -> Message:
    """Return the message in the fields of a record."""
    at = row["event_at"]
    seconds = 0.0 if at is None else at.timestamp()
    return message_of({**row, "message_key": row["key"], "event_at": seconds})


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberLane:
    """Numbers the messages of a lane, which come in their order, and divides them into rounds."""

    per_round: int
    """How many messages of one lane are in a round."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the batches with number, kind and round; what was refused has no place."""
        import pyarrow
        import pyarrow.compute as pc

        start = 0
        for batch in batches:
            is_made = pc.is_null(batch.column("reason"))
            count = pc.cumulative_sum(is_made.cast(pyarrow.int64()))
            number = pc.add(count, start - 1)
            rounds = pc.if_else(is_made, pc.divide(number, self.per_round), 0)
            kind = pc.if_else(is_made, MADE, REFUSED)
            more = {"_number": number, "kind": kind, "round": rounds.cast(pyarrow.int32())}
            yield pyarrow.RecordBatch.from_arrays(
                [*batch.columns, *more.values()], names=[*batch.schema.names, *more]
            )
            start += pc.sum(is_made).as_py() or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRound:
    """Publishes the messages of one lane and round in their order, through the adapter."""

    broker: str
    patience: float = 60.0
    """Seconds for which a broker that is away is waited for, at any one place."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield what the broker refuses, and at last how many messages it took.

        A broker that stays away is told, not raised: to begin the task again would not help.
        """
        import pyarrow

        try:
            with (
                closing(connect(revealed(self.broker))) as broker,
                closing(broker.sink()) as sink,
            ):
                yield from self.publish(sink, batches)
        except DependencyDown as error:
            told_row = {"outage": told(error)[:_MOST_REASON]}
            yield pyarrow.RecordBatch.from_pylist([told_row], schema=_outcome_schema())

    def publish(
        self, sink: Sink, batches: Iterator[pa.RecordBatch], clock: Clock = SYSTEM_CLOCK
    ) -> Iterator[pa.RecordBatch]:
        """Do the same with *sink*, where what stays away is raised."""
        import pyarrow

        sent, schema = 0, _outcome_schema()
        for batch in batches:
            rows = batch.to_pylist()
            refused = []
            for start in range(0, len(rows), _CHUNK):
                some = rows[start : start + _CHUNK]
                lost = self._published(sink, some, clock)
                sent += len(some) - len(lost)
                refused += lost
            if refused:
                yield pyarrow.RecordBatch.from_pylist(refused, schema=schema)
        yield pyarrow.RecordBatch.from_pylist([{"sent": sent}], schema=schema)

    def _published(
        self, sink: Sink, rows: list[dict[str, Any]], clock: Clock
    ) -> list[dict[str, Any]]:
        """Publish *rows* until the broker has taken each or refused it; return what it refused.

        What it did not take because of an outage or of another message is published again, in
        its order.
        """
        refused: list[dict[str, Any]] = []
        waiting = [(row, message_in(row)) for row in rows]
        backoff, attempt = Backoff(first=0.1, ceiling=5.0), 1
        until = clock.monotonic() + self.patience
        while waiting:
            left, wrong = [], None
            for (row, message), error in zip(waiting, _errors(sink, waiting), strict=True):
                if isinstance(error, InvalidMessage | PoisonMessage):
                    refused.append(row | {"reason": told(error)[:_MOST_REASON]})
                elif isinstance(error, DependencyDown | Transient):
                    left.append((row, message))
                    wrong = error
                elif error is not None:
                    raise error
            if wrong is not None:
                delay = backoff.delay(attempt) or 0.0
                if clock.monotonic() + delay > until:
                    raise wrong
                log.warning("the broker does not take it now, the lane waits: %s", told(wrong))
                clock.sleep(delay)
                attempt += 1
            waiting = left
        return refused


def _errors(
    sink: Sink, waiting: list[tuple[dict[str, Any], Message]]
) -> list[HoldfastError | None]:
    """Publish what waits, and return what is wrong with each; of an outage, the same with all."""
    try:
        results = sink.publish([message for _, message in waiting])
    except DependencyDown as error:
        return [error] * len(waiting)
    found = [result.error for result in results]
    down = next((error for error in found if isinstance(error, DependencyDown)), None)
    return found if down is None else [down] * len(waiting)


def _outcome_schema() -> pa.Schema:
    import pyarrow

    text = pyarrow.string()
    schema = records.arrow_schema(fields(as_letters=False))
    kinds = (("transform", text), ("reason", text), ("sent", pyarrow.int64()), ("outage", text))
    for name, kind in kinds:
        schema = schema.append(pyarrow.field(name, kind))
    return schema


def outcome_ddl() -> str:
    """Return what `PublishRound` yields, as Spark's DDL."""
    return f"{made_ddl(as_letters=False)}, `sent` bigint, `outage` string"
