"""The transaction around one attempt: dedup row, handler writes and outbox rows commit together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from holdfast.classification import classify
from holdfast.consumer.session import AnyEngine, HandlerSession, guarded
from holdfast.errors import DependencyDown, Remedy
from holdfast.idempotency.aborted import note_begin, require_whole
from holdfast.in_thread import done_anyway, to_the_end
from holdfast.isolation import at_read_committed
from holdfast.layer import Call, Layer, Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

COMMITTING = "holdfast.committing"
"""Key in `call.notes`: a list of functions of the connection, run before the commit."""


class DatabaseDown(DependencyDown):
    """The consumer's database does not answer; nothing was committed."""


class Transaction(Layer):
    """A fresh session for each attempt, committed when the handler returns.

    In the plan of an `async def` its statements run in a thread, so that the loop goes on.
    """

    stage: ClassVar[Stage] = Stage.TRANSACTION
    label: ClassVar[str] = "transaction"

    def __init__(self, engine: Engine) -> None:
        self._engine = for_handlers(engine)

    def describe(self) -> str:
        """Say which database."""
        return self._engine.url.render_as_string(hide_password=True)

    def enter(self, call: Call) -> None:
        """Begin, so that a database that is down shows before any work is done."""
        session = HandlerSession(self._engine)
        try:
            note_begin(session.begin_guarded(), outer=True)
        except BaseException as error:
            session.end(commit=False)
            raise outage_of(error, connecting=True) from error
        call.session = session

    def leave(self, call: Call) -> None:
        """Commit; only after this may the broker be told."""
        session, call.session = call.session, None
        try:
            run_committing(call, session.require_ours())
        except BaseException as error:
            session.end(commit=False)
            raise outage_of(error) from error
        try:
            session.end(commit=True)
        except DBAPIError as error:
            raise outage_of(error) from error

    def fail(self, call: Call, error: BaseException) -> None:
        """Leave nothing behind; a lost connection is an outage, not a failed attempt."""
        session, call.session = call.session, None
        try:
            session.end(commit=False)
        except DBAPIError as lost:  # it died while the handler did something else
            raise outage_of(lost) from error
        translated = outage_of(error)
        if translated is not error:
            raise translated from error

    async def enter_async(self, call: Call) -> None:
        """Begin in a thread; one that is cancelled meanwhile leaves no transaction open."""
        call.session = None
        try:
            await to_the_end(self.enter, call)
        except asyncio.CancelledError:
            session, call.session = call.session, None
            if session is not None:
                await to_the_end(session.end, commit=False)
            raise

    async def leave_async(self, call: Call) -> None:
        """Commit in a thread; a cancellation that comes meanwhile is too late."""
        await done_anyway(asyncio.ensure_future(asyncio.to_thread(self.leave, call)))

    async def fail_async(self, call: Call, error: BaseException) -> None:
        """Roll back in a thread."""
        await to_the_end(self.fail, call, error)


class AsyncTransaction(Layer):
    """The same with an `AsyncSession`, for `async def` handlers that ask for one."""

    stage: ClassVar[Stage] = Stage.TRANSACTION
    label: ClassVar[str] = "transaction"

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = for_handlers(engine)

    def describe(self) -> str:
        """Say which database."""
        return f"{self._engine.url.render_as_string(hide_password=True)}, async"

    async def dispose(self) -> None:
        """Close the connections, which belong to the loop that ends now."""
        await self._engine.dispose()

    async def enter_async(self, call: Call) -> None:
        """Begin."""
        from sqlalchemy.ext.asyncio import AsyncSession

        session = AsyncSession(self._engine, sync_session_class=HandlerSession)
        try:
            await session.run_sync(_begin)
        except BaseException as error:
            await _end(session, commit=False)
            raise outage_of(error, connecting=True) from error
        call.session = session

    async def leave_async(self, call: Call) -> None:
        """Commit."""
        session, call.session = call.session, None
        try:
            await session.run_sync(lambda sync: run_committing(call, sync.require_ours()))
        except BaseException as error:
            await _end(session, commit=False)
            raise outage_of(error) from error
        try:
            await done_anyway(asyncio.ensure_future(_end(session, commit=True)))
        except DBAPIError as error:
            raise outage_of(error) from error

    async def fail_async(self, call: Call, error: BaseException) -> None:
        """Leave nothing behind."""
        session, call.session = call.session, None
        try:
            await asyncio.shield(_end(session, commit=False))
        except DBAPIError as lost:
            raise outage_of(lost) from error
        translated = outage_of(error)
        if translated is not error:
            raise translated from error


def for_handlers(engine: AnyEngine) -> AnyEngine:
    """Return *engine* for handlers, at the level where a rival's commit is no error."""
    return guarded(at_read_committed(engine))


def before_commit(call: Call, action: Callable[[Connection], None]) -> None:
    """Have *action* run in the transaction of *call*, after the handler, before the commit."""
    call.notes.setdefault(COMMITTING, []).append(action)


def run_committing(call: Call, connection: Connection) -> None:
    """Run what was asked for with `before_commit`; an aborted transaction is refused first.

    A database error that the handler swallowed would make the commit a silent rollback.
    """
    require_whole(connection)
    for action in call.notes.get(COMMITTING, ()):
        action(connection)


def is_outage(error: BaseException, *, connecting: bool = False) -> bool:
    """Whether *error* says that the database is away, rather than that a statement is wrong."""
    if isinstance(error, PoolTimeout):
        return True
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated:
        return True
    kind = isinstance(error, (OperationalError, InterfaceError))
    return connecting and kind and classify(error) is Remedy.RETRY


def outage_of(error: BaseException, *, connecting: bool = False) -> BaseException:
    """Return *error*, or `DatabaseDown` in its place where that is what it says."""
    if isinstance(error, PoolTimeout):
        return DatabaseDown(
            "no connection of the pool came free in time: more handlers run at once than it has "
            "(pool_size and max_overflow of the engine; workers and tasks of the consumer)"
        )
    if is_outage(error, connecting=connecting):
        return DatabaseDown(f"the consumer's database does not answer: {error.__class__.__name__}")
    return error


def _begin(session: Any) -> None:
    note_begin(session.begin_guarded(), outer=True)


async def _end(session: Any, *, commit: bool) -> None:
    await session.run_sync(lambda sync: sync.end(commit=commit))
