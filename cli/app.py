"""The `holdfast` command: the composition root, and the only reader of the environment."""

from __future__ import annotations

import json
import logging
import signal
import sys
from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError

from holdfast.brokers import connect, schemes
from holdfast.database import open_database
from holdfast.errors import DependencyDown, HoldfastError
from holdfast.outbox import Relay, create_tables
from holdfast.urls import mask

app = typer.Typer(
    name="holdfast",
    help="Reliability middleware for message producers and consumers, around any broker.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console()
err = Console(stderr=True)

Database = Annotated[
    str,
    typer.Option(
        envvar="HOLDFAST_DATABASE",
        help="Where the outbox is, e.g. sqlite:///shop.db or postgresql+psycopg://user@host/db.",
    ),
]
BrokerOption = Annotated[
    str,
    typer.Option(envvar="HOLDFAST_BROKER", help="Where messages go, e.g. sqlite:///broker.db."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]

EXIT_FIX, EXIT_DOWN, EXIT_INTERRUPTED = 2, 3, 130


@app.command()
def version() -> None:
    """Print the version."""
    out.print(installed_version("holdfast"))


@app.command()
def brokers(*, as_json: Json = False) -> None:
    """List the URL schemes that an installed adapter answers for."""
    if as_json:
        out.print_json(json.dumps(schemes()))
        return
    for scheme in schemes():
        out.print(scheme)


@app.command()
def lag(
    topics: Annotated[list[str], typer.Argument(help="The topics to look at.")],
    *,
    broker: BrokerOption,
    group: Annotated[str, typer.Option(help="The consumer group.")],
    as_json: Json = False,
) -> None:
    """Show how many messages a group has not yet settled, by lane."""
    counts = connect(broker).lag(group, topics)
    if as_json:
        rows = [{"topic": t, "partition": p, "lag": n} for (t, p), n in sorted(counts.items())]
        out.print_json(json.dumps(rows))
        return
    table = Table("topic", "partition", "lag", title=f"group {group}")
    for (topic, partition), count in sorted(counts.items()):
        table.add_row(topic, str(partition), f"{count:,}")
    out.print(table)


@app.command()
def relay(
    *,
    database: Database,
    broker: BrokerOption,
    once: Annotated[bool, typer.Option(help="Publish what is there, then end (for cron).")] = False,
    create: Annotated[bool, typer.Option(help="Create the outbox table if missing.")] = False,
) -> None:
    """Publish committed outbox events to the broker, in order per key, at least once.

    Run it beside the service that writes the outbox. SIGTERM or Ctrl-C ends it after the
    batch in hand; nothing is lost whenever it is killed.
    """
    engine = open_database(database)
    if create:
        create_tables(engine)
    sink = connect(broker).sink()
    running = Relay(engine, sink)
    try:
        if once:
            total = 0
            while moved := running.run_once():
                total += moved
            out.print(f"published {total:,} events")
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: running.stop())
        err.print(f"relay: {mask(database)} → {mask(broker)}; Ctrl-C to stop")
        running.run()
    finally:
        sink.close()
        engine.dispose()


def main(args: list[str] | None = None) -> Any:
    """Run the command; an expected failure is one clear sentence, never a traceback."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    try:
        return app(args=args)
    except DependencyDown as error:
        _fail(error, EXIT_DOWN)
    except (HoldfastError, SQLAlchemyError) as error:
        _fail(error, EXIT_FIX)
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


def _fail(error: Exception, code: int) -> None:
    first = mask(str(error)).split("\n(Background on this error", 1)[0]
    err.print(f"[bold red]holdfast:[/] {first}", highlight=False, markup=True, soft_wrap=True)
    raise SystemExit(code)
