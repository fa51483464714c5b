"""The sagas of a program: started anywhere, driven by replies and timers, asked for results."""

from __future__ import annotations

import logging
import os
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session  # noqa: TC002 - the consumer looks at the annotations

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.codec import JsonCodec
from holdfast.consumer import Batches
from holdfast.db import open_database
from holdfast.db.engine import reading
from holdfast.db.transactions import transact
from holdfast.dlq import dead_letter
from holdfast.durations import Duration, in_seconds
from holdfast.errors import ConfigurationError, HoldfastError, NotFound, PoisonMessage
from holdfast.idempotency import idempotent
from holdfast.ids import new_id
from holdfast.message import Message, handling
from holdfast.outbox import Outbox
from holdfast.retry import retry
from holdfast.sagas import store
from holdfast.sagas.alerts import SagaAlerts
from holdfast.sagas.orchestrator import Came, Transitions, advance, locked
from holdfast.sagas.participant import AGAIN
from holdfast.sagas.states import Answered, Signalled
from holdfast.sagas.timers import TimerWorker, WorkerTerms
from holdfast.sagas.versions import CannotMigrate, DefinitionChanged, Definitions, UnknownVersion
from holdfast.sagas.wire import answered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.consumer import Consumer
    from holdfast.dlq.alerts import Hook
    from holdfast.sagas.definition import Saga
    from holdfast.sagas.store import StoredSaga

log = logging.getLogger("holdfast.sagas")

_LOOK_SECONDS = 0.05


class SagaTimeout(TimeoutError):
    """A saga has not ended within the time that was waited for it; it goes on all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SagaResult:
    """How far a saga is: running, compensating, parked, completed or compensated."""

    id: str
    type: str
    version: int
    key: str
    status: str
    state: Any
    reason: str
    parked: tuple[str, ...]
    """The steps that wait for a human."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing will happen any more."""
        return self.status in ("completed", "compensated")


