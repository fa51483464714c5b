"""A capture as a service: database, broker, engine, probes and metrics put together."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from holdfast.brokers import connect
from holdfast.db.engine import open_database
from holdfast.errors import DependencyDown, HoldfastError
from holdfast.health import host_and_port, serving
from holdfast.outbox.relay.monitoring import CdcMetrics, Probes
from holdfast.outbox.relay.relay import DeferredEngine, Relay
from holdfast.urls import mask

if TYPE_CHECKING:
    from typing import Self

    from holdfast.outbox.cdc.engine import Cdc
    from holdfast.ports import Sink

log = logging.getLogger("holdfast.cli")


@dataclass(frozen=True, slots=True, kw_only=True)
class CdcSettings:
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
    stall_seconds: float = 120.0

    def __post_init__(self) -> None:
        if self.http is not None:
            host_and_port(self.http)


class CaptureService:
    """One capture with all that an operator needs around it; use it as a context manager.

    A database or broker that is down is an outage, at the start as well as later; `run_once`
    raises it. `stop` is safe from a signal handler.
    """

    def __init__(self, settings: CdcSettings) -> None:
        self._settings = settings
        self._database = open_database(settings.database)
        self._broker = connect(settings.broker)
        self._sink: Sink | None = None
        self._cdc: Cdc | None = None
        self.relay = Relay(DeferredEngine("cdc", self._make), timer=self._timed)
        self._metrics = CdcMetrics(self.relay.health, self._rows)
        self._probes = Probes(self.relay.health, stall_seconds=settings.stall_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self) -> None:
        """Publish until `stop`, through every outage."""
        settings, probes = self._settings, self._probes
        with serving(
            settings.http, alive=probes.alive, ready=probes.ready, metrics=self._metrics.page
        ) as where:
            log.info(
                "cdc %s: %s of %s → %s%s",
                version("holdfast"), ", ".join(settings.tables), mask(settings.database),
                mask(settings.broker), where,
            )  # fmt: skip
            self.relay.run()
        log.info("cdc ended: published %d", self.relay.health.published)

    def run_once(self) -> int:
        """Publish what is there; outages raise, and so does another capture at work."""
        return self.relay.run_once(wait_more=self._refuse_standby)

    def stop(self) -> None:
        """End a run after the batch in hand."""
        self.relay.stop()

    def close(self) -> None:
        """Close sink, broker and database."""
        for end in (self._sink, self._broker):
            if end is not None:
                with suppress(HoldfastError):
                    end.close()
        self._database.dispose()

    def _refuse_standby(self) -> bool:
        if self.relay.health.standby:
            raise DependencyDown(
                "another capture reads the replication slot and publishes the changes; this one "
                "did nothing"
            )
        return False

    def _make(self) -> Cdc:
        from holdfast.outbox.cdc.engine import Cdc  # needs psycopg, which is an extra

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

    def _timed(self, seconds: float) -> None:
        self._metrics.step_seconds.observe(seconds)
