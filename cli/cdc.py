"""`holdfast cdc`: the changes of plain tables as a stream of events."""

from contextlib import ExitStack
from typing import Annotated

import typer

from holdfast.brokers import connect
from holdfast.cli import logs
from holdfast.cli.display import out
from holdfast.cli.logs import LogFormat, LogLevel
from holdfast.cli.options import Broker, Config, Database
from holdfast.cli.stopping import stopped_by_signals
from holdfast.outbox import Relay

EXAMPLE = (
    "Example: holdfast cdc --database postgresql+psycopg://shop@db/shop "
    "--broker kafka://broker:9092 --server shop --table public.customer --table public.invoice"
)


def cdc(
    *,
    config: Config = None,  # its callback has read the file
    database: Database,
    broker: Broker,
    table: Annotated[list[str], typer.Option(help="A table to capture; repeat for more.")],
    server: Annotated[
        str,
        typer.Option(
            envvar="HOLDFAST_CDC_SERVER",
            help="A name for the database: topics are <server>.<schema>.<table>.",
        ),
    ],
    slot: Annotated[
        str | None, typer.Option(help="The replication slot; named after the server unless given.")
    ] = None,
    publication: Annotated[
        str | None, typer.Option(help="The publication; named after the server unless given.")
    ] = None,
    create_topics: Annotated[
        bool, typer.Option(help="Create the tables' topics where they are missing.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Publish what is there, then end (for cron).")
    ] = False,
    batch: Annotated[int, typer.Option(help="Changes published at a time.")] = 2000,
    drain_seconds: Annotated[
        float, typer.Option(help="After SIGTERM, finish the batch in hand for at most so long.")
    ] = 20.0,
    log_format: Annotated[
        LogFormat,
        typer.Option(
            envvar="HOLDFAST_LOG_FORMAT", help="auto is text on a terminal and JSON elsewhere."
        ),
    ] = LogFormat.AUTO,
    log_level: Annotated[
        LogLevel, typer.Option(envvar="HOLDFAST_LOG_LEVEL", help="The least level to log.")
    ] = LogLevel.INFO,
) -> None:
    """Publish the rows of tables, then every change of them, as Debezium's change events.

    PostgreSQL only. The first start takes a snapshot; later ones go on where the last one
    was. A second process waits to take over. After the last use drop the slot, which would
    keep the server's log: SELECT pg_drop_replication_slot('holdfast_cdc_<server>').
    """
    from holdfast.outbox.cdc import Cdc  # needs psycopg, which is an extra

    logs.configure(log_format, log_level)
    with ExitStack() as closing:
        target = connect(broker)
        closing.callback(target.close)
        sink = target.sink()
        closing.callback(sink.close)
        capture = Cdc(
            database, sink, tables=table, server=server, slot=slot, publication=publication,
            batch=batch,
        )  # fmt: skip
        if create_topics:
            for topic in capture.topics():
                target.create_topic(topic)
        running = Relay(capture)
        closing.enter_context(stopped_by_signals(running.stop, drain_seconds=drain_seconds))
        if once:
            out.print(f"published {running.run_once():,} changes")
        else:
            running.run()
