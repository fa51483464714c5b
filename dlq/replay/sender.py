"""The sender: publishes a plan in batches, fenced by its lease, and heeds what comes back.

Publish before marking: a crash sends one batch again, which the consumer's dedup absorbs,
and never loses one. What is confirmed is never sent again.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.backoff import Backoff
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.metrics import METRICS
from holdfast.dlq.replay.ending import Ending, EndingKind
from holdfast.dlq.replay.lease import Lease
from holdfast.dlq.replay.letters import Outgoing, outgoing, settled
from holdfast.dlq.replay.plans import tally
from holdfast.dlq.replay.rate import Bucket
from holdfast.dlq.replay.refused import set_aside
from holdfast.dlq.replay.state import ACTIVE, ENDED, NotNow, PlanState
from holdfast.dlq.replay.steps import Await, Finish, Send, Stop, Unconfirmed, next_step
from holdfast.dlq.replay.target import Target
from holdfast.dlq.replay.watch import Watch, plan_row
from holdfast.dlq.transactions import committed
from holdfast.errors import ConfigurationError, DependencyDown

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.replay.plan import Plan
    from holdfast.dlq.replay.watch import Observer
    from holdfast.dlq.vault import Vault
    from holdfast.ports import Broker, Published, Sink

log = logging.getLogger("holdfast.dlq.replay")

_SENDABLE = ACTIVE | {PlanState.DRAFT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a sender works; the plan itself says what and how fast."""

    batch: int = 2000
    """Published at a time; after a crash at most so many are sent again."""
    lease_seconds: float = 5.0
    poll_seconds: float = 0.2


class Sender:
    """Sends one plan from where it stands, until it ends or somebody stops it."""

    def __init__(
        self,
        engine: Engine,
        broker: Broker,
        *,
        pace: Pace | None = None,
        clock: Clock = SYSTEM_CLOCK,
        observe: Observer | None = None,
        vault: Vault | None = None,
    ) -> None:
        self._vault = vault
        self._engine = engine
        self._broker = broker
        self._pace = Pace() if pace is None else pace
        self._clock = clock
        self._observe = observe

    def run(self, plan_id: str) -> Ending:
        """Send the plan on; returns how it ended. One sender at a time, whoever calls."""
        with self._engine.connect() as db:
            found = plan_row(db, plan_id)
        if found.state in ENDED:
            raise NotNow(f"plan {found.short} is {found.state}: nothing is left to send")
        if found.waits_for_approval:
            raise NotNow(
                f"plan {found.short} of {found.total:,} messages waits for the approval of "
                f"somebody else than {found.created_by}: holdfast dlq plans approve {found.short}"
            )
        seconds = self._pace.lease_seconds
        lease = Lease.take(self._engine, plan_id, seconds=seconds, clock=self._clock)
        sink = self._broker.sink()
        try:
            with ThreadPoolExecutor(1, "holdfast-replay") as reader:
                watch = Watch(self._engine, clock=self._clock, observe=self._observe)
                stream = _Stream(self._engine, plan_id, reader, self._vault)
                run = _Run(lease, sink, Target(self._broker, found.target), watch, stream)
                return run.go(found, self._pace)
        finally:
            sink.close()
            lease.release()


class _Stream:
    """Reads the items of a plan, the next batch while the one before is on its way."""

    def __init__(
        self, engine: Engine, plan_id: str, reader: ThreadPoolExecutor, vault: Vault | None
    ) -> None:
        self._vault = vault
        self._engine = engine
        self._plan_id = plan_id
        self._reader = reader
        self._ahead: tuple[int, int, Future[list[Outgoing]]] | None = None

    def read(self, start: int, end: int) -> list[Outgoing]:
        if self._ahead is not None:
            first, last, future = self._ahead
            self._ahead = None
            found = future.result()
            if (first, last) == (start, end):
                return self.without_held(found, start, end)
        return self._fetch(start, end)

    def without_held(self, batch: list[Outgoing], start: int, end: int) -> list[Outgoing]:
        """Return *batch* without what was held back or confirmed since it was read."""
        with self._engine.connect() as db:
            gone = settled(db, self._plan_id, start, end)
        return [one for one in batch if one.position not in gone] if gone else batch

    def read_ahead(self, start: int, end: int) -> None:
        self._ahead = start, end, self._reader.submit(self._fetch, start, end)

    def _fetch(self, start: int, end: int) -> list[Outgoing]:
        with self._engine.connect() as db:
            batch = outgoing(db, self._plan_id, start, end)
        for one in batch:
            one.open(self._vault)
        return batch


