"""`holdfast relay`: the sidecar."""

from typing import Annotated

import typer

from holdfast.cli.display import answer
from holdfast.cli.failures import RowsLeft, Unfinished
from holdfast.cli.late import grouped
from holdfast.cli.logs import Logging
from holdfast.cli.opened import require_file
from holdfast.cli.options import Broker, Config, Database, Drain, Http, Json, Stall, seconds
from holdfast.cli.progress import DrainLog, shown_progress
from holdfast.cli.stopping import stopped_by_signals
from holdfast.errors import ConfigurationError
from holdfast.outbox.relay.service import Drained, EngineName, RelayService, RelaySettings
from holdfast.tracing.setup import setup_if_asked

EXAMPLE = (
    "Example: holdfast relay --database postgresql+psycopg://shop@db/shop "
    "--broker kafka://broker:9092 --http 127.0.0.1:9464"
)


@grouped
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
    lease: Annotated[
        str,
        typer.Option(envvar="HOLDFAST_LEASE", help="A relay that dies is replaced within this."),
    ] = "10s",
    http: Http = None,
    drain: Drain = "20s",
    stall: Stall = "2m",
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
        bool, typer.Option("--messages", envvar="HOLDFAST_MESSAGES", hidden=True)
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
    logging: Logging,
    as_json: Json = False,
) -> None:
    """Publish committed outbox events to the broker, in order per key, at least once.

    Run it beside the service that writes the outbox, as often as you like: relays share the
    work. While broker or database are down it waits and tries again. SIGTERM or Ctrl-C ends
    it after the batch in hand; nothing is lost whenever it is killed.
    """
    logging.configure(as_json=as_json)
    setup_if_asked("holdfast-relay")
    if messages:
        raise ConfigurationError(
            "--messages (HOLDFAST_MESSAGES) is removed, and WalOutbox with it: a lost slot took "
            "their events along. Leave it out, and write events with holdfast.outbox.Outbox, "
            "which keeps each in the table until it is published"
        )
    service = RelayService(
        RelaySettings(
            database=database,
            broker=broker,
            engine=engine,
            batch=batch,
            lease_seconds=seconds(lease, "--lease"),
            http=http,
            stall_seconds=seconds(stall, "--stall"),
            slot=slot,
            publication=publication,
            transactional_id=transactional_id,
            expect_groups=tuple(_expected(text) for text in expect_group or ()),
        )
    )
    with service:
        require_file(service.database)
        with stopped_by_signals(service.stop, drain_seconds=seconds(drain, "--drain")):
            if once:
                with shown_progress(service.waiting) as progress:
                    drained = service.run_once(progress)
            else:
                service.run(DrainLog(service.waiting))
    if once:
        _check_all_went(drained)
        count = drained.published
        answer(f"published {count:,} events", {"published": count}, as_json=as_json)


def _check_all_went(drained: Drained) -> None:
    if drained.waiting:
        raise Unfinished(
            f"published {drained.published:,} events, then was told to stop; {drained.waiting:,} "
            "still wait: the next run goes on with them"
        )
    left = []
    if drained.parked:
        left.append(f"{drained.parked:,} were parked: see  holdfast outbox parked list")
    if drained.missing:
        topics = ", ".join(drained.missing)
        left.append(f"others wait, for there is no topic {topics}: see  holdfast topics create")
    if left:
        raise RowsLeft(f"published {drained.published:,} events; {'; '.join(left)}")


def _expected(text: str) -> tuple[str, str]:
    topic, equals, group = text.partition("=")
    if not (topic and equals and group):
        raise ConfigurationError(f"--expect-group {text!r}: write TOPIC=GROUP, as orders=billing")
    return topic, group
