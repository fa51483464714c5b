"""The record: one dead letter as every job reads and writes it, whatever its source.

One versioned list of fields; the Arrow schema, Spark's DDL and the conversions follow from it.
Nothing here needs Spark. Rules of the schema: a field never changes its type or meaning under
its name; a new version only adds fields. So files of several versions can be read together: what
an older file lacks is null, what a newer one has besides is left out.

Version 1 is what `holdfast dlq export` writes: the rows of the store, with moments as seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from holdfast.dlq.store.rows import fingerprint_of, row_of
from holdfast.extras import driver

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import pyarrow as pa

    from holdfast.dlq.letter import DeadLetter

SCHEMA_VERSION = 2
"""The version that is written. Newer files are read as far as this version knows them."""

EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)
"""No message is older: an earlier moment is a clock that was never set."""
AHEAD = timedelta(days=1)
"""How far a clock may be ahead of the one that stored the letter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordField:
    """One field: its Spark type, its column in the SQL store if it has one, and what it means."""

    name: str
    type: str
    meaning: str
    column: str | None = None
    required: bool = False

    @property
    def is_moment(self) -> bool:
        """Whether it is a moment; the store keeps those as POSIX seconds."""
        return self.type == "timestamp"


def _of(
    name: str, kind: str, meaning: str, *, column: str | None = "", required: bool = False
) -> RecordField:
    return RecordField(
        name=name, type=kind, meaning=meaning, required=required,
        column=name if column == "" else column,
    )  # fmt: skip


FIELDS: tuple[RecordField, ...] = (
    _of("record_version", "int", "the version of this schema", column=None),
    _of("dlq_id", "string", "the identity of the dead letter", required=True),
    _of("seq", "bigint", "the store's own order; null from topics"),
    _of("group_id", "string", "the failure group"),
    _of("state", "string", "pending, confirmed, discarded or parked"),
    _of("message_id", "string", "the id of the original message"),
    _of("topic", "string", "where the original was published"),
    _of("type", "string", "the type of the event"),
    _of("source", "string", "who made the event"),
    _of("key", "binary", "the key of the original; null if it has none", column="message_key"),
    _of("key_hash", "string", "what stands for the key where keys are counted"),
    _of("payload", "binary", "the original bytes; null for a tombstone"),
    _of("headers", "string", 'JSON [[name, text | {"base64": …} | null], …], as in the store'),
    _of("event_at", "timestamp", "when the event was made"),
    _of("correlation_id", "string", "the conversation that it belongs to"),
    _of("causation_id", "string", "the message that caused it"),
    _of("content_type", "string", "how the payload is encoded"),
    _of("schema_ref", "string", "the schema of the payload"),
    _of("traceparent", "string", "the W3C trace context of the original"),
    _of("exact", "string", "JSON of attributes that their fields do not hold as they are"),
    _of("broker", "string", "the adapter that delivered the original"),
    _of("lane", "int", "its partition"),
    _of("position", "string", "its offset, or what the broker has for one"),
    _of("consumer_group", "string", "the group that failed"),
    _of("handler", "string", "the handler that failed"),
    _of("service_version", "string", "the version of the service that failed"),
    _of("stage", "string", "deserialize, validate, handle, publish or crash"),
    _of("error_class", "string", "poison, transient, dependency, timeout or unknown",
        column="class"),
    _of("error_type", "string", "the type of the root exception"),
    _of("error_text", "string", "what the root exception said"),
    _of("fingerprint", "string", "the digest of the problem, by the rules of dlq/"),
    _of("shape", "string", "the digest of the payload's paths and types"),
    _of("envelope", "string", "JSON of all that is known: exceptions with frames, trace, host"),
    _of("envelope_version", "int", "the version of the envelope", column="schema_version"),
    _of("origin", "string", "captured, collected, quarantine or imported"),
    _of("tenant", "string", "whose data it is"),
    _of("entity_ref", "string", "the entity that it is about"),
    _of("subject", "string", "the person that it is about"),
    _of("attempts", "int", "how often it was tried"),
    _of("occurrences", "int", "how often it was dead-lettered"),
    _of("first_failed_at", "timestamp", "the first failure, by the clock of its host"),
    _of("last_failed_at", "timestamp", "the latest failure, by the clock of its host"),
    _of("failed_at", "timestamp", "the latest failure; when it was stored if that clock is wrong",
        column=None),
    _of("clock_outlier", "boolean", "whether the host's clock was wrong: before 2000, or ahead",
        column=None),
    _of("history", "string", "JSON of its latest failures"),
    _of("stored_at", "timestamp", "when the store or the topic took it"),
    _of("replay_count", "int", "how often it was replayed"),
    _of("revision", "int", "its latest edit; 0 is the original"),
    _of("replayable", "boolean", "whether the payload is what was sent: nothing redacted"),
    _of("verdict", "string", "what triage decided"),
    _of("retries", "int", "how many automatic retries it had"),
    _of("due_at", "timestamp", "when it is retried by itself"),
    _of("closed_at", "timestamp", "when it was closed"),
    _of("closed_by", "string", "by whom"),
    _of("closed_reason", "string", "why"),
    _of("expires_at", "timestamp", "when it may be deleted"),
)  # fmt: skip
"""The fields in their order."""

NAMES: tuple[str, ...] = tuple(field.name for field in FIELDS)
BY_NAME: Mapping[str, RecordField] = {field.name: field for field in FIELDS}
STORED: tuple[RecordField, ...] = tuple(field for field in FIELDS if field.column is not None)
"""The fields that are columns of the SQL store."""

