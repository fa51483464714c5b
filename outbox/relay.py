"""The relay: keeps an engine going through outages, and ends it cleanly."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from holdfast.backoff import Backoff
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import DependencyDown, Transient
from holdfast.outbox.outages import is_outage, short, unreadable

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.outbox.engine import RelayEngine, Step

log = logging.getLogger("holdfast.outbox")

_PATIENCE = 8
"""How many failures in a row that may pass by themselves a single run waits out."""


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
    slots_lost: int = 0
    """How often events were lost with their replication slot."""
    outage: str | None = None
    """What is down, while the relay waits for it."""
    failures: int = 0
    """Outages in a row."""
    last_step: float = field(default=float("-inf"))
    """When the last step ended well, by the monotonic clock."""


class Relay:
    """Runs an engine until stopped.

    While the broker or the database is down it waits, longer and longer with jitter, and
    tries again: nothing is counted against any message and nothing is parked.
    """

    def __init__(
        self,
        engine: RelayEngine,
        *,
        backoff: Backoff | None = None,
        idle: Backoff | None = None,
        clock: Clock = SYSTEM_CLOCK,
        observer: Callable[[Step], None] = lambda _: None,
    ) -> None:
        self.engine = engine
        self.health = Health()
        self._backoff = Backoff(first=0.1, ceiling=15) if backoff is None else backoff
        self._idle = Backoff(first=0.0005, ceiling=0.02, factor=1.25) if idle is None else idle
        self._clock = clock
        self._observer = observer
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

    def _patient_step(self) -> Step | None:
        try:
            step = self.engine.step()
        except Transient as error:
            if self.health.failures >= _PATIENCE:
                raise
            self._wait_out(error)
            return None
        except DBAPIError as error:
            if is_outage(error):
                raise
            raise unreadable(error) from error
        self._note(step)
        if step.hindered is not None:
            raise DependencyDown(step.hindered)
        return step

    def _step(self) -> Step | None:
        try:
            step = self.engine.step()
        except (DependencyDown, Transient) as error:
            self._wait_out(error)
        except DBAPIError as error:
            if not is_outage(error):
                raise unreadable(error) from error
            self._wait_out(error)
        else:
            self._note(step)
            return step
        return None

    def _note(self, step: Step) -> None:
        health = self.health
        if health.outage is not None:
            log.warning("relay goes on after %d failures", health.failures)
        health.published += step.published
        health.parked += step.parked
        health.standby = step.standby
        health.hindered = step.hindered
        health.missing = step.missing
        health.slots_lost += step.slots_lost
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
