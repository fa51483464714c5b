"""Side effects that can be switched off: in simulations always, in replays where asked."""

from __future__ import annotations

import functools
import inspect
import logging
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, overload

from holdfast.errors import ConfigurationError
from holdfast.message import current_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

F = TypeVar("F", bound="Callable[..., Any]")

log = logging.getLogger("holdfast.effects")

_suppressed: ContextVar[list[str] | None] = ContextVar("holdfast_suppressed", default=None)


@contextmanager
def suppressed() -> Iterator[list[str]]:
    """Let no `@effect` happen inside, in this thread or task; yield the names of those skipped."""
    skipped: list[str] = []
    token = _suppressed.set(skipped)
    try:
        yield skipped
    finally:
        _suppressed.reset(token)


def is_suppressed() -> bool:
    """Whether effects are switched off here."""
    return _suppressed.get() is not None


@overload
def effect(function: F, /) -> F: ...
@overload
def effect(*, on_replay: bool = True, instead: Any = None) -> Callable[[F], F]: ...


def effect(
    function: Callable[..., Any] | None = None, /, *, on_replay: bool = True, instead: Any = None
) -> Any:
    """Mark a function whose effect lies outside the handler's transaction: a mail, a webhook.

    A simulation skips it and returns *instead*. The replay of a dead letter runs it, for
    the first time it failed; with `on_replay=False` a replayed message skips it too.
    """
    if function is not None and not callable(function):
        raise ConfigurationError(
            f"@effect({function!r}): settings have names, e.g. @effect(on_replay=False)"
        )
    if function is None:
        return functools.partial(_marked, on_replay=on_replay, instead=instead)
    return _marked(function, on_replay=on_replay, instead=instead)


def _marked(function: Callable[..., Any], *, on_replay: bool, instead: Any) -> Callable[..., Any]:
    name = getattr(function, "__qualname__", repr(function))

    def is_skipped() -> bool:
        skipped = _suppressed.get()
        if skipped is not None:
            skipped.append(name)
            return True
        message = current_message()
        if on_replay or message is None or not message.is_replay:
            return False
        log.info("effect %s skipped: message %s is a replay", name, message.id)
        return True

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            return instead if is_skipped() else await function(*args, **kwargs)

        return run_async

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return instead if is_skipped() else function(*args, **kwargs)

    return run
