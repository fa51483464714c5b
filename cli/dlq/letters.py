"""What operators decide about dead letters: discard, reopen, prune, forget, edit; all audited."""

import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.confirming import confirm
from holdfast.cli.display import answer, print_json, say
from holdfast.cli.dlq.options import Letters, MasterKey, Names, dead_letters, named, operator
from holdfast.cli.dlq.progress import shown_work
from holdfast.cli.dlq.sending import opened_vault
from holdfast.cli.exits import EXIT_NOT_FOUND
from holdfast.cli.options import (
    Actor,
    Config,
    Database,
    IsDryRun,
    Json,
    OlderThan,
    Reason,
    Yes,
    seconds,
)
from holdfast.db.audit import Operator
from holdfast.dlq.operations import DeadLetterAdmin
from holdfast.dlq.replay.edits import Edits, LetterEdit, Transform
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.replay.simulation import Named
from holdfast.dlq.store.rows import CONFIRMED, DISCARDED, PARKED, PENDING
from holdfast.errors import ConfigurationError, NotFound


def discard(
    names: Names = None,
    *,
    config: Config = None,
    database: Database,
    letter: Letters = None,
    reason: Reason,
    actor: Actor = None,
    park: Annotated[
        bool, typer.Option("--park", help="Put aside for good instead: may be reopened.")
    ] = False,
    fixed: Annotated[
        bool,
        typer.Option("--fixed", help="Somebody brought the effect about by hand: nothing is lost."),
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Close dead letters for good without replaying them."""
    if park and fixed:
        raise ConfigurationError("--park and --fixed: use one of them")
    with dead_letters(database) as engine:
        admin = DeadLetterAdmin(engine)
        selection = named(admin, names, letter)
        ids = admin.closable(selection)
        what = "Park" if park else "Close as fixed by hand" if fixed else "Discard for good"
        asked = f"{what} {len(ids):,} messages"
        confirm(asked, count=len(ids), yes=yes, as_json=as_json)
        state = PARKED if park else CONFIRMED if fixed else DISCARDED
        done = admin.close(ids, state, operator(actor, reason), selection=selection)
    if as_json:
        print_json(asdict(done))
        return
    say(f"{done.count:,} messages are {'fixed by hand' if fixed else done.state}")
    if done.left:
        say(f"{done.left:,} were closed or claimed by a plan meanwhile, and left alone")
    if done.claimed:
        say(
            f"{done.claimed:,} belong to a plan and were left alone: see  holdfast dlq plans list "
            "--open"
        )


def reopen(
    names: Names = None,
    *,
    config: Config = None,
    database: Database,
    letter: Letters = None,
    reason: Reason,
    actor: Actor = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Make parked or discarded letters pending again, with all their replays."""
    with dead_letters(database) as engine:
        admin = DeadLetterAdmin(engine)
        selection = named(admin, names, letter)
        ids = admin.reopenable(selection)
        asked = f"Reopen {len(ids):,} messages"
        confirm(asked, count=len(ids), yes=yes, as_json=as_json)
        count = admin.reopen(ids, operator(actor, reason), selection=selection)
    facts = {"state": PENDING, "count": count}
    answer(f"{count:,} messages are pending again", facts, as_json=as_json)


def prune(
    *,
    config: Config = None,
    database: Database,
    older_than: OlderThan = "30d",
    actor: Actor = None,
    dry_run: IsDryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete closed dead letters that are old enough; open ones are never deleted."""
    from holdfast.dlq.store.retention import prunable

    length = seconds(older_than, "--older-than")
    with dead_letters(database) as engine:
        found = prunable(engine, older_than=length)
        if dry_run:
            text = f"{found:,} closed dead letters would be deleted"
            answer(text, {"would_delete": found}, as_json=as_json)
            return
        who = operator(actor, f"older than {older_than}")
        if found:
            asked = f"Delete {found:,} dead letters that were closed over {older_than} ago"
            confirm(asked, count=found, yes=yes, as_json=as_json)
        with shown_work("deleted", found) as observe:
            gone = DeadLetterAdmin(engine).prune(older_than=length, operator=who, observe=observe)
    text = (
        f"deleted {gone.letters:,} closed dead letters and {gone.plans:,} plans; {gone.left:,} "
        "letters are left"
    )
    facts = {"deleted": gone.letters, "plans": gone.plans, "left": gone.left}
    answer(text, facts, as_json=as_json)


def forget(
    subject: Annotated[str, typer.Argument(help="The data subject, as captured.")],
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    actor: Actor = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Destroy the key of a data subject: its encrypted fields are gone for good."""
    from holdfast.dlq.protection.vault import forget as destroyed

    confirm(f"Destroy the key of {subject} for good", yes=yes, as_json=as_json)
    with dead_letters(database) as engine:
        found = destroyed(engine, subject, operator(actor, reason))
    if not found:
        raise NotFound(f"{subject} has no key: it was forgotten before, or nothing was encrypted")
    text = f"the key of {subject} is destroyed: its encrypted fields are gone for good"
    answer(text, {"subject": subject, "forgotten": True}, as_json=as_json)


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
    who = operator(actor, reason)
    named = None if handler is None else Named.load(handler)
    with dead_letters(database) as engine:
        admin = DeadLetterAdmin(engine)
        if transform is not None:
            edits = Edits(engine, vault=opened_vault(engine, master_key_file))
            _transform(
                admin, edits, name, Transform.load(transform), who, named, yes=yes, as_json=as_json
            )
            return
        dlq_id = admin.letter_id(name)
        payload = _payload(admin, dlq_id, payload_file, ask=not header and not drop_header)
        change = LetterEdit(
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
    admin: DeadLetterAdmin,
    edits: Edits,
    name: str,
    transform: Transform,
    who: Operator,
    handler: Named | None,
    *,
    yes: bool,
    as_json: bool,
) -> None:
    group = admin.group(name)
    ids = admin.ids(Selection(groups=(group.group_id,)))
    if not ids:
        raise NotFound(f"group {group.group_id[:8]} has nothing pending")
    with shown_work("tried", len(ids)) as observe:
        samples, failures = edits.preview(ids, transform, handler=handler, observe=observe)
    for sample in () if as_json else samples:
        say(f"{sample.dlq_id[:8]}:\n{sample.difference}\n")
    for dlq_id, why in () if as_json else failures[:5]:
        say(f"{dlq_id[:8]} fails: {why}")
    if not failures:
        asked = f"Edit {len(ids):,} messages by {transform}"
        confirm(asked, count=len(ids), yes=yes, as_json=as_json)
    with shown_work("edited", len(ids)) as observe:
        count = edits.transform(ids, transform, who, handler=handler, observe=observe)
    facts = {"edited": count, "of": len(ids), "transform": str(transform)}
    answer(f"{count:,} of {len(ids):,} messages have a new revision", facts, as_json=as_json)


def _payload(admin: DeadLetterAdmin, dlq_id: str, path: Path | None, *, ask: bool) -> bytes | None:
    if path is not None:
        try:
            return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"--payload-file {path}: {error.strerror}") from error
    if not ask:
        return None
    if not sys.stdin.isatty():
        raise ConfigurationError("nobody is here to edit: give --payload-file, or - for a pipe")
    before = admin.payload(dlq_id)
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
