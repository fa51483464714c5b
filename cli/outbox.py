"""`holdfast outbox`: what operators see and do, to events that the broker refused above all."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.audit import acts
from holdfast.cli.confirming import confirm
from holdfast.cli.display import answer, encoded, excerpt, print_json, print_table, say
from holdfast.cli.opened import operator_of, outbox_database
from holdfast.cli.options import (
    Actor,
    AnyTopic,
    Config,
    Database,
    Json,
    Key,
    Limit,
    OlderThan,
    Reason,
    Yes,
    seconds,
)
from holdfast.db.audit import OUTBOX, Audit, Operator, entries
from holdfast.errors import ConfigurationError
from holdfast.outbox.parked import (
    EventEdit,
    EventNotParked,
    ParkedEvent,
    ParkedEventKey,
    ParkedKeys,
    ParkedSelection,
)

parked = typer.Typer(
    help="Keys that wait because the broker refused one of their events.", no_args_is_help=True
)

Events = Annotated[list[str] | None, typer.Argument(help="Numbers or ids of events.")]
One = Annotated[str, typer.Argument(help="The number or id of a refused event.")]


@parked.command("list", epilog="Example: holdfast outbox parked list --topic orders")
def list_(
    *,
    config: Config = None,
    database: Database,
    topic: AnyTopic = None,
    limit: Limit = 100,
    as_json: Json = False,
) -> None:
    """List the keys that wait, the longest waiting first, with the error that holds them."""
    with outbox_database(database) as engine:
        keys = ParkedKeys(engine).waiting(topic=topic, limit=limit)
    if as_json:
        print_json([asdict(key) for key in keys])
        return
    if not keys:
        say("nothing is parked")
        return
    print_table(("first", "events", "topic and key, and the error"),
                [(str(k.first), _counts(k), _parked(k)) for k in keys], whole=2,
                blocks=True)  # fmt: skip
    if len(keys) == limit:
        say(f"these are the {limit:,} that wait longest; see more with --limit")
    say(f"next: holdfast outbox parked show {keys[0].first}, then edit, release or skip it")


def _counts(key: ParkedEventKey) -> str:
    named = {"refused": key.refused, "behind": key.behind, "released": key.released}
    return "\n".join(f"{count:,} {name}" for name, count in named.items() if count)


def _parked(key: ParkedEventKey) -> str:
    name = "(no key)" if key.key is None else f"key {key.key}"
    since = f"since {key.since:%Y-%m-%d %H:%M:%S}Z"
    return f"{key.topic}, {name}\n{since}\n{key.error or ''}".rstrip()


@parked.command(epilog="Example: holdfast outbox parked show 4711")
def show(
    events: Events = None,
    *,
    config: Config = None,
    database: Database,
    topic: AnyTopic = None,
    key: Key = None,
    limit: Limit = 20,
    as_json: Json = False,
) -> None:
    """Show parked events in their order, with headers and payload."""
    selection = ParkedSelection(events=tuple(events or ()), topic=topic, key=key)
    with outbox_database(database) as engine:
        found = ParkedKeys(engine).events(selection, limit=limit)
    if not found:
        raise EventNotParked(f"nothing is parked under {selection.subject}")
    if as_json:
        print_json([_as_json(event) for event in found])
        return
    for event in found:
        _show(event)


@parked.command(epilog="Example: holdfast outbox parked edit 4711 --payload-file fixed.json "
             "--reason 'total was negative, see OPS-12'")  # fmt: skip
def edit(
    event: One,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    payload: Annotated[str | None, typer.Option(help="The new payload, as text.")] = None,
    payload_file: Annotated[
        Path | None, typer.Option(help="The new payload, from a file; - is standard input.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="Set a header: NAME=VALUE; may repeat.")
    ] = None,
    drop_header: Annotated[
        list[str] | None, typer.Option(help="Remove a header; may repeat.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Take a payload that is not JSON all the same.")
    ] = False,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Change payload or headers of a refused event; it stays parked until it is released.

    The audit trail keeps the digests before and after and which JSON paths changed.
    """
    change = EventEdit(
        payload=_payload(payload, payload_file),
        headers=tuple(_header(text) for text in header or ()),
        without=tuple(drop_header or ()),
        force=force,
    )
    with outbox_database(database) as engine:
        edited = ParkedKeys(engine).edit(event, change, _operator(actor, reason))
    text = f"edited {edited.subject}; next: holdfast outbox parked release {edited.seq} --reason …"
    answer(text, {"edited": edited.seq, "id": edited.id}, as_json=as_json)


