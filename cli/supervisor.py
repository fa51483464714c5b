"""Worker processes: kept running, asked how they are, ended together.

The link between `holdfast consume` and its worker processes: a socket pair, one line each way.

The parent asks, the worker answers with its vital signs and metrics. A worker whose parent
is gone hears the end of the link and drains, so that nothing runs unsupervised.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import REGISTRY

from holdfast.backoff import Backoff
from holdfast.cli.worker_metrics import Family, Merged, WorkerSeries
from holdfast.clock import SYSTEM_CLOCK
from holdfast.concurrency import signals_heard
from holdfast.health import Exposition, ProbeResult
from holdfast.metrics import Instruments, counter, exposition, gauge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client import Metric

log = logging.getLogger("holdfast.cli")
_ANSWER_SECONDS = 3.0
LOOK_SECONDS = 5.0
"""How often workers are asked for their figures: so much of a killed one's is lost at most."""
WORKERS = gauge("holdfast_consumer_workers", "Worker processes wanted")
WORKERS_UP = gauge("holdfast_consumer_workers_up", "Worker processes that run")
RESTARTS = counter(
    "holdfast_consumer_worker_restarts", "How often a worker process died and was started again",
    "worker",
)  # fmt: skip


class LinkReport(msgspec.Struct, frozen=True):
    """What a worker says about itself."""

    number: int = 0
    alive: bool = False
    why_alive: str = "starting"
    ready: bool = False
    why_ready: str = "starting"
    families: list[Family] = []


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(LinkReport).decode


class Asking:
    """The parent's end."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(_ANSWER_SECONDS)
        self._end = end
        self._lines = end.makefile("rb")
        self._number = 0
        self._lock = threading.Lock()

    def ask(self) -> LinkReport | None:
        """Return the worker's report; None if it does not answer, as while it starts."""
        with self._lock:
            self._number += 1
            try:
                self._end.sendall(b"%d\n" % self._number)
                while line := self._lines.readline():
                    report = _decode(line)
                    if report.number == self._number:  # not the late answer to an earlier one
                        return report
            except (OSError, ValueError, msgspec.DecodeError):
                # A timeout spoils the buffered reader; the socket itself is still good.
                with suppress(OSError):
                    self._lines = self._end.makefile("rb")
        return None

    def close(self) -> None:
        """End the link."""
        self._lines.close()
        self._end.close()


def answer(
    descriptor: int, report: Callable[[int], LinkReport], orphaned: Callable[[], None]
) -> None:
    """Answer on *descriptor* in a thread; call *orphaned* once the parent is gone."""
    end = socket.socket(fileno=descriptor)

    def serve() -> None:
        try:
            with end, end.makefile("rb") as lines:
                for line in lines:
                    end.sendall(_encode(report(int(line))) + b"\n")
        except (OSError, ValueError) as error:
            log.debug("the link to the parent ended: %s", error)
        log.warning("the parent process is gone: this worker finishes what is in hand and ends")
        orphaned()

    threading.Thread(target=serve, name="holdfast-link", daemon=True).start()


_HEALTHY_SECONDS = 30.0
_NOT_YET = LinkReport(alive=True)


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
        self._series = WorkerSeries()

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
        self._series.ended()
        if self._link is not None:
            self._link.close()
        return f"ended with {process.returncode}"

    def send(self, number: int) -> None:
        """Pass a signal on."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(number)

    def report(self, stall_seconds: float) -> LinkReport:
        """Return how the worker is; one that never answers is not alive after *stall_seconds*."""
        if not self.is_up:
            return LinkReport(
                alive=True, why_alive=self._ended, why_ready=self._ended or "starting"
            )
        number = self._series.process  # before the link: what a dead one said is not the next one's
        link = self._link
        said = None if link is None else link.ask()
        now = SYSTEM_CLOCK.monotonic()
        if said is not None:
            self._since = now
            self._series.came(number, said.families)
            return said
        silent = now - self._since
        if silent > stall_seconds:
            return LinkReport(why_alive=f"has not answered for {silent:.0f} s", why_ready="silent")
        return _NOT_YET

    def figures(self, report: LinkReport) -> list[Family]:
        """Return what its processes have counted so far, and what the present one *report*s."""
        return self._series.shown(answers=bool(report.families))

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
        self._looks = False
        Instruments(REGISTRY).tells(self, WORKERS, WORKERS_UP, RESTARTS)

    def run(self) -> None:
        """Run until a signal comes; every worker has ended when this returns."""
        keepers = [threading.Thread(target=worker.keep) for worker in self.workers]
        if self._looks:
            threading.Thread(target=self._look, name="holdfast-workers", daemon=True).start()
        with signals_heard(self._asked):
            for keeper in keepers:
                keeper.start()
            for keeper in keepers:
                keeper.join()

    def watch(self) -> None:
        """Keep what workers count in sight, for `metrics`; before `run`."""
        self._looks = True

    def alive(self) -> ProbeResult:
        """Whether every worker that runs is alive; one that died is being started again."""
        reports = self._reports()
        good = all(report.alive for report in reports)
        return ProbeResult(good, _lines(report.why_alive for report in reports))

    def ready(self) -> ProbeResult:
        """Whether every worker is up and handles messages."""
        reports = self._reports()
        good = all(report.ready for report in reports)
        return ProbeResult(good, _lines(report.why_ready for report in reports))

    def metrics(self, accept: str) -> Exposition:
        """Return the workers' metrics, each with its worker's number, and those about them."""
        shown = [worker.figures(worker.report(self._stall_seconds)) for worker in self.workers]
        return exposition([self, Merged(shown)], accept)

    def collect(self) -> Iterator[Metric]:
        """Return the figures about the workers themselves."""
        yield WORKERS.family(len(self.workers))
        yield WORKERS_UP.family(sum(worker.is_up for worker in self.workers))
        yield RESTARTS.family(by=(((str(one.number),), one.restarts) for one in self.workers))

    def _look(self) -> None:
        """Ask for figures now and then, so that those of a worker that is killed are known."""
        while not SYSTEM_CLOCK.wait(self._stopping, LOOK_SECONDS):
            for worker in self.workers:
                worker.report(self._stall_seconds)

    def _reports(self) -> list[LinkReport]:
        return [worker.report(self._stall_seconds) for worker in self.workers]

    def _asked(self, number: int) -> None:
        self._stopping.set()
        for worker in self.workers:
            worker.send(number)


def _lines(said: Iterable[str]) -> str:
    return "\n".join(f"worker {number}: {why}" for number, why in enumerate(said))
