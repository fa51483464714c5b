"""A capture put together: database, broker, probes and metrics."""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from holdfast.brokers import connect
from holdfast.cli.late_engine import LateEngine
from holdfast.cli.serving import served
from holdfast.cli.stopping import stopped_by_signals
from holdfast.database import open_database
from holdfast.errors import ConfigurationError, DependencyDown, HoldfastError
from holdfast.outbox import Relay
from holdfast.outbox.cdc.metrics import CdcMetrics
from holdfast.outbox.endpoint import host_and_port
from holdfast.outbox.measured_engine import MeasuredEngine
from holdfast.outbox.probes import Probes
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.outbox.cdc import Cdc
    from holdfast.ports import Sink

log = logging.getLogger("holdfast.cli")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """Everything that can be set about a capture."""

    database: str
    broker: str
    tables: list[str]
    server: str
    slot: str | None = None
    publication: str | None = None
    snapshot: bool = False
    create_topics: bool = False
    batch: int = 2000
    http: str | None = None
    drain_seconds: float = 20.0
    stall_seconds: float = 120.0

    def __post_init__(self) -> None:
        if self.drain_seconds < 0:
            raise ConfigurationError(f"drain_seconds {self.drain_seconds}: use 0 or more")
        if self.http is not None:
            host_and_port(self.http)


class Capture:
    """One capture with all that an operator needs around it.

    A database or broker that is down is an outage, at the start as well as later; `run_once`
    raises it.
    """

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._database = open_database(settings.database)
        self._broker = connect(settings.broker)
        self._sink: Sink | None = None
        self._cdc: Cdc | None = None
        late = LateEngine("cdc", self._make)
        measured = MeasuredEngine(late, observe=self._observe_seconds)
        self.relay = Relay(measured)
        self._metrics = CdcMetrics(self.relay.health, self._rows)
        self._probes = Probes(self.relay.health, measured, stall_seconds=settings.stall_seconds)

    def run(self) -> None:
        """Publish until a signal comes, through every outage."""
        settings = self._settings
        with self._open() as closing:
            where = served(settings.http, self._probes, self._metrics.text, closing)
            log.info(
                "cdc %s: %s of %s → %s%s",
                version("holdfast"), ", ".join(settings.tables), mask(settings.database),
                mask(settings.broker), where,
            )  # fmt: skip
            self.relay.run()
        log.info("cdc ended: published %d", self.relay.health.published)

    def run_once(self) -> int:
        """Publish what is there; outages raise, and so does another capture at work."""
        with self._open():
            return self.relay.run_once(wait_more=self._refuse_standby)

    def _refuse_standby(self) -> bool:
        if self.relay.health.standby:
            raise DependencyDown(
                "another capture reads the replication slot and publishes the changes; this one "
                "did nothing"
            )
        return False

    @contextmanager
    def _open(self) -> Iterator[ExitStack]:
        with ExitStack() as closing:
            closing.callback(self._close)
            drain = self._settings.drain_seconds
            closing.enter_context(stopped_by_signals(self.relay.stop, drain_seconds=drain))
            yield closing

    def _make(self) -> Cdc:
        from holdfast.outbox.cdc import Cdc  # needs psycopg, which is an extra

        settings = self._settings
        if self._sink is None:
            self._sink = self._broker.sink()
        if self._cdc is None:
            self._cdc = Cdc(
                self._database, self._sink, tables=settings.tables, server=settings.server,
                slot=settings.slot, publication=settings.publication, batch=settings.batch,
                snapshot=settings.snapshot,
            )  # fmt: skip
        if settings.create_topics:
            for topic in self._cdc.topics():
                self._broker.create_topic(topic)
        return self._cdc

    def _rows(self) -> int | None:
        return None if self._cdc is None else self._cdc.progress

    def _observe_seconds(self, seconds: float) -> None:
        self._metrics.step_seconds.observe(seconds)

    def _close(self) -> None:
        for end in (self._sink, self._broker):
            if end is not None:
                with suppress(HoldfastError):
                    end.close()
        self._database.dispose()
