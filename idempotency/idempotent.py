"""`@idempotent`, with or without settings.

`@idempotent`: a message whose effect is already there is not handled again.
"""

from __future__ import annotations

import asyncio
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar, overload

import msgspec

from holdfast.call import Call, Done, Stage
from holdfast.concurrency import to_the_end
from holdfast.durations import as_text, in_seconds
from holdfast.errors import ConfigurationError
from holdfast.idempotency.call_identity import CallIdentity
from holdfast.idempotency.claim import Claim, ClaimRequest, keep_result
from holdfast.idempotency.inbox import DEFAULT_WINDOW, Inbox
from holdfast.idempotency.lease import LeaseMemory
from holdfast.idempotency.leased import Leased, LeaseSettings
from holdfast.idempotency.results import Results
from holdfast.idempotency.savepoints import Savepoint, asks_to_be_whole, require_whole
from holdfast.ids import require_name
from holdfast.layer import Layer
from holdfast.pipeline import Handler, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.durations import Duration
    from holdfast.idempotency.former import FormerScopes
    from holdfast.idempotency.lease import LeaseStore


P = ParamSpec("P")
R = TypeVar("R")


class _Claimed(msgspec.Struct):
    """What one attempt claimed, and the part of the caller's transaction that it runs in."""

    wanted: ClaimRequest
    part: Savepoint | None


class Idempotent(Layer):
    """Claims the message in the handler's transaction, or ends the run as a duplicate.

    The claim, the handler's writes and the events it stages commit together or not at all.
    In a transaction of the caller's own, which goes on after a failed attempt, they are
    rolled back to where the attempt began: it may be tried again, or dead-lettered, and
    what the caller commits then holds nothing of it.
    """

    stage: ClassVar[Stage] = Stage.DEDUP
    label: ClassVar[str] = "@idempotent"

    def __init__(
        self,
        inbox: Inbox,
        *,
        key: Callable[..., Any] | None = None,
        keep_result: bool = False,
        scope: str | None = None,
    ) -> None:
        self.inbox = inbox
        self.scope = scope
        self._key = key
        self._keeps = keep_result
        self.subject: CallIdentity | None = None
        self._results: Results | None = None

    def __call__(self, function: Callable[P, R]) -> Handler[P, R]:
        """Wrap *function*; each one gets a layer of its own that knows it."""
        own = type(self)(self.inbox, key=self._key, keep_result=self._keeps, scope=self.scope)
        inner = function.plan.function if isinstance(function, Handler) else function
        handler = wrap(own, function)
        own.subject = subject = CallIdentity(inner, self._key, self.scope)
        own.succeed(self.scope or subject.name, subject.formerly)
        own._results = Results(inner) if self._keeps else None
        return handler

    def describe(self) -> str:
        """Say what is remembered, and how long."""
        what = "message id" if self._key is None else "key"
        window = self.inbox.window
        kept = "for ever" if window is None else f"for {as_text(window)}"
        results = ", with its result" if self._keeps else ""
        return f"once per group, handler and {what}, {kept}{results}"

    def succeed(self, consumer: str, formerly: FormerScopes) -> None:
        """Have *consumer* take over what earlier versions remember under other names."""
        self.inbox.succeed(consumer, formerly)

    @property
    def keeps_result(self) -> bool:
        """Whether what the handler returned is kept for the duplicates."""
        return self._keeps

    def enter(self, call: Call) -> Done | None:
        """End the run when this message was handled before."""
        return self._enter(call, self._about.session(call))

    def leave(self, call: Call) -> None:
        """Store the result in the same transaction, and see that it can still commit."""
        if not call.duplicate:
            self._store(call, self._about.session(call))

    def fail(self, call: Call, error: BaseException) -> None:
        """Take the claim back, together with what the handler wrote."""
        claimed: _Claimed | None = call.notes.pop(self, None)
        if claimed is not None and claimed.part is not None:
            claimed.part.undo()

    async def enter_async(self, call: Call) -> Done | None:
        """Claim without blocking the event loop."""
        session = self._about.session(call)
        if hasattr(session, "run_sync"):
            answer: Done | None = await session.run_sync(lambda sync: self._enter(call, sync))
            return answer
        try:
            return await to_the_end(self._enter, call, session)
        except asyncio.CancelledError as error:
            await to_the_end(self.fail, call, error)  # the thread may have claimed it
            raise

    async def leave_async(self, call: Call) -> None:
        """Do the same without blocking the event loop."""
        if call.duplicate:
            return
        session = self._about.session(call)
        if hasattr(session, "run_sync"):
            await session.run_sync(lambda sync: self._store(call, sync))
        elif call.session is None or self._keeps or asks_to_be_whole(session):
            await to_the_end(self._store, call, session)
        else:
            self._store(call, session)  # asks nothing of the database

    async def fail_async(self, call: Call, error: BaseException) -> None:
        """Take the claim back without blocking the event loop."""
        if call.session is not None or self not in call.notes:
            return
        session = self._about.session(call)
        if hasattr(session, "run_sync"):
            await session.run_sync(lambda _: self.fail(call, error))
        else:
            await to_the_end(self.fail, call, error)

    @property
    def _about(self) -> CallIdentity:
        if self.subject is None:
            raise RuntimeError("@idempotent was put into a plan without decorating a function")
        return self.subject

    def _enter(self, call: Call, session: Any) -> Done | None:
        wanted = self._about.wanted(call)
        call.identity = wanted.identity
        # A transaction of our own is rolled back as a whole.
        part = Savepoint(session) if call.session is None else None
        try:
            claim = self._claim(call, session, wanted)
        except BaseException:
            if part is not None:
                part.undo()
            raise
        if claim.is_new:
            call.notes[self] = _Claimed(wanted, part)
            return None
        if part is not None:
            part.keep()
        call.duplicate = True
        return Done(None if self._results is None else self._results.decode(claim.result))

    def _claim(self, call: Call, session: Any, wanted: ClaimRequest) -> Claim:
        claim = self.inbox.claim_all(session, self._about.consumer(call), [wanted])[0]
        if claim.conflict is not None:
            raise claim.conflict
        return claim

    def _store(self, call: Call, session: Any) -> None:
        claimed: _Claimed = call.notes[self]
        try:
            require_whole(session)
            if self._results is not None:
                stored = self._results.encode(call.result)
                keep_result(session, self._about.consumer(call), claimed.wanted.key, stored)
            if claimed.part is not None:
                claimed.part.keep()
        except BaseException as error:
            self.fail(call, error)
            raise


