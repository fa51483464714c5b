"""`holdfast dlq edit`: a new revision by hand, from a file, or by a versioned function."""

import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import select
from sqlalchemy.engine import Engine

from holdfast.cli.display import answer, print_json, say
from holdfast.cli.dlq.confirming import confirm
from holdfast.cli.dlq.opened import dead_letters, one_group, one_letter, warrant
from holdfast.cli.dlq.options import Database, MasterKey
from holdfast.cli.dlq.progress import shown_work
from holdfast.cli.dlq.sending import opened_vault
from holdfast.cli.failures import EXIT_NOT_FOUND
from holdfast.cli.options import Actor, Config, Json, Reason, Yes
from holdfast.dlq.audit import Warrant
from holdfast.dlq.replay.edit import Edit
from holdfast.dlq.replay.edits import Edits
from holdfast.dlq.replay.handlers import Named
from holdfast.dlq.replay.letters import messages
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.replay.transforms import Transform
from holdfast.dlq.schema import message
from holdfast.errors import ConfigurationError, NotFound


def edit(
    name: Annotated[str, typer.Argument(help="A dead letter; with --transform a failure group.")],
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    payload_file: Annotated[
        Path | None, typer.Option(help="The new payload, from a file; - is standard input.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="Set a header: NAME=VALUE; may repeat.")
    ] = None,
    drop_header: Annotated[
        list[str] | None, typer.Option(help="Remove a header; may repeat.")
    ] = None,
    transform: Annotated[
        str | None,
        typer.Option(help="module:function@version that makes the new payload from the old one."),
    ] = None,
    handler: Annotated[
        str | None, typer.Option(help="module:function that must accept the new payload.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Take a payload that is no JSON.")] = False,
    master_key_file: MasterKey = None,
    actor: Actor = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Make a new revision of a dead letter, or of a whole group by a function.

    The original stays as it is. Without --payload-file, --header or --transform, $EDITOR opens.
    """
    who = warrant(actor, reason)
    named = None if handler is None else Named.load(handler)
    with dead_letters(database) as engine:
        if transform is not None:
            edits = Edits(engine, vault=opened_vault(engine, master_key_file))
            _transform(
                engine, edits, name, Transform.load(transform), who, named, yes=yes, as_json=as_json
            )
            return
        dlq_id = one_letter(engine, name)
        payload = _payload(engine, dlq_id, payload_file, ask=not header and not drop_header)
        change = Edit(
            payload=payload,
            headers=tuple(_header(text) for text in header or ()),
            without=tuple(drop_header or ()),
            force=force,
        )
        vault = opened_vault(engine, master_key_file)
        made = Edits(engine, vault=vault).edit(dlq_id, change, who, handler=named)
    if as_json:
        print_json(asdict(made))
        return
    say(made.difference or "nothing changed")
    say(f"dead letter {dlq_id[:8]} has revision {made.revision}; a replay sends that one")


def _transform(
    engine: Engine,
    edits: Edits,
    name: str,
    transform: Transform,
    who: Warrant,
    handler: Named | None,
    *,
    yes: bool,
    as_json: bool,
) -> None:
    group = one_group(engine, name)
    query = select(message.c.dlq_id).where(*Selection(groups=(group.group_id,)).where())
    with engine.connect() as db:
        ids = list(db.execute(query.order_by(message.c.seq)).scalars())
    if not ids:
        raise NotFound(f"group {group.group_id[:8]} has nothing pending")
    with shown_work("tried", len(ids)) as observe:
        samples, failures = edits.preview(ids, transform, handler=handler, observe=observe)
    for sample in () if as_json else samples:
        say(f"{sample.dlq_id[:8]}:\n{sample.difference}\n")
    for dlq_id, why in () if as_json else failures[:5]:
        say(f"{dlq_id[:8]} fails: {why}")
    if not failures:
        confirm(len(ids), f"Edit {len(ids):,} messages by {transform}", yes=yes)
    with shown_work("edited", len(ids)) as observe:
        count = edits.transform(ids, transform, who, handler=handler, observe=observe)
    facts = {"edited": count, "of": len(ids), "transform": str(transform)}
    answer(f"{count:,} of {len(ids):,} messages have a new revision", facts, as_json=as_json)


def _payload(engine: Engine, dlq_id: str, path: Path | None, *, ask: bool) -> bytes | None:
    if path is not None:
        try:
            return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"--payload-file {path}: {error.strerror}") from error
    if not ask:
        return None
    if not sys.stdin.isatty():
        raise ConfigurationError("nobody is here to edit: give --payload-file, or - for a pipe")
    with engine.connect() as db:
        before = messages(db, [dlq_id])[dlq_id].payload
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{dlq_id}.json"
        file.touch(mode=0o600)
        file.write_bytes(before or b"")
        editor = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
        try:
            subprocess.run([*editor, str(file)], check=True)  # noqa: S603 - the user's own editor
            after = file.read_bytes()
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigurationError(
                f"the editor failed, nothing was changed: {error}; set $EDITOR, or give "
                "--payload-file"
            ) from error
    if after == (before or b""):
        say("left as it is")
        raise SystemExit(EXIT_NOT_FOUND)
    return after


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigurationError(f"--header {text!r}: write NAME=VALUE")
    return name, value
