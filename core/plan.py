"""The plan: stacked decorators compiled into one flat run."""

from __future__ import annotations

import functools
import inspect
from types import MethodType
from typing import TYPE_CHECKING, Any

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import PlanError
from holdfast.layer import Again, Call, Done, Layer
from holdfast.order import check_order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Plan:
    """Layers around a function, run in a single frame: no tower of closures.

    `run` is for `def`, `run_async` for `async def`; the decisions are the same objects.
    A run in which nothing fails stays in that frame and calls only the hooks that exist;
    the first error, `Done` or `Again` hands over to the general loop.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        function: Callable[..., Any],
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.name = getattr(function, "__name__", repr(function))
        check_order(layers, self.name)
        self.layers = tuple(layers)
        self._size = len(layers)
        self.function = function
        self.is_async = _is_async(function)
        self.clock = clock
        self._enter = self._hooks("enter")
        self._leave = self._hooks("leave")
        self._fail = self._hooks("fail")
        self._entering = _present(self._enter)
        self._leaving = _present(self._leave)[::-1]
        self.only_fails = not self._entering and not self._leaving
        """Whether no layer acts unless the function raises."""

    def run(self, call: Call) -> Any:
        """Run *call* through the layers and the function."""
        call.clock = self.clock
        depth = 0
        try:
            for depth, enter in self._entering:  # noqa: B007 - says how far it came
                done = enter(call)
                if done is not None:
                    break
            else:
                depth, kwargs = self._size, call.kwargs
                # An empty ** would still build a dict for the call.
                if kwargs:
                    result = self.function(*call.args, **kwargs)
                else:
                    result = self.function(*call.args)
                call.result = result
                for depth, leave in self._leaving:  # noqa: B007
                    again = leave(call)
                    if again is not None:
                        break
                else:
                    return result
                done = None
        except BaseException as error:  # noqa: BLE001 - a layer must see every end
            failure = error
        else:
            if done is not None:
                return self._go_on(call, depth + 1, done)
            return self._go_on(call, depth + 1, again)
        try:
            return self.recover(call, failure, depth)
        finally:
            del failure  # or the frame and its traceback would keep each other alive

    def recover(self, call: Call, error: BaseException, depth: int | None = None) -> Any:
        """Go on after *error* left the *depth* outermost layers entered; all, if None."""
        return self._go_on(call, *self._unwind(call, error, depth))

    def _go_on(self, call: Call, depth: int, verdict: Done | Again) -> Any:
        """Run on from *depth* entered layers: outwards after `Done`, inwards after `Again`."""
        size = self._size
        while True:
            try:
                if isinstance(verdict, Again):
                    if verdict.delay:
                        self.clock.sleep(verdict.delay)
                    while depth < size:
                        enter = self._enter[depth]
                        done = None if enter is None else enter(call)
                        depth += 1
                        if done is not None:
                            result = done.result
                            break
                    else:
                        result = self.function(*call.args, **call.kwargs)
                else:
                    result = verdict.result
                call.result = result
                while depth:
                    depth -= 1
                    leave = self._leave[depth]
                    again = None if leave is None else leave(call)
                    if again is not None:
                        depth, verdict = depth + 1, again
                        break
                else:
                    return result
            except BaseException as error:  # noqa: BLE001 - a layer must see every end
                depth, verdict = self._unwind(call, error, depth)

    def _unwind(
        self, call: Call, error: BaseException, depth: int | None = None
    ) -> tuple[int, Done | Again]:
        """Ask the entered layers, innermost first; return how deep the run goes on, and how."""
        depth = self._size if depth is None else depth
        while depth:
            depth -= 1
            fail = self._fail[depth]
            try:
                verdict = None if fail is None else fail(call, error)
            except BaseException as other:  # noqa: BLE001 - it takes the error's place
                error = _in_place_of(error, other)
            else:
                if verdict is not None:
                    return depth + isinstance(verdict, Again), verdict
        raise error

    async def run_async(self, call: Call) -> Any:
        """Run *call* like `run`; hooks may return awaitables, and waits suspend the task."""
        call.clock = self.clock
        depth = 0
        try:
            for depth, enter in self._entering:  # noqa: B007 - says how far it came
                done = enter(call)
                if done is not None and type(done) is not Done:
                    done = await done
                if done is not None:
                    break
            else:
                depth = self._size
                result = call.result = await self.function(*call.args, **call.kwargs)
                for depth, leave in self._leaving:  # noqa: B007
                    again = leave(call)
                    if again is not None and type(again) is not Again:
                        again = await again
                    if again is not None:
                        break
                else:
                    return result
                done = None
        except BaseException as error:  # noqa: BLE001 - a layer must see every end
            failure = error
        else:
            if done is not None:
                return await self._go_on_async(call, depth + 1, done)
            return await self._go_on_async(call, depth + 1, again)
        try:
            return await self._go_on_async(call, *await self._unwind_async(call, failure, depth))
        finally:
            del failure

    async def _go_on_async(self, call: Call, depth: int, verdict: Done | Again) -> Any:
        size = self._size
        while True:
            try:
                if isinstance(verdict, Again):
                    if verdict.delay:
                        await self.clock.sleep_async(verdict.delay)
                    while depth < size:
                        enter = self._enter[depth]
                        done = None if enter is None else await _settled(enter(call))
                        depth += 1
                        if done is not None:
                            result = done.result
                            break
                    else:
                        result = await self.function(*call.args, **call.kwargs)
                else:
                    result = verdict.result
                call.result = result
                while depth:
                    depth -= 1
                    leave = self._leave[depth]
                    again = None if leave is None else await _settled(leave(call))
                    if again is not None:
                        depth, verdict = depth + 1, again
                        break
                else:
                    return result
            except BaseException as error:  # noqa: BLE001 - a layer must see every end
                depth, verdict = await self._unwind_async(call, error, depth)

    async def _unwind_async(
        self, call: Call, error: BaseException, depth: int
    ) -> tuple[int, Done | Again]:
        while depth:
            depth -= 1
            fail = self._fail[depth]
            try:
                verdict = None if fail is None else await _settled(fail(call, error))
            except BaseException as other:  # noqa: BLE001 - it takes the error's place
                error = _in_place_of(error, other)
            else:
                if verdict is not None:
                    return depth + isinstance(verdict, Again), verdict
        raise error

    def explain(self) -> str:
        """Return the plan as text, outermost first."""
        lines = [f"{self.name}:"]
        for depth, layer in enumerate(self.layers):
            lines.append(f"{'  ' * (depth + 1)}{layer.label} {layer.describe()}".rstrip())
        colour = "async def" if self.is_async else "def"
        lines.append(f"{'  ' * (len(self.layers) + 1)}{colour} {self.name}")
        return "\n".join(lines)

    def _hooks(self, name: str) -> list[Callable[..., Any] | None]:
        return [layer.hook(name, is_async=self.is_async) for layer in self.layers]


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


def wrap(layer: Layer, function: Callable[..., Any]) -> Handler:
    """Put *layer* around *function*; around a `Handler` it joins the one flat plan."""
    if isinstance(function, Handler):
        plan = function.plan
        return Handler((layer, *plan.layers), plan.function, clock=plan.clock)
    if not callable(function) or isinstance(function, type):
        raise PlanError(f"{layer.label} decorates functions, not {function!r}")
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


def _present(
    hooks: Sequence[Callable[..., Any] | None],
) -> tuple[tuple[int, Callable[..., Any]], ...]:
    return tuple((depth, hook) for depth, hook in enumerate(hooks) if hook is not None)


def _in_place_of(error: BaseException, other: BaseException) -> BaseException:
    """Return *other* with *error* as what led to it."""
    if other is not error and other.__context__ is None:
        other.__context__ = error
    return other


async def _settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
