"""`holdfast keys`: keys that wait behind a dead letter or a later retry."""

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from holdfast.audit import Warrant
from holdfast.cli.display import print_json, print_table, say
from holdfast.cli.failures import EXIT_NOT_FOUND
from holdfast.cli.opened import existing_database, warranted
from holdfast.cli.options import Actor, Config, Database, Json, Limit, Reason, Topic, Yes
from holdfast.consumer.desk import Desk
from holdfast.consumer.tables import require_tables
from holdfast.errors import ConfigurationError

app = typer.Typer(
    help="Keys that a consumer holds back, and what to do about them.", no_args_is_help=True
)

Group = Annotated[str, typer.Argument(help="The consumer group.", metavar="GROUP")]
OfTopic = Annotated[str, typer.Argument(help="The topic.", metavar="TOPIC")]
TheKey = Annotated[
    str, typer.Argument(help="The key, or its id as `holdfast keys list` shows it.", metavar="KEY")
]
OnlyGroup = Annotated[str | None, typer.Option("--group", help="Only this group.")]


def _desk(database: str) -> Desk:
    engine = existing_database(database)
    with engine.connect() as db:
        require_tables(db)
    return Desk(engine)


def _warrant(actor: str | None, reason: str) -> Warrant:
    return warranted(actor, reason)


@app.command("list", epilog="Example: holdfast keys list --group billing")
def list_(
    *,
    config: Config = None,
    database: Database,
    group: OnlyGroup = None,
    topic: Topic = None,
    limit: Limit = 100,
    as_json: Json = False,
) -> None:
    """List the keys that wait, the longest waiting first, with the dead letter that holds them."""
    keys = _desk(database).waiting(group=group, topic=topic, limit=limit)
    if as_json:
        print_json([asdict(key) for key in keys])
        return
    if not keys:
        say("no key is held")
        return
    rows = [
        (k.group, k.topic, k.key, k.id, k.parked, f"{k.since:%Y-%m-%d %H:%M:%S}Z",
         k.dead_letter or "", "" if k.due is None else f"{k.due:%H:%M:%S}Z", k.note or "")
        for k in keys
    ]  # fmt: skip
    print_table(
        ("group", "topic", "key", "id", "parked", "since", "dead letter", "due", "note"), rows
    )
    say("next: close the dead letter (holdfast dlq …), or  holdfast keys release … --reason …")


@app.command(epilog="Example: holdfast keys show billing orders ada")
def show(
    group: Group,
    topic: OfTopic,
    key: TheKey,
    *,
    config: Config = None,
    database: Database,
    limit: Limit = 20,
    as_json: Json = False,
) -> None:
    """Show the messages parked behind a key, in order."""
    rows = _desk(database).messages(group, topic, key, limit=limit)
    shown = [
        {"number": row.seq, "message": row.origin.message.id, "attempt": row.attempt,
         "position": f"{row.origin.lane.partition}/{row.origin.position}",
         "bytes": len(row.origin.body or b"")}
        for row in rows
    ]  # fmt: skip
    if as_json:
        print_json(shown)
    elif not shown:
        say("the key is held, and nothing waits behind it")
    else:
        print_table(tuple(shown[0]), [tuple(row.values()) for row in shown])


@app.command(epilog="Example: holdfast keys release billing orders ada --reason 'order is fixed'")
def release(
    group: Group,
    topic: OfTopic,
    key: TheKey,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    actor: Actor = None,
) -> None:
    """Let a key go on: what is parked runs in order, before anything newer."""
    parked = _desk(database).release(group, topic, key, _warrant(actor, reason))
    say(f"released {key}: {parked} parked messages run now")


@app.command(epilog="Example: holdfast keys skip billing orders ada --reason 'obsolete' --yes")
def skip(
    group: Group,
    topic: OfTopic,
    key: TheKey,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    number: Annotated[
        list[int] | None,
        typer.Option(
            help="Discard this parked message instead, by its number in `keys show`; may repeat."
        ),
    ] = None,
    actor: Actor = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Discard the message that holds a key; what waits behind it then runs, in order.

    That is the dead letter, or the message whose retry is waited for. It stays among the dead
    letters as discarded: holdfast dlq reopen --id … brings it back.
    """
    desk, numbers, warrant = _desk(database), tuple(number or ()), _warrant(actor, reason)
    if not yes:
        going, parked = desk.skippable(group, topic, key, numbers=numbers)
        if as_json or not sys.stdin.isatty():
            named = ", ".join(one.message_id for one in going) or "nothing"
            raise ConfigurationError(
                f"skip discards message {named} and nobody is here to ask: add --yes"
            )
        for one in going:
            say(f"message {one.message_id} of key {key}: {one.why}")
        rest = "it waits as before" if numbers else f"{parked} parked messages run then"
        if not typer.confirm(f"Discard {len(going)} message(s)? Of the key, {rest}."):
            say("left as it is")
            raise SystemExit(EXIT_NOT_FOUND)
    gone = desk.skip(group, topic, key, warrant, numbers=numbers)
    if as_json:
        print_json([{"message": one.message_id, "dlq_id": one.dlq_id} for one in gone])
        return
    for one in gone:
        say(f"skipped message {one.message_id} of {key}; to bring it back:  holdfast dlq reopen "
            f"--id {one.dlq_id} --reason …")  # fmt: skip


@app.command(epilog="Example: holdfast keys audit --limit 20")
def audit(
    *, config: Config = None, database: Database, limit: Limit = 100, as_json: Json = False
) -> None:
    """Show who released or skipped what, or opened and closed a circuit, and why; newest first."""
    entries = _desk(database).audited(limit=limit)
    if as_json:
        print_json([asdict(entry) for entry in entries])
        return
    if not entries:
        say("nothing was done by hand")
        return
    rows = [(f"{e.at:%Y-%m-%d %H:%M:%S}Z", e.actor, e.action, e.subject, e.reason) for e in entries]
    print_table(("at", "actor", "action", "subject", "reason"), rows)
