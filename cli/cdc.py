"""`holdfast cdc`: the changes of plain tables as a stream of events."""

from typing import Annotated

import typer

from holdfast.cli import logs
from holdfast.cli.capture import Capture, CaptureSettings
from holdfast.cli.display import out
from holdfast.cli.logs import LogFormat, LogLevel
from holdfast.cli.options import Broker, Config, Database

EXAMPLE = (
    "Example: holdfast cdc --database postgresql+psycopg://shop@db/shop "
    "--broker kafka://broker:9092 --server shop --table public.customer --table public.invoice"
)


def cdc(
    *,
    config: Config = None,  # its callback has read the file
    database: Database,
    broker: Broker,
    table: Annotated[
        list[str],
        typer.Option(help="A table to capture, written as in SQL; repeat for more."),
    ],
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
    snapshot: Annotated[
        bool,
        typer.Option(
            "--snapshot",
            help="Read the tables anew if the replication slot is gone or lost, which is an error "
            "otherwise: rows deleted since then never show as deleted.",
        ),
    ] = False,
    create_topics: Annotated[
        bool, typer.Option(help="Create the tables' topics where they are missing.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Publish what is there, then end (for cron).")
    ] = False,
    batch: Annotated[int, typer.Option(help="Changes published at a time.")] = 2000,
    http: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_HTTP",
            help="Serve /healthz, /readyz and /metrics here, e.g. 127.0.0.1:9464; off unless set.",
        ),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(help="After SIGTERM, finish the batch in hand for at most so long.")
    ] = 20.0,
    stall_seconds: Annotated[
        float, typer.Option(help="/healthz fails when a step takes longer than this.")
    ] = 120.0,
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
    was. A second process waits to take over. While broker or database are down it waits and
    tries again. After the last use drop the slot, which would keep the server's log:
    SELECT pg_drop_replication_slot('holdfast_cdc_<server>').
    """
    logs.configure(log_format, log_level)
    capture = Capture(
        CaptureSettings(
            database=database,
            broker=broker,
            tables=table,
            server=server,
            slot=slot,
            publication=publication,
            snapshot=snapshot,
            create_topics=create_topics,
            batch=batch,
            http=http,
            drain_seconds=drain_seconds,
            stall_seconds=stall_seconds,
        )
    )
    if once:
        out.print(f"published {capture.run_once():,} changes")
    else:
        capture.run()
