"""`holdfast group`: consumer groups, made before anybody publishes."""

from contextlib import closing

import typer

from holdfast.brokers import connect
from holdfast.cli.display import print_json, say
from holdfast.cli.options import Broker, Config, Group, Json, Topics
from holdfast.ids import require_name

app = typer.Typer(help="Make consumer groups before the first producer.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Make consumer groups before the first producer."""


@app.command(
    epilog="Example: holdfast group create --broker amqp://guest:guest@localhost/ "
    "--group billing --topic orders --topic refunds"
)
def create(
    *,
    config: Config = None,
    broker: Broker,
    group: Group,
    topics: Topics,
    as_json: Json = False,
) -> None:
    """Make sure that a group gets what is published from now on, before its first consumer runs.

    RabbitMQ keeps messages only for groups whose queues exist: run this in a deployment before the
    first producer. Elsewhere a new group reads a topic from its beginning, and this notes the
    group, so that holdfast brokers prune keeps what it has not read. Done again, nothing changes.
    """
    require_name(group, "--group")
    for topic in topics:
        require_name(topic, "--topic")
    found = []
    with closing(connect(broker)) as connected:
        for topic in dict.fromkeys(topics):
            was_there = connected.has_group(topic, group)
            connected.create_group(topic, group)
            found.append({"group": group, "topic": topic, "created": not was_there})
    if as_json:
        print_json(found)
        return
    for one in found:
        say(f"group {group} gets what is published to {one['topic']}"
            f"{' from now on' if one['created'] else ''}")  # fmt: skip
