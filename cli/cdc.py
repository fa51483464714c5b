"""`holdfast cdc`: the changes of plain tables as a stream of events."""

from typing import Annotated

import typer

from holdfast.cli.display import answer
from holdfast.cli.late import grouped
from holdfast.cli.logs import Logging
from holdfast.cli.options import Broker, Config, Database, Drain, Http, Json, Stall, seconds
from holdfast.cli.stopping import stopped_by_signals
from holdfast.outbox.cdc.service import CaptureService, CdcSettings
from holdfast.tracing.setup import setup_if_asked

EXAMPLE = (
    "Example: holdfast cdc --database postgresql+psycopg://shop@db/shop "
    "--broker kafka://broker:9092 --server shop --table public.customer --table public.invoice"
)


@grouped
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
    http: Http = None,
    drain: Drain = "20s",
    stall: Stall = "2m",
    logging: Logging,
    as_json: Json = False,
) -> None:
    """Publish the rows of tables, then every change of them, as Debezium's change events.

    PostgreSQL only. The first start takes a snapshot; later ones go on where the last one
    was. A second process waits to take over. While broker or database are down it waits and
    tries again. After the last use drop the slot, which would keep the server's log:
    SELECT pg_drop_replication_slot('holdfast_cdc_<server>').
    """
    logging.configure(as_json=as_json)
    setup_if_asked("holdfast-cdc")
    capture = CaptureService(
        CdcSettings(
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
            stall_seconds=seconds(stall, "--stall"),
        )
    )
    with capture, stopped_by_signals(capture.stop, drain_seconds=seconds(drain, "--drain")):
        if not once:
            capture.run()
            return
        count = capture.run_once()
    answer(f"published {count:,} changes", {"published": count}, as_json=as_json)
