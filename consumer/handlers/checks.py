"""Whether a function can serve as a handler: seen when it is registered, and when it returns."""

from __future__ import annotations

import asyncio
import inspect
from concurrent import futures
from types import AsyncGeneratorType, CoroutineType, GeneratorType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from holdfast.call import Call, Stage
from holdfast.errors import ConfigurationError, Transient
from holdfast.idempotency.idempotent import Idempotent
from holdfast.idempotency.leased import Leased
from holdfast.ids import name_of
from holdfast.layer import Layer
from holdfast.pipeline import REGISTERED, Handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.consumer.handlers.route import Route
    from holdfast.pipeline import Pipeline

F = TypeVar("F", bound="Callable[..., Any]")

_UNRUN = (CoroutineType, GeneratorType, AsyncGeneratorType)
_PLAIN = frozenset({type(None), bool, int, str, bytes, dict, list, tuple})


class CancelledWithin(Transient):
    """The handler was not asked to end: something that it waited for was cancelled."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name}() let a CancelledError out, and nobody had cancelled it: catch it where the "
            "handler waits for what may be cancelled"
        )


class ReturnedValue(Layer):
    """Refuses a result that has not run yet: the message would count as handled by nothing.

    A `def` around an `async def` returns a coroutine; so do most decorators that know only
    `def`. What is refused here rolls the transaction back, and nothing is acknowledged.
    """

    stage: ClassVar[Stage] = Stage.RETURN
    label: ClassVar[str] = "result"

    def __init__(self, name: str) -> None:
        self._name = name

    def describe(self) -> str:
        """Say what is refused."""
        return "no coroutine, no generator"

    def fail(self, call: Call, error: BaseException) -> None:
        """Make a failure of a cancellation that nobody asked for: it would be released for ever."""
        if isinstance(error, asyncio.CancelledError | futures.CancelledError):
            raise CancelledWithin(self._name) from error

    def fail_async(self, call: Call, error: BaseException) -> None:
        """Do the same, unless it is the task of the handler that is asked to end."""
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            self.fail(call, error)

    def leave(self, call: Call) -> None:
        """Look at what the handler returned."""
        result = call.result
        if type(result) in _PLAIN or not is_unrun(result):
            return
        if isinstance(result, CoroutineType | GeneratorType):
            result.close()  # or Python would warn of it, once more and with less to say
        call.result = None
        raise ConfigurationError(
            f"{self._name}() returned a {type(result).__name__}, which nobody runs: its body has "
            "not begun. Make the handler an async def, and await in it what it calls; a decorator "
            "between must know async def"
        )


def is_unrun(result: object) -> bool:
    """Whether *result* is work that was made and not done."""
    return isinstance(result, _UNRUN) or inspect.isawaitable(result)


def handler_of(function: Any) -> Handler[..., Any]:
    """Return *function* with its layers, once it is known to be fit; a method keeps its own."""
    if isinstance(function, Handler):
        _check(function.plan.function)
        return function
    inner = getattr(function, "__func__", None)
    if isinstance(function, MethodType) and isinstance(inner, Handler):
        plan = inner.plan
        bound = MethodType(plan.function, function.__self__)
        _check(bound)
        return Handler(plan.layers, bound, clock=plan.clock)
    _check(function)
    return Handler((), function)


def registered(function: F, topic: str) -> F:
    """Return *function*, marked so that no decorator above it is taken for a part of the plan."""
    if isinstance(function, MethodType):
        return function
    plan = handler_of(function).plan
    marked = Handler(plan.layers, plan.function, clock=plan.clock)
    setattr(marked, REGISTERED, topic)
    return cast("F", marked)


def check_memory(plan: Pipeline) -> None:
    """Refuse a dedup layer in a consumer without a database, where it has no memory."""
    for layer in plan.layers:
        if isinstance(layer, Idempotent) or (
            isinstance(layer, Leased) and layer.settings.store is None
        ):
            raise ConfigurationError(
                f"@idempotent on {plan.name}() has nowhere to remember: give the consumer a "
                "database, Consumer(…, database=…), or keep leases in Redis, "
                "@idempotent(store=RedisInbox(…))"
            )


def check_apart(route: Route, others: Iterable[Route]) -> None:
    """Refuse another handler of the same name where keys of the user's own are remembered.

    Both would remember under that name, and one take the keys of the other for duplicates.
    """
    own = inspect.unwrap(route.plan.function)
    for other in others:
        if other.name != route.name or inspect.unwrap(other.plan.function) == own:
            continue
        if _makes_keys(route.plan) or _makes_keys(other.plan):
            raise ConfigurationError(
                f"the handlers of {other.topic!r} and {route.topic!r} are both called "
                f"{route.name!r} and make keys with @idempotent(key=…): they would take each "
                "other's messages for duplicates. Give each a name of its own"
            )


def _makes_keys(plan: Pipeline) -> bool:
    return any(
        isinstance(layer, Idempotent | Leased)
        and layer.subject is not None
        and layer.subject.makes_keys
        for layer in plan.layers
    )


def _check(function: Any) -> None:
    """Refuse what cannot be a handler, and say what to write instead."""
    if not callable(function) or isinstance(function, type):
        raise ConfigurationError(
            f"a handler is a function, not {function!r}: put @consumer.on(topic) on a def or "
            "async def"
        )
    name = name_of(function).rpartition("<locals>.")[2]
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"{name}() is a generator: called, it returns before its body runs, and every message "
            "would count as handled by nothing. Take the yield out of it"
        )
    _check_parameters(name, function)


def _check_parameters(name: str, function: Callable[..., Any]) -> None:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some builtins have no signature
        return
    first = parameters[0] if parameters else None
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise ConfigurationError(
            f"{name}() takes no payload: its first parameter is what the message carries, e.g. "
            f"def {name.rpartition('.')[2]}(order: dict)"
        )
    for parameter in parameters[1:]:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ConfigurationError(
                f"{name}() takes {parameter.name!r} by position only, but it is given by name: put "
                "the / right after the payload"
            )
