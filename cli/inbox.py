"""`holdfast inbox`: what consumers remember, and for how long."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer

from holdfast.cli.confirming import confirm
from holdfast.cli.display import print_json, print_table, say
from holdfast.cli.opened import existing_database, operator_of
from holdfast.cli.options import Actor, Config, Database, Json, Reason, Yes
from holdfast.durations import as_text
from holdfast.errors import NotFound
from holdfast.idempotency import ConsumerStats, InboxAdmin

app = typer.Typer(
    help="See and prune what consumers remember of handled messages.", no_args_is_help=True
)

_COUNTED = 100_000  # what goes is counted no further: counting keeps the server busy
Consumer = Annotated[str, typer.Argument(help="The consumer as `holdfast inbox stats` names it.")]


@app.command(epilog="Example: holdfast inbox stats --database sqlite:///shop.db")
def stats(*, config: Config = None, database: Database, as_json: Json = False) -> None:
    """Show what each consumer remembers, its window, and messages in flight or in trouble."""
    with _inbox(database) as inbox:
        found = inbox.stats()
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


@app.command(epilog="Example: holdfast inbox prune --consumer billing/orders --yes")
def prune(
    *,
    config: Config = None,
    database: Database,
    consumer: Annotated[str | None, typer.Option(help="Only this consumer.")] = None,
    step: Annotated[int, typer.Option(min=1, help="Rows per transaction.")] = 500,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete what is older than its consumer's window, in small steps; several may run at once.

    A message that comes again after that takes effect a second time, as it would without pruning.
    """
    with _inbox(database) as inbox:
        going = {} if yes else inbox.prunable(consumer=consumer, most=_COUNTED)
        if going:
            shown = [f"{name}: {_many(rows)} beyond its window" for name, rows in going.items()]
            total = sum(going.values())
            confirm(f"Forget {_many(total)} handled message(s)", count=total, shown=shown,
                    yes=yes, as_json=as_json)  # fmt: skip
        pruned = inbox.prune(consumer=consumer, step=step) if yes or going else {}
    if as_json:
        print_json(pruned)
        return
    for name, rows in sorted(pruned.items()):
        say(f"pruned {rows:,} of {name}")
    if not pruned:
        say("nothing to prune")


def _many(rows: int) -> str:
    return f"{rows:,} or more" if rows >= _COUNTED else f"{rows:,}"


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
    operator = operator_of(actor, reason)
    asked = f"Let {len(ids):,} message(s) take effect a second time"
    confirm(asked, count=len(ids), yes=yes, as_json=as_json)

    with _inbox(database) as inbox:
        forgotten = inbox.forget(consumer, ids, operator, source=source)
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
    operator = operator_of(actor, reason)
    confirm(f"Give all memory of {old} to {new}", yes=yes, as_json=as_json)

    with _inbox(database) as inbox:
        done = inbox.rename(old, new, operator)
    if as_json:
        print_json(asdict(done))
        return
    say(f"{new} remembers {done.remembered:,} messages of {old} now")


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
def _inbox(url: str) -> Iterator[InboxAdmin]:
    engine = existing_database(url)
    try:
        yield InboxAdmin(engine)
    finally:
        engine.dispose()
