"""`holdfast consume`: run a consumer, in one process or in several that are looked after."""

import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from holdfast.cli import logs
from holdfast.cli.dlq.options import retentions
from holdfast.cli.exported import export_circuits, export_store
from holdfast.cli.link import Family, Report, answer
from holdfast.cli.logs import LogFormat, LogLevel
from holdfast.cli.supervisor import Supervisor
from holdfast.consumer import Consumer
from holdfast.consumer.vitals import Vitals
from holdfast.dlq import dlq_topic
from holdfast.dlq.uncollected import Uncollected
from holdfast.errors import ConfigurationError
from holdfast.outbox.endpoint import Endpoint, host_and_port

log = logging.getLogger("holdfast.cli")

EXAMPLE = "Example: holdfast consume billing:consumer --workers 4 --http 127.0.0.1:9464"
_RUN = "import sys; from holdfast.cli import main; sys.exit(main())"


def consume(
    target: Annotated[str, typer.Argument(help="Where the consumer is: module:variable.")],
    *,
    workers: Annotated[
        int, typer.Option(min=1, envvar="HOLDFAST_WORKERS", help="Processes to run.")
    ] = 1,
    http: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_HTTP",
            help="Serve /healthz, /readyz and /metrics here, for all workers; off unless set.",
        ),
    ] = None,
    stall_seconds: Annotated[
        float,
        typer.Option(
            envvar="HOLDFAST_STALL_SECONDS",
            help="/healthz fails when a worker has not polled for so long.",
        ),
    ] = 120.0,
    retention: Annotated[
        list[str] | None,
        typer.Option(
            envvar="HOLDFAST_RETENTION",
            metavar="TOPIC=AGE",
            help="How long the broker keeps a dead-letter topic, e.g. orders.billing.dlq=7d or "
            "'*=7d'; /metrics then counts what it eats uncollected within a day.",
        ),
    ] = None,
    service_version: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_SERVICE_VERSION",
            help="Your service's version, for its dead letters, unless the program says it.",
        ),
    ] = None,
    log_format: Annotated[
        LogFormat, typer.Option(envvar="HOLDFAST_LOG_FORMAT", help="auto: JSON off a terminal.")
    ] = LogFormat.AUTO,
    log_level: Annotated[
        LogLevel, typer.Option(envvar="HOLDFAST_LOG_LEVEL", help="The least level to log.")
    ] = LogLevel.INFO,
    link: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the handlers of a consumer until SIGTERM or Ctrl-C.

    What is in hand is finished and acknowledged first; the same signal once more ends it at
    once, and nothing is lost by that. A worker process that dies is started again, later and
    later if it dies soon. /healthz says whether all poll, /readyz whether all handle messages.
    """
    logs.configure(log_format, log_level)
    if http is not None:
        host_and_port(http)
    kept = retentions(retention)
    consumer = load(target)
    named = [] if service_version is None else [f"--service-version={service_version}"]
    if service_version is not None:
        consumer.identify(service_version)
    vitals = Vitals(consumer, stall_seconds=stall_seconds)
    with ExitStack() as closing:
        if workers > 1:
            argv = [sys.executable, "-c", _RUN, "consume", target, "--workers", "1",
                    "--stall-seconds", str(stall_seconds), "--log-format", log_format.value,
                    "--log-level", log_level.value,
                    *(f"--retention={one}" for one in retention or ()), *named]  # fmt: skip
            supervisor = Supervisor(argv, workers, stall_seconds=stall_seconds)
            if http is not None:
                closing.callback(_served(http, supervisor, supervisor.metrics).stop)
            supervisor.run()
            return
        if link is not None:
            answer(link, lambda number: _report(number, vitals, consumer), _terminate)
        elif http is not None:
            closing.callback(_served(http, vitals, lambda: _metrics(consumer)).stop)
        export_circuits()
        if http is not None or link is not None:
            export_store(consumer.engine, _uncollected(consumer, kept))
        consumer.run()


def load(target: str) -> Consumer:
    """Return the consumer at *target*, `module:variable`."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ConfigurationError(f"{target!r} names no consumer: write module:variable")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{target!r}: {error}; run it where the module is") from error
    except AttributeError as error:
        raise ConfigurationError(f"{module!r} has no {name!r}") from error
    if not isinstance(found, Consumer):
        raise ConfigurationError(f"{target!r} is a {type(found).__name__}, not a Consumer")
    return found


def _uncollected(consumer: Consumer, kept: dict[str, float]) -> Uncollected | None:
    """Return what to ask about letters on topics; None where they go to the store directly."""
    if consumer.engine is not None:
        return None
    topics = [dlq_topic(topic, consumer.group) for topic in consumer.topics]
    return Uncollected(broker=consumer.broker, topics=topics, retention=kept)


def _served(address: str, judge: Vitals | Supervisor, metrics: Any) -> Endpoint:
    endpoint = Endpoint(address, alive=judge.alive, ready=judge.ready, metrics=metrics)
    endpoint.start()
    log.info("http://%s serves /healthz, /readyz and /metrics", endpoint.address)
    return endpoint


def _metrics(consumer: Consumer) -> bytes:
    """Return the consumer's own metrics, and those of dead letters, circuits and the process."""
    return b"".join(generate_latest(registry) for registry in _registries(consumer))


def _report(number: int, vitals: Vitals, consumer: Consumer) -> Report:
    alive, ready = vitals.alive(), vitals.ready()
    return Report(
        number=number,
        alive=alive.good,
        why_alive=alive.why,
        ready=ready.good,
        why_ready=ready.why,
        families=[
            family for registry in _registries(consumer) for family in _families(registry.collect())
        ],
    )


def _registries(consumer: Consumer) -> list[CollectorRegistry]:
    own = consumer.metrics.registry
    return [REGISTRY] if own is REGISTRY else [own, REGISTRY]


def _families(metrics: Iterable[Metric]) -> Iterable[Family]:
    for metric in metrics:
        samples: list[tuple[str, dict[str, str], float | None]] = [
            (sample.name, dict(sample.labels), sample.value) for sample in metric.samples
        ]
        yield Family(metric.name, metric.documentation, metric.type, samples)


def _terminate() -> None:
    """End as by a signal: in good order, and within a bound."""
    os.kill(os.getpid(), signal.SIGTERM)
