"""Options that several commands share; each is also read from the environment."""

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.config import load

Config = Annotated[
    Path | None,
    typer.Option(
        envvar="HOLDFAST_CONFIG",
        is_eager=True,
        callback=load,
        help="A TOML file with database, broker and a table per command; flags and "
        "environment win over it.",
    ),
]
# The default is never shown: it may come from the file and hold a password.
Database = Annotated[
    str,
    typer.Option(
        envvar="HOLDFAST_DATABASE",
        show_default=False,
        help="Where the outbox is, e.g. sqlite:///shop.db or postgresql+psycopg://user@host/db.",
    ),
]
Broker = Annotated[
    str,
    typer.Option(
        envvar="HOLDFAST_BROKER",
        show_default=False,
        help="Where messages go, e.g. sqlite:///broker.db or kafka://host:9092.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Limit = Annotated[int, typer.Option(min=1, max=1_000_000, help="Show at most so many.")]
Topic = Annotated[str | None, typer.Option(help="Only this topic.")]
Key = Annotated[str | None, typer.Option(help="Only this key of the topic.")]
Reason = Annotated[str, typer.Option(help="Why; kept in the audit trail.")]
Actor = Annotated[
    str | None,
    typer.Option(envvar="HOLDFAST_ACTOR", help="Who acts; the system's user unless given."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