_ARROW = {"string": "string", "binary": "binary", "int": "int32", "bigint": "int64",
          "boolean": "bool_"}  # fmt: skip


def ddl(names: Collection[str] = NAMES) -> str:
    """Return the record as Spark's DDL, or the fields in *names* alone."""
    return ", ".join(f"`{field.name}` {field.type}" for field in FIELDS if field.name in names)


def arrow_schema(names: Collection[str] = NAMES) -> pa.Schema:
    """Return the record as an Arrow schema; moments are microseconds in UTC, as Spark has them."""
    pyarrow = driver("pyarrow", extra="spark")
    kinds = {kind: getattr(pyarrow, name)() for kind, name in _ARROW.items()}
    kinds["timestamp"] = pyarrow.timestamp("us", tz="UTC")
    return pyarrow.schema([(f.name, kinds[f.type]) for f in FIELDS if f.name in names])


def record_of(letter: DeadLetter, *, stored_at: float) -> dict[str, Any]:
    """Return *letter* as a record: its row in the store, with moments as moments."""
    row = row_of(letter, fingerprint_of(letter.failure), now=stored_at)
    return record_of_row({**row, "seq": None})


def record_of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a *row* of the SQL store as a record."""
    record: dict[str, Any] = {"record_version": SCHEMA_VERSION}
    for field in STORED:
        value = row[field.column or field.name]
        record[field.name] = moment(value) if field.is_moment else value
    failed_at, is_outlier = failed_moment(record["last_failed_at"], record["stored_at"])
    return record | {"failed_at": failed_at, "clock_outlier": is_outlier}


def row_of_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return *record* as a row of the SQL store; `dlq.store.rows.letter_of` takes it."""
    row: dict[str, Any] = {}
    for field in STORED:
        value = record[field.name]
        if isinstance(value, datetime):
            value = value.timestamp()
        row[field.column or field.name] = value
    return row


def batch_of(records: Iterable[Mapping[str, Any]]) -> pa.RecordBatch:
    """Return *records* as one Arrow batch."""
    pyarrow = driver("pyarrow", extra="spark")
    return pyarrow.RecordBatch.from_pylist(list(records), schema=arrow_schema())


def moment(seconds: float | None) -> datetime | None:
    """Return POSIX *seconds* as a moment; the nearest that has a date where it has none."""
    if seconds is None or seconds != seconds:
        return None
    return datetime.fromtimestamp(max(0.0, min(seconds, 253_402_300_799.0)), UTC)


def failed_moment(
    last_failed_at: datetime | None, stored_at: datetime | None
) -> tuple[datetime | None, bool]:
    """Return when the letter failed by a clock that can be believed, and whether its own is wrong.

    A moment before 2000, or a day ahead of the moment when it was stored, is an outlier: the
    moment of storing stands for it. Where that is no better it is null: of unknown time.
    """
    stored = stored_at if stored_at is not None and stored_at >= EARLIEST else None
    if last_failed_at is None or last_failed_at < EARLIEST:
        return stored, True
    if stored is not None and last_failed_at > stored + AHEAD:
        return stored, True
    return last_failed_at, False


def is_export(columns: Collection[str]) -> bool:
    """Whether *columns* are those of version 1: the store's rows, by `holdfast dlq export`."""
    return "message_key" in columns and "dlq_id" in columns and "record_version" not in columns


def missing(columns: Collection[str]) -> list[str]:
    """Return the required fields that *columns* lack: without them these are no records."""
    return [field.name for field in FIELDS if field.required and field.name not in columns]


def upgrades(columns: Mapping[str, str]) -> list[str]:
    """Return Spark expressions that select records of this version.

    They work on *columns* (names with Spark types) of any version, and of exports.
    """
    exported = is_export(columns)
    found = [_upgrade(field, columns, exported=exported) for field in FIELDS]
    return [f"{expression} AS `{name}`" for name, expression in zip(NAMES, found, strict=True)]


def _upgrade(field: RecordField, columns: Mapping[str, str], *, exported: bool) -> str:
    name = (field.column or field.name) if exported else field.name
    if field.name == "record_version":  # upgraded ones are of this version; newer ones stay newer
        own = "NULL" if name not in columns else f"`{name}`"
        return f"CAST(greatest({own}, {SCHEMA_VERSION}) AS int)"
    if name not in columns:
        return _derived(field, columns, exported=exported)
    if field.is_moment and columns[name] in ("double", "float", "bigint"):
        return f"timestamp_micros(CAST(`{name}` * 1000000 AS BIGINT))"
    return f"`{name}`" if columns[name] == field.type else f"CAST(`{name}` AS {field.type})"


def _derived(field: RecordField, columns: Mapping[str, str], *, exported: bool) -> str:
    if field.name not in ("failed_at", "clock_outlier") or "last_failed_at" not in columns:
        return f"CAST(NULL AS {field.type})"
    last, stored = (
        _upgrade(BY_NAME[name], columns, exported=exported)
        for name in ("last_failed_at", "stored_at")
    )
    earliest = f"TIMESTAMP '{EARLIEST:%Y-%m-%d} 00:00:00 UTC'"
    known = f"CASE WHEN {stored} >= {earliest} THEN {stored} END"
    is_outlier = (
        f"(({last}) IS NULL OR ({last}) < {earliest} "
        f"OR coalesce(({last}) > ({known}) + INTERVAL {AHEAD.days} DAY, false))"
    )
    if field.name == "clock_outlier":
        return is_outlier
    return f"CASE WHEN {is_outlier} THEN {known} ELSE {last} END"
