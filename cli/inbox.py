"""`holdfast inbox`: what consumers remember, and for how long."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer
from sqlalchemy.engine import Connection, Engine

from holdfast.cli.display import print_json, print_table, say
from holdfast.cli.dlq.opened import dead_letters
from holdfast.cli.dlq.opened import warrant as warranted
from holdfast.cli.opened import existing_database
from holdfast.cli.options import Actor, Config, Database, Json, Reason, Yes
from holdfast.dlq.audit import Audit
from holdfast.errors import ConfigurationError, NotFound
from holdfast.idempotency.pruner import prune as prune_rows
from holdfast.idempotency.renaming import Renamed
from holdfast.idempotency.renaming import rename as rename_scope
from holdfast.idempotency.stats import ConsumerStats, require_inbox
from holdfast.idempotency.stats import forget as forget_rows
from holdfast.idempotency.stats import stats as count
from holdfast.idempotency.window import as_text

app = typer.Typer(
    help="See and prune what consumers remember of handled messages.", no_args_is_help=True
)

Consumer = Annotated[str, typer.Argument(help="The consumer as `holdfast inbox stats` names it.")]


@app.command(epilog="Example: holdfast inbox stats --database sqlite:///shop.db")
def stats(*, config: Config = None, database: Database, as_json: Json = False) -> None:
    """Show what each consumer remembers, its window, and messages in flight or in trouble."""
    with _inbox(database) as engine:
        found = count(engine)
    if as_json:
        print_json(asdict(found))
        return
    headings = ("consumer", "remembered", "oldest", "newest", "window", "to prune", "leased")
    print_table(headings, [_row(consumer) for consumer in found.consumers])
    say(
        f"in flight {found.in_flight:,}, failing {found.failing:,} (suspected of a crash "
        f"{found.suspects:,}), waiting for an earlier version {found.ahead:,}"
    )
    if any(consumer.overdue for consumer in found.consumers):
        say("next: holdfast inbox prune")


@app.command(epilog="Example: holdfast inbox prune --consumer billing/orders")
def prune(
    *,
    config: Config = None,
    database: Database,
    consumer: Annotated[str | None, typer.Option(help="Only this consumer.")] = None,
    step: Annotated[int, typer.Option(min=1, help="Rows per transaction.")] = 500,
    as_json: Json = False,
) -> None:
    """Delete what is older than its consumer's window, in small steps; several may run at once."""
    with _inbox(database) as engine:
        pruned = prune_rows(engine, consumer=consumer, step=step)
    if as_json:
        print_json(pruned)
        return
    for name, rows in sorted(pruned.items()):
        say(f"pruned {rows:,} of {name}")
    if not pruned:
        say("nothing to prune")


@app.command(epilog="Example: holdfast inbox forget billing/orders 0190163d-8694-739b-aea5-"
             "966c26f8ad91 --source shop --reason 'effect was undone by hand' --yes")  # fmt: skip
def forget(
    consumer: Consumer,
    ids: Annotated[list[str], typer.Argument(help="Ids (or keys) of handled messages.")],
    *,
    config: Config = None,
    database: Database,
    source: Annotated[
        str | None,
        typer.Option(help="The messages' source, where they have one: Outbox(source=…)."),
    ] = None,
    reason: Reason,
    actor: Actor = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Forget handled messages: when they come again, their effect happens a second time.

    Who did it and why goes into the audit trail, in the same transaction: holdfast dlq audit.
    """
    warrant = warranted(actor, reason)
    if not yes:
        _confirm(
            "forget lets effects happen twice",
            f"Let {len(ids):,} message(s) take effect a second time?",
        )

    def record(db: Connection, forgotten: list[str]) -> None:
        Audit().append(db, warrant, "inbox.forget", consumer, {"messages": forgotten})

    with _inbox(database) as engine, dead_letters(database):
        forgotten = forget_rows(engine, consumer, ids, source=source, record=record)
    if not forgotten:
        hint = "" if source is not None else ": add --source SOURCE if they have one"
        raise NotFound(f"{consumer} remembers none of these {len(ids)} message(s){hint}")
    if as_json:
        print_json(forgotten)
        return
    say(f"forgot {len(forgotten):,} of {len(ids):,}: they are handled again when they come")


@app.command(epilog="Example: holdfast inbox rename billing/orders billing/orders-v2 "
             "--reason 'the topic has a new name' --yes")  # fmt: skip
def rename(
    old: Annotated[str, typer.Argument(help="The consumer as `holdfast inbox stats` names it.")],
    new: Annotated[str, typer.Argument(help="Its new name: GROUP/TOPIC, or GROUP/NAME.")],
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    actor: Actor = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Give what one consumer remembers to another name, all at once.

    For a topic or handler that has a new name: what was handled is not handled again. Stop the
    consumer that uses the old name first. Who did it and why goes into the audit trail.
    """
    warrant = warranted(actor, reason)
    if not yes:
        _confirm(f"rename takes all memory from {old}", f"Give all memory of {old} to {new}?")

    def record(db: Connection, done: Renamed) -> None:
        detail = {"new": new, "remembered": done.remembered, "attempts": done.attempts}
        Audit().append(db, warrant, "inbox.rename", old, detail)

    with _inbox(database) as engine, dead_letters(database):
        done = rename_scope(engine, old, new, record=record)
    if as_json:
        print_json(asdict(done))
        return
    say(f"{new} remembers {done.remembered:,} messages of {old} now")


def _confirm(what: str, question: str) -> None:
    if not sys.stdin.isatty():
        raise ConfigurationError(f"{what} and nobody is here to ask: add --yes")
    if not typer.confirm(question):
        say("left as it is")
        raise SystemExit(1)


def _row(found: ConsumerStats) -> tuple[object, ...]:
    window = "for ever" if found.window_seconds is None else as_text(found.window_seconds)
    return (
        found.consumer,
        f"{found.remembered:,}",
        "" if found.oldest is None else f"{found.oldest:%Y-%m-%d %H:%M:%S}Z",
        "" if found.newest is None else f"{found.newest:%Y-%m-%d %H:%M:%S}Z",
        window,
        f"{found.overdue:,}",
        f"{found.leased:,}",
    )


@contextmanager
def _inbox(url: str) -> Iterator[Engine]:
    engine = existing_database(url)
    try:
        with engine.connect() as db:
            require_inbox(db)
        yield engine
    finally:
        engine.dispose()
