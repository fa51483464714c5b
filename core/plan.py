"""The plan: stacked decorators compiled into one flat run."""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import TYPE_CHECKING, Any

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import PlanError
from holdfast.layer import REASONS, REPEATABLE, Again, Call, Done, Layer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Hook = Any


class Plan:
    """Layers around a function, run in a single frame: no tower of closures.

    `run` is for `def`, `run_async` for `async def`; the decisions are the same objects.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        function: Callable[..., Any],
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        check_order(layers, getattr(function, "__name__", repr(function)))
        self.layers = tuple(layers)
        self.function = function
        self.is_async = inspect.iscoroutinefunction(function)
        self._clock = clock
        self._enter = [_hook(layer, "enter") for layer in layers]
        self._leave = [_hook(layer, "leave") for layer in layers]
        self._fail = [_hook(layer, "fail") for layer in layers]

    def run(self, call: Call) -> Any:
        """Run *call* through the layers and the function."""
        depth, size, entering, result = 0, len(self._enter), True, None
        while True:
            try:
                while entering:
                    if depth == size:
                        result, entering = self.function(*call.args, **call.kwargs), False
                        break
                    enter = self._enter[depth]
                    verdict = None if enter is None else enter(call)
                    depth += 1
                    if verdict is not None:
                        result, entering = verdict.result, False
                while depth:
                    depth -= 1
                    leave = self._leave[depth]
                    if leave is not None:
                        leave(call)
            except BaseException as error:  # noqa: BLE001 - a layer must see every end
                depth, decided = self._unwind(call, error, depth)
                entering = isinstance(decided, Again)
                if isinstance(decided, Done):
                    result = decided.result
                elif decided.delay:
                    self._clock.sleep(decided.delay)
            else:
                return result

    async def run_async(self, call: Call) -> Any:
        """Run *call* like `run`; hooks may return awaitables, and waits suspend the task."""
        depth, size, entering, result = 0, len(self._enter), True, None
        while True:
            try:
                while entering:
                    if depth == size:
                        result, entering = await self.function(*call.args, **call.kwargs), False
                        break
                    enter = self._enter[depth]
                    verdict = None if enter is None else await _settled(enter(call))
                    depth += 1
                    if verdict is not None:
                        result, entering = verdict.result, False
                while depth:
                    depth -= 1
                    leave = self._leave[depth]
                    if leave is not None:
                        await _settled(leave(call))
            except BaseException as error:  # noqa: BLE001 - a layer must see every end
                depth, decided = await self._unwind_async(call, error, depth)
                entering = isinstance(decided, Again)
                if isinstance(decided, Done):
                    result = decided.result
                elif decided.delay:
                    await self._clock.sleep_async(decided.delay)
            else:
                return result

    def explain(self) -> str:
        """Return the plan as text, outermost first."""
        lines = [f"{inspect.unwrap(self.function).__name__}:"]
        for depth, layer in enumerate(self.layers):
            lines.append(f"{'  ' * (depth + 1)}{layer.label} {layer.describe()}".rstrip())
        colour = "async def" if self.is_async else "def"
        lines.append(f"{'  ' * (len(self.layers) + 1)}{colour} {self.function.__name__}")
        return "\n".join(lines)

    def _unwind(self, call: Call, error: BaseException, depth: int) -> tuple[int, Done | Again]:
        """Ask the entered layers, innermost first; return how deep the run goes on, and how."""
        while depth:
            depth -= 1
            fail = self._fail[depth]
            verdict = None if fail is None else fail(call, error)
            if verdict is not None:
                return depth + isinstance(verdict, Again), verdict
        raise error

    async def _unwind_async(
        self, call: Call, error: BaseException, depth: int
    ) -> tuple[int, Done | Again]:
        while depth:
            depth -= 1
            fail = self._fail[depth]
            verdict = None if fail is None else await _settled(fail(call, error))
            if verdict is not None:
                return depth + isinstance(verdict, Again), verdict
        raise error


class Handler:
    """A decorated function: called like the function itself, or run as a plan."""

    def __init__(self, layers: Sequence[Layer], function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.plan = Plan(layers, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function through its layers; an `async def` gives an awaitable."""
        plan = self.plan
        call = Call(args, kwargs)
        return plan.run_async(call) if plan.is_async else plan.run(call)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind to an instance, so that methods can be decorated."""
        return self if instance is None else functools.partial(self, instance)

    def explain(self) -> str:
        """Return the plan as text."""
        return self.plan.explain()


def wrap(layer: Layer, function: Callable[..., Any]) -> Handler:
    """Put *layer* around *function*; around a `Handler` it joins the one flat plan."""
    if isinstance(function, Handler):
        return Handler((layer, *function.plan.layers), function.plan.function)
    if not callable(function):
        raise PlanError(f"{layer.label} decorates functions, not {function!r}")
    return Handler((layer,), function)


def check_order(layers: Sequence[Layer], name: str) -> None:
    """Refuse an order of *layers* that would lose or repeat messages, and show the right one."""
    for outer, inner in itertools.pairwise(layers):
        if outer.stage == inner.stage and outer.stage in REPEATABLE:
            continue
        if outer.stage == inner.stage:
            raise PlanError(f"{name}() has {outer.label} twice: keep one of them")
        if outer.stage > inner.stage:
            raise PlanError(_wrong_order(layers, outer, inner, name))


def _wrong_order(layers: Sequence[Layer], outer: Layer, inner: Layer, name: str) -> str:
    reason = REASONS.get((outer.stage, inner.stage))
    right = sorted(layers, key=lambda layer: layer.stage)
    return (
        f"{name}(): {outer.label} stands outside {inner.label}"
        + (f", so {reason}" if reason else "")
        + ".\nStack them in this order, outermost first:\n"
        + "\n".join(f"    {layer.label}" for layer in right)
    )


def _hook(layer: Layer, name: str) -> Hook:
    """Return the layer's own hook, or None where it only inherits the empty one."""
    return None if getattr(type(layer), name) is getattr(Layer, name) else getattr(layer, name)


async def _settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
