"""`holdfast dlq collect`: dead-letter topics into the store, continuously or once."""

import difflib
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated

import typer
from prometheus_client import REGISTRY

from holdfast.brokers import connect
from holdfast.cli.display import answer, err, note
from holdfast.cli.dlq.options import dead_letters
from holdfast.cli.dlq.progress import shown_work
from holdfast.cli.exported import export_store
from holdfast.cli.options import Broker, Config, Database, Http, Json, Retention, retentions
from holdfast.cli.stopping import stopped_by_signals
from holdfast.clock import SYSTEM_CLOCK
from holdfast.dlq.destination import DeadLetterStore
from holdfast.dlq.operations import DeadLetterAdmin
from holdfast.dlq.replay.simulation import loaded
from holdfast.dlq.topic.collector import Collector, Uncollected
from holdfast.dlq.topic.topic import COLLECTOR
from holdfast.dlq.triage import BUILT_IN, Triage
from holdfast.errors import ConfigurationError, NotFound, UnknownTopic
from holdfast.health import Endpoint, ProbeResult
from holdfast.metrics import exposition
from holdfast.ports import Broker as Port

_STALL_SECONDS = 120.0


def collect(
    topics: Annotated[list[str], typer.Argument(help="Dead-letter topics: TOPIC.GROUP.dlq.")],
    *,
    config: Config = None,
    database: Database,
    broker: Broker,
    collector: Annotated[str, typer.Option(help="The consumer group that collects.")] = COLLECTOR,
    http: Http = None,
    retention: Retention = None,
    triage: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="A Triage of your own, for what is collected."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End when nothing is left.")] = False,
    as_json: Json = False,
) -> None:
    """Move dead letters from broker topics into the store, again and again."""
    kept, rules = retentions(retention), BUILT_IN if triage is None else _triage(triage)
    with dead_letters(database) as engine, ExitStack() as closing:
        opened = connect(broker)
        missing = [topic for topic in topics if not _exists(opened, collector, topic)]
        if missing and once:
            opened.close()
            raise NotFound(_unknown(DeadLetterAdmin(engine).topics(), missing))
        for topic in missing:
            note(f"topic {topic} does not exist yet: waiting for its first dead letter")
        source = opened.source(topics, group=collector)
        try:
            moving = Collector(source, DeadLetterStore(engine, triage=rules))
            # Signals first: whoever sees the endpoint answer may end this in good order.
            closing.enter_context(stopped_by_signals(moving.stop, drain_seconds=30))
            if http is not None:
                asked = connect(broker)  # by another thread than the one that collects
                closing.callback(asked.close)
                waiting = Uncollected(broker=asked, topics=topics, group=collector, retention=kept)
                export_store(engine, waiting)
                closing.callback(_served(http, moving).stop)
            total = (
                sum(opened.lag(collector, topics).values()) if once and err.is_terminal else None
            )
            with shown_work("collected", total) as observe:
                found = moving.run(
                    until_idle=once, progress=lambda one: observe(one.stored + one.confirmed)
                )
        finally:
            source.close()
            opened.close()
    text = (
        f"collected {found.stored:,} dead letters, {found.unreadable:,} of them without envelope; "
        f"{found.confirmed:,} replayed messages were handled"
    )
    if found.unknown:
        text += f"; {found.unknown:,} reports of no known plan closed nothing"
    answer(text, asdict(found), as_json=as_json)


def _triage(name: str) -> Triage:
    found = loaded(name)
    if not isinstance(found, Triage):
        raise ConfigurationError(f"--triage {name!r} is a {type(found).__name__}, not a Triage")
    return found


def _served(address: str, collector: Collector) -> Endpoint:
    def alive() -> ProbeResult:
        silent = SYSTEM_CLOCK.monotonic() - collector.pulse
        return ProbeResult(silent < _STALL_SECONDS, f"asked the broker {silent:.0f} s ago")

    def ready() -> ProbeResult:
        return ProbeResult(collector.down is None, collector.down or "collects")

    endpoint = Endpoint(
        address, alive=alive, ready=ready, metrics=lambda accept: exposition([REGISTRY], accept)
    )
    endpoint.start()
    note(f"http://{endpoint.address} serves /healthz, /readyz and /metrics")
    return endpoint


def _exists(broker: Port, group: str, topic: str) -> bool:
    try:
        return bool(broker.lag(group, [topic]))
    except UnknownTopic:
        return False


def _unknown(known: list[str], missing: list[str]) -> str:
    """Say which topics do not exist, and what may have been meant."""
    told = []
    for topic in missing:
        near = difflib.get_close_matches(topic, known, n=3)
        told.append(f"{topic!r}" + (f" (did you mean {', '.join(near)}?)" if near else ""))
    return (
        f"no such topic: {', '.join(told)}; a dead-letter topic is called TOPIC.GROUP.dlq and is "
        "made with its first dead letter"
    )