@parked.command(epilog="Example: holdfast outbox parked release --topic orders --key 17 "
             "--reason 'topic created'")  # fmt: skip
def release(
    events: Events = None,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    topic: AnyTopic = None,
    key: Key = None,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Let refused events go: the relay publishes them, then what waits behind, in order.

    Name events, or a key by --topic and --key, or everything refused by --topic alone.
    """
    selection = ParkedSelection(events=tuple(events or ()), topic=topic, key=key)
    with outbox_database(database) as engine:
        count = ParkedKeys(engine).release(selection, _operator(actor, reason))
    text = f"released {count:,} of {selection.subject}; a running relay publishes within a second"
    answer(text, {"released": count, "of": selection.subject}, as_json=as_json)


@parked.command(epilog="Example: holdfast outbox parked skip 4711 --reason 'test data' --yes")
def skip(
    event: One,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    actor: Actor = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Discard a refused event for good; what waits behind it then flows by itself."""
    operator = _operator(actor, reason)
    with outbox_database(database) as engine:
        keys = ParkedKeys(engine)
        if not yes:
            found = keys.events(ParkedSelection(events=(event,)))
            if not found:
                raise EventNotParked(f"no event {event} is parked")
            confirm("Discard this event for good", shown=_lines(found[0]), yes=yes, as_json=as_json)
        skipped = keys.skip(event, operator)
    text = f"skipped {skipped.subject}: it will never be published"
    answer(text, {"skipped": skipped.seq, "id": skipped.id}, as_json=as_json)


def _operator(actor: str | None, reason: str) -> Operator:
    return operator_of(actor, reason)


def _payload(text: str | None, path: Path | None) -> bytes | None:
    if text is not None and path is not None:
        raise ConfigurationError("give --payload or --payload-file, not both")
    if path is None:
        return None if text is None else text.encode()
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"--payload-file {path}: {error.strerror}") from error


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigurationError(f"--header {text!r}: write NAME=VALUE")
    return name, value


def _as_json(event: ParkedEvent) -> dict[str, Any]:
    fields = {name: getattr(event, name) for name in _FIELDS}
    headers = [{"name": name, **encoded(value)} for name, value in event.headers]
    return {**fields, "payload": encoded(event.payload), "headers": headers}


def _show(event: ParkedEvent) -> None:
    for line in _lines(event):
        say(line)


def _lines(event: ParkedEvent) -> list[str]:
    key = "no key" if event.key is None else f"key {event.key}"
    since = f"{event.parked_at:%Y-%m-%d %H:%M:%S}Z"
    found = [
        f"event {event.seq}  {event.id}  {event.type}",
        f"  {event.state} since {since}  topic {event.topic}, {key}",
    ]
    if event.error is not None:
        found.append(f"  error: {event.error}")
    found += [f"  {name}: {excerpt(value, most=200)}" for name, value in event.headers]
    return [*found, f"{excerpt(event.payload)}\n"]


_FIELDS = ("seq", "id", "topic", "key", "type", "state", "error", "parked_at")


app = typer.Typer(help="Look into the outbox and handle parked keys.", no_args_is_help=True)
app.add_typer(parked, name="parked")


@app.command(epilog="Example: holdfast outbox prune --older-than 365d --reason 'yearly'")
def prune(
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    older_than: OlderThan = "365d",
    actor: Actor = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete old entries of the audit trail, which all of Holdfast shares, from its beginning."""
    days = seconds(older_than, "--older-than") / 86400
    with outbox_database(database) as engine:
        if found := Audit().prunable(engine, days):
            asked = f"Delete {found:,} entries of the audit trail, all over {older_than} old"
            confirm(asked, count=found, yes=yes, as_json=as_json)
        count = Audit().prune(engine, days, operator_of(actor, reason))
    answer(f"pruned {count:,} entries", {"pruned": count}, as_json=as_json)


@app.command(epilog="Example: holdfast outbox audit --database sqlite:///shop.db --limit 20")
def audit(
    *, config: Config = None, database: Database, limit: Limit = 50, as_json: Json = False
) -> None:
    """Show what operators did to parked events, newest first."""
    with outbox_database(database) as engine, engine.connect() as db:
        found = entries(db, limit=limit, area=OUTBOX)
    if as_json:
        print_json(acts(found))
        return
    rows = [
        (f"{one.moment:%Y-%m-%d %H:%M:%S}Z", one.actor, one.action, one.subject, one.reason)
        for one in found
    ]
    print_table(("at", "actor", "action", "event", "reason"), rows)