class _Run:
    """One run of a sender."""

    def __init__(
        self, lease: Lease, sink: Sink, target: Target, watch: Watch, stream: _Stream
    ) -> None:
        self._lease = lease
        self._clock = lease.clock
        self._sink = sink
        self._target = target
        self._watch = watch
        self._stream = stream
        self._plan: Plan
        self._marked = self._clock.monotonic()

    def go(self, found: Plan, pace: Pace) -> Ending:
        """Step until the end."""
        self._plan = found
        bucket = Bucket(found.rate, clock=self._clock)
        self._mark()  # what an operator did while the lease was waited for
        while self._plan.state in _SENDABLE:
            match next_step(self._watch.look(self._plan), self._plan.policy):
                case Send(until, state):
                    self._enter(state)
                    granted, wait = bucket.grant(min(until - self._plan.sent, pace.batch))
                    if granted:
                        self._send(self._plan.sent + granted, until, pace)
                    else:
                        self._pause(min(wait, pace.poll_seconds))
                case Await(state):
                    self._enter(state)
                    self._pause(pace.poll_seconds)
                case Stop(reason):
                    log.warning("plan %s stops: %s", self._plan.short, reason)
                    self._mark(only=_SENDABLE, state=PlanState.STOPPED, stopped_because=reason)
                    return Ending(EndingKind.STOPPED, self._plan.id, reason)
                case Unconfirmed(waiting):
                    text = f"{waiting:,} were sent and are not confirmed yet"
                    return Ending(EndingKind.UNCONFIRMED, self._plan.id, text)
                case Finish():
                    return self._finish()
        return Ending.interrupted(self._plan)

    def _send(self, end: int, until: int, pace: Pace) -> None:
        batch = self._fit(self._stream.read(self._plan.sent, end), end)
        if self._plan.rate.per_second is None and end < until:
            self._stream.read_ahead(end, min(until, end + pace.batch))
        if batch:
            results = self._published(batch)
            self._set_aside(batch, results)
            METRICS.replayed.labels("sent").inc(len(batch))
        # Published, then marked: between the two a crash duplicates, and never loses.
        self._mark(sent=end)

    def _fit(self, batch: list[Outgoing], end: int) -> list[Outgoing]:
        """Set aside what cannot be sent as it was, and what follows of its key; return the rest."""
        unfit = [(one, one.unfit) for one in batch if one.unfit is not None]
        if not unfit:
            return batch
        log.warning("%d messages of plan %s are set aside, the first because %s",
                    len(unfit), self._plan.short, unfit[0][1])  # fmt: skip
        self._committed(lambda db: set_aside(db, self._plan.id, unfit, self._clock))
        return self._stream.without_held(batch, self._plan.sent, end)

    def _published(self, batch: list[Outgoing]) -> list[Published]:
        """Publish, waiting out a broker that is away for a while."""
        backoff = Backoff(first=0.1, ceiling=5.0)
        patience = self._clock.monotonic() + self._plan.policy.patience
        attempt = 1
        while True:
            try:
                messages = [self._target.addressed(one, self._plan.id) for one in batch]
                results = self._sink.publish(messages)
                down = next((r.error for r in results if isinstance(r.error, DependencyDown)), None)
                if down is None:
                    return results
                raise down
            except DependencyDown as error:
                delay = backoff.delay(attempt) or 0.0
                if self._clock.monotonic() + delay > patience:
                    raise
                log.warning("the broker is away, plan %s waits: %s", self._plan.short, error)
                self._pause(delay)
                attempt += 1

    def _set_aside(self, batch: list[Outgoing], results: list[Published]) -> None:
        refused = []
        for one, result in zip(batch, results, strict=True):
            if isinstance(result.error, ConfigurationError):
                raise result.error
            if result.error is not None:
                refused.append((one, str(result.error)))
        if refused:
            log.warning("the broker refused %d messages of plan %s", len(refused), self._plan.short)
            self._committed(lambda db: set_aside(db, self._plan.id, refused, self._clock))

    def _pause(self, seconds: float) -> None:
        """Wait, keep the lease, and hear what others ask of the plan."""
        self._clock.sleep(seconds)
        self._mark()

    def _enter(self, state: PlanState) -> None:
        if self._plan.state is not state:
            self._mark(only=_SENDABLE, state=state)

    def _mark(self, *, only: frozenset[PlanState] = frozenset(), **values: Any) -> None:
        """Write to the plan under our epoch, renew, and read what others wrote to it."""

        def work(db: Connection) -> Plan:
            self._lease.mark(db, states=only, **values)
            return plan_row(db, self._lease.plan_id)

        self._plan = self._committed(work)

    def _committed(self, work: Any) -> Any:
        return committed(self._lease.engine, work, clock=self._clock)

    def _finish(self) -> Ending:
        self._mark(only=_SENDABLE, state=PlanState.DONE, ended_at=self._clock.now().timestamp())
        if self._plan.state is not PlanState.DONE:
            return Ending.interrupted(self._plan)
        with self._lease.engine.connect() as db:
            return Ending.finished(self._plan, tally(db, self._plan))