DEFAULT_LEASE = "30s"


@overload
def idempotent(function: Callable[P, R], /) -> Handler[P, R]: ...
@overload
def idempotent(
    *,
    window: Duration | EllipsisType | None = ...,
    key: Callable[..., Any] | None = ...,
    keep_result: bool = ...,
    lease: Duration | None = ...,
    store: LeaseStore | None = ...,
    scope: str | None = ...,
) -> Layer: ...


def idempotent(
    function: Callable[..., Any] | None = None,
    /,
    *,
    window: Duration | EllipsisType | None = ...,
    key: Callable[..., Any] | None = None,
    keep_result: bool = False,
    lease: Duration | None = None,
    store: LeaseStore | None = None,
    scope: str | None = None,
) -> Handler[..., Any] | Layer:
    """Handle each message once: dedup row and the handler's writes commit together.

    *window* is how long a handled message is remembered: 30 days, or what *store* is set to,
    unless told otherwise; None is for ever. *key* makes the identity from the
    payload, or from payload and message, instead of the message's id; then the content is
    not compared. With *keep_result*, a duplicate returns what the first run returned.

    With *lease*, for effects outside the database, one worker at a time holds the message,
    for as long as its heartbeat renews the lease. *store* is where leases are kept, e.g.
    `DatabaseLeases(engine)` or `RedisInbox(url)`; under a consumer its database by default.

    *scope* names whose memory it is. Without it that is the consumer's group and handler, and
    alone the module and name of the function.
    """
    if function is not None and not callable(function):
        raise ConfigurationError(
            f"@idempotent({function!r}): settings have names, e.g. @idempotent(window='14d')"
        )
    if key is not None and not callable(key):
        raise ConfigurationError(
            f"@idempotent(key={key!r}): pass a function of the payload, e.g. lambda o: o.id"
        )
    if store is not None and not (hasattr(store, "take") and hasattr(store, "complete")):
        raise ConfigurationError(
            f"@idempotent(store={store!r}): pass where leases are kept, e.g. "
            "DatabaseLeases(engine) or RedisInbox(url)"
        )
    if scope is not None:
        require_name(scope, "@idempotent(scope=…)")
    inbox = Inbox(window=DEFAULT_WINDOW if isinstance(window, EllipsisType) else window)
    if store is not None and not isinstance(window, EllipsisType):
        store = _remembering(store, window)
    layer: Layer
    if lease is None and store is None:
        layer = Idempotent(inbox, key=key, keep_result=keep_result, scope=scope)
    else:
        settings = LeaseSettings(
            seconds=in_seconds(DEFAULT_LEASE if lease is None else lease, of="lease"),
            inbox=inbox,
            store=store,
            key=key,
            keep_result=keep_result,
            scope=scope,
        )
        layer = Leased(settings)
    return layer if function is None else layer(function)


def _remembering(store: LeaseStore, window: Duration | None) -> LeaseStore:
    """Return *store* with the *window* of one handler."""
    if not isinstance(store, LeaseMemory):
        raise ConfigurationError(
            f"@idempotent(window={window!r}, store={type(store).__name__}): this store decides by "
            "itself how long it remembers; leave out window, or let it be a LeaseMemory"
        )
    return store.with_window(window)
