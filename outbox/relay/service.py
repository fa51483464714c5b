"""A relay as a service: database, broker, engine, probes and metrics put together."""

from __future__ import annotations

import gc
import logging
import math
import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from holdfast.brokers import connect
from holdfast.clock import SYSTEM_CLOCK
from holdfast.db.engine import open_database
from holdfast.errors import ConfigurationError, DependencyDown, HoldfastError
from holdfast.health import host_and_port, serving
from holdfast.outbox.relay.lease_engine import LeaseEngine
from holdfast.outbox.relay.leases import LeaseTerms
from holdfast.outbox.relay.monitoring import Backlog, Probes, RelayMetrics, Sampler, default_slot
from holdfast.outbox.relay.publishing import ShardSinks
from holdfast.outbox.relay.relay import DeferredEngine, Relay
from holdfast.outbox.schema import SHARDS
from holdfast.tracing import switch
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from holdfast.outbox.relay.relay import RelayEngine, RelayStep
    from holdfast.ports import Sink

log = logging.getLogger("holdfast.cli")


class EngineName(Enum):
    """Which engine moves the rows."""

    LEASE = "lease"
    WAL = "wal"


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """Everything that can be set about a relay that runs as a service."""

    database: str
    broker: str
    engine: EngineName = EngineName.LEASE
    batch: int = 2000
    lease_seconds: float = 10.0
    http: str | None = None
    stall_seconds: float = 120.0
    slot: str | None = None
    publication: str = "holdfast_outbox"
    transactional_id: str | None = None
    expect_groups: tuple[tuple[str, str], ...] = ()
    """Topics and groups that must be there before anything is published."""

    def __post_init__(self) -> None:
        if not self.batch >= 1:
            raise ConfigurationError(f"batch {self.batch}: use 1 or more")
        for name in ("lease_seconds", "stall_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} {getattr(self, name)}: use more than 0, e.g. 10")
        LeaseTerms(seconds=self.lease_seconds)
        if self.http is not None:
            host_and_port(self.http)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """What a single run did, and what it left."""

    published: int
    parked: int
    """Events that were set aside, because the broker refused one of their key."""
    missing: tuple[str, ...]
    """Topics that do not exist; their events wait."""
    waiting: int
    """Events that still wait because the run was told to stop."""


