"""Records without Spark: Parquet files and the SQL store as Arrow batches, in bounded memory.

Files of every version of the record, and exports, may lie in one folder: each is brought to the
fields that are asked for by the rules of `spark_jobs/records.py`. A file that is broken or holds
something else is named in the error.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from holdfast.db.engine import open_database, reading
from holdfast.db.errors import down
from holdfast.dlq.operations import require_tables
from holdfast.dlq.store.schema import message
from holdfast.errors import ConfigurationError
from holdfast.spark_jobs import records
from holdfast.spark_jobs.secrets import revealed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy.engine import Connection

    from holdfast.spark_jobs.analytics.results import Scope
    from holdfast.spark_jobs.sources import SourceSpec

BATCH = 20_000
_REPEATED = ("topic", "consumer_group", "handler", "stage", "error_class", "error_type")
"""Columns of few words: they stay encoded from the file to whoever reads a batch."""
_MICROS = 1_000_000
_DERIVED = ("failed_at", "clock_outlier")
_FROM = ("last_failed_at", "stored_at")


def is_readable(spec: SourceSpec) -> bool:
    """Whether *spec* can be read without Spark."""
    return spec.kind == "store" or (spec.kind == "files" and spec.format == "parquet")


def count(spec: SourceSpec) -> int:
    """Return how many records *spec* has, without reading them: from footers, or by sequence."""
    if spec.kind == "store":
        with _connected(spec) as db:
            low, high = db.execute(select(func.min(message.c.seq), func.max(message.c.seq))).one()
        return 0 if low is None else int(high) - int(low) + 1
    return sum(_opened(path).metadata.num_rows for path in files(spec.place))


def files(place: str) -> list[Path]:
    """Return the Parquet files at *place*: a file, a folder with all below it, or a pattern."""
    path = Path(place.removeprefix("file://"))
    if path.is_dir():
        found = sorted(one for one in path.rglob("*.parquet") if one.name[0] not in "._")
    elif path.is_file():
        found = [path]
    else:
        anchor = Path(path.anchor) if path.is_absolute() else Path()
        pattern = str(path.relative_to(anchor)) if path.is_absolute() else str(path)
        found = sorted(anchor.glob(pattern)) if any(sign in pattern for sign in "*?[") else []
        if not found:
            raise ConfigurationError(f"{place}: there is nothing at that path")
    if not found:
        raise ConfigurationError(f"{place} holds no parquet file")
    return found


def batches(spec: SourceSpec, fields: Sequence[str], scope: Scope) -> Iterator[pa.RecordBatch]:
    """Yield batches of *fields* of the records of *spec* in *scope*; `at` is the failure's moment.

    `at` is in seconds since 1970, null where no clock can be believed. Columns of few words may
    be dictionaries.
    """
    wanted = list(dict.fromkeys([*fields, *_DERIVED, *scope.equal]))
    source = _stored(spec, wanted) if spec.kind == "store" else _filed(spec, wanted)
    for batch in source:
        found = _within(_dated(batch), scope)
        if found.num_rows:
            yield found.select([*fields, "at", "clock_outlier"])


def _filed(spec: SourceSpec, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
    for path in files(spec.place):
        opened = _opened(path)
        columns = opened.schema_arrow.names
        exported = records.is_export(columns)
        if lacking := records.missing(columns):
            names = ", ".join(sorted(columns)[:12]) or "none"
            raise ConfigurationError(
                f"{path} holds no dead letters: it has no field {', '.join(lacking)} (its fields: "
                f"{names}); write records with holdfast spark archive, or holdfast dlq export"
            )
        told = () if _tells_when(columns, exported=exported) else _FROM
        needed = [_column(name, exported) for name in dict.fromkeys([*wanted, *told])]
        try:
            for batch in opened.iter_batches(
                BATCH, columns=[name for name in needed if name in columns]
            ):
                yield _upgraded(batch, wanted, exported=exported, of=str(path))
        except (pa.ArrowException, OSError) as error:
            raise _broken(path, error) from error


def _opened(path: Path) -> pq.ParquetFile:
    try:
        known = pq.read_metadata(path)
        columns = known.schema.to_arrow_schema()
        few = [name for name in _REPEATED
               if name in columns.names and columns.field(name).type == pa.string()]  # fmt: skip
        return pq.ParquetFile(path, metadata=known, pre_buffer=False, read_dictionary=few)
    except (pa.ArrowException, OSError) as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> ConfigurationError:
    first = str(error).strip().splitlines()[0][:200]
    return ConfigurationError(f"{path} cannot be read as parquet: {first}")


def _stored(spec: SourceSpec, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
    needed = [
        records.BY_NAME[name] for name in dict.fromkeys([*wanted, *_FROM]) if name not in _DERIVED
    ]
    names = [field.column or field.name for field in needed]
    query = select(*(message.c[name] for name in names))
    schema = pa.schema(
        [
            (name, pa.float64() if one.is_moment else records.arrow_schema([one.name])[0].type)
            for name, one in zip(names, needed, strict=True)
        ]
    )
    with _connected(spec) as db:
        try:
            rows = db.execution_options(stream_results=True, yield_per=BATCH).execute(query)
            for part in rows.partitions():
                columns = list(zip(*part, strict=True))
                arrays = [
                    pa.array(column, kind)
                    for column, kind in zip(columns, schema.types, strict=True)
                ]
                batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
                yield _upgraded(batch, wanted, exported=True, of="the store")
        except SQLAlchemyError as error:
            raise down(error) from error


@contextmanager
def _connected(spec: SourceSpec) -> Iterator[Connection]:
    """Yield a connection to the store for the time of a read."""
    engine = open_database(revealed(spec.place))
    try:
        path = engine.url.database
        if engine.dialect.name == "sqlite" and path and not Path(path).exists():
            raise ConfigurationError(f"{spec.place}: there is no such file")
        require_tables(engine)
        with reading(engine).connect() as db:
            yield db
    except SQLAlchemyError as error:
        raise down(error) from error
    finally:
        engine.dispose()


def _column(name: str, exported: bool) -> str:
    field = records.BY_NAME[name]
    return (field.column or name) if exported else name


def _upgraded(
    batch: pa.RecordBatch, wanted: Sequence[str], *, exported: bool, of: str
) -> pa.RecordBatch:
    """Return the fields *wanted* of *batch*, in their types; what it does not have is null."""
    found: dict[str, pa.Array] = {}
    dated = _tells_when(batch.schema.names, exported=exported)
    for name in dict.fromkeys([*wanted, *(() if dated else _FROM)]):
        kind = records.arrow_schema([name])[0].type
        column = _column(name, exported)
        if column not in batch.schema.names:
            found[name] = pa.nulls(batch.num_rows, kind)
            continue
        values = batch.column(column)
        if pa.types.is_timestamp(kind) and not pa.types.is_timestamp(values.type):
            micros = pc.round(pc.multiply(values.cast(pa.float64()), float(_MICROS)))
            values = micros.cast(pa.int64(), safe=False).cast(kind)
        try:
            found[name] = values if _is(values.type, kind) else values.cast(kind)
        except pa.ArrowException as error:
            raise ConfigurationError(
                f"{of}: the field {column} is {values.type}, which is no {kind}"
            ) from error
    if dated:
        return pa.RecordBatch.from_pydict({name: found[name] for name in wanted})
    found["failed_at"], found["clock_outlier"] = _failed(
        found["last_failed_at"], found["stored_at"]
    )
    return pa.RecordBatch.from_pydict({name: found[name] for name in wanted})


def _tells_when(columns: Sequence[str], *, exported: bool) -> bool:
    """Whether records say themselves when they failed."""
    return not exported and "failed_at" in columns


def _is(found: pa.DataType, kind: pa.DataType) -> bool:
    """Whether *found* is *kind*, or a dictionary of it."""
    own = found.value_type if pa.types.is_dictionary(found) else found
    return bool(own == kind)


def _failed(last: pa.Array, stored: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return what `records.failed_moment` says of each letter."""
    earliest = pa.scalar(records.EARLIEST, last.type)
    known = pc.if_else(pc.fill_null(pc.greater_equal(stored, earliest), False), stored, None)
    ahead = pc.add(known, pa.scalar(records.AHEAD, pa.duration("us")))
    late = pc.fill_null(pc.greater(last, ahead), False)
    outlier = pc.or_(pc.fill_null(pc.less(last, earliest), True), late)
    return pc.if_else(outlier, known, last), outlier


def _dated(batch: pa.RecordBatch) -> pa.RecordBatch:
    micros = batch.column("failed_at").cast(pa.int64())
    at = pc.divide(micros.cast(pa.float64()), float(_MICROS))
    return batch.append_column("at", at)


def _within(batch: pa.RecordBatch, scope: Scope) -> pa.RecordBatch:
    conditions = [pc.equal(batch.column(name), value) for name, value in scope.equal.items()]
    if scope.since is not None:
        conditions.append(pc.greater_equal(batch.column("at"), scope.since))
    if scope.until is not None:
        conditions.append(pc.less(batch.column("at"), scope.until))
    if not conditions:
        return batch
    together = conditions[0]
    for one in conditions[1:]:
        together = pc.and_(together, one)
    return batch.filter(pc.fill_null(together, False))
