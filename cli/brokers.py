"""`holdfast brokers` and `holdfast lag`: what can be connected, how far groups are, upkeep."""

from collections import Counter
from contextlib import closing
from typing import Annotated

import typer

from holdfast.brokers import connect, schemes
from holdfast.cli.display import out, print_json, print_table, say
from holdfast.cli.options import Broker, Json
from holdfast.errors import ConfigurationError, NotFound
from holdfast.urls import mask

_COUNTED = 100_000  # a dry run counts no further in each lane: counting keeps the server busy

app = typer.Typer(help="List the URL schemes that an installed adapter answers for; prune topics.")


@app.callback(invoke_without_command=True, epilog="Example: holdfast brokers --json")
def brokers(context: typer.Context, *, as_json: Json = False) -> None:
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
    broker: Broker,
    topics: Annotated[
        list[str] | None,
        typer.Option("--topic", help="Only this topic; may be given again. All unless given."),
    ] = None,
    older_than: Annotated[
        str, typer.Option(help="Keep messages that are younger: 36h, 7d or 2w, say.")
    ] = "7d",
    dry_run: Annotated[bool, typer.Option(help="Only count; delete nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Delete messages that every group has settled, in small steps, from Redis, SQLite or memory.

    These brokers keep a topic for ever otherwise. What any group has not settled stays, and so does
    a topic that no group has read: name a group that is yet to come with holdfast group create.
    The other brokers delete by settings of their own.
    """
    from holdfast.idempotency.window import as_text, in_seconds  # needs SQLAlchemy, which is slow

    seconds = in_seconds(older_than, of="older_than")
    with closing(connect(broker)) as connected:
        for topic in topics or ():
            if connected.caps.prune and not connected.has_group(topic, "holdfast"):
                raise NotFound(f"{mask(broker)} has no topic {topic!r}")
        pruned: Counter[str] = Counter()
        if dry_run:
            pruned.update(connected.prune(topics, older_than=seconds, most=_COUNTED, dry_run=True))
        else:
            while step := connected.prune(topics, older_than=seconds):
                pruned.update(step)
    if as_json:
        rows = [{"topic": topic, "pruned": count} for topic, count in sorted(pruned.items())]
        print_json({"dry_run": dry_run, "older_than_seconds": seconds, "topics": rows})
        return
    for topic, count in sorted(pruned.items()):
        many = " or more" if dry_run and count >= _COUNTED else ""
        say(f"{'would prune' if dry_run else 'pruned'} {count:,}{many} of {topic}")
    if not pruned:
        say(f"nothing to prune: no message over {as_text(seconds)} old is settled by every group")


def lag(
    topics: Annotated[list[str], typer.Argument(help="The topics to look at.")],
    *,
    broker: Broker,
    group: Annotated[str, typer.Option(help="The consumer group.")],
    as_json: Json = False,
) -> None:
    """Show how many messages a group has not yet settled, by lane."""
    if not group or not all(topics):
        raise ConfigurationError("a topic or the group is an empty text: name it")
    with closing(connect(broker)) as connected:
        counts = connected.lag(group, topics)
    if missing := sorted(set(topics) - {topic for topic, _ in counts}):
        raise NotFound(f"{mask(broker)} has no topic {', '.join(map(repr, missing))}")
    if as_json:
        print_json([{"topic": t, "partition": p, "lag": n} for (t, p), n in sorted(counts.items())])
        return
    rows = [(topic, partition, f"{n:,}") for (topic, partition), n in sorted(counts.items())]
    print_table(("topic", "partition", "lag"), rows, title=f"group {group}")
