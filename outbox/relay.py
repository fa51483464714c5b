"""The relay: keeps an engine going through outages, and ends it cleanly."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError, OperationalError

from holdfast.backoff import Backoff
from holdfast.classification import recognise
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError, DependencyDown, Remedy, Transient
from holdfast.outbox.schema import metadata
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.outbox.engine import RelayEngine, Step

log = logging.getLogger("holdfast.outbox")
_NO_PRIVILEGE = "42501"
_MYSQL_NO_PRIVILEGE = (1142, 1143)


@dataclass(slots=True)
class Health:
    """How the relay is doing, for probes and metrics."""

    published: int = 0
    parked: int = 0
    standby: bool = False
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
        self._idle = Backoff(first=0.001, ceiling=0.02) if idle is None else idle
        self._clock = clock
        self._observer = observer
        self._stop = threading.Event()

    def run(self) -> None:
        """Publish until `stop`; everything acknowledged is deleted before this returns."""
        idle = 0
        try:
            while not self._stop.is_set():
                step = self._step()
                idle = idle + 1 if step is not None and step.idle else 0
                if idle:
                    self._clock.wait(self._stop, self._idle.longest(idle))
        finally:
            self._close()

    def run_once(self, *, linger: Callable[[Step], bool] = lambda _: False) -> int:
        """Publish until nothing is left, then end; outages raise. For cron and for tests.

        *linger* is asked when a step found nothing to do, whether more is to be waited for.
        """
        total = idle = 0
        try:
            while not self._stop.is_set():
                step = self.engine.step()
                self._note(step)
                total += step.published
                idle = idle + 1 if step.idle else 0
                if idle and not linger(step):
                    break
                if idle:
                    self._clock.wait(self._stop, self._idle.longest(idle))
        except DBAPIError as error:
            raise _explained(error) from error
        finally:
            self._close()
        return total

    def stop(self) -> None:
        """End `run` after the batch in hand. Safe from a signal handler or another thread."""
        self._stop.set()

    def _step(self) -> Step | None:
        try:
            step = self.engine.step()
        except (DependencyDown, Transient) as error:
            self._wait_out(error)
        except DBAPIError as error:
            explained = _explained(error)
            if not isinstance(explained, DependencyDown):
                raise explained from error
            self._wait_out(explained)
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
        health.outage, health.failures = None, 0
        health.last_step = self._clock.monotonic()
        self._observer(step)

    def _wait_out(self, error: Exception) -> None:
        health = self.health
        health.failures += 1
        health.outage = _short(error)
        delay = self._backoff.delay(health.failures) or self._backoff.ceiling
        log.warning("relay waits %.1f s: %s", delay, health.outage)
        self._clock.wait(self._stop, delay)

    def _close(self) -> None:
        try:
            self.engine.close()
        except (DependencyDown, Transient, DBAPIError) as error:
            log.warning("relay ended with work in flight, it will be done again: %s", _short(error))


def _explained(error: DBAPIError) -> ConfigurationError | DependencyDown:
    """Return *error* as an outage to wait for, or as what must be put right before."""
    said = _short(error)
    code = error.orig.args[0] if error.orig is not None and error.orig.args else None
    if getattr(error.orig, "sqlstate", None) == _NO_PRIVILEGE or code in _MYSQL_NO_PRIVILEGE:
        return ConfigurationError(
            f"{said}: grant the relay's user SELECT, INSERT, UPDATE and DELETE on "
            f"{', '.join(sorted(metadata.tables))}"
        )
    passing = isinstance(error, OperationalError) or error.connection_invalidated
    if passing or recognise(error) is Remedy.RETRY:
        return DependencyDown(f"the database: {said}")
    return ConfigurationError(f"the outbox cannot be read: {said}")


def _short(error: Exception) -> str:
    return mask(str(error)).split("\n[SQL", 1)[0].split("\n(Background", 1)[0]
