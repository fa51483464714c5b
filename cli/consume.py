"""`holdfast consume`: run a consumer, in one process or in several that are looked after."""

import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
from typing import Annotated, Any

import typer
from prometheus_client import generate_latest

from holdfast.backoff import Backoff
from holdfast.cli import logs
from holdfast.cli.logs import LogFormat, LogLevel
from holdfast.consumer import Consumer
from holdfast.errors import ConfigurationError
from holdfast.outbox.endpoint import Endpoint
from holdfast.outbox.probes import Verdict

log = logging.getLogger("holdfast.cli")

EXAMPLE = "Example: holdfast consume billing:consumer --workers 4"
_RUN = "import sys; from holdfast.cli import main; sys.exit(main())"
_HEALTHY_SECONDS = 30.0


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
            help="Serve /healthz, /readyz and /metrics here; with one process only.",
        ),
    ] = None,
    log_format: Annotated[
        LogFormat, typer.Option(envvar="HOLDFAST_LOG_FORMAT", help="auto: JSON off a terminal.")
    ] = LogFormat.AUTO,
    log_level: Annotated[
        LogLevel, typer.Option(envvar="HOLDFAST_LOG_LEVEL", help="The least level to log.")
    ] = LogLevel.INFO,
) -> None:
    """Run the handlers of a consumer until SIGTERM or Ctrl-C.

    What is in hand is finished and acknowledged first; the same signal once more ends it at
    once. A worker process that dies is started again, later and later if it dies soon.
    """
    logs.configure(log_format, log_level)
    consumer = load(target)
    if workers > 1:
        if http is not None:
            raise ConfigurationError("--http serves one process: leave it out with --workers")
        Supervisor(target, workers, log_level.value).run()
        return
    endpoint = None if http is None else _endpoint(http, consumer)
    try:
        consumer.run()
    finally:
        if endpoint is not None:
            endpoint.stop()


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


def _endpoint(address: str, consumer: Consumer) -> Endpoint:
    def alive() -> Verdict:
        return Verdict(True, "runs")

    def ready() -> Verdict:
        running = consumer.running
        if running is None:
            return Verdict(False, "starting")
        clerk = running.clerk
        trouble = running.runtime.broker_down or (None if clerk is None else clerk.down)
        return Verdict(trouble is None, trouble or "consumes")

    endpoint = Endpoint(
        address, alive=alive, ready=ready,
        metrics=lambda: generate_latest(consumer.metrics.registry),
    )  # fmt: skip
    endpoint.start()
    return endpoint


class Supervisor:
    """Keeps a number of worker processes running, and ends them together."""

    def __init__(self, target: str, workers: int, log_level: str) -> None:
        self._argv = [
            sys.executable, "-c", _RUN, "consume", target, "--log-level", log_level,
        ]  # fmt: skip
        self._count = workers
        self._stopping = threading.Event()
        self._backoff = Backoff(first=0.5, ceiling=30.0)

    def run(self) -> None:
        """Run until a signal comes; every worker has ended when this returns."""
        before = {
            number: signal.signal(number, self._asked) for number in (signal.SIGTERM, signal.SIGINT)
        }
        keepers = [threading.Thread(target=self._keep, args=(n,)) for n in range(self._count)]
        self._live: set[subprocess.Popen[bytes]] = set()
        for keeper in keepers:
            keeper.start()
        for keeper in keepers:
            while keeper.is_alive():
                keeper.join(0.2)  # short, so that signals are served
        for number, handler in before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, _frame: object) -> None:
        self._stopping.set()
        for process in list(self._live):
            process.send_signal(number)

    def _keep(self, number: int) -> None:
        deaths = 0
        while not self._stopping.is_set():
            process = subprocess.Popen(self._argv, start_new_session=True)  # noqa: S603
            self._live.add(process)
            if self._stopping.is_set():  # the signal came while it was being started
                process.terminate()
            log.info("worker %d is process %d", number, process.pid)
            try:
                process.wait(_HEALTHY_SECONDS)
            except subprocess.TimeoutExpired:
                deaths = 0
                process.wait()
            self._live.discard(process)
            if self._stopping.is_set():
                return
            deaths += 1
            delay = self._backoff.delay(deaths) or 0.5
            log.error("worker %d ended with %s, started again in %.1f s", number,
                      process.returncode, delay)  # fmt: skip
            self._stopping.wait(delay)
