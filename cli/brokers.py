"""`holdfast brokers` and `holdfast lag`: what can be connected, and how far groups are."""

from contextlib import closing
from typing import Annotated

import typer

from holdfast.brokers import connect, schemes
from holdfast.cli.display import out, print_json, print_table
from holdfast.cli.options import Broker, Json
from holdfast.errors import ConfigurationError, NotFound
from holdfast.urls import mask


def brokers(*, as_json: Json = False) -> None:
    """List the URL schemes that an installed adapter answers for."""
    if as_json:
        print_json(schemes())
        return
    for scheme in schemes():
        out.print(scheme)


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
