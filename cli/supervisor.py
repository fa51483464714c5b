"""Worker processes: kept running, asked how they are, ended together."""

from __future__ import annotations

import logging
import math
import socket
import subprocess
import threading
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric

from holdfast.backoff import Backoff
from holdfast.cli.link import Asking, Report
from holdfast.clock import SYSTEM_CLOCK
from holdfast.outbox.probes import Verdict
from holdfast.signals import signals_heard

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

log = logging.getLogger("holdfast.cli")
_HEALTHY_SECONDS = 30.0
_NOT_YET = Report(alive=True)


class Worker:
    """One place for a worker process, which is filled again whenever the process dies."""

    def __init__(self, number: int, argv: Sequence[str], stopping: threading.Event) -> None:
        self.number = number
        self.restarts = 0
        self._argv = argv
        self._stopping = stopping
        self._backoff = Backoff(first=0.5, ceiling=30.0)
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Asking | None = None
        self._since = SYSTEM_CLOCK.monotonic()
        self._ended = ""

    @property
    def is_up(self) -> bool:
        """Whether there is a process now."""
        process = self._process
        return process is not None and process.poll() is None

    def keep(self) -> None:
        """Run the process, and run it again, until all is to end."""
        deaths = 0
        while not self._stopping.is_set():
            began = SYSTEM_CLOCK.monotonic()
            end = self._run_once()
            if self._stopping.is_set():
                return
            if SYSTEM_CLOCK.monotonic() - began > _HEALTHY_SECONDS:
                deaths = 0
            deaths += 1
            self.restarts += 1
            delay = self._backoff.delay(deaths) or 0.5
            self._ended = f"{end}, started again in {delay:.1f} s"
            log.error("worker %d %s", self.number, self._ended)
            self._stopping.wait(delay)

    def _run_once(self) -> str:
        """Run the process to its end, and say how it ended."""
        try:
            process = self._start()
        except OSError as error:  # no memory or no process left for another one
            return f"could not be started ({error})"
        log.info("worker %d is process %d", self.number, process.pid)
        process.wait()
        self._process = None
        if self._link is not None:
            self._link.close()
        return f"ended with {process.returncode}"

    def send(self, number: int) -> None:
        """Pass a signal on."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(number)

    def report(self, stall_seconds: float) -> Report:
        """Return how the worker is; one that never answers is not alive after *stall_seconds*."""
        if not self.is_up:
            return Report(alive=True, why_alive=self._ended, why_ready=self._ended or "starting")
        link = self._link
        said = None if link is None else link.ask()
        now = SYSTEM_CLOCK.monotonic()
        if said is not None:
            self._since = now
            return said
        silent = now - self._since
        if silent > stall_seconds:
            return Report(why_alive=f"has not answered for {silent:.0f} s", why_ready="silent")
        return _NOT_YET

    def _start(self) -> subprocess.Popen[bytes]:
        mine, its = socket.socketpair()
        try:
            process = subprocess.Popen(  # noqa: S603
                [*self._argv, "--link", str(its.fileno())],
                start_new_session=True,
                pass_fds=[its.fileno()],
            )
        except OSError:
            mine.close()
            raise
        finally:
            its.close()
        self._link, self._since = Asking(mine), SYSTEM_CLOCK.monotonic()
        self._process = process
        if self._stopping.is_set():  # the signal came while it was being started
            process.terminate()
        return process


class Supervisor:
    """Keeps a number of worker processes running, speaks for them, and ends them together."""

    def __init__(self, argv: Sequence[str], workers: int, *, stall_seconds: float = 120.0) -> None:
        self._stopping = threading.Event()
        self._stall_seconds = stall_seconds
        self.workers = [Worker(number, argv, self._stopping) for number in range(workers)]

    def run(self) -> None:
        """Run until a signal comes; every worker has ended when this returns."""
        keepers = [threading.Thread(target=worker.keep) for worker in self.workers]
        with signals_heard(self._asked):
            for keeper in keepers:
                keeper.start()
            for keeper in keepers:
                keeper.join()

    def alive(self) -> Verdict:
        """Whether every worker that runs is alive; one that died is being started again."""
        reports = self._reports()
        good = all(report.alive for report in reports)
        return Verdict(good, _lines(report.why_alive for report in reports))

    def ready(self) -> Verdict:
        """Whether every worker is up and handles messages."""
        reports = self._reports()
        good = all(report.ready for report in reports)
        return Verdict(good, _lines(report.why_ready for report in reports))

    def metrics(self) -> bytes:
        """Return the workers' metrics, each with its worker's number, and those about them."""
        registry = CollectorRegistry()
        wanted = Gauge("holdfast_consumer_workers", "Worker processes wanted", registry=registry)
        up = Gauge("holdfast_consumer_workers_up", "Worker processes that run", registry=registry)
        restarts = Counter(
            "holdfast_consumer_worker_restarts",
            "How often a worker process died and was started again",
            ["worker"],
            registry=registry,
        )
        wanted.set(len(self.workers))
        up.set(sum(worker.is_up for worker in self.workers))
        for worker in self.workers:
            restarts.labels(str(worker.number)).inc(worker.restarts)
        registry.register(_Merged(self._reports()))
        return generate_latest(registry)

    def _reports(self) -> list[Report]:
        return [worker.report(self._stall_seconds) for worker in self.workers]

    def _asked(self, number: int) -> None:
        self._stopping.set()
        for worker in self.workers:
            worker.send(number)


class _Merged:
    """The metrics of all workers; a label tells them apart, so that each counts on its own."""

    def __init__(self, reports: Sequence[Report]) -> None:
        self._reports = reports

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for number, report in enumerate(self._reports):
            for family in report.families:
                metric = found.setdefault(
                    family.name, Metric(family.name, family.help, family.kind)
                )
                for name, labels, value in family.samples:
                    number_of = {**labels, "worker": str(number)}
                    metric.add_sample(name, number_of, math.nan if value is None else value)
        return found.values()


def _lines(said: Iterable[str]) -> str:
    return "\n".join(f"worker {number}: {why}" for number, why in enumerate(said))
