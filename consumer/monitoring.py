"""What a consumer counts and exports, and whether it is alive and ready, for probes."""

from __future__ import annotations

import math
import threading
from collections import Counter as Tallied
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from holdfast.circuit import Closed
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError
from holdfast.health import ProbeResult
from holdfast.metrics import Across, Instruments, counter, gauge, histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client import Counter

    from holdfast.consumer.consumer import Consumer
    from holdfast.consumer.handlers.route import Route
    from holdfast.consumer.run import ConsumerRun
    from holdfast.consumer.scheduling.work import Work
    from holdfast.metrics import TraceLink
    from holdfast.ports import Lane

OUTCOMES = (
    "handled", "duplicates", "failed", "released", "dead_lettered", "crashed", "skipped",
    "held_back", "withdrawn", "unmarked",
)  # fmt: skip
_EXPORTED = frozenset(OUTCOMES)
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)


CONSUMED = counter(
    "holdfast_consumer_messages", "What became of messages and attempts, by topic",
    "topic", "outcome",
)  # fmt: skip
RETRIES = counter(
    "holdfast_consumer_retries", "Attempts at messages that had failed before, by topic", "topic"
)
HANDLER_SECONDS = histogram(
    "holdfast_consumer_handler_seconds", "How long handlers ran", "topic", buckets=_SECONDS
)
BATCH = histogram(
    "holdfast_consumer_batch_messages",
    "How many messages were handled in one transaction, where handlers run in batches",
    "topic",
    buckets=_SIZES,
)
LAG = gauge(
    "holdfast_consumer_lag", "Messages of the owned partitions that are not settled yet", "topic"
)
LAG_SECONDS = gauge(
    "holdfast_consumer_lag_seconds",
    "Age of the oldest message of the owned partitions that is not settled yet",
    "topic",
    across=Across.MAX,
)
PARTITION_LAG = gauge(
    "holdfast_consumer_partition_lag", "Messages of an owned partition that are not settled yet",
    "topic", "partition",
)  # fmt: skip
PARTITION_SECONDS = gauge(
    "holdfast_consumer_partition_lag_seconds",
    "Age of the oldest message of an owned partition that is not settled yet",
    "topic", "partition",
    across=Across.MAX,
)  # fmt: skip
RETENTION = gauge(
    "holdfast_consumer_retention_seconds",
    "For how long the broker keeps messages, settled or not, as it was at the start; +Inf "
    "where it keeps what is not settled, or does not tell",
    "topic",
    across=Across.MAX,
)
HELD_KEYS = gauge(
    "holdfast_consumer_held_keys", "Keys that wait in the database", across=Across.MAX
)
PARKED = gauge("holdfast_consumer_parked", "Messages parked in the database", across=Across.MAX)
PAUSED = gauge(
    "holdfast_consumer_paused", "Partitions that are paused, by a full backlog or an open circuit"
)
STALLED = gauge(
    "holdfast_consumer_stalled_partitions",
    "Partitions that hold messages and bring none, though nothing keeps them back",
)
HANGING = gauge("holdfast_consumer_hanging", "Handlers that run longer than hang_seconds")
DOWN = gauge(
    "holdfast_consumer_down", "1 while that does not answer and the intake waits for it", "what",
    across=Across.MAX,
)  # fmt: skip
IN_FLIGHT = gauge("holdfast_consumer_in_flight", "Handlers that run now")
SUSPECTS = gauge(
    "holdfast_consumer_suspects",
    "Messages in hand whose process died; they run apart, and all others wait for them",
)
BUDGET_LEFT = gauge(
    "holdfast_retry_budget_left",
    "Retries that could be scheduled now, by the name of the budget, or its handler's topic",
    "budget",
)


