"""The transaction around one attempt: dedup row, handler writes and outbox rows commit together.

The session that a handler gets: its transaction is not its own to end.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from holdfast.call import Call, Stage
from holdfast.concurrency import done_anyway, to_the_end
from holdfast.consumer.attempt.columns import inserted_by_columns
from holdfast.consumer.attempt.inserts import InsertBuffer, SentTogether
from holdfast.db.engine import at_read_committed
from holdfast.db.errors import DatabaseDown, outage
from holdfast.errors import ConfigurationError
from holdfast.idempotency.savepoints import note_begin, require_whole
from holdfast.layer import Layer
from holdfast.statements import ends_transaction

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine
    from sqlalchemy.orm import SessionTransaction


AnyEngine = TypeVar("AnyEngine", "Engine", "AsyncEngine")

_GUARD = "holdfast_guard"
_MYSQL = ("mysql", "mariadb")
_LONGEST_KEPT = 2_000  # of a statement, in memory


class TransactionNotYours(ConfigurationError):
    """A handler tried to end the transaction that its dedup row commits with."""

    def __init__(self, verb: str) -> None:
        super().__init__(
            f"the handler called {verb}: the consumer ends this transaction, together with the "
            "dedup row, or an effect could get lost or happen twice. Leave it out; use "
            "session.flush() to send statements, session.begin_nested() for a part that may fail"
        )
        self.verb = verb


class HandlerSession(Session):
    """A `Session` that only the consumer may commit, roll back or close.

    Its connection refuses to commit as well, and so do statements that would.
    """

    _begun: Any = None
    _own: Connection
    _root: SessionTransaction | None = None
    """The outermost transaction, whose connection is known; inside savepoints it is asked for."""
    _guard: dict[str, bool]
    _inserts: InsertBuffer | None = None
    _is_spoilt = False

    def collect_inserts(self) -> None:
        """From now on send plain inserts together; an error of them may come late."""
        if not self.dispatch.do_orm_execute:  # who listens may look at the message in hand
            self._inserts = InsertBuffer(super().execute, self._insert_many)

    def execute(self, statement: Any, params: Any = None, **options: Any) -> Any:
        """Execute *statement*, or keep it: a plain insert in a batch."""
        inserts = self._inserts
        if inserts is not None:
            if not options and not (self.new or self.dirty or self.deleted):
                kept = inserts.kept(statement, params)
                if kept is not None:
                    return kept
            inserts.send()
        return super().execute(statement, params, **options)

    def scalar(self, *args: Any, **options: Any) -> Any:
        """Send what is kept first."""
        self._send_inserts()
        return super().scalar(*args, **options)

    def scalars(self, *args: Any, **options: Any) -> Any:
        """Send what is kept first."""
        self._send_inserts()
        return super().scalars(*args, **options)

    def flush(self, objects: Any = None) -> None:
        """Send what is kept first."""
        self._send_inserts()
        super().flush(objects)

    def connection(self, *args: Any, **options: Any) -> Connection:
        """Keep nothing from now on: what is said on the connection itself is not heard here."""
        self._end_collecting()
        root = self._root
        # Asked several times for each message, and SQLAlchemy looks for it in many steps.
        if (
            root is not None
            and self._transaction is root
            and root.is_active
            and not (args or options)
        ):
            return self._own
        return super().connection(*args, **options)

    def bulk_save_objects(self, *args: Any, **options: Any) -> None:
        """Send what is kept first."""
        self._send_inserts()
        super().bulk_save_objects(*args, **options)

    def bulk_insert_mappings(self, *args: Any, **options: Any) -> None:
        """Send what is kept first."""
        self._send_inserts()
        super().bulk_insert_mappings(*args, **options)

    def bulk_update_mappings(self, *args: Any, **options: Any) -> None:
        """Send what is kept first."""
        self._send_inserts()
        super().bulk_update_mappings(*args, **options)

    def _insert_many(self, statement: Any, rows: list[dict[str, Any]]) -> bool:
        return inserted_by_columns(super().connection(), statement, rows)

    def _send_inserts(self) -> None:
        if self._inserts is not None:
            self._inserts.send()

    def _end_collecting(self) -> None:
        self._send_inserts()
        inserts, self._inserts = self._inserts, None
        self._is_spoilt = self._is_spoilt or (inserts is not None and inserts.is_spoilt)

    def begin_guarded(self) -> Connection:
        """Begin, and let nobody but `end` end it; the engine is one of `guarded`."""
        self._guard = {"shut": False}  # the BEGIN itself is ours
        connection = self.connection(execution_options={_GUARD: self._guard})
        self._guard["shut"] = True
        self._begun = connection.get_transaction()
        self._own, self._root = connection, self._transaction
        return connection

    def require_ours(self) -> Connection:
        """Return the connection, still in the transaction that was begun."""
        connection = self.connection()
        if self._is_spoilt:
            raise SentTogether
        transaction = connection.get_transaction()
        if transaction is None or transaction is not self._begun or not transaction.is_active:
            raise TransactionNotYours("rollback() on the connection of its session")
        return connection

    def begin(self, nested: bool = False) -> SessionTransaction:
        """Refuse, unless it is a savepoint."""
        if not nested:
            raise TransactionNotYours("session.begin()")
        self._end_collecting()  # or its rollback would not reach what is kept
        return super().begin(nested)

    def commit(self) -> NoReturn:
        """Refuse."""
        raise TransactionNotYours("session.commit()")

    def rollback(self) -> NoReturn:
        """Refuse."""
        raise TransactionNotYours("session.rollback()")

    def close(self) -> NoReturn:
        """Refuse."""
        raise TransactionNotYours("session.close()")

    def reset(self) -> NoReturn:
        """Refuse."""
        raise TransactionNotYours("session.reset()")

    def invalidate(self) -> NoReturn:
        """Refuse."""
        raise TransactionNotYours("session.invalidate()")

    def end(self, *, commit: bool) -> None:
        """Commit or roll back, and give the connection back; for the consumer alone."""
        try:
            if not commit:
                self._inserts = None
            if commit:
                self.require_ours()
                self._guard["shut"] = False
                Session.commit(self)
        finally:
            Session.close(self)


def guarded(engine: AnyEngine) -> AnyEngine:
    """Return *engine* for the sessions of handlers: what ends their transaction is refused."""
    own = engine.execution_options()
    target: Any = getattr(own, "sync_engine", own)
    event.listen(target, "commit", _refuse_commit)
    event.listen(target, "before_cursor_execute", _refuse_end)
    return own


def is_handler_session(session: Any) -> bool:
    """Whether the consumer made *session*."""
    return isinstance(session, HandlerSession)


def _is_shut(connection: Connection) -> bool:
    guard = connection.get_execution_options().get(_GUARD)
    return guard is not None and guard["shut"]


def _refuse_commit(connection: Connection) -> None:
    if _is_shut(connection):
        # SQLAlchemy holds a transaction whose commit failed for ended, and would not do it.
        connection.connection.rollback()
        raise TransactionNotYours("commit() on the connection of its session")


def _refuse_end(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
    if not _is_shut(connection):
        return
    mysql = connection.dialect.name in _MYSQL
    is_long = len(statement) > _LONGEST_KEPT
    verb = ends_transaction(statement, mysql=mysql) if is_long else _known_verb(statement, mysql)
    if verb is not None:
        raise TransactionNotYours(verb)


@lru_cache(maxsize=1000)
def _known_verb(statement: str, mysql: bool) -> str | None:
    """Return what `ends_transaction` says; handlers say the same again and again."""
    return ends_transaction(statement, mysql=mysql)


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


def run_committing(call: Call, connection: Connection) -> None:
    """Run what *call* is to do before its commit; an aborted transaction is refused first.

    A database error that the handler swallowed would make the commit a silent rollback.
    """
    require_whole(connection)
    for action in call.before_commit:
        action(connection)


def outage_of(error: BaseException, *, connecting: bool = False) -> BaseException:
    """Return *error*, or `DatabaseDown` in its place where that is what it says."""
    if isinstance(error, PoolTimeout):
        return DatabaseDown(
            "no connection of the pool came free in time: more handlers run at once than it has "
            "(pool_size and max_overflow of the engine; workers and tasks of the consumer)"
        )
    found = outage(error)
    if found.away if connecting else found.lost:
        return DatabaseDown(f"the consumer's database does not answer: {error.__class__.__name__}")
    return error


def _begin(session: Any) -> None:
    note_begin(session.begin_guarded(), outer=True)


async def _end(session: Any, *, commit: bool) -> None:
    await session.run_sync(lambda sync: sync.end(commit=commit))