class RelayService:
    """One relay with all that an operator needs around it; use it as a context manager.

    Wrong settings show when it is made. A database or broker that is down shows as an
    outage, at the start as well as later. `stop` is safe from a signal handler.
    """

    def __init__(self, settings: RelaySettings) -> None:
        self._settings = settings
        self.database = open_database(settings.database)
        self._is_wal = settings.engine is EngineName.WAL
        if self._is_wal and self.database.dialect.name != "postgresql":
            raise ConfigurationError(
                f"--engine wal reads PostgreSQL's log, not {self.database.dialect.name}'s: "
                "use --engine lease"
            )
        self._broker = connect(settings.broker)
        self._sink: Sink | ShardSinks | None = None
        if settings.transactional_id is not None:
            self._sink = ShardSinks(self._broker, settings.transactional_id)
        self._engine = DeferredEngine(settings.engine.value, self._make_engine)
        self._observe: Callable[[RelayStep], None] = _ignored
        self.relay = Relay(self._engine, observer=self._observed, timer=self._timed)
        self._backlog = Backlog(self.database, slot=self._slot)
        self._sampler = Sampler(self._backlog)
        self._patient_until = 0.0
        self._metrics = RelayMetrics(self.relay.health, self._sampler, shards=self._shards)
        self._probes = Probes(self.relay.health, stall_seconds=settings.stall_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, observe: Callable[[RelayStep], None] | None = None) -> None:
        """Publish until `stop`, through every outage; *observe* is told each step."""
        self._observe = _ignored if observe is None else observe
        probes, settings = self._probes, self._settings
        with ExitStack() as ending:
            where = ending.enter_context(
                serving(
                    settings.http,
                    alive=probes.alive,
                    ready=probes.ready,
                    metrics=self._metrics.page,
                )
            )
            if where or switch.meters is not None:
                ending.callback(self._sampler.stop)
                self._sampler.start()
            log.info(
                "relay %s: %s → %s, engine %s%s",
                version("holdfast"), mask(settings.database), mask(settings.broker),
                settings.engine.value, where,
            )  # fmt: skip
            with _imports_frozen():
                self.relay.run()
        moved = {"published": self.relay.health.published, "parked": self.relay.health.parked}
        log.info("relay ended: published %d, parked %d", *moved.values(), extra=moved)

    def run_once(self, observe: Callable[[RelayStep], None] | None = None) -> Drained:
        """Publish what is there; outages raise, and so do shards that another relay keeps."""
        self._observe = _ignored if observe is None else observe
        self._patient_until = SYSTEM_CLOCK.monotonic() + 1.5 * self._settings.lease_seconds
        with _imports_frozen():
            published = self.relay.run_once(wait_more=self._is_more_to_come)
        health = self.relay.health
        return Drained(
            published=published,
            parked=health.parked,
            missing=health.missing,
            waiting=self._backlog.measure().waiting if self.relay.stopped else 0,
        )

    def stop(self) -> None:
        """End a run after the batch in hand."""
        self.relay.stop()

    def waiting(self) -> int:
        """Return how many events wait, as far as the database tells."""
        with suppress(SQLAlchemyError):  # the first step says what is wrong
            return self._backlog.measure().waiting
        return 0

    def close(self) -> None:
        """Close sink, broker and database."""
        for end in (self._sink, self._broker):
            if end is not None:
                with suppress(HoldfastError):
                    end.close()
        self.database.dispose()

    def _is_more_to_come(self) -> bool:
        """Whether events wait in shards that another relay holds, which may have died."""
        if self._shards() == SHARDS or not (waiting := self.waiting()):
            return False
        if SYSTEM_CLOCK.monotonic() < self._patient_until:
            return True
        raise DependencyDown(
            f"{waiting} events wait in shards that other relays hold: see  holdfast doctor"
        )

    @property
    def _slot(self) -> str | None:
        if not self._is_wal:
            return None
        return default_slot(self.database) if self._settings.slot is None else self._settings.slot

    def _make_engine(self) -> RelayEngine:
        settings = self._settings
        terms = LeaseTerms(seconds=settings.lease_seconds)
        for topic, group in settings.expect_groups:
            if not self._broker.has_group(topic, group):
                raise DependencyDown(
                    f"group {group!r} of topic {topic!r} is expected and not there; it would miss "
                    f"what is published: run  holdfast group create --topic {topic} --group {group}"
                )
        self._sink = self._broker.sink() if self._sink is None else self._sink
        if self._is_wal:
            from holdfast.outbox.wal import WalEngine  # needs psycopg, which is an extra

            return WalEngine(self.database, self._sink, slot=self._slot,
                             publication=settings.publication, terms=terms,
                             batch=settings.batch)  # fmt: skip
        return LeaseEngine(self.database, self._sink, terms=terms, batch=settings.batch)

    def _shards(self) -> int:
        if not self._is_wal:
            engine = self._engine.made
            return engine.shards if isinstance(engine, LeaseEngine) else 0
        health = self.relay.health  # the WAL engine takes all shards or none
        return SHARDS if health.last_step > float("-inf") and not health.standby else 0

    def _observed(self, step: RelayStep) -> None:
        self._observe(step)

    def _timed(self, seconds: float) -> None:
        self._metrics.step_seconds.observe(seconds)


@contextmanager
def _imports_frozen() -> Iterator[None]:
    """Spare the collector of garbage what imports made, where the process is the relay's."""
    is_ours = threading.current_thread() is threading.main_thread() and not gc.get_freeze_count()
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


def _ignored(_step: RelayStep) -> None:
    """Nobody watches."""
