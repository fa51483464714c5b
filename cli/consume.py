"""`holdfast consume`: run a consumer, in one process or in several that are looked after."""

import importlib
import os
import signal
import sys
from contextlib import ExitStack
from logging import getLogger
from typing import Annotated, Any

import typer
from prometheus_client import REGISTRY, CollectorRegistry

from holdfast.cli.exported import export_circuits, export_store
from holdfast.cli.late import grouped
from holdfast.cli.logs import Logging
from holdfast.cli.options import Config, Http, Json, Retention, Stall, retentions, seconds
from holdfast.cli.supervisor import LinkReport, Supervisor, answer
from holdfast.cli.worker_metrics import reported
from holdfast.consumer import Consumer
from holdfast.consumer.monitoring import HealthChecks
from holdfast.dlq import dlq_topic
from holdfast.dlq.topic.collector import Uncollected
from holdfast.errors import ConfigurationError
from holdfast.health import Endpoint, host_and_port
from holdfast.metrics import exposition
from holdfast.tracing import switch
from holdfast.tracing.setup import setup_if_asked

log = getLogger("holdfast.cli")

EXAMPLE = "Example: holdfast consume billing:consumer --workers 4 --http 127.0.0.1:9464"
_RUN = "import sys; from holdfast.cli import main; sys.exit(main())"


@grouped
def consume(
    target: Annotated[str, typer.Argument(help="Where the consumer is: module:variable.")],
    *,
    config: Config = None,
    workers: Annotated[
        int, typer.Option(min=1, envvar="HOLDFAST_WORKERS", help="Processes to run.")
    ] = 1,
    http: Http = None,
    stall: Stall = "2m",
    retention: Retention = None,
    service_version: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_SERVICE_VERSION",
            help="Your service's version, for its dead letters, unless the program says it.",
        ),
    ] = None,
    logging: Logging,
    as_json: Json = False,
    link: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the handlers of a consumer until SIGTERM or Ctrl-C.

    What is in hand is finished and acknowledged first; the same signal once more ends it at
    once, and nothing is lost by that. A worker process that dies is started again, later and
    later if it dies soon. /healthz says whether all poll, /readyz whether all handle messages.
    """
    chosen = logging.configure(as_json=as_json)
    setup_if_asked("holdfast-consume")
    stall_seconds = seconds(stall, "--stall")
    if http is not None:
        host_and_port(http)
    kept = retentions(retention)
    consumer = load(target)
    named = [] if service_version is None else [f"--service-version={service_version}"]
    if service_version is not None:
        consumer.identify(service_version)
    vitals = HealthChecks(consumer, stall_seconds=stall_seconds)
    with ExitStack() as closing:
        if workers > 1:
            argv = [sys.executable, "-c", _RUN, "consume", target, "--workers", "1",
                    "--stall", stall, "--log-format", chosen.value,
                    "--log-level", logging.log_level.value,
                    *(f"--retention={one}" for one in retention or ()), *named]  # fmt: skip
            supervisor = Supervisor(argv, workers, stall_seconds=stall_seconds)
            if http is not None:
                supervisor.watch()
                closing.callback(_served(http, supervisor, supervisor.metrics).stop)
            supervisor.run()
            return
        if link is not None:
            answer(link, lambda number: _report(number, vitals, consumer), _terminate)
        elif http is not None:
            pages = _registries(consumer)
            closing.callback(_served(http, vitals, lambda told: exposition(pages, told)).stop)
        export_circuits()
        if http is not None or link is not None or switch.meters is not None:
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


def _served(address: str, judge: HealthChecks | Supervisor, metrics: Any) -> Endpoint:
    endpoint = Endpoint(address, alive=judge.alive, ready=judge.ready, metrics=metrics)
    endpoint.start()
    log.info("http://%s serves /healthz, /readyz and /metrics", endpoint.address)
    return endpoint


def _report(number: int, vitals: HealthChecks, consumer: Consumer) -> LinkReport:
    alive, ready = vitals.alive(), vitals.ready()
    return LinkReport(
        number=number,
        alive=alive.good,
        why_alive=alive.why,
        ready=ready.good,
        why_ready=ready.why,
        families=[
            family for registry in _registries(consumer) for family in reported(registry.collect())
        ],
    )


def _registries(consumer: Consumer) -> list[CollectorRegistry]:
    """Return those of the consumer, and of dead letters, circuits and the process."""
    own = consumer.metrics.registry
    return [REGISTRY] if own is REGISTRY else [own, REGISTRY]


def _terminate() -> None:
    """End as by a signal: in good order, and within a bound."""
    os.kill(os.getpid(), signal.SIGTERM)
