"""`holdfast consume --workers`: figures that add up, also when a worker is killed."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from holdfast import Message
from holdfast.brokers import connect
from holdfast.consumer import create_tables
from holdfast.db.engine import open_database
from holdfast.testing import wait_until
from tests.servers.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
SHOP = """
from holdfast import idempotent
from holdfast.consumer import Consumer

consumer = Consumer("sqlite:///broker.db?session=5", group="billing", database="sqlite:///app.db",
                    takeover_seconds=2.0)

@consumer.on("orders")
@idempotent  # a slow machine may hand out a message twice: it is handled once
def bill(order: str) -> None:
    with open("handled.txt", "a") as file:
        file.write(order + "\\n")
"""
GROWING = ("_total", "_count", "_bucket", "_sum")
HANDLED = "holdfast_consumer_messages_total"
Series = tuple[str, tuple[tuple[str, str], ...]]


class Collector:
    """A backend of OpenTelemetry that keeps what is exported to it."""

    def __init__(self) -> None:
        self.handled: dict[str, dict[str, int]] = {}
        """By process and name of the instrument, the newest sum over its points."""
        self.traces: set[str] = set()
        keep = {"/v1/metrics": self._keep_metrics, "/v1/traces": self._keep_traces}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                keep[self.path](self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _keep_metrics(self, body: bytes) -> None:
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            facts = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    points = [*metric.sum.data_points, *metric.histogram.data_points]
                    mine = self.handled.setdefault(facts["service.instance.id"], {})
                    mine[metric.name] = int(sum(map(figure, points)))

    def _keep_traces(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.traces |= {span.trace_id.hex() for span in scope.spans}

    def told(self, name: str) -> list[int]:
        """Return what each process has told of *name*, if it was anything."""
        return sorted(mine[name] for mine in self.handled.values() if mine.get(name))

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()


def figure(point: Any) -> float:
    """Return the count of a histogram's point, or the value of another one."""
    found: float = point.count if hasattr(point, "count") else point.as_double + point.as_int
    return found


def alive(pid: int) -> bool:
    """Whether there is such a process, and it runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class Shop:
    """Two workers, their broker, and what is to be seen of them."""

    def __init__(self, folder: Path, collector: Collector) -> None:
        self.folder = folder
        self.port = free_port()
        self.collector = collector
        self.seen: dict[Series, float] = {}
        """The newest figure of everything that only grows."""
        self.backwards: list[str] = []
        """What was less than before, or missing."""
        engine = open_database(f"sqlite:///{folder}/app.db")
        create_tables(engine)
        engine.dispose()
        (folder / "shop.py").write_text(SHOP)
        broker = connect(f"sqlite:///{folder}/broker.db")
        broker.create_topic("orders", partitions=4)
        broker.close()
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
        environment |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        self.log = folder / "log.txt"
        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                [HOLDFAST, "consume", "shop:consumer", "--workers", "2", "--log-format", "text",
                 "--http", f"127.0.0.1:{self.port}"],
                cwd=folder, env=environment, stderr=errors,
            )  # fmt: skip

    def publish(self, *orders: str) -> None:
        broker = connect(f"sqlite:///{self.folder}/broker.db")
        sink = broker.sink()
        sink.publish([Message.new("orders", one.encode(), key=one) for one in orders])
        sink.close()
        broker.close()

    def lag(self) -> int:
        broker = connect(f"sqlite:///{self.folder}/broker.db")
        try:
            return sum(broker.lag("billing", ["orders"]).values())
        finally:
            broker.close()

    def pids(self) -> dict[int, int]:
        """Return the newest process of each worker."""
        found = re.findall(r"worker (\d+) is process (\d+)", self.log.read_text())
        return {int(number): int(pid) for number, pid in found}

    def page(self, path: str = "/metrics", accept: str = OPENMETRICS) -> tuple[str, str]:
        """Return content type and text of a page; nothing while nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path, headers={"Accept": accept})
            answer = connection.getresponse()
            return answer.headers["Content-Type"], answer.read().decode()
        except (OSError, http.client.HTTPException):
            return "", ""
        finally:
            connection.close()

    def samples(self) -> list[Any]:
        """Return all samples of a scrape, after looking whether anything went back."""
        kind, text = self.page()
        if not kind:
            return []
        found = [one for family in text_string_to_metric_families(text) for one in family.samples]
        now = {
            (one.name, tuple(sorted(one.labels.items()))): one.value
            for one in found
            if one.name.endswith(GROWING)
        }
        for series, before in self.seen.items():
            if now.get(series, -1.0) < before - 1e-6:
                self.backwards.append(f"{series}: {before} → {now.get(series)}")
        self.seen = now
        return found

    def figures(self, name: str, **labels: str) -> dict[str, float]:
        """Return the figures of *name* by worker."""
        found: Counter[str] = Counter()
        for one in self.samples():
            if one.name == name and labels.items() <= one.labels.items():
                found[one.labels.get("worker", "")] += one.value
        return dict(found)

    def close(self) -> None:
        """End it, in peace or not."""
        self.process.kill()
        self.process.wait()
        for pid in self.pids().values():  # they end by themselves when their parent is gone
            wait_until(lambda pid=pid: not alive(pid), deadline=90, what="all gone")


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    """Offer two workers that consume."""
    collector = Collector()
    made = Shop(tmp_path, collector)
    yield made
    made.close()
    collector.close()


