"""Watching a relay: probes, the backlog, the slot, and all of it in Prometheus' format.

Figures of the tables are sampled in a thread of their own: a scrape never waits for the
database, and an outage is no reason to restart a relay that waits for its end.
"""

from __future__ import annotations

import logging
import re
import threading
import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.registry import Collector
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.sql import statements
from holdfast.errors import ConfigurationError
from holdfast.health import Exposition, ProbeResult
from holdfast.metrics import Across, Instruments, counter, exposition, gauge, histogram
from holdfast.outbox.relay.latency import DUE
from holdfast.outbox.schema import delayed, outbox, parked
from holdfast.scrubbing import told
from holdfast.stored_message import unpacked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import Metric
    from sqlalchemy import Table
    from sqlalchemy.engine import Connection, Engine

    from holdfast.metrics import MetricDefinition
    from holdfast.outbox.relay.relay import Health


class Probes:
    """Judges a relay by what it did last.

    An outage of broker or database is no reason to restart the relay, so it stays alive
    but not ready. A step that never ends is a reason.
    """

    def __init__(
        self,
        health: Health,
        *,
        stall_seconds: float = 120.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if stall_seconds <= 0:
            raise ConfigurationError(f"stall_seconds {stall_seconds}: use more than 0")
        self._health = health
        self._stall_seconds = stall_seconds
        self._clock = clock

    def alive(self) -> ProbeResult:
        """Whether the relay still steps, be it through an outage."""
        silent = self._clock.monotonic() - self._health.pulse
        if silent > self._stall_seconds:
            return ProbeResult(False, f"no step began or ended for {silent:.0f} s")
        return ProbeResult(True, "stepping" if self._health.outage is None else "waiting")

    def ready(self) -> ProbeResult:
        """Whether the relay does its work, or stands by to take over."""
        health = self._health
        if health.outage is not None:
            return ProbeResult(False, f"outage: {health.outage}")
        if health.last_step == float("-inf"):
            return ProbeResult(False, "starting")
        if health.hindered is not None:
            return ProbeResult(False, f"hindered: {health.hindered}")
        if health.missing:
            return ProbeResult(False, f"events wait, no such topic: {', '.join(health.missing)}")
        return ProbeResult(True, "standby" if health.standby else "publishing")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLag:
    """One slot at one moment; sizes are bytes of log."""

    is_lost: bool
    """The slot is missing, or the server has thrown away what it needs."""
    retained: float = 0.0
    """What the slot keeps on the server's disk."""
    unconfirmed: float = 0.0
    """What the relay has not yet finished."""
    safe: float | None = None
    """What can still be written before the slot is lost; None: nothing limits it."""

    @classmethod
    def of(cls, db: Connection, slot: str) -> SlotLag:
        """Return how *slot* stands now."""
        command = statements("holdfast.outbox.wal", "postgresql")["standing"]
        found = db.execute(command, {"name": slot}).first()
        if found is None or found.wal_status == "lost":
            return cls(is_lost=True)
        return cls(
            is_lost=False,
            retained=float(found.retained or 0),
            unconfirmed=float(found.unconfirmed or 0),
            safe=None if found.safe_wal_size is None else max(0.0, float(found.safe_wal_size)),
        )


_COUNTED = 100_000
_UUID7 = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogSample:
    """What the tables hold at one moment."""

    waiting: int
    """Events not yet published; above 100,000 estimated from the sequence numbers."""
    is_exact: bool
    oldest_seconds: float | None
    """For how long the first event could have left: since its UUIDv7 was made or, if it was
    delayed, since it was due. 0 when none waits, None when its id tells nothing."""
    delayed: int
    overdue_seconds: float
    """How long the first delayed event has been due; 0 when none is."""
    parked: int
    slot: SlotLag | None = None
    """The WAL engine's replication slot; None with another engine."""


class Backlog:
    """Measures the outbox cheaply, however large it is, and with it the *slot* if one is named."""

    def __init__(self, engine: Engine, *, slot: str | None = None) -> None:
        self._engine = engine
        self._slot = slot
        self._sql = statements("holdfast.outbox", engine.dialect.name)

    def measure(self) -> BacklogSample:
        """Return what the tables hold now."""
        with self._engine.connect() as db:
            now = float(db.execute(self._sql["now"]).scalar_one())
            waiting, is_exact = _waiting(db)
            first = select(outbox.c.id, outbox.c.headers).order_by(outbox.c.seq).limit(1)
            wait = db.execute(self._sql["next_due"]).scalar()
            return BacklogSample(
                waiting=waiting,
                is_exact=is_exact,
                oldest_seconds=_age(db.execute(first).first(), now),
                delayed=_count(db, delayed),
                overdue_seconds=0.0 if wait is None else max(0.0, -float(wait)),
                parked=_count(db, parked),
                slot=None if self._slot is None else SlotLag.of(db, self._slot),
            )


def _waiting(db: Connection) -> tuple[int, bool]:
    count = _count(db, outbox)
    if count < _COUNTED:
        return count, True
    # Counting millions of rows takes seconds; the ends of the index are there at once.
    ends = select(func.min(outbox.c.seq), func.max(outbox.c.seq))
    lowest, highest = db.execute(ends).one()
    return (count, True) if lowest is None else (max(count, highest - lowest + 1), False)


def _count(db: Connection, table: Table) -> int:
    some = select(table.c.seq).limit(_COUNTED).subquery()
    return db.execute(select(func.count()).select_from(some)).scalar_one()


def _age(first: Any, now: float) -> float | None:
    if first is None:
        return 0.0
    ready = _due(first.headers)
    if ready is None:
        own = first.id if isinstance(first.id, uuid.UUID) else uuid.UUID(str(first.id))
        ready = (own.int >> 80) / 1000 if own.version == _UUID7 else None
    return None if ready is None else max(0.0, now - ready)


def _due(headers: Any) -> float | None:
    """Return when a delayed event was due, if its headers say so."""
    said = dict(unpacked(msgspec.json.encode(headers).decode())).get(DUE)
    try:
        return None if said is None else datetime.fromisoformat(said.decode()).timestamp()
    except ValueError:  # a header of the caller's own
        return None


log = logging.getLogger("holdfast.outbox")

_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_STALE = 12  # sampling intervals after which a sample is withheld rather than believed


class Sampler:
    """Measures the outbox now and then in a thread of its own.

    A scrape never waits for the database, and a database that is down never hides the
    counters.
    """

    def __init__(
        self, backlog: Backlog, *, every: float = 5.0, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._backlog = backlog
        self._every = every
        self._clock = clock
        self._sample: tuple[float, BacklogSample] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-sampler", daemon=True)

    def start(self) -> None:
        """Take the first sample now, then one per interval."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; one that hangs in the database is left behind."""
        self._stop.set()
        self._thread.join(timeout=1.0)

    @property
    def latest(self) -> BacklogSample | None:
        """The last sample, or None when it is missing or too old to be believed."""
        if self._sample is None:
            return None
        taken, standing = self._sample
        return standing if self._clock.monotonic() - taken < self._every * _STALE else None

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._sample = self._clock.monotonic(), self._backlog.measure()
            except SQLAlchemyError as error:
                log.debug("the backlog cannot be measured now: %s", type(error).__name__)
            except Exception as error:  # noqa: BLE001 - a row that nobody foresaw must not blind
                log.error("the backlog cannot be measured: %s", told(error))  # noqa: TRY400
            self._clock.wait(self._stop, self._every)


_TABLES = Across.MAX  # the same from every relay
PUBLISHED = counter(
    "holdfast_relay_published", "Events that the broker took and whose rows are gone."
)
PARKED_HERE = counter("holdfast_relay_parked", "Events set aside by this relay.")
OUTAGE = gauge(
    "holdfast_relay_outage", "1 while the broker or the database is down.", across=Across.MAX
)
STANDBY = gauge("holdfast_relay_standby", "1 while another relay is at work.")
HINDERED = gauge(
    "holdfast_relay_hindered", "1 while a stranger keeps it from its work.", across=Across.MAX
)
MISSING = gauge(
    "holdfast_relay_missing_topics", "Topics that do not exist; events wait.", across=Across.MAX
)
LEASES = gauge("holdfast_relay_leases_owned", "Shards that this relay owns.")
SAMPLED = gauge(
    "holdfast_outbox_sampled", "1 when the figures of the tables are current.", across=Across.MIN
)
BACKLOG = gauge("holdfast_outbox_backlog", "Events not yet published.", across=_TABLES)
OLDEST = gauge(
    "holdfast_outbox_oldest_age_seconds", "Age of the first unpublished event.", across=_TABLES
)
PARKED = gauge("holdfast_outbox_parked", "Events parked now.", across=_TABLES)
DELAYED = gauge("holdfast_outbox_delayed", "Events that wait to be due.", across=_TABLES)
OVERDUE = gauge(
    "holdfast_outbox_overdue_seconds", "How long the first delayed event has been due.",
    across=_TABLES,
)  # fmt: skip
SLOT_LOST = gauge(
    "holdfast_slot_lost", "1 while the WAL engine's slot is lost or missing.", across=_TABLES
)
SLOT_RETAINED = gauge(
    "holdfast_slot_retained_bytes", "Log that the slot keeps on the server's disk.", across=_TABLES
)
SLOT_UNCONFIRMED = gauge(
    "holdfast_slot_unconfirmed_bytes", "Log that the relay has not yet finished.", across=_TABLES
)
SLOT_SAFE = gauge(
    "holdfast_slot_safe_bytes", "Log that can still be written before the slot is lost.",
    across=_TABLES,
)  # fmt: skip
RELAY_STEP = histogram(
    "holdfast_relay_step_seconds", "How long the steps of the relay took.", buckets=_BUCKETS
)
CDC_STEP = histogram(
    "holdfast_cdc_step_seconds", "How long the steps of the cdc took.", buckets=_BUCKETS
)
CDC_PUBLISHED = counter("holdfast_cdc_published", "Change events that the broker took.")
CDC_OUTAGE = gauge(
    "holdfast_cdc_outage", "1 while the broker or the database is down.", across=Across.MAX
)
CDC_STANDBY = gauge("holdfast_cdc_standby", "1 while another capture is at work.")
CDC_SNAPSHOT = gauge(
    "holdfast_cdc_snapshot", "1 while the snapshot is taken.", across=Across.MAX
)  # fmt: skip
CDC_ROWS = gauge("holdfast_cdc_snapshot_rows", "Rows that the running snapshot has read.")


class StepMetrics(Collector):
    """A registry of its own, and in it how long steps took."""

    def __init__(self, seconds: MetricDefinition, *told: MetricDefinition) -> None:
        self._registry = CollectorRegistry()
        made = Instruments(self._registry)
        self.step_seconds = made.histogram(seconds)
        self._registry.register(self)
        made.tells(self, *told)

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: it is asked only when it is whole."""
        return iter(())

    def text(self) -> bytes:
        """Return its own series as Prometheus scrapes them."""
        return exposition([self._registry]).body

    def page(self, accept: str) -> Exposition:
        """Return its own series and those of the process, in a format of *accept*."""
        return exposition([self._registry, REGISTRY], accept)


class RelayMetrics(StepMetrics):
    """What a relay exports; every series is there from the start, at 0."""

    def __init__(self, health: Health, sampler: Sampler, *, shards: Callable[[], int]) -> None:
        self._health = health
        self._sampler = sampler
        self._shards = shards
        super().__init__(
            RELAY_STEP, PUBLISHED, PARKED_HERE, OUTAGE, STANDBY, HINDERED, MISSING, LEASES, SAMPLED,
            BACKLOG, OLDEST, PARKED, DELAYED, OVERDUE, SLOT_LOST, SLOT_RETAINED, SLOT_UNCONFIRMED,
            SLOT_SAFE,
        )  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        """Read the relay's health and the last sample of the tables."""
        health = self._health
        yield PUBLISHED.family(health.published)
        yield PARKED_HERE.family(health.parked)
        yield OUTAGE.family(float(health.outage is not None))
        yield STANDBY.family(float(health.standby))
        yield HINDERED.family(float(health.hindered is not None))
        yield MISSING.family(len(health.missing))
        yield LEASES.family(self._shards())
        standing = self._sampler.latest
        yield SAMPLED.family(float(standing is not None))
        if standing is not None:
            yield from _tables(standing)


def _tables(standing: BacklogSample) -> Iterator[Metric]:
    yield BACKLOG.family(standing.waiting)
    if standing.oldest_seconds is not None:
        yield OLDEST.family(standing.oldest_seconds)
    yield PARKED.family(standing.parked)
    yield DELAYED.family(standing.delayed)
    yield OVERDUE.family(standing.overdue_seconds)
    slot = standing.slot
    if slot is not None:
        yield SLOT_LOST.family(float(slot.is_lost))
        yield SLOT_RETAINED.family(slot.retained)
        yield SLOT_UNCONFIRMED.family(slot.unconfirmed)
        if slot.safe is not None:
            yield SLOT_SAFE.family(slot.safe)


class CdcMetrics(StepMetrics):
    """What a capture exports; every series is there from the start, at 0."""

    def __init__(self, health: Health, rows: Callable[[], int | None]) -> None:
        self._health = health
        self._rows = rows
        super().__init__(
            CDC_STEP, CDC_PUBLISHED, CDC_OUTAGE, CDC_STANDBY, CDC_SNAPSHOT, CDC_ROWS
        )  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        """Read the capture's health."""
        health, rows = self._health, self._rows()
        yield CDC_PUBLISHED.family(health.published)
        yield CDC_OUTAGE.family(float(health.outage is not None))
        yield CDC_STANDBY.family(float(health.standby))
        yield CDC_SNAPSHOT.family(float(rows is not None))
        yield CDC_ROWS.family(rows or 0)


_UNFIT = re.compile(r"[^a-z0-9_]")


def default_slot(engine: Engine) -> str:
    """Return the slot's name for the database of *engine*."""
    name = _UNFIT.sub("_", (engine.url.database or "").lower())
    return f"holdfast_outbox_{name}"[:63]
