"""A capture's figures in Prometheus' format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from holdfast.outbox.metrics import StepMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import Metric

    from holdfast.outbox.relay import Health


class CdcMetrics(StepMetrics):
    """What Prometheus reads; every series is there from the start, at 0."""

    def __init__(self, health: Health, rows: Callable[[], int | None]) -> None:
        super().__init__("cdc")
        self._health = health
        self._rows = rows
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Read the capture's health."""
        health, rows = self._health, self._rows()
        yield CounterMetricFamily(
            "holdfast_cdc_published", "Change events that the broker took.", value=health.published
        )
        for name, text, value in (
            ("outage", "1 while the broker or the database is down.", health.outage is not None),
            ("standby", "1 while another capture is at work.", health.standby),
            ("snapshot", "1 while the snapshot is taken.", rows is not None),
            ("snapshot_rows", "Rows that the running snapshot has read.", rows or 0),
        ):
            yield GaugeMetricFamily(f"holdfast_cdc_{name}", text, value=float(value))
