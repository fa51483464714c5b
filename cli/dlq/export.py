"""`holdfast dlq export`: dead letters as JSON lines or Parquet, for other tools."""

import base64
import contextlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from holdfast.cli.display import err, print_json
from holdfast.cli.dlq.options import LetterFilter, Problems, State, dead_letters, operator
from holdfast.cli.dlq.progress import shown_work
from holdfast.cli.late import grouped
from holdfast.cli.options import Actor, Config, Database, Json, Reason
from holdfast.dlq.operations import DeadLetterAdmin
from holdfast.dlq.protection.redaction import holds_credentials
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.store.rows import PENDING
from holdfast.dlq.store.schema import message
from holdfast.errors import ConfigurationError
from holdfast.extras import driver
from holdfast.scrubbing import REDACTED


@grouped
def export(
    *,
    config: Config = None,
    database: Database,
    problem: Problems = None,
    wanted: LetterFilter,
    state: State = PENDING,
    to: Annotated[
        Path, typer.Option(help="The file: .jsonl or .parquet; - is standard output.")
    ] = Path("-"),
    with_credentials: Annotated[
        bool,
        typer.Option("--with-credentials", help="Headers that hold credentials as they are."),
    ] = False,
    reason: Reason = "export",
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Write dead letters as JSON lines or Parquet; the file is yours alone, and audited.

    Headers whose names speak of credentials show stars unless --with-credentials asks for them.
    """
    if to.suffix not in (".jsonl", ".parquet") and str(to) != "-":
        raise ConfigurationError(f"--to {to}: name a .jsonl or a .parquet file, or -")
    with dead_letters(database) as engine:
        admin = DeadLetterAdmin(engine)
        selection = wanted.selection(admin, groups=problem, state=state)
        # Before anything leaves: what cannot be audited is not written.
        admin.exporting(selection, operator(actor, reason), to=str(to), state=state,
                        with_credentials=with_credentials)  # fmt: skip
        try:
            count = _export(admin, selection, to, shows=with_credentials)
        except BrokenPipeError:
            raise  # who reads has enough, as `head` has: the command ends without a word
        except OSError as broken:
            raise ConfigurationError(f"--to {to}: {broken.strerror or broken}") from broken
    if as_json:
        # The lines themselves are on standard output then.
        print_json({"exported": count, "to": str(to)}, on_stderr=str(to) == "-")
    else:
        err.print(f"exported {count:,} dead letters", highlight=False)


def _export(admin: DeadLetterAdmin, selection: Selection, to: Path, *, shows: bool) -> int:
    """Write them, and show how far that is, unless the lines themselves are on the terminal."""
    total = admin.count(selection) if err.is_terminal else None
    batches = admin.pages(selection)
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
    pyarrow = driver("pyarrow", extra="parquet")
    parquet = driver("pyarrow.parquet", extra="parquet")
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
