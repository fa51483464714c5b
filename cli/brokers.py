"""`holdfast brokers`: what can be connected, and upkeep."""

from collections import Counter
from contextlib import closing

import typer

from holdfast.brokers import connect, schemes
from holdfast.cli.confirming import confirm
from holdfast.cli.display import out, print_json, say
from holdfast.cli.options import (
    AnyTopics,
    Broker,
    Config,
    IsDryRun,
    Json,
    OlderThan,
    Yes,
    seconds,
)
from holdfast.durations import as_text
from holdfast.errors import ConfigurationError, NotFound
from holdfast.urls import mask

_COUNTED = 100_000  # a dry run counts no further in each lane: counting keeps the server busy

app = typer.Typer(help="List the URL schemes that an installed adapter answers for; prune topics.")


@app.callback(invoke_without_command=True, epilog="Example: holdfast brokers --json")
def brokers(context: typer.Context, *, config: Config = None, as_json: Json = False) -> None:
    """List the URL schemes that an installed adapter answers for; prune topics."""
    if context.invoked_subcommand is not None:
        return
    if as_json:
        print_json(schemes())
        return
    for scheme in schemes():
        out.print(scheme)


@app.command(
    epilog="Example: holdfast brokers prune --broker redis://localhost/0 --older-than 7d --dry-run"
)
def prune(
    *,
    config: Config = None,
    broker: Broker,
    topics: AnyTopics = None,
    older_than: OlderThan = "7d",
    dry_run: IsDryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete messages that every group has settled, in small steps, from Redis, SQLite or memory.

    These brokers keep a topic for ever otherwise. What any group has not settled stays, and so does
    a topic that no group has read: name a group that is yet to come with holdfast group create.
    The other brokers delete by settings of their own.
    """
    length = seconds(older_than, "--older-than")
    if not length:
        raise ConfigurationError("--older-than 0s: keep what is younger than something, e.g. 7d")
    with closing(connect(broker)) as connected:
        for topic in topics or ():
            if connected.caps.prune and not connected.has_group(topic, "holdfast"):
                raise NotFound(f"{mask(broker)} has no topic {topic!r}")
        pruned: Counter[str] = Counter()
        if dry_run or not yes:
            pruned.update(connected.prune(topics, older_than=length, most=_COUNTED, dry_run=True))
        if pruned and not dry_run:
            shown = [_told(topic, count, "would prune") for topic, count in sorted(pruned.items())]
            asked = f"Delete messages over {as_text(length)} old that every group has settled"
            confirm(asked, shown=shown, yes=yes, as_json=as_json)
        if not dry_run:
            pruned.clear()
            while step := connected.prune(topics, older_than=length):
                pruned.update(step)
    if as_json:
        rows = [{"topic": topic, "pruned": count} for topic, count in sorted(pruned.items())]
        print_json({"dry_run": dry_run, "older_than_seconds": length, "topics": rows})
        return
    for topic, count in sorted(pruned.items()):
        say(_told(topic, count, "would prune" if dry_run else "pruned"))
    if not pruned:
        say(f"nothing to prune: no message over {as_text(length)} old is settled by every group")


def _told(topic: str, count: int, what: str) -> str:
    many = " or more" if what != "pruned" and count >= _COUNTED else ""
    return f"{what} {count:,}{many} of {topic}"
