"""The `holdfast` command: the composition root, and the only reader of the environment."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from typing import Any

import typer
from sqlalchemy.exc import SQLAlchemyError

from holdfast.cli import brokers, cdc, db, doctor, logs, outbox, relay
from holdfast.cli.display import out
from holdfast.cli.failures import EXIT_INTERRUPTED, fail
from holdfast.errors import HoldfastError

app = typer.Typer(
    name="holdfast",
    help="Reliability middleware for message producers and consumers, around any broker.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(epilog=relay.EXAMPLE)(relay.relay)
app.command(epilog=cdc.EXAMPLE)(cdc.cdc)
app.add_typer(outbox.app, name="outbox")
app.add_typer(db.app, name="db")
app.command(epilog=doctor.EXAMPLE)(doctor.doctor)
app.command(epilog="Example: holdfast lag orders --broker sqlite:///b.db --group billing")(
    brokers.lag
)
app.command(epilog="Example: holdfast brokers --json")(brokers.brokers)


@app.command(epilog="Example: holdfast version")
def version() -> None:
    """Print the version."""
    out.print(installed_version("holdfast"))


def main(args: list[str] | None = None) -> Any:
    """Run the command; an expected failure is one clear sentence, never a traceback."""
    logs.configure(logs.LogFormat.TEXT, logs.LogLevel.WARNING)
    try:
        return app(args=args)
    except (HoldfastError, SQLAlchemyError) as error:
        fail(error)
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
