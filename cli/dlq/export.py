"""`holdfast dlq export`: dead letters as JSON lines or Parquet, for other tools."""

import base64
import contextlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from sqlalchemy import func, select
from sqlalchemy.engine import Engine

from holdfast.cli.display import err
from holdfast.cli.dlq.opened import dead_letters, one_group, warrant
from holdfast.cli.dlq.options import (
    ConsumerGroup,
    Database,
    Error,
    InGroup,
    Key,
    Kind,
    Since,
    Tenant,
    Topic,
    Until,
    Version,
    known_class,
    moment,
)
from holdfast.cli.dlq.progress import shown_work
from holdfast.cli.options import Actor, Config
from holdfast.database import reading
from holdfast.dlq.audit import Audit
from holdfast.dlq.redaction import holds_credentials
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.rows import CLOSED, PENDING
from holdfast.dlq.schema import message
from holdfast.errors import ConfigurationError
from holdfast.extras import driver
from holdfast.scrubbing import REDACTED

_BATCH = 1000
_STATES = (PENDING, *CLOSED, "any")


def export(
    *,
    config: Config = None,
    database: Database,
    group: InGroup = None,
    topic: Topic = None,
    consumer: ConsumerGroup = None,
    kind: Kind = None,
    error: Error = None,
    tenant: Tenant = None,
    version: Version = None,
    key: Key = None,
    since: Since = None,
    until: Until = None,
    state: Annotated[
        str, typer.Option(help="pending, confirmed, discarded, parked or any.")
    ] = "pending",
    to: Annotated[
        Path, typer.Option(help="The file: .jsonl or .parquet; - is standard output.")
    ] = Path("-"),
    with_credentials: Annotated[
        bool,
        typer.Option("--with-credentials", help="Headers that hold credentials as they are."),
    ] = False,
    reason: Annotated[str, typer.Option(help="Why; kept in the audit trail.")] = "export",
    actor: Actor = None,
) -> None:
    """Write dead letters as JSON lines or Parquet; the file is yours alone, and audited.

    Headers whose names speak of credentials show stars unless --with-credentials asks for them.
    """
    if to.suffix not in (".jsonl", ".parquet") and str(to) != "-":
        raise ConfigurationError(f"--to {to}: name a .jsonl or a .parquet file, or -")
    known_class(kind)
    if state not in _STATES:
        raise ConfigurationError(f"--state {state}: write one of {', '.join(_STATES)}")
    with dead_letters(database) as engine:
        selection = Selection(
            groups=tuple(one_group(engine, name).group_id for name in group or ()),
            topic=topic,
            consumer_group=consumer,
            kind=kind,
            error=error,
            tenant=tenant,
            version=version,
            key=key,
            since=moment(since, "--since"),
            until=moment(until, "--until"),
            state=None if state == "any" else state,
        )
        facts = {"to": str(to), "state": state, "with_credentials": with_credentials}
        chosen = {name: value for name, value in asdict(selection).items() if value}
        # Before anything leaves: what cannot be audited is not written.
        Audit().record(engine, warrant(actor, reason), "export", "dead letters",
                       {**facts, "selection": chosen})  # fmt: skip
        try:
            count = _export(engine, selection, to, shows=with_credentials)
        except BrokenPipeError:
            raise  # who reads has enough, as `head` has: the command ends without a word
        except OSError as broken:
            raise ConfigurationError(f"--to {to}: {broken.strerror or broken}") from broken
    err.print(f"exported {count:,} dead letters", highlight=False)


def _export(engine: Engine, selection: Selection, to: Path, *, shows: bool) -> int:
    """Write them, and show how far that is, unless the lines themselves are on the terminal."""
    total = None
    if err.is_terminal:
        with reading(engine).connect() as db:
            rows = select(func.count()).select_from(message).where(*selection.where())
            total = db.execute(rows).scalar_one()
    batches = _batches(engine, selection)
    if not shows:
        batches = ([_starred(row) for row in batch] for batch in batches)
    if str(to) == "-":
        return _written(batches, to)
    with shown_work("exported", total) as observe:
        return _written(_counted(batches, observe), to)


def _counted(
    batches: Iterator[list[dict[str, Any]]], observe: Callable[[int], None]
) -> Iterator[list[dict[str, Any]]]:
    done = 0
    for batch in batches:
        yield batch
        done += len(batch)
        observe(done)


def _batches(engine: Engine, selection: Selection) -> Iterator[list[dict[str, Any]]]:
    """Yield rows in their order, by ranges of numbers: no long transaction is held."""
    after = 0
    while True:
        query = select(message).where(*selection.where(), message.c.seq > after)
        with reading(engine).connect() as db:
            rows = db.execute(query.order_by(message.c.seq).limit(_BATCH)).mappings().all()
        if not rows:
            return
        after = rows[-1]["seq"]
        yield [dict(row) for row in rows]


def _written(batches: Iterator[list[dict[str, Any]]], to: Path) -> int:
    if to.suffix == ".parquet":
        return _parquet(batches, to)
    if str(to) == "-":
        count = _lines(batches, sys.stdout)
        sys.stdout.flush()
        return count
    with open(to, "w", encoding="ascii", opener=_private) as file:
        return _lines(batches, file)


def _private(path: str, flags: int) -> int:
    """Open a file that nobody else may read, also one that was there with other rights."""
    found = os.open(path, flags, 0o600)
    with contextlib.suppress(OSError):  # /dev/stdout, or another's
        if stat.S_ISREG(os.fstat(found).st_mode):
            os.fchmod(found, 0o600)
    return found


def _starred(row: dict[str, Any]) -> dict[str, Any]:
    """Return *row* with stars for what headers hold credentials."""
    pairs = [
        [name, REDACTED if value is not None and holds_credentials(name) else value]
        for name, value in json.loads(row["headers"])
    ]
    if not any(value == REDACTED for _, value in pairs):
        return row
    return {**row, "headers": json.dumps(pairs)}


def _lines(batches: Iterator[list[dict[str, Any]]], file: IO[str]) -> int:
    count = 0
    for batch in batches:
        for row in batch:
            file.write(json.dumps(_plain(row)) + "\n")
        count += len(batch)
    return count


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    plain = dict(row)
    for name in ("message_key", "payload"):
        value = plain.pop(name)
        plain[f"{name}_base64"] = None if value is None else base64.b64encode(value).decode()
    for name in ("headers", "envelope", "history"):
        plain[name] = json.loads(plain[name])
    return plain


def _parquet(batches: Iterator[list[dict[str, Any]]], to: Path) -> int:
    pyarrow, parquet = driver("pyarrow", extra="spark"), driver("pyarrow.parquet", extra="spark")
    count, schema = 0, _schema(pyarrow)
    with (
        open(to, "wb", opener=_private) as file,
        parquet.ParquetWriter(file, schema) as writer,
    ):
        for batch in batches:
            writer.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def _schema(pyarrow: Any) -> Any:
    kinds = {"LargeBinary": pyarrow.binary(), "BigInteger": pyarrow.int64(),
             "Integer": pyarrow.int64(), "Boolean": pyarrow.bool_(),
             "Double": pyarrow.float64()}  # fmt: skip
    return pyarrow.schema(
        [
            (column.name, kinds.get(type(column.type).__name__, pyarrow.string()))
            for column in message.columns
        ]
    )
