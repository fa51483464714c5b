"""`holdfast keys`: keys that wait behind a dead letter or a later retry."""

from dataclasses import asdict
from typing import Annotated

import typer

from holdfast.cli.audit import acts
from holdfast.cli.confirming import confirm
from holdfast.cli.display import answer, cut, print_json, print_table, say
from holdfast.cli.opened import existing_database, operator_of
from holdfast.cli.options import (
    Actor,
    AnyGroup,
    AnyTopic,
    Config,
    Database,
    Json,
    Limit,
    Reason,
    Yes,
)
from holdfast.consumer.parking.admin import ParkingAdmin, WaitingMessage
from holdfast.consumer.schema import require_tables

app = typer.Typer(
    help="Keys that a consumer holds back, and what to do about them.", no_args_is_help=True
)

Group = Annotated[str, typer.Argument(help="The consumer group.", metavar="GROUP")]
OfTopic = Annotated[str, typer.Argument(help="The topic.", metavar="TOPIC")]
TheKey = Annotated[
    str, typer.Argument(help="The key, or its id as `holdfast keys list` shows it.", metavar="KEY")
]


_KEY = 32  # characters of a key that are shown: its id below names it


def _admin(database: str) -> ParkingAdmin:
    engine = existing_database(database)
    with engine.connect() as db:
        require_tables(db)
    return ParkingAdmin(engine)


@app.command("list", epilog="Example: holdfast keys list --group billing")
def list_(
    *,
    config: Config = None,
    database: Database,
    group: AnyGroup = None,
    topic: AnyTopic = None,
    limit: Limit = 100,
    as_json: Json = False,
) -> None:
    """List the keys that wait, the longest waiting first, with the dead letter that holds them."""
    keys = _admin(database).waiting(group=group, topic=topic, limit=limit)
    if as_json:
        print_json([asdict(key) for key in keys])
        return
    if not keys:
        say("no key is held")
        return
    rows = [(f"{cut(k.key, _KEY)}\n{k.id}", k.parked, _waits(k)) for k in keys]
    print_table(("key", "parked", "where, and what it waits for"), rows, whole=2, blocks=True)
    if len(keys) == limit:
        say(f"these are the {limit:,} that wait longest; see more with --limit")
    first = next((k for k in keys if k.dead_letter is not None), None)
    if first is not None:
        say(f"next: holdfast dlq show {first.dead_letter}, then replay or discard it")
        say(f"or, whatever becomes of it: holdfast keys release {first.group} {first.topic} "
            f"{first.id} --reason …")  # fmt: skip


def _waits(held: WaitingMessage) -> str:
    """Return where a key is held, since when, and until what."""
    lines = [f"{held.group} on {held.topic}", f"since {held.since:%Y-%m-%d %H:%M:%S}Z"]
    if held.dead_letter is not None:
        lines.append(f"dead letter {held.dead_letter}")
    if held.due is not None:
        lines.append(f"retry due {held.due:%Y-%m-%d %H:%M:%S}Z")
    if held.note:
        lines.append(held.note.replace("\n", " "))
    return "\n".join(lines)


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
    rows = _admin(database).messages(group, topic, key, limit=limit)
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
    as_json: Json = False,
) -> None:
    """Let a key go on: what is parked runs in order, before anything newer."""
    parked = _admin(database).release(group, topic, key, operator_of(actor, reason))
    text = f"released {key}: {parked} parked messages run now"
    answer(text, {"released": key, "parked": parked}, as_json=as_json)


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
    unredacted: Annotated[
        bool,
        typer.Option(
            "--unredacted",
            help="Keep a message that an older version parked as it is: what its handler hides is "
            "not known.",
        ),
    ] = False,
    actor: Actor = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Discard the message that holds a key; what waits behind it then runs, in order.

    That is the dead letter, or the message whose retry is waited for. It stays among the dead
    letters as discarded: holdfast dlq reopen --id … brings it back.
    """
    admin, numbers, operator = _admin(database), tuple(number or ()), operator_of(actor, reason)
    if not yes:
        going, parked = admin.skippable(group, topic, key, numbers=numbers)
        rest = "it waits as before" if numbers else f"{parked} parked messages run then"
        confirm(f"Discard {len(going)} message(s)? Of the key, {rest}. Go on",
                shown=[f"message {one.message_id} of key {key}: {one.why}" for one in going],
                yes=yes, as_json=as_json)  # fmt: skip
    gone = admin.skip(group, topic, key, operator, numbers=numbers, unredacted=unredacted)
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
    found = _admin(database).audited(limit=limit)
    if as_json:
        print_json([{k: v for k, v in one.items() if k != "seq"} for one in acts(found)])
        return
    if not found:
        say("nothing was done by hand")
        return
    rows = [
        (f"{one.moment:%Y-%m-%d %H:%M:%S}Z", one.actor, one.action, one.subject, one.reason)
        for one in found
    ]
    print_table(("at", "actor", "action", "subject", "reason"), rows)
