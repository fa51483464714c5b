"""`holdfast dlq collect`: dead-letter topics into the store, continuously or once."""

import difflib
from contextlib import ExitStack
from typing import Annotated

import typer
from prometheus_client import REGISTRY, generate_latest
from sqlalchemy import select
from sqlalchemy.engine import Engine

from holdfast.brokers import connect
from holdfast.cli.display import err, say
from holdfast.cli.dlq.opened import dead_letters
from holdfast.cli.dlq.options import Database, retentions
from holdfast.cli.dlq.progress import shown_work
from holdfast.cli.exported import export_store
from holdfast.cli.options import Broker, Config
from holdfast.cli.stopping import stopped_by_signals
from holdfast.clock import SYSTEM_CLOCK
from holdfast.dlq.collector import Collector
from holdfast.dlq.letter import dlq_topic
from holdfast.dlq.replay.handlers import loaded
from holdfast.dlq.schema import group as table
from holdfast.dlq.store import StoreHome
from holdfast.dlq.topic import COLLECTOR
from holdfast.dlq.triage import BUILT_IN, Triage
from holdfast.dlq.uncollected import Uncollected
from holdfast.errors import ConfigurationError, NotFound, UnknownTopic
from holdfast.outbox.endpoint import Endpoint
from holdfast.outbox.probes import Verdict
from holdfast.ports import Broker as Port

_STALL_SECONDS = 120.0


def collect(
    topics: Annotated[list[str], typer.Argument(help="Dead-letter topics: TOPIC.GROUP.dlq.")],
    *,
    config: Config = None,
    database: Database,
    broker: Broker,
    group: Annotated[str, typer.Option(help="The consumer group that collects.")] = COLLECTOR,
    http: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_HTTP",
            help="Serve /healthz, /readyz and /metrics here, those of the store among them.",
        ),
    ] = None,
    retention: Annotated[
        list[str] | None,
        typer.Option(
            envvar="HOLDFAST_RETENTION",
            metavar="TOPIC=AGE",
            help="How long the broker keeps a dead-letter topic, e.g. '*=7d'; /metrics then counts "
            "what it eats uncollected within a day.",
        ),
    ] = None,
    triage: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="A Triage of your own, for what is collected."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End when nothing is left.")] = False,
) -> None:
    """Move dead letters from broker topics into the store, again and again."""
    kept, rules = retentions(retention), BUILT_IN if triage is None else _triage(triage)
    with dead_letters(database) as engine, ExitStack() as closing:
        opened = connect(broker)
        missing = [topic for topic in topics if not _exists(opened, group, topic)]
        if missing and once:
            opened.close()
            raise NotFound(_unknown(engine, missing))
        for topic in missing:
            say(f"topic {topic} does not exist yet: waiting for its first dead letter")
        source = opened.source(topics, group=group)
        try:
            collector = Collector(source, StoreHome(engine, triage=rules))
            if http is not None:
                asked = connect(broker)  # by another thread than the one that collects
                closing.callback(asked.close)
                waiting = Uncollected(broker=asked, topics=topics, group=group, retention=kept)
                export_store(engine, waiting)
                closing.callback(_served(http, collector).stop)
            total = sum(opened.lag(group, topics).values()) if once and err.is_terminal else None
            with (
                stopped_by_signals(collector.stop, drain_seconds=30),
                shown_work("collected", total) as observe,
            ):
                found = collector.run(
                    until_idle=once, progress=lambda one: observe(one.stored + one.confirmed)
                )
        finally:
            source.close()
            opened.close()
    say(
        f"collected {found.stored:,} dead letters, {found.unreadable:,} of them without envelope; "
        f"{found.confirmed:,} replayed messages were handled"
        + (f"; {found.unknown:,} reports of no known plan closed nothing" if found.unknown else "")
    )


def _triage(name: str) -> Triage:
    found = loaded(name)
    if not isinstance(found, Triage):
        raise ConfigurationError(f"--triage {name!r} is a {type(found).__name__}, not a Triage")
    return found


def _served(address: str, collector: Collector) -> Endpoint:
    def alive() -> Verdict:
        silent = SYSTEM_CLOCK.monotonic() - collector.pulse
        return Verdict(silent < _STALL_SECONDS, f"asked the broker {silent:.0f} s ago")

    def ready() -> Verdict:
        return Verdict(collector.down is None, collector.down or "collects")

    endpoint = Endpoint(
        address, alive=alive, ready=ready, metrics=lambda: generate_latest(REGISTRY)
    )
    endpoint.start()
    say(f"http://{endpoint.address} serves /healthz, /readyz and /metrics")
    return endpoint


def _exists(broker: Port, group: str, topic: str) -> bool:
    try:
        return bool(broker.lag(group, [topic]))
    except UnknownTopic:
        return False


def _unknown(engine: Engine, missing: list[str]) -> str:
    """Say which topics do not exist, and what may have been meant."""
    query = select(table.c.topic, table.c.consumer_group).distinct().limit(1000)
    with engine.connect() as db:
        known = [dlq_topic(topic, group) for topic, group in db.execute(query)]
    told = []
    for topic in missing:
        near = difflib.get_close_matches(topic, known, n=3)
        told.append(f"{topic!r}" + (f" (did you mean {', '.join(near)}?)" if near else ""))
    return (
        f"no such topic: {', '.join(told)}; a dead-letter topic is called TOPIC.GROUP.dlq and is "
        "made with its first dead letter"
    )
