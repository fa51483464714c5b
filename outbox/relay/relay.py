"""The relay: keeps an engine going through outages, and ends it cleanly."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from sqlalchemy.exc import DBAPIError, ProgrammingError, SQLAlchemyError

from holdfast.backoff import Backoff
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.errors import is_wrong, outage, short, unreadable
from holdfast.errors import ConfigurationError, DependencyDown, Transient
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("holdfast.outbox")

_PATIENCE = 8
"""How many failures in a row that may pass by themselves a single run waits out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStep:
    """What one step did."""

    published: int = 0
    """Messages that the broker took; their rows are gone or being deleted."""
    parked: int = 0
    """Messages set aside because the broker refused them, or one of their key before."""
    idle: bool = False
    """Nothing was there to do; wait before the next step, unless this one has waited itself."""
    rested: bool = False
    """It has waited by itself, and would have ended with the first thing to do."""
    standby: bool = False
    """Another relay is at work; this one waits to take over."""
    hindered: str | None = None
    """What keeps the relay from its work, though nothing is down and no other relay does it."""
    missing: tuple[str, ...] = ()
    """Topics that do not exist: their events wait in the outbox, those of others go on."""

    def plus(self, other: RelayStep) -> RelayStep:
        """Return what both steps moved."""
        return RelayStep(
            published=self.published + other.published, parked=self.parked + other.parked
        )


class RelayEngine(Protocol):
    """Moves committed events to the broker, at least once and in order per key."""

    name: str

    def step(self) -> RelayStep:
        """Do one bounded piece of work.

        `BrokerDown` or a database outage raises, with nothing lost and no attempt counted:
        the caller waits and calls again.
        """
        ...

    def close(self) -> None:
        """Finish what is in flight, delete what was acknowledged, give up the leases."""
        ...


@dataclass(slots=True)
class Health:
    """How the relay is doing, for probes and metrics."""

    published: int = 0
    parked: int = 0
    standby: bool = False
    hindered: str | None = None
    """What keeps the relay from its work, though nothing is down."""
    missing: tuple[str, ...] = ()
    """Topics that do not exist; their events wait."""
    outage: str | None = None
    """What is down, while the relay waits for it."""
    failures: int = 0
    """Outages in a row."""
    last_step: float = field(default=float("-inf"))
    """When the last step ended well, by the monotonic clock."""
    pulse: float = field(default=float("-inf"))
    """When a step last began or ended, well or not; from the start, when the relay was made."""


