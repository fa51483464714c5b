"""A handler that only looks as if it had run: it returned work instead of doing it."""

from __future__ import annotations

import inspect
from typing import Any

from holdfast.errors import ConfigurationError


class HandlerNotRun(ConfigurationError):
    """A `def` handler returned a coroutine or a generator; its body has not run."""

    def __init__(self, result: object) -> None:
        super().__init__(
            f"the handler returned {result!r}, whose body has not run, so the message is not "
            "acknowledged: make the handler async def, and see that every decorator on it is "
            "made for that"
        )


def require_ran(result: Any) -> None:
    """Refuse a *result* that stands for work not done."""
    if result is None:
        return
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        close = getattr(result, "close", None)
        if close is not None:
            close()  # or Python would warn that it was never awaited
        raise HandlerNotRun(result)


def require_runnable(function: Any, name: str) -> None:
    """Refuse a *function* that cannot be a handler."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"{name}() is a generator, whose body would not run: a handler takes one message and "
            "returns"
        )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return  # some builtins have no signature
    if not parameters or parameters[0].kind in (
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    ):
        raise ConfigurationError(
            f"{name}() takes no payload: give it a first parameter, e.g. def {name}(order: dict)"
        )
