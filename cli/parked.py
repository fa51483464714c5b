"""`holdfast outbox parked`: events that the broker refused, and what to do about them."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.audit import Warrant
from holdfast.cli.display import answer, encoded, excerpt, print_json, print_table, say
from holdfast.cli.failures import EXIT_NOT_FOUND
from holdfast.cli.opened import outbox_database, warranted
from holdfast.cli.options import Actor, Config, Database, Json, Key, Limit, Reason, Topic, Yes
from holdfast.errors import ConfigurationError
from holdfast.outbox.parked_event import Edit, NotParked, ParkedEvent
from holdfast.outbox.parked_keys import ParkedKeys, Selection

app = typer.Typer(
    help="Keys that wait because the broker refused one of their events.", no_args_is_help=True
)

Events = Annotated[list[str] | None, typer.Argument(help="Numbers or ids of events.")]
One = Annotated[str, typer.Argument(help="The number or id of a refused event.")]


@app.command("list", epilog="Example: holdfast outbox parked list --topic orders")
def list_(
    *,
    config: Config = None,
    database: Database,
    topic: Topic = None,
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
    rows = [
        (k.topic, "(no key)" if k.key is None else k.key, k.first, k.refused, k.behind,
         k.released, f"{k.since:%Y-%m-%d %H:%M:%S}Z", k.error)
        for k in keys
    ]  # fmt: skip
    headings = ("topic", "key", "first", "refused", "behind", "released", "since", "error")
    print_table(headings, rows)
    say("next: holdfast outbox parked show FIRST, then edit, release or skip it with --reason")


@app.command(epilog="Example: holdfast outbox parked show 4711")
def show(
    events: Events = None,
    *,
    config: Config = None,
    database: Database,
    topic: Topic = None,
    key: Key = None,
    limit: Limit = 20,
    as_json: Json = False,
) -> None:
    """Show parked events in their order, with headers and payload."""
    selection = Selection(events=tuple(events or ()), topic=topic, key=key)
    with outbox_database(database) as engine:
        found = ParkedKeys(engine).events(selection, limit=limit)
    if not found:
        raise NotParked(f"nothing is parked under {selection.subject}")
    if as_json:
        print_json([_as_json(event) for event in found])
        return
    for event in found:
        _show(event)


@app.command(epilog="Example: holdfast outbox parked edit 4711 --payload-file fixed.json "
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
    change = Edit(
        payload=_payload(payload, payload_file),
        headers=tuple(_header(text) for text in header or ()),
        without=tuple(drop_header or ()),
        force=force,
    )
    with outbox_database(database) as engine:
        edited = ParkedKeys(engine).edit(event, change, _warrant(actor, reason))
    text = f"edited {edited.subject}; next: holdfast outbox parked release {edited.seq} --reason …"
    answer(text, {"edited": edited.seq, "id": edited.id}, as_json=as_json)


@app.command(epilog="Example: holdfast outbox parked release --topic orders --key 17 "
             "--reason 'topic created'")  # fmt: skip
def release(
    events: Events = None,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    topic: Topic = None,
    key: Key = None,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Let refused events go: the relay publishes them, then what waits behind, in order.

    Name events, or a key by --topic and --key, or everything refused by --topic alone.
    """
    selection = Selection(events=tuple(events or ()), topic=topic, key=key)
    with outbox_database(database) as engine:
        count = ParkedKeys(engine).release(selection, _warrant(actor, reason))
    text = f"released {count:,} of {selection.subject}; a running relay publishes within a second"
    answer(text, {"released": count, "of": selection.subject}, as_json=as_json)


@app.command(epilog="Example: holdfast outbox parked skip 4711 --reason 'test data' --yes")
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
    warrant = _warrant(actor, reason)
    if as_json and not yes:
        raise ConfigurationError("skip discards an event and a script is not asked: add --yes")
    with outbox_database(database) as engine:
        keys = ParkedKeys(engine)
        if not yes:
            found = keys.events(Selection(events=(event,)))
            if not found:
                raise NotParked(f"no event {event} is parked")
            _confirm(found[0])
        skipped = keys.skip(event, warrant)
    text = f"skipped {skipped.subject}: it will never be published"
    answer(text, {"skipped": skipped.seq, "id": skipped.id}, as_json=as_json)


def _confirm(event: ParkedEvent) -> None:
    if not sys.stdin.isatty():
        raise ConfigurationError("skip discards an event and nobody is here to ask: add --yes")
    _show(event)
    if not typer.confirm("Discard this event for good?"):
        say("left as it is")
        raise SystemExit(EXIT_NOT_FOUND)


def _warrant(actor: str | None, reason: str) -> Warrant:
    return warranted(actor, reason)


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
    key = "no key" if event.key is None else f"key {event.key}"
    say(f"event {event.seq}  {event.id}  {event.type}")
    say(f"  {event.state} since {event.parked_at:%Y-%m-%d %H:%M:%S}Z  topic {event.topic}, {key}")
    if event.error is not None:
        say(f"  error: {event.error}")
    for name, value in event.headers:
        say(f"  {name}: {excerpt(value, most=200)}")
    say(f"{excerpt(event.payload)}\n")


_FIELDS = ("seq", "id", "topic", "key", "type", "state", "error", "parked_at")
