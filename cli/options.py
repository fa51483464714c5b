"""Options that mean the same in every command; each comes from a flag, HOLDFAST_* or the file."""

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.config import load
from holdfast.durations import written
from holdfast.errors import ConfigurationError

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="HOLDFAST_CONFIG",
        is_eager=True,
        callback=load,
        help="A TOML file with the shared settings and a table per command; flags and "
        "environment win over it.",
    ),
]

# The default is never shown: it may come from the file and hold a password.
_database = typer.Option(
    "--database",
    envvar="HOLDFAST_DATABASE",
    show_default=False,
    help="Where Holdfast's tables are, e.g. sqlite:///shop.db or "
    "postgresql+psycopg://user@host/db.",
)
_broker = typer.Option(
    "--broker",
    envvar="HOLDFAST_BROKER",
    show_default=False,
    help="Where messages are, e.g. sqlite:///broker.db or kafka://host:9092.",
)
_group = typer.Option("--group", envvar="HOLDFAST_GROUP", help="The consumer group.")
_topic = typer.Option("--topic", envvar="HOLDFAST_TOPIC", help="The topic.")
_topics = typer.Option("--topic", envvar="HOLDFAST_TOPIC", help="The topic; may repeat.")
_reason = typer.Option("--reason", envvar="HOLDFAST_REASON", help="Why; kept in the audit trail.")

Database = Annotated[str, _database]
AnyDatabase = Annotated[str | None, _database]
Also = Annotated[
    list[str] | None,
    typer.Option(help="The database of another service that took part; may be repeated."),
]
Broker = Annotated[str, _broker]
AnyBroker = Annotated[str | None, _broker]
Group = Annotated[str, _group]
AnyGroup = Annotated[str | None, _group]
AnyTopic = Annotated[str | None, _topic]
Topics = Annotated[list[str], _topics]
AnyTopics = Annotated[list[str] | None, _topics]
Reason = Annotated[str, _reason]
AnyReason = Annotated[str | None, _reason]
Actor = Annotated[
    str | None,
    typer.Option(
        "--actor", envvar="HOLDFAST_ACTOR", help="Who acts; the system's user unless given."
    ),
]
Json = Annotated[
    bool, typer.Option("--json", envvar="HOLDFAST_JSON", help="Print JSON for scripts.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", envvar="HOLDFAST_YES", help="Do not ask.")]

Key = Annotated[str | None, typer.Option("--key", help="The key of a message.")]
Limit = Annotated[int, typer.Option(min=1, max=1_000_000, help="Show at most so many.")]
OlderThan = Annotated[
    str, typer.Option("--older-than", help="Only what is older, e.g. 36h or 30d.")
]
IsDryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")]
Http = Annotated[
    str | None,
    typer.Option(
        "--http",
        envvar="HOLDFAST_HTTP",
        help="Serve /healthz, /readyz and /metrics here, e.g. 127.0.0.1:9464; off unless set.",
    ),
]
Stall = Annotated[
    str,
    typer.Option(
        "--stall",
        envvar="HOLDFAST_STALL",
        help="/healthz fails when nothing moved for longer than this, e.g. 2m.",
    ),
]
Drain = Annotated[
    str,
    typer.Option(
        "--drain",
        envvar="HOLDFAST_DRAIN",
        help="After SIGTERM, finish what is in hand for at most so long.",
    ),
]
Retention = Annotated[
    list[str] | None,
    typer.Option(
        "--retention",
        envvar="HOLDFAST_RETENTION",
        metavar="TOPIC=AGE",
        help="How long the broker keeps a dead-letter topic, e.g. orders.billing.dlq=7d or "
        "'*=7d'; /metrics then counts what it eats uncollected within a day.",
    ),
]


def seconds(text: str, option: str) -> float:
    """Return a length of time written as 30s, 15m, 4h, 14d or 2w."""
    return written(text, of=option)


def retentions(given: list[str] | None) -> dict[str, float]:
    """Return how long the broker keeps which topic, from `orders=7d`."""
    found = {}
    for one in given or ():
        topic, equals, length = one.rpartition("=")
        if not equals or not topic:
            raise ConfigurationError(f"--retention {one!r}: write TOPIC=AGE, e.g. orders=7d")
        found[topic] = seconds(length, "--retention")
    return found
