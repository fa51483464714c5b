"""`@idempotent(lease=…)`: for handlers whose effect is outside the database."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import msgspec

from holdfast.call import Call, Done, Stage
from holdfast.concurrency import to_the_end
from holdfast.durations import as_text
from holdfast.errors import ConfigurationError
from holdfast.idempotency.call_identity import CallIdentity
from holdfast.idempotency.lease import (
    DatabaseLeases,
    Handled,
    Heartbeat,
    Lease,
    LeaseMemory,
    LeaseStore,
)
from holdfast.idempotency.results import Results
from holdfast.layer import Layer
from holdfast.pipeline import Handler, wrap
from holdfast.scrubbing import told

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Engine

    from holdfast.idempotency.former import FormerScopes
    from holdfast.idempotency.inbox import Inbox

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("holdfast.idempotency")

HEARTBEAT = Heartbeat()


class LeaseSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a function is leased."""

    seconds: float
    inbox: Inbox
    store: LeaseStore | None = None
    key: Any = None
    keep_result: bool = False
    scope: str | None = None


class _Held(msgspec.Struct):
    """The lease of one call."""

    lease: Lease
    is_complete: bool = False


class Leased(Layer):
    """Takes the message before the attempt, and remembers it as handled after.

    Two workers never run it at once while the lease is kept up by its heartbeat. A crash in
    the middle lets it run again: the other side must know the idempotency key, for no
    database can undo what happened outside. The end of a worker that lost its lease is
    refused, together with all that it wrote in its transaction.
    """

    stage: ClassVar[Stage] = Stage.ATTEMPT
    label: ClassVar[str] = "@idempotent"

    def __init__(self, settings: LeaseSettings, *, heartbeat: Heartbeat = HEARTBEAT) -> None:
        self.settings = settings
        self._heartbeat = heartbeat
        self._store = settings.store
        self.subject: CallIdentity | None = None
        self._results: Results | None = None

    def __call__(self, function: Callable[P, R]) -> Handler[P, R]:
        """Wrap *function*; each one gets a layer of its own that knows it."""
        inner = function.plan.function if isinstance(function, Handler) else function
        subject = CallIdentity(inner, self.settings.key, self.settings.scope)
        own = self._for(subject, Results(inner))
        own.succeed(self.settings.scope or subject.name, subject.formerly)
        return wrap(own, function)

    def succeed(self, consumer: str, formerly: FormerScopes) -> None:
        """Have *consumer* take over what earlier versions remember under other names."""
        self.settings.inbox.succeed(consumer, formerly)
        memory: object = self._store
        if isinstance(memory, LeaseMemory):
            memory.succeed(consumer, formerly)

    def bind_database(self, engine: Engine) -> Leased:
        """Return this layer with its leases in *engine*, unless it has a store of its own."""
        if self._store is not None:
            return self
        bound = self._for(self.subject, self._results)
        bound._store = DatabaseLeases(engine, inbox=self.settings.inbox)
        return bound

    def unbound(self) -> Leased:
        """Return this layer without a store of its own: a consumer gives it its database."""
        own = self._for(self.subject, self._results)
        own._store = None
        return own

    def describe(self) -> str:
        """Say how long a lease lasts, and how long a handled message is remembered."""
        store, inbox = self._store, self.settings.inbox
        window = store.window if isinstance(store, LeaseMemory) else inbox.window
        kept = "for ever" if window is None else f"for {as_text(window)}"
        lasts = as_text(self.settings.seconds)
        return f"one worker at a time, leased for {lasts}, remembered {kept}"

    def enter(self, call: Call) -> Done | None:
        """Take the lease, or end the run if the message was handled before."""
        subject, store = self._about, self._lease_store()
        session = subject.find_session(call)
        if _would_wait_for_itself(session):
            raise ConfigurationError(
                f"{subject.name} holds SQLite's one write lock when its lease is to be taken: "
                "call it before the session has begun"
            )
        wanted = subject.wanted(call)
        call.identity = wanted.identity
        taken = store.take(subject.consumer(call), wanted, self.settings.seconds)
        if isinstance(taken, Handled):
            call.duplicate = True
            keeps = self.settings.keep_result and self._results is not None
            return Done(self._results.decode(taken.result) if keeps and self._results else None)
        call.notes[self] = held = _Held(taken)
        if isinstance(store, DatabaseLeases):
            # The handler's transaction, if it has one, ends the lease with its own commit.
            call.before_commit += (functools.partial(self._join, call, held, store),)
        self._heartbeat.keep(taken, store.renew)
        return None

    def leave(self, call: Call) -> None:
        """Remember the message as handled, if the handler's transaction has not done so."""
        held: _Held | None = call.notes.pop(self, None)
        if held is None:
            return
        self._heartbeat.drop(held.lease)
        if held.is_complete:
            return
        store, session = self._lease_store(), self._about.find_session(call)
        is_plain = session is not None and not hasattr(session, "run_sync")
        if isinstance(store, DatabaseLeases) and is_plain:
            # A function that stands alone with a session: its commit ends the lease too.
            store.complete(held.lease, self._result(call), connection=session)
        else:
            store.complete(held.lease, self._result(call))

    def fail(self, call: Call, error: BaseException) -> None:
        """Give the lease back, so that the next attempt need not wait for its end."""
        held: _Held | None = call.notes.pop(self, None)
        if held is None:
            return
        self._heartbeat.drop(held.lease)
        try:
            self._lease_store().free(held.lease)
        except Exception as other:  # noqa: BLE001 - the lease ends by itself; *error* goes on
            log.warning("lease on %s was not given back: %s", held.lease.wanted.id, told(other))

    async def enter_async(self, call: Call) -> Done | None:
        """Take the lease in a thread; one that is cancelled meanwhile keeps no lease."""
        try:
            return await to_the_end(self.enter, call)
        except asyncio.CancelledError as error:
            await to_the_end(self.fail, call, error)
            raise

    async def leave_async(self, call: Call) -> None:
        """End the lease in a thread, to the end even if the task is cancelled meanwhile."""
        await to_the_end(self.leave, call)

    async def fail_async(self, call: Call, error: BaseException) -> None:
        """Give the lease back in a thread."""
        await to_the_end(self.fail, call, error)

    def _join(self, call: Call, held: _Held, store: DatabaseLeases, connection: Any) -> None:
        if call.notes.get(self) is held and not held.is_complete:
            store.complete(held.lease, self._result(call), connection=connection)
            held.is_complete = True

    def _result(self, call: Call) -> bytes | None:
        keeps = self.settings.keep_result and self._results is not None
        return self._results.encode(call.result) if keeps and self._results else None

    def _for(self, subject: CallIdentity | None, results: Results | None) -> Leased:
        own = Leased(self.settings, heartbeat=self._heartbeat)
        own.subject, own._results = subject, results
        return own

    @property
    def _about(self) -> CallIdentity:
        if self.subject is None:
            raise RuntimeError("@idempotent was put into a plan without decorating a function")
        return self.subject

    def _lease_store(self) -> LeaseStore:
        if self._store is None:
            raise ConfigurationError(
                f"@idempotent(lease=…) on {self._about.name} has no place for its leases: give "
                "store=DatabaseLeases(engine) or store=RedisInbox(url), or register it with "
                "Consumer(..., database=...)"
            )
        return self._store


def _would_wait_for_itself(session: Any) -> bool:
    if session is None or hasattr(session, "run_sync") or not session.in_transaction():
        return False
    bind = session.get_bind() if hasattr(session, "get_bind") else session
    if bind.dialect.name != "sqlite":
        return False
    # A session that was only told to begin has no connection yet.
    return bool(getattr(session.get_transaction(), "_connections", True))