class Relay:
    """Runs an engine until stopped.

    While the broker or the database is down it waits, longer and longer with jitter, and
    tries again: nothing is counted against any message and nothing is parked. *observer* is
    told each step that went well, *timer* the seconds of every one.
    """

    def __init__(
        self,
        engine: RelayEngine,
        *,
        backoff: Backoff | None = None,
        idle: Backoff | None = None,
        clock: Clock = SYSTEM_CLOCK,
        observer: Callable[[RelayStep], None] = lambda _: None,
        timer: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.engine = engine
        self.health = Health(pulse=clock.monotonic())
        self._backoff = Backoff(first=0.1, ceiling=15) if backoff is None else backoff
        # Each wait is a thirtieth longer: 50 ms after 1.6 s without events, 100 ms after 3.3 s.
        # What comes first after a pause waits for as long as that, and so does what follows it.
        self._idle = Backoff(first=0.002, ceiling=0.1, factor=1.03) if idle is None else idle
        self._clock = clock
        self._observer = observer
        self._timer = timer
        self._stop = threading.Event()

    def run(self) -> None:
        """Publish until `stop`; everything acknowledged is deleted before this returns."""
        idle = 0
        try:
            while not self._stop.is_set():
                step = self._step()
                idle = idle + 1 if step is not None and step.idle and not step.rested else 0
                if idle:
                    self._clock.wait(self._stop, self._idle.longest(idle))
        finally:
            self._close()

    def run_once(self, *, wait_more: Callable[[], bool] = lambda: False) -> int:
        """Publish until nothing is left, then end; outages raise. For cron and for tests.

        What may pass at once, as a lease that ran out, is tried again for some seconds.
        With nothing to do, *wait_more* is asked whether something is still to come: events
        of shards that another relay holds, say.
        """
        total = 0
        try:
            while not self._stop.is_set():
                step = self._patient_step()
                if step is None:
                    continue
                total += step.published
                if step.idle and not wait_more():
                    break
                if step.idle:
                    self._clock.wait(self._stop, self._idle.ceiling)
        finally:
            self._close()
        return total

    def stop(self) -> None:
        """End `run` after the batch in hand. Safe from a signal handler or another thread."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        """Whether somebody asked it to stop."""
        return self._stop.is_set()

    def _patient_step(self) -> RelayStep | None:
        try:
            step = self._timed_step()
        except Transient as error:
            if self.health.failures >= _PATIENCE:
                raise
            self._wait_out(error)
            return None
        except DBAPIError as error:
            if outage(error).passes:
                raise
            raise unreadable(error) from error
        self._note(step)
        if step.hindered is not None:
            raise DependencyDown(step.hindered)
        return step

    def _step(self) -> RelayStep | None:
        try:
            step = self._timed_step()
        except (DependencyDown, Transient) as error:
            self._wait_out(error)
        except DBAPIError as error:
            if not outage(error).passes:
                raise unreadable(error) from error
            self._wait_out(error)
        else:
            self._note(step)
            return step
        return None

    def _timed_step(self) -> RelayStep:
        self.health.pulse = began = self._clock.monotonic()
        try:
            return self.engine.step()
        finally:
            self.health.pulse = self._clock.monotonic()
            self._timer(self.health.pulse - began)

    def _note(self, step: RelayStep) -> None:
        health = self.health
        if health.outage is not None:
            log.warning("relay goes on after %d failures", health.failures)
        health.published += step.published
        health.parked += step.parked
        health.standby = step.standby
        health.hindered = step.hindered
        health.missing = step.missing
        health.outage, health.failures = None, 0
        health.last_step = self._clock.monotonic()
        self._observer(step)

    def _wait_out(self, error: Exception) -> None:
        health = self.health
        health.failures += 1
        health.outage = short(error)
        delay = self._backoff.delay(health.failures) or self._backoff.ceiling
        facts = {"outage": health.outage, "failures": health.failures, "seconds": round(delay, 3)}
        log.warning("relay waits %.1f s: %s", delay, health.outage, extra=facts)
        self._clock.wait(self._stop, delay)

    def _close(self) -> None:
        try:
            self.engine.close()
        except (DependencyDown, Transient, DBAPIError) as error:
            log.warning("relay ended with work in flight, it will be done again: %s", short(error))


class DeferredEngine:
    """Makes the real engine when first asked to step, and again until that works.

    So a start during an outage only waits. Until a step has gone well once, a database that
    refuses us is a mistake in the settings and ends the relay. Later the same words may mean
    a failover or new credentials on their way, and are waited out.
    """

    def __init__(self, name: str, make: Callable[[], RelayEngine]) -> None:
        self.name = name
        self._make = make
        self.made: RelayEngine | None = None
        """The real one, once it could be made."""
        self._is_proven = False

    def step(self) -> RelayStep:
        """Make the engine if need be, then do one step of it."""
        try:
            if self.made is None:
                self.made = self._make()
            step = self.made.step()
        except SQLAlchemyError as error:
            if self._is_proven or not is_wrong(error):
                raise
            if isinstance(error, ProgrammingError):
                raise unreadable(error) from error
            raise ConfigurationError(_said(error)) from error
        self._is_proven = True
        return step

    def close(self) -> None:
        """Close the engine if it was made."""
        if self.made is not None:
            self.made.close()


def _said(error: SQLAlchemyError) -> str:
    if not isinstance(error, DBAPIError) or error.orig is None:
        return mask(str(error))
    return mask(f"the database says: {error.orig.args[-1] if error.orig.args else error.orig}")