class Sagas:
    """Runs *sagas* on a database; keep each version here until its last instance has ended.

    Replies come through a `Consumer` (`attach`), timers and local steps are worked off by workers
    (`worker`); `run` does both. As many processes as you like share the work. *hooks* hear of
    sagas that are parked or past their deadline: those of `holdfast.dlq.alerts`, or your own.
    """

    def __init__(
        self,
        database: str | Engine,
        *sagas: Saga[Any],
        outbox: Outbox | None = None,
        hooks: Sequence[Hook] = (),
        terms: WorkerTerms | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not sagas:
            raise ConfigurationError("Sagas(database) has no sagas: name those that it runs")
        self.engine = open_database(database)
        self.definitions = Definitions(sagas)
        self.owner = f"{socket.gethostname()[:16]}-{os.getpid()}-{new_id()[-12:]}"
        self._outbox = Outbox(source="saga") if outbox is None else outbox
        self._terms = WorkerTerms() if terms is None else terms
        self._alerts = SagaAlerts(self.engine, tuple(hooks), clock=clock) if hooks else None
        self._clock = clock
        self.running: TimerWorker | None = None
        """The worker of the `run` under way, for probes."""

    def attach(self, consumer: Consumer) -> None:
        """Take the replies to these sagas from *consumer*, which must have the same database."""
        if consumer.engine is None or consumer.engine.url != self.engine.url:
            raise ConfigurationError(
                "the consumer has another database than the sagas, or none: a reply and what it "
                "does to its saga commit together; give both the same"
            )
        for topic in sorted({saga.replies for saga in self.definitions.known.values()}):

            def take_replies(replies: list[Message], session: Session) -> None:
                self.take_replies(session, replies)

            # Replies may come in any order: one that is poison holds no others of its saga back.
            batches = Batches(size=self._terms.batch, whole=True)
            on = consumer.on(topic, ordered=False, batch=batches)
            on(dead_letter()(retry(AGAIN)(idempotent()(take_replies))))

    def take_replies(self, session: Session, replies: Sequence[Message]) -> None:
        """Take *replies* into their sagas, in the caller's transaction; all of them or none.

        Those of one saga count in their order. One for a saga that is not there is poison; one
        that comes too late is written down.
        """
        said = [(message, *answered(message)) for message in replies]
        db = session.connection()
        rows = store.locked_all(db, {saga_id for _, saga_id, _ in said})
        transitions = Transitions(db, self._outbox)
        for message, saga_id, event in said:
            row = rows.get(saga_id)
            if row is None:
                raise PoisonMessage(f"a reply to a saga that is not there: {saga_id!r}")
            with handling(message):
                rows[saga_id] = self._take_reply(transitions, db, row, event, message.payload)
        transitions.write()

    def _take_reply(
        self,
        transitions: Transitions,
        db: Connection,
        row: StoredSaga,
        event: Answered,
        reply: bytes | None,
    ) -> StoredSaga:
        """Take one reply into its saga; return *row*, which may have been moved to a version."""
        if row.progress.phase.is_final:
            transitions.tell(row, event, f"the saga is {row.status} already")
            if self._alerts is not None:
                self._alerts.came_late(row, event)
            return row
        try:
            saga, row = self.definitions.current(db, row)
        except (UnknownVersion, CannotMigrate, DefinitionChanged) as error:
            self._leave_to_others(db, row, event, reply, error)
            return row
        transitions.add(saga, row, event, Came(payload=reply))
        return row

    def _leave_to_others(
        self,
        db: Connection,
        row: StoredSaga,
        event: Answered,
        reply: bytes | None,
        error: HoldfastError,
    ) -> None:
        """Keep a reply for the workers that know the saga's version; it is theirs to take up."""
        if event.step not in row.progress.steps:
            raise PoisonMessage(f"saga {row.type!r} has no step {event.step!r}") from error
        level = logging.INFO if isinstance(error, UnknownVersion) else logging.ERROR
        log.log(level, "a reply to saga %s %s is left to others: %s", row.type, row.key, error)
        store.keep_reply(db, row, event, reply)

    def worker(self) -> TimerWorker:
        """Return a worker for what is due: timers and local steps."""
        return TimerWorker(
            self.engine, self.definitions, outbox=self._outbox, owner=self.owner,
            terms=self._terms, alerts=self._alerts, clock=self._clock,
        )  # fmt: skip

    def run(self, consumer: Consumer) -> None:
        """Attach to *consumer* and run it beside a worker, until it is stopped.

        It does not begin if a definition was changed under its version (`DefinitionChanged`).
        """
        with reading(self.engine).connect() as db:
            self.definitions.require_unchanged(db)
        self.attach(consumer)
        self.running = worker = self.worker()
        # A daemon: a step that does not end within the drain is another worker's after its lease.
        thread = threading.Thread(target=worker.run, name="holdfast-saga-timers", daemon=True)
        thread.start()
        try:
            consumer.run()
        finally:
            worker.stop()
            thread.join(consumer.settings.drain_seconds)
            if thread.is_alive():
                log.error("ending without the local step that still runs; it is run again")
            self.running = None

    def result(self, key: str, *, saga: str | None = None) -> SagaResult:
        """Return how far the saga is that was started last with *key*, or raise `NotFound`."""
        with reading(self.engine).connect() as db:
            row = store.latest(db, saga, key)
        if row is None:
            raise NotFound(f"no saga was started with key {key!r}")
        return self._result(row)

    def wait(self, key: str, timeout: Duration, *, saga: str | None = None) -> SagaResult:
        """Return the result once the saga has ended or is parked; `SagaTimeout` after *timeout*."""
        until = self._clock.monotonic() + in_seconds(timeout, of="timeout")
        while True:
            found = self.result(key, saga=saga)
            if found.has_ended or found.parked:
                return found
            if self._clock.monotonic() >= until:
                raise SagaTimeout(f"saga {key!r} is still {found.status} after {timeout}")
            self._clock.sleep(_LOOK_SECONDS)

    def signal(self, key: str, name: str, body: Any = None, *, saga: str | None = None) -> None:
        """Send signal *name* to the saga that runs under *key*, in a transaction of its own."""
        payload, _ = JsonCodec().encode(body)

        def work(db: Connection) -> None:
            found = store.latest(db, saga, key)
            if found is None:
                raise NotFound(f"no saga was started with key {key!r}")
            definition, row = self.definitions.current(db, locked(db, found.id))
            advance(
                db, definition, row, Signalled(name), outbox=self._outbox,
                came=Came(payload=payload),
            )  # fmt: skip

        transact(self.engine, work, clock=self._clock)

    def _result(self, row: StoredSaga) -> SagaResult:
        known = self.definitions.known.get((row.type, row.version))
        return SagaResult(
            id=row.id,
            type=row.type,
            version=row.version,
            key=row.key,
            status=row.status,
            state=row.data if known is None else known.decode(row.data),
            reason=row.progress.reason,
            parked=row.progress.parked,
        )
