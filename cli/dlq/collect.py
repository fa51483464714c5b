"""`holdfast dlq collect`: dead-letter topics into the store, continuously or once."""

from typing import Annotated

import typer

from holdfast.brokers import connect
from holdfast.cli.display import say
from holdfast.cli.dlq.opened import dead_letters
from holdfast.cli.dlq.options import Database
from holdfast.cli.options import Broker, Config
from holdfast.cli.stopping import stopped_by_signals
from holdfast.dlq.collector import Collector
from holdfast.dlq.store import StoreHome


def collect(
    topics: Annotated[list[str], typer.Argument(help="Dead-letter topics: TOPIC.GROUP.dlq.")],
    *,
    config: Config = None,
    database: Database,
    broker: Broker,
    group: Annotated[
        str, typer.Option(help="The consumer group that collects.")
    ] = "holdfast-dlq-collector",
    once: Annotated[bool, typer.Option("--once", help="End when nothing is left.")] = False,
) -> None:
    """Move dead letters from broker topics into the store, again and again."""
    with dead_letters(database) as engine:
        opened = connect(broker)
        source = opened.source(topics, group=group)
        try:
            collector = Collector(source, StoreHome(engine))
            with stopped_by_signals(collector.stop, drain_seconds=30):
                found = collector.run(until_idle=once)
        finally:
            source.close()
            opened.close()
    say(f"collected {found.stored:,} dead letters, {found.unreadable:,} of them without envelope")
