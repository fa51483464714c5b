"""Is a consumer alive, is it ready: decisions for an orchestrator's probes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.circuit import Closed
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError
from holdfast.outbox.probes import Verdict

if TYPE_CHECKING:
    from holdfast.consumer.assembly import Assembly
    from holdfast.consumer.consumer import Consumer
    from holdfast.consumer.route import Route


class Vitals:
    """Judges a consumer by what its threads did last.

    An outage is no reason to restart it, so it stays alive but is not ready. A thread that
    is dead, or that has been in one step for *stall_seconds*, is a reason.
    """

    def __init__(
        self, consumer: Consumer, *, stall_seconds: float = 120.0, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        if not stall_seconds > 0:
            raise ConfigurationError(f"stall_seconds={stall_seconds!r}: use more than 0")
        self._consumer = consumer
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._since = clock.monotonic()

    def alive(self) -> Verdict:
        """Whether the poll thread still polls and the clerk still works, be it in an outage."""
        running = self._consumer.running
        now = self._clock.monotonic()
        if running is None:
            if now - self._since > self._stall_seconds:
                return Verdict(False, f"does not run for {now - self._since:.0f} s")
            return Verdict(True, "starting")
        self._since = now
        silent = now - running.runtime.pulse
        if silent > self._stall_seconds:
            return Verdict(False, f"the poll thread has not polled for {silent:.0f} s")
        clerk = running.clerk
        if clerk is not None and clerk.is_started and now - clerk.pulse > self._stall_seconds:
            return Verdict(False, f"no word of the database for {now - clerk.pulse:.0f} s")
        return Verdict(True, "polls")

    def ready(self) -> Verdict:
        """Whether messages are handled: subscribed, database and dead letters in reach."""
        running = self._consumer.running
        if running is None:
            return Verdict(False, "starting")
        troubles = _troubles(running)
        return Verdict(not troubles, "; ".join(troubles) or "consumes")


def _troubles(running: Assembly) -> list[str]:
    runtime, clerk = running.runtime, running.clerk
    found: list[str] = []
    if runtime.stopping.is_set():
        found.append("stopping")
    if runtime.broker_down is not None:
        found.append(f"the broker is down: {runtime.broker_down}")
    elif not runtime.subscribed:
        found.append("not subscribed yet")
    if stalled := runtime.stalls.text():
        found.append(stalled)
    if clerk is not None and clerk.down is not None:
        found.append(f"the database is down: {clerk.down}")
    if runtime.hanging_threads >= running.settings.workers:
        found.append(f"all {running.settings.workers} handler threads hang")
    if runtime.hanging_tasks >= running.settings.tasks:
        found.append(f"all {running.settings.tasks} handler tasks hang")
    waits = any(work.waits_for for work in running.lanes.in_hand())
    if waits and running.homes.down is not None:
        found.append(f"dead letters cannot be written: {running.homes.down}")
    found += [trouble for route in running.routes.values() for trouble in _outages(route)]
    found += [
        f"{route.topic} is paused: too many of its messages die"
        for route in running.routes.values()
        if route.limit is not None and not isinstance(route.limit.state, Closed)
    ]
    return found


def _outages(route: Route) -> list[str]:
    """Return which dependencies keep the intake of *route* paused."""
    detector = route.outage.detector
    found = [
        f"{route.topic} is paused: the circuit of {breaker.name!r} is not closed"
        for breaker in route.breakers
        if breaker not in (route.limit, detector.breaker) and not isinstance(breaker.state, Closed)
    ]
    if detector.is_open:
        found.append(f"{route.topic} is paused, something that it needs is down: {detector.cause}")
    return found
