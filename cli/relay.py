"""`holdfast relay`: the sidecar."""

from typing import Annotated

import typer

from holdfast.cli import logs
from holdfast.cli.display import out
from holdfast.cli.logs import LogFormat, LogLevel
from holdfast.cli.options import Broker, Config, Database
from holdfast.cli.sidecar import EngineName, RelaySettings, Sidecar
from holdfast.errors import ConfigurationError

EXAMPLE = (
    "Example: holdfast relay --database postgresql+psycopg://shop@db/shop "
    "--broker kafka://broker:9092 --http 127.0.0.1:9464"
)


def relay(
    *,
    config: Config = None,
    database: Database,
    broker: Broker,
    engine: Annotated[
        EngineName,
        typer.Option(
            envvar="HOLDFAST_ENGINE",
            help="lease works on any database and with several relays; wal streams PostgreSQL's "
            "log, with the others on standby.",
        ),
    ] = EngineName.LEASE,
    once: Annotated[
        bool, typer.Option("--once", help="Publish what is there, then end (for cron).")
    ] = False,
    batch: Annotated[
        int, typer.Option(envvar="HOLDFAST_BATCH", help="Rows read and published at a time.")
    ] = 2000,
    lease_seconds: Annotated[
        float,
        typer.Option(
            envvar="HOLDFAST_LEASE_SECONDS", help="A relay that dies is replaced within this."
        ),
    ] = 10.0,
    http: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_HTTP",
            help="Serve /healthz, /readyz and /metrics here, e.g. 127.0.0.1:9464; off unless set.",
        ),
    ] = None,
    drain_seconds: Annotated[
        float,
        typer.Option(
            envvar="HOLDFAST_DRAIN_SECONDS",
            help="After SIGTERM, finish the batch in hand for at most so long.",
        ),
    ] = 20.0,
    stall_seconds: Annotated[
        float,
        typer.Option(
            envvar="HOLDFAST_STALL_SECONDS",
            help="/healthz fails when a step takes longer than this.",
        ),
    ] = 120.0,
    slot: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_SLOT",
            show_default=False,
            help="The WAL engine's replication slot; holdfast_outbox_<database> unless set.",
        ),
    ] = None,
    publication: Annotated[
        str, typer.Option(envvar="HOLDFAST_PUBLICATION", help="The WAL engine's publication.")
    ] = "holdfast_outbox",
    messages: Annotated[
        bool,
        typer.Option(
            "--messages",
            envvar="HOLDFAST_MESSAGES",
            help="With the WAL engine, also publish events that were emitted without a row "
            "(WalOutbox). Without it the relay ends when it meets one.",
        ),
    ] = False,
    transactional_id: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_TRANSACTIONAL_ID",
            help="Kafka only: publish in transactions, one per shard under this id and the "
            "shard's number, so that the broker refuses a relay that was replaced. One id per "
            "outbox. Slower: raise --batch.",
        ),
    ] = None,
    expect_group: Annotated[
        list[str] | None,
        typer.Option(
            envvar="HOLDFAST_EXPECT_GROUP",
            metavar="TOPIC=GROUP",
            help="Publish nothing before this consumer group is there; may be given again. For "
            "RabbitMQ, which keeps messages only for groups whose queues exist.",
        ),
    ] = None,
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
    """Publish committed outbox events to the broker, in order per key, at least once.

    Run it beside the service that writes the outbox, as often as you like: relays share the
    work. While broker or database are down it waits and tries again. SIGTERM or Ctrl-C ends
    it after the batch in hand; nothing is lost whenever it is killed.
    """
    logs.configure(log_format, log_level)
    sidecar = Sidecar(
        RelaySettings(
            database=database,
            broker=broker,
            engine=engine,
            batch=batch,
            lease_seconds=lease_seconds,
            http=http,
            drain_seconds=drain_seconds,
            stall_seconds=stall_seconds,
            slot=slot,
            publication=publication,
            messages=messages,
            transactional_id=transactional_id,
            expect_groups=tuple(_expected(text) for text in expect_group or ()),
        )
    )
    if once:
        out.print(f"published {sidecar.run_once():,} events")
    else:
        sidecar.run()


def _expected(text: str) -> tuple[str, str]:
    topic, equals, group = text.partition("=")
    if not (topic and equals and group):
        raise ConfigurationError(f"--expect-group {text!r}: write TOPIC=GROUP, as orders=billing")
    return topic, group
