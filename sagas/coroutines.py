"""`async def` steps, run by an engine that is not: in the same transaction, to their end.

A step that is awaited gets an `AsyncSession` over the engine's own connection, so its effect still
commits with the word that it is done, and no asynchronous driver is needed. Each call has an event
loop of its own: a statement that waits for a lock keeps no other step waiting.
"""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from holdfast.codec import resolved
from holdfast.extras import driver

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

S = TypeVar("S")
P = TypeVar("P")


class LocalDecorator(Protocol[S]):
    """Takes a step that runs in the engine's transaction, of either colour."""

    @overload
    def __call__(self, function: Callable[[S, Session], S], /) -> Callable[[S, Session], S]: ...
    @overload
    def __call__(
        self, function: Callable[[S, AsyncSession], Awaitable[S]], /
    ) -> Callable[[S, AsyncSession], Awaitable[S]]: ...


class FoldDecorator(Protocol[S]):
    """Takes a function that takes up into the state what came, of either colour."""

    @overload
    def __call__(self, function: Callable[[S, P], S], /) -> Callable[[S, P], S]: ...
    @overload
    def __call__(
        self, function: Callable[[S, P], Awaitable[S]], /
    ) -> Callable[[S, P], Awaitable[S]]: ...


def wants_async_session(function: Callable[..., Any]) -> bool:
    """Whether *function* is to get an `AsyncSession`: it says so, or is `async def` and silent."""
    parameters = list(inspect.signature(function).parameters.values())
    annotation = parameters[1].annotation if len(parameters) > 1 else inspect.Parameter.empty
    if annotation is inspect.Parameter.empty:
        return inspect.iscoroutinefunction(function)
    found = resolved(function, annotation)
    return getattr(found, "__name__", "") == "AsyncSession"


def over(session: Session) -> AsyncSession:
    """Return an `AsyncSession` whose statements are those of *session*."""
    driver("greenlet", extra="asyncio")
    from sqlalchemy.ext.asyncio import AsyncSession

    given: Any = lambda **_: session  # noqa: E731 - it is asked for a session, and there is one
    return AsyncSession(sync_session_class=given)


def completed(result: Any) -> Any:
    """Return *result*, or what it comes to where a function was `async def`."""
    if not isinstance(result, CoroutineType):
        return result
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(result)
    # Inside of a program that is asynchronous itself, which waits for us: its loop is not ours.
    with ThreadPoolExecutor(1) as other:
        return other.submit(copy_context().run, asyncio.run, result).result()