class ConsumerMetrics:
    """What a consumer exports; every series of a known topic starts at 0."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._shown: set[str] = set()
        self._owned: set[Lane] = set()
        self._counters: dict[tuple[str, str], Counter] = {}
        self._made = made = Instruments(self.registry)
        self._consumed = made.counter(CONSUMED)
        self._retries = made.counter(RETRIES)
        self._seconds = made.histogram(HANDLER_SECONDS)
        self.batch = made.histogram(BATCH)
        self._lag = made.gauge(LAG)
        self._lag_seconds = made.gauge(LAG_SECONDS)
        self._lane_lag = made.gauge(PARTITION_LAG)
        self._lane_seconds = made.gauge(PARTITION_SECONDS)
        self._retention = made.gauge(RETENTION)
        self.held_keys = made.gauge(HELD_KEYS)
        self.parked = made.gauge(PARKED)
        self.paused = made.gauge(PAUSED)
        self.stalled = made.gauge(STALLED)
        self.hanging = made.gauge(HANGING)
        self._down = made.gauge(DOWN)
        self._in_flight = made.gauge(IN_FLIGHT)
        self._suspects = made.gauge(SUSPECTS)
        self._budget_left = made.gauge(BUDGET_LEFT)

    def belongs_to(self, group: str) -> None:
        """Tell OpenTelemetry, which sees all consumers of a process, whose figures these are."""
        self._made.attributes["messaging.consumer.group.name"] = group

    def begin(
        self, topics: Iterable[str], in_flight: Callable[[], int], suspects: Callable[[], int]
    ) -> None:
        """Show every series of *topics* from the start."""
        for topic in topics:
            for outcome in OUTCOMES:
                self._consumed.labels(topic, outcome)
            self._retries.labels(topic)
            self._lag.labels(topic).set(0)
            self._lag_seconds.labels(topic).set(0)
            self._retention.labels(topic).set(math.inf)
        self._in_flight.set_function(lambda: float(in_flight()))
        self._suspects.set_function(lambda: float(suspects()))

    def watch(self, what: str, down: Callable[[], str | None]) -> None:
        """Show whether *what* is down, by what *down* says when it is asked."""
        self._down.labels(what).set_function(lambda: float(down() is not None))

    def watch_budget(self, name: str, left: Callable[[], float]) -> None:
        """Show how many retries a budget has left, by what *left* says when it is asked."""
        self._budget_left.labels(name).set_function(left)

    def retried(self, topic: str, count: int = 1) -> None:
        """Count attempts at messages that had failed before."""
        self._retries.labels(topic).inc(count)

    def count(self, topic: str, outcome: str, count: int = 1) -> None:
        """Count one outcome, or *count* of the kind."""
        counter = self._counters.get((topic, outcome))
        if counter is None:  # `labels` is slow, and each message is counted
            counter = self._counters[topic, outcome] = self._consumed.labels(topic, outcome)
        counter.inc(count)

    def ran(
        self, topic: str, seconds: float, link: Callable[[], TraceLink | None] | None = None
    ) -> None:
        """Note how long a handler of *topic* ran; *link* tells in which span, if it is recorded."""
        self._seconds.labels(topic).observe(seconds, link)

    def show_retention(self, seconds: Mapping[str, float]) -> None:
        """Show for how long topics keep messages."""
        for topic, kept in seconds.items():
            self._retention.labels(topic).set(kept)

    def show_lag(
        self, lag: Mapping[Lane, int], ages: Mapping[Lane, float], topics: Iterable[str]
    ) -> None:
        """Show how far behind each of *topics* is, and their retry tiers and replays by name."""
        found = Tallied(dict.fromkeys(topics, 0))
        oldest: dict[str, float] = {}
        for lane, count in lag.items():
            found[lane.topic] += count
            oldest[lane.topic] = max(oldest.get(lane.topic, 0.0), ages[lane])
            self._lane_lag.labels(*lane).set(count)
            self._lane_seconds.labels(*lane).set(ages[lane])
        self._shown.update(found)
        for topic in self._shown:
            self._lag.labels(topic).set(found[topic])
            self._lag_seconds.labels(topic).set(oldest.get(topic, 0.0))
        for lane in self._owned - lag.keys():  # somebody else shows it now
            self._lane_lag.remove(*lane)
            self._lane_seconds.remove(*lane)
        self._owned = set(lag)


class LagAges:
    """Tells how old the oldest unsettled message of each lane is, without asking the broker.

    A source hands out in order, so that message is in hand. While none is, in a pause say, it
    is at least as old as the last one that was, or as the moment when the lag was first seen.
    """

    def __init__(self) -> None:
        self._stored: dict[Lane, float] = {}

    def look(
        self, lag: Mapping[Lane, int], in_hand: Iterable[Work], now: float
    ) -> dict[Lane, float]:
        """Return the age in seconds by lane; *now* is in POSIX seconds."""
        oldest: dict[Lane, float] = {}
        for work in in_hand:
            delivery = work.delivery
            if delivery is not None and delivery.timestamp is not None:
                known = oldest.get(delivery.lane, math.inf)
                oldest[delivery.lane] = min(known, delivery.timestamp)
        self._stored = {
            lane: oldest.get(lane, self._stored.get(lane, now))
            for lane, count in lag.items()
            if count
        }
        return {lane: max(now - self._stored.get(lane, now), 0.0) for lane in lag}


@dataclass(slots=True)
class Counters:
    """What a consumer has done so far, shown by *metrics* as well; any thread may add to it."""

    metrics: ConsumerMetrics = field(repr=False, compare=False)

    handled: int = 0
    duplicates: int = 0
    failed: int = 0
    """Attempts for which a message was blamed."""
    released: int = 0
    """Attempts that ended because something was down, for which nobody was blamed."""
    dead_lettered: int = 0
    crashed: int = 0
    """Messages quarantined because they ended their process too often."""
    parked: int = 0
    """Messages put aside in the database: for a later retry, or behind a held key."""
    delayed: int = 0
    """Messages given to the broker for a later retry, without a database."""
    skipped: int = 0
    """Replayed messages meant for another group."""
    withdrawn: int = 0
    """Replayed copies that came too late: the plan was aborted, or the letter closed or edited."""
    unmarked: int = 0
    """Messages whose marks of a replay do not count: handled as the ordinary ones they are."""
    held_back: int = 0
    """Replayed messages left among the dead letters: an earlier one of their key failed again."""
    uncorrelated: int = 0
    """Messages that came without a correlation id."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, topic: str, outcome: str, *, count: int = 1, blamed: bool = True) -> None:
        """Count what became of a message of *topic*, or of several, or of an attempt at one.

        This is the one place where outcomes are counted. A failed attempt that may turn out to
        be an outage is not *blamed* on the message: it shows in the metrics alone.
        """
        if blamed:
            with self._lock:
                setattr(self, outcome, getattr(self, outcome) + count)
        if outcome in _EXPORTED:
            self.metrics.count(topic, outcome, count)


