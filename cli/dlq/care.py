"""What operators say about failure groups; each word is audited."""

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from holdfast.cli.display import answer
from holdfast.cli.dlq.opened import dead_letters, one_group, warrant
from holdfast.cli.dlq.options import Database, seconds
from holdfast.cli.options import Actor, Config, Json, Reason
from holdfast.dlq.groups import Group, Groups
from holdfast.errors import ConfigurationError

Name = Annotated[str, typer.Argument(help="A failure group, or its first characters.")]


def ack(
    name: Name,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    owner: Annotated[
        str | None, typer.Option(help="Who looks after it; you, unless given.")
    ] = None,
    note: Annotated[str | None, typer.Option(help="A note kept with the group.")] = None,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Say that somebody looks after a group."""
    who = warrant(actor, reason)
    with dead_letters(database) as engine:
        groups = Groups(engine)
        found = groups.acknowledge(one_group(engine, name).group_id, who, owner=owner)
        if note is not None:
            found = groups.annotate(found.group_id, who, note=note)
    _tell(found, f"is looked after by {found.owner}", as_json=as_json)


def mute(
    name: Name,
    *,
    config: Config = None,
    database: Database,
    length: Annotated[str, typer.Option("--for", help="How long, e.g. 30m, 4h or 2d.")],
    reason: Reason,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Keep a group out of alerts for a while."""
    try:
        until = datetime.now(UTC) + timedelta(seconds=seconds(length, "--for"))
    except OverflowError as error:
        raise ConfigurationError(
            f"--for {length}: nobody would hear of it again, say e.g. 4h or 2d"
        ) from error
    with dead_letters(database) as engine:
        found = Groups(engine).mute(
            one_group(engine, name).group_id, warrant(actor, reason), until=until
        )
    text = f"is muted until {until:%Y-%m-%d %H:%M}Z; it goes on counting"
    _tell(found, text, as_json=as_json)


def note(
    name: Name,
    text: Annotated[str, typer.Argument(help="What the next one should know.")],
    *,
    config: Config = None,
    database: Database,
    reason: Reason = "a note",
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Keep a note with a group, for whoever looks next."""
    with dead_letters(database) as engine:
        group_id = one_group(engine, name).group_id
        found = Groups(engine).annotate(group_id, warrant(actor, reason), note=text)
    _tell(found, "has the note", as_json=as_json)


def resolve(
    name: Name,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Say that a problem is over; refused while a message of it is pending."""
    with dead_letters(database) as engine:
        found = Groups(engine).resolve(one_group(engine, name).group_id, warrant(actor, reason))
    _tell(found, f"is {found.state}; should it return, it is told as regressed", as_json=as_json)


def _tell(found: Group, text: str, *, as_json: bool) -> None:
    answer(f"group {found.group_id[:8]} {text}", asdict(found), as_json=as_json)
