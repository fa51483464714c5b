"""`holdfast topics`: the topics of a broker, made before anybody needs them."""

from contextlib import closing
from typing import Annotated

import typer

from holdfast.brokers import connect
from holdfast.cli.display import print_json, print_table, say
from holdfast.cli.options import Broker, Config, Json
from holdfast.errors import NotFound, Unsupported
from holdfast.ids import require_name
from holdfast.ports import BrokerPowers
from holdfast.urls import mask

app = typer.Typer(help="Make topics, and see which there are.", no_args_is_help=True)

_Names = Annotated[list[str], typer.Argument(help="The topics.")]


@app.command(
    epilog="Example: holdfast topics create orders refunds --partitions 12 "
    "--broker 'kafka://localhost:9092?replication_factor=3'"
)
def create(
    topics: _Names,
    *,
    config: Config = None,
    broker: Broker,
    partitions: Annotated[
        int | None,
        typer.Option(min=1, help="Lanes of a new topic; as partitions= in the URL if not set."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make sure that topics exist; existing ones are left as they are.

    What a new topic is like stands in the broker's URL, which relay, consumer and this command
    share: partitions=, and for Kafka also replication_factor= and settings as
    topic.retention.ms=. With auto_create=true in it, topics are made when they are first used.
    """
    _check(topics)
    with closing(connect(broker)) as connected:
        powers = BrokerPowers.of(connected)
        known = powers.topics()
        for topic in dict.fromkeys(topics):
            connected.create_topic(topic, partitions=partitions or powers.default_partitions)
    found = [
        {"topic": topic, "created": None if known is None else topic not in known}
        for topic in dict.fromkeys(topics)
    ]
    if as_json:
        print_json(found)
        return
    for one in found:
        say(f"topic {one['topic']} {'was there' if one['created'] is False else 'is made'}")


@app.command("list", epilog="Example: holdfast topics list --broker kafka://localhost:9092")
def list_(*, config: Config = None, broker: Broker, as_json: Json = False) -> None:
    """List the topics of a broker and how many partitions each has."""
    with closing(connect(broker)) as connected:
        known = BrokerPowers.of(connected).topics()
    if known is None:
        raise Unsupported("list its topics", mask(broker), "ask its own tools")
    found = sorted(known.items())
    if as_json:
        print_json([{"topic": topic, "partitions": count} for topic, count in found])
        return
    print_table(("topic", "partitions"), [(topic, f"{count:,}") for topic, count in found])


@app.command(epilog="Example: holdfast topics show orders --broker kafka://localhost:9092")
def show(topics: _Names, *, config: Config = None, broker: Broker, as_json: Json = False) -> None:
    """Show how many partitions topics have; exits with 1 when one does not exist."""
    _check(topics)
    with closing(connect(broker)) as connected:
        known = BrokerPowers.of(connected).topics()
    if known is None:
        raise Unsupported("tell its topics", mask(broker), "ask its own tools")
    if missing := sorted(set(topics) - known.keys()):
        raise NotFound(f"{mask(broker)} has no topic {', '.join(map(repr, missing))}")
    if as_json:
        print_json([{"topic": topic, "partitions": known[topic]} for topic in topics])
        return
    for topic in topics:
        say(f"topic {topic}: {known[topic]:,} partition(s)")


def _check(topics: list[str]) -> None:
    for topic in topics:
        require_name(topic, "TOPIC")