class HealthChecks:
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

    def alive(self) -> ProbeResult:
        """Whether the poll thread still polls and messages are admitted, be it in an outage."""
        running = self._consumer.running
        now = self._clock.monotonic()
        if running is None:
            if now - self._since > self._stall_seconds:
                return ProbeResult(False, f"does not run for {now - self._since:.0f} s")
            return ProbeResult(True, "starting")
        self._since = now
        silent = now - running.poller.pulse
        if silent > self._stall_seconds:
            return ProbeResult(False, f"the poll thread has not polled for {silent:.0f} s")
        asking = running.admission
        if asking is not None and asking.is_started and now - asking.pulse > self._stall_seconds:
            return ProbeResult(False, f"no word of the database for {now - asking.pulse:.0f} s")
        return ProbeResult(True, "polls")

    def ready(self) -> ProbeResult:
        """Whether messages are handled: subscribed, database and dead letters in reach."""
        running = self._consumer.running
        if running is None:
            return ProbeResult(False, "starting")
        troubles = _troubles(running)
        return ProbeResult(not troubles, "; ".join(troubles) or "consumes")


def _troubles(running: ConsumerRun) -> list[str]:
    poller, settings = running.poller, running.context.settings
    found: list[str] = []
    if poller.stopping.is_set():
        found.append("stopping")
    if poller.broker_down is not None:
        found.append(f"the broker is down: {poller.broker_down}")
    elif not poller.subscribed:
        found.append("not subscribed yet")
    if stalled := poller.stalls.text():
        found.append(stalled)
    if poller.database_down is not None:
        found.append(f"the database is down: {poller.database_down}")
    if poller.hanging_threads >= settings.workers:
        found.append(f"all {settings.workers} handler threads hang")
    if poller.hanging_tasks >= settings.tasks:
        found.append(f"all {settings.tasks} handler tasks hang")
    waits = any(work.history.waits_for for work in running.lanes.in_hand())
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
