"""The sidecar: database, broker, engine, probes and metrics put together."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from holdfast.brokers import connect
from holdfast.cli.failures import LeftBehind, Unfinished
from holdfast.cli.late_engine import LateEngine
from holdfast.cli.opened import require_file
from holdfast.cli.progress import DrainLog, shown_progress
from holdfast.cli.serving import served
from holdfast.cli.stopping import stopped_by_signals
from holdfast.clock import SYSTEM_CLOCK
from holdfast.database import open_database
from holdfast.errors import ConfigurationError, DependencyDown, HoldfastError
from holdfast.outbox import LeaseEngine, LeaseTerms, Relay, ShardSinks
from holdfast.outbox.backlog import Backlog
from holdfast.outbox.endpoint import host_and_port
from holdfast.outbox.measured_engine import MeasuredEngine
from holdfast.outbox.metrics import RelayMetrics, Sampler
from holdfast.outbox.probes import Probes
from holdfast.outbox.schema import SHARDS
from holdfast.outbox.slot_name import default_slot
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.outbox import RelayEngine, Step
    from holdfast.ports import Sink

log = logging.getLogger("holdfast.cli")


class EngineName(Enum):
    """Which engine moves the rows."""

    LEASE = "lease"
    WAL = "wal"


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """Everything that can be set about a sidecar."""

    database: str
    broker: str
    engine: EngineName = EngineName.LEASE
    batch: int = 2000
    lease_seconds: float = 10.0
    http: str | None = None
    drain_seconds: float = 20.0
    stall_seconds: float = 120.0
    slot: str | None = None
    publication: str = "holdfast_outbox"
    messages: bool = False
    transactional_id: str | None = None
    expect_groups: tuple[tuple[str, str], ...] = ()
    """Topics and groups that must be there before anything is published."""

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("drain_seconds", 0)):
            if not least <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} {getattr(self, name)}: use {least} or more")
        for name in ("lease_seconds", "stall_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} {getattr(self, name)}: use more than 0, e.g. 10")
        LeaseTerms(seconds=self.lease_seconds)
        if self.http is not None:
            host_and_port(self.http)


class Sidecar:
    """One relay with all that an operator needs around it.

    Wrong settings show when it is made. A database or broker that is down shows as an
    outage, at the start as well as later.
    """

    def __init__(self, settings: RelaySettings) -> None:
        self._settings = settings
        self._database = open_database(settings.database)
        self._is_wal = settings.engine is EngineName.WAL
        if self._is_wal and self._database.dialect.name != "postgresql":
            raise ConfigurationError(
                f"--engine wal reads PostgreSQL's log, not {self._database.dialect.name}'s: "
                "use --engine lease"
            )
        self._broker = connect(settings.broker)
        require_file(self._database)
        self._sink: Sink | ShardSinks | None = None
        if settings.transactional_id is not None:
            self._sink = ShardSinks(self._broker, settings.transactional_id)
        late = LateEngine(settings.engine.value, self._make_engine)
        measured = MeasuredEngine(late, observe=self._observe_seconds)
        self._progress: Callable[[Step], None] = _ignored
        self.relay = Relay(measured, observer=self._observe)
        self._backlog = Backlog(self._database, slot=self._slot)
        self._sampler = Sampler(self._backlog)
        self._late = late
        self._patient_until = 0.0
        self._metrics = RelayMetrics(self.relay.health, self._sampler, shards=self._shards)
        self._probes = Probes(self.relay.health, measured, stall_seconds=settings.stall_seconds)

    def run(self) -> None:
        """Publish until a signal comes, through every outage."""
        with ExitStack() as closing:
            closing.callback(self._close)
            closing.enter_context(self._stopping())
            where = self._serve(closing)
            self._progress = DrainLog(self._total)
            log.info(
                "relay %s: %s → %s, engine %s%s",
                version("holdfast"), mask(self._settings.database), mask(self._settings.broker),
                self._settings.engine.value, where,
            )  # fmt: skip
            self.relay.run()
        moved = {"published": self.relay.health.published, "parked": self.relay.health.parked}
        log.info("relay ended: published %d, parked %d", *moved.values(), extra=moved)

    def run_once(self) -> int:
        """Publish what is there, with progress on a terminal; outages raise.

        `Unfinished` if a signal came while events still wait, `LeftBehind` if some were
        parked or wait for a topic that does not exist.
        """
        with ExitStack() as closing:
            closing.callback(self._close)
            closing.enter_context(self._stopping())
            self._progress = closing.enter_context(shown_progress(self._total))
            self._patient_until = SYSTEM_CLOCK.monotonic() + 1.5 * self._settings.lease_seconds
            published = self.relay.run_once(wait_more=self._is_more_to_come)
            if self.relay.stopped and (left := self._backlog.measure().waiting):
                raise Unfinished(
                    f"published {published:,} events, then was told to stop; {left:,} still wait: "
                    "the next run goes on with them"
                )
            self._check_left(published)
            return published

    def _check_left(self, published: int) -> None:
        health, left = self.relay.health, []
        if health.parked:
            left.append(f"{health.parked:,} were parked: see  holdfast outbox parked list")
        if health.missing:
            topics = ", ".join(health.missing)
            left.append(f"others wait, for there is no topic {topics}: see  holdfast topics create")
        if left:
            raise LeftBehind(f"published {published:,} events; {'; '.join(left)}")

    def _is_more_to_come(self) -> bool:
        """Whether events wait in shards that another relay holds, which may have died."""
        if self._shards() == SHARDS or not (waiting := self._total()):
            return False
        if SYSTEM_CLOCK.monotonic() < self._patient_until:
            return True
        raise DependencyDown(
            f"{waiting} events wait in shards that other relays hold: see  holdfast doctor"
        )

    def _total(self) -> int:
        with suppress(SQLAlchemyError):  # the first step says what is wrong
            return self._backlog.measure().waiting
        return 0

    def _stopping(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(
            stopped_by_signals(self.relay.stop, drain_seconds=self._settings.drain_seconds)
        )
        return stack

    def _serve(self, closing: ExitStack) -> str:
        where = served(self._settings.http, self._probes, self._metrics.text, closing)
        if where:
            closing.callback(self._sampler.stop)
            self._sampler.start()
        return where

    @property
    def _slot(self) -> str | None:
        if not self._is_wal:
            return None
        return default_slot(self._database) if self._settings.slot is None else self._settings.slot

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

            return WalEngine(self._database, self._sink, slot=self._slot,
                             publication=settings.publication, messages=settings.messages,
                             terms=terms, batch=settings.batch)  # fmt: skip
        return LeaseEngine(self._database, self._sink, terms=terms, batch=settings.batch)

    def _shards(self) -> int:
        if not self._is_wal:
            return self._late.shards
        health = self.relay.health  # the WAL engine takes all shards or none
        return SHARDS if health.last_step > float("-inf") and not health.standby else 0

    def _observe(self, step: Step) -> None:
        self._progress(step)

    def _observe_seconds(self, seconds: float) -> None:
        self._metrics.step_seconds.observe(seconds)

    def _close(self) -> None:
        for end in (self._sink, self._broker):
            if end is not None:
                with suppress(HoldfastError):
                    end.close()
        self._database.dispose()


def _ignored(_step: Step) -> None:
    """Nobody watches."""