def test_the_figures_of_workers_add_up_and_a_killed_one_takes_nothing_back(shop: Shop) -> None:
    """Counters and histograms go on, gauges are of who answers, traces are linked; so is OTLP."""

    def handled() -> float:
        return sum(shop.figures(HANDLED, outcome="handled").values())

    def ready() -> bool:
        return shop.page("/readyz")[1].count("consumes") == 2

    def linked() -> set[str]:
        found = (one.exemplar for one in shop.samples() if one.exemplar is not None)
        return {one.labels["trace_id"] for one in found}

    def traced() -> bool:
        return bool(traces := linked()) and traces <= shop.collector.traces

    told, processed = shop.collector.told, "messaging.process.duration"
    wait_until(ready, deadline=180, what="both are ready")
    first = {f"a{number}" for number in range(12)}
    shop.publish(*first)
    wait_until(lambda: shop.lag() == 0, deadline=180, what="all of the first are settled")
    wait_until(lambda: handled() == 12, deadline=180, what="the first are counted")
    # The supervisor and both workers: nobody speaks for another.
    wait_until(lambda: len(shop.collector.handled) == 3, deadline=180, what="all tell OTLP")
    wait_until(lambda: sum(told(processed)) >= 12, deadline=180, what="OTLP tells of the first")
    wait_until(traced, deadline=180, what="each link leads to a trace")
    before = shop.figures(HANDLED, outcome="handled")
    busiest = max(before, key=lambda worker: before[worker])

    victim = shop.pids()[int(busiest)]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: sum(shop.figures("holdfast_consumer_worker_restarts_total").values()) == 1,
               deadline=180, what="the death is seen")  # fmt: skip
    wait_until(ready, deadline=180, what="both are ready again")
    assert shop.figures(HANDLED, outcome="handled") == before
    assert shop.pids()[int(busiest)] != victim
    second = {f"b{number}" for number in range(12)}
    shop.publish(*second)
    wait_until(lambda: shop.lag() == 0, deadline=180, what="all are settled")
    wait_until(lambda: handled() == 24, deadline=180, what="all are counted")
    assert set((shop.folder / "handled.txt").read_text().split()) == first | second

    for name in ("holdfast_consumer_handler_seconds", "messaging_process_duration_seconds"):
        counted = shop.figures(f"{name}_count")
        assert sum(counted.values()) >= 24
        assert shop.figures(f"{name}_bucket", le="+Inf") == counted
    wait_until(lambda: shop.figures("holdfast_consumer_in_flight") == {"0": 0, "1": 0},
               deadline=180, what="nothing is in flight, in both that run")  # fmt: skip
    assert shop.figures("holdfast_consumer_workers_up") == {"": 2}
    wait_until(traced, deadline=180, what="each link leads to a trace")
    kind, text = shop.page(accept="text/plain")
    assert (kind, "trace_id" in text) == ("text/plain; version=0.0.4; charset=utf-8", False)
    assert shop.backwards == []

    wait_until(lambda: len(shop.collector.handled) == 4, deadline=180, what="the new one, too")
    wait_until(lambda: told("holdfast.consumer.worker_restarts") == [1], deadline=180,
               what=f"OTLP tells of the restart: {shop.collector.handled}")  # fmt: skip
    wait_until(lambda: sum(told(processed)) >= 24, deadline=180, what="OTLP tells of all")
    shop.process.send_signal(signal.SIGTERM)
    assert shop.process.wait(150) == 0
