"""The plan: stacked decorators compiled into one flat run."""

from __future__ import annotations

import functools
import inspect
from types import MethodType
from typing import TYPE_CHECKING, Any

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import PlanError
from holdfast.layer import Call, Layer
from holdfast.names import short_name
from holdfast.order import check_order
from holdfast.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Plan(Runner):
    """Layers around a function, in an order that was checked: no tower of closures."""

    def __init__(
        self,
        layers: Sequence[Layer],
        function: Callable[..., Any],
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.name = short_name(function)
        check_order(layers, self.name)
        self.layers = tuple(layers)
        self.is_async = _is_async(function)
        inside = [layer.inside() for layer in self.layers]
        hooked = (*self.layers, *(layer for layer in inside if layer is not None))
        super().__init__(hooked, function, is_async=self.is_async, clock=clock)

    def explain(self) -> str:
        """Return the plan as text, outermost first."""
        lines = [f"{self.name}:"]
        for depth, layer in enumerate(self.layers):
            lines.append(f"{'  ' * (depth + 1)}{layer.label} {layer.describe()}".rstrip())
        colour = "async def" if self.is_async else "def"
        lines.append(f"{'  ' * (len(self.layers) + 1)}{colour} {self.name}")
        return "\n".join(lines)


class Handler:
    """A decorated function: called like the function itself, or run as a plan."""

    __slots__ = ("__dict__", "_bare", "_run", "plan")

    def __init__(
        self,
        layers: Sequence[Layer],
        function: Callable[..., Any],
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        functools.update_wrapper(self, function)
        self.plan = plan = Plan(layers, function, clock=clock)
        self._run = plan.run_async if plan.is_async else plan.run
        self._bare = function if plan.only_fails and not plan.is_async else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function through its layers; an `async def` gives an awaitable."""
        bare = self._bare
        if bare is None:
            return self._run(Call(args, kwargs))
        try:
            return bare(*args, **kwargs) if kwargs else bare(*args)
        except BaseException as error:  # noqa: BLE001 - a layer must see every end
            failure = error
        try:
            return self.plan.recover(Call(args, kwargs, clock=self.plan.clock), failure)
        finally:
            del failure

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind to an instance, so that methods can be decorated."""
        return self if instance is None else MethodType(self, instance)

    def explain(self) -> str:
        """Return the plan as text."""
        return self.plan.explain()

    def with_clock(self, clock: Clock) -> Handler:
        """Return the same function on another clock, e.g. a `VirtualClock` in a test."""
        return Handler(self.plan.layers, self.plan.function, clock=clock)


REGISTERED = "__holdfast_registered__"
"""What a consumer leaves on a function that it runs: its topic."""


def wrap(layer: Layer, function: Callable[..., Any]) -> Handler:
    """Put *layer* around *function*; around a `Handler` it joins the one flat plan."""
    topic = getattr(function, REGISTERED, None)
    if topic is not None:
        raise PlanError(
            f"{layer.label} stands above @consumer.on({topic!r}), which runs {short_name(function)}"
            f"() without it: put {layer.label} below @consumer.on"
        )
    if isinstance(function, Handler):
        plan = function.plan
        return Handler((layer, *plan.layers), plan.function, clock=plan.clock)
    if isinstance(function, staticmethod | classmethod | property):
        kind = type(function).__name__
        raise PlanError(f"{layer.label} stands above @{kind}: put it below, next to the def")
    if not callable(function) or isinstance(function, type):
        raise PlanError(
            f"{layer.label} decorates functions, not {function!r}: put it on a def or async def"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise PlanError(
            f"{layer.label} cannot cover {function.__name__}(): a generator has not run yet when "
            "it returns; decorate the function that consumes it"
        )
    return Handler((layer,), function)


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - an object may be a coroutine function
    )
