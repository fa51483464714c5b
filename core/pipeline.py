"""The order of layers: checked when a function is decorated, not when a message is lost.

The runner: calls of a function through the hooks of its layers, in a single frame.

The plan: stacked decorators compiled into one flat run.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
    cast,
    overload,
)

from holdfast.call import REASONS, REPEATABLE, Again, Call, Done, Later
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import PlanError
from holdfast.ids import short_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.layer import Layer


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


class Runner:
    """Runs calls through layers: `run` for `def`, `run_async` for `async def`.

    The decisions are the same objects in both. A run in which nothing fails stays in one
    frame and calls only the hooks that exist; the first error, `Done` or `Again` hands over
    to the general loop.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        function: Callable[..., Any],
        *,
        is_async: bool,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.function = function
        self.clock = clock
        self._size = len(layers)
        self._enter, self._leave, self._fail = (
            [layer.hook(name, is_async=is_async) for layer in layers]
            for name in ("enter", "leave", "fail")
        )
        scrubs = (layer.hook("scrub", is_async=False) for layer in layers)
        self._scrub = next((scrub for scrub in scrubs if scrub is not None), None)
        self._visible = next((found for layer in layers if (found := layer.visible)), None)
        self._entering = _present(self._enter)
        self._leaving = _present(self._leave)[::-1]
        self.only_fails = not self._entering and not self._leaving
        """Whether no layer acts unless the function raises."""

    def run(self, call: Call) -> Any:
        """Run *call* through the layers and the function."""
        call.clock = self.clock
        if self._visible is not None:
            call.visible = self._visible
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
        try:
            depth, verdict = self._unwind(call, error, depth)
        finally:
            del error
        return self._go_on(call, depth, verdict)

    def resume(self, call: Call, later: Later) -> Any:
        """Go on with a run that returned *later*; the caller has waited."""
        return self._go_on(call, later.depth, Again())

    async def resume_async(self, call: Call, later: Later) -> Any:
        """Go on like `resume`."""
        return await self._go_on_async(call, later.depth, Again())

    def _go_on(self, call: Call, depth: int, verdict: Done | Again) -> Any:
        """Run on from *depth* entered layers: outwards after `Done`, inwards after `Again`."""
        size = self._size
        while True:
            if call.suspends and isinstance(verdict, Again) and verdict.delay:
                return Later(verdict.delay, depth)
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
        if call.suspends:  # otherwise call and error would keep each other alive
            call.error = error
        if call.scrub is None:
            call.scrub = self._scrub
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
        try:
            raise error
        finally:
            del error

    async def recover_async(self, call: Call, error: BaseException, depth: int) -> Any:
        """Go on like `recover`."""
        return await self._go_on_async(call, *await self._unwind_async(call, error, depth))

    async def run_async(self, call: Call) -> Any:
        """Run *call* like `run`; hooks may return awaitables, and waits suspend the task."""
        call.clock = self.clock
        if self._visible is not None:
            call.visible = self._visible
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
            if call.suspends and isinstance(verdict, Again) and verdict.delay:
                return Later(verdict.delay, depth)
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
        if call.suspends:  # otherwise call and error would keep each other alive
            call.error = error
        if call.scrub is None:
            call.scrub = self._scrub
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
        try:
            raise error
        finally:
            del error


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


P = ParamSpec("P")
Rest = ParamSpec("Rest")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
_FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__")


class Pipeline(Runner):
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


class Handler(Generic[P, R_co]):
    """A decorated function: called like the function itself, or run as a plan.

    It keeps the signature and the colour: `inspect.iscoroutinefunction` says of it what it says
    of the function, and type checkers see its parameters and what it returns. Pickle and copy
    treat it as they treat functions: by its name.
    """

    __slots__ = ("__dict__", "_bare", "_run", "plan")
    __name__: str
    __qualname__: str
    __wrapped__: Callable[P, R_co]

    def __init__(
        self,
        layers: Sequence[Layer],
        function: Callable[P, R_co],
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        functools.update_wrapper(self, function)
        self.plan = plan = Pipeline(layers, function, clock=clock)
        self._run: Callable[[Call], Any] = plan.run_async if plan.is_async else plan.run
        self._bare = function if plan.only_fails and not plan.is_async else None
        if plan.is_async:
            _show_async(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function through its layers; an `async def` gives an awaitable."""
        bare = self._bare
        if bare is None:
            return self._run(Call(args, kwargs))  # type: ignore[no-any-return]
        try:
            return bare(*args, **kwargs) if kwargs else bare(*args)  # type: ignore[call-arg]
        except BaseException as error:  # noqa: BLE001 - a layer must see every end
            failure = error
        try:
            found: R_co = self.plan.recover(Call(args, kwargs, clock=self.plan.clock), failure)
            return found
        finally:
            del failure

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: Handler[Concatenate[Any, Rest], R], instance: object, owner: type | None = None
    ) -> Callable[Rest, R]: ...

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind to an instance, so that methods can be decorated."""
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> str:
        """Be pickled by name, as a function is."""
        if not hasattr(self, "__qualname__"):
            from pickle import PicklingError

            raise PicklingError(
                f"{self!r} has no name to be found by: decorate a def of a module, or pickle what "
                "it is made of"
            )
        return self.__qualname__

    def __copy__(self) -> Self:
        """Be copied as a function is: it is the same one."""
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """Be copied as a function is: it is the same one."""
        return self

    def __repr__(self) -> str:
        """Show the function and what stands around it, outermost first."""
        colour = "async def" if self.plan.is_async else "def"
        layers = "".join(f"{layer.label} " for layer in self.plan.layers)
        return f"<Handler {layers}{colour} {self.plan.name}>"

    def explain(self) -> str:
        """Return the plan as text."""
        return self.plan.explain()

    def with_clock(self, clock: Clock) -> Handler[P, R_co]:
        """Return the same function on another clock, e.g. a `VirtualClock` in a test."""
        function = cast("Callable[P, R_co]", self.plan.function)
        return Handler(self.plan.layers, function, clock=clock)


REGISTERED = "__holdfast_registered__"
"""What a consumer leaves on a function that it runs: its topic."""


def wrap(layer: Layer, function: Callable[P, R]) -> Handler[P, R]:
    """Put *layer* around *function*; around a `Handler` it joins the one flat plan."""
    topic = getattr(function, REGISTERED, None)
    if topic is not None:
        raise PlanError(
            f"{layer.label} stands above @consumer.on({topic!r}), which runs {short_name(function)}"
            f"() without it: put {layer.label} below @consumer.on"
        )
    if isinstance(function, Handler):
        plan = function.plan
        inner = cast("Callable[P, R]", plan.function)
        return Handler((layer, *plan.layers), inner, clock=plan.clock)
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


def _show_async(handler: Handler[Any, Any], function: Callable[..., Any]) -> None:
    """Let `inspect` see a coroutine function: it looks at the parts that a function has."""
    shown = function if hasattr(function, "__code__") else getattr(function, "__call__")  # noqa: B004, B009
    for name in _FUNCTION_PARTS:
        if hasattr(shown, name):
            setattr(handler, name, getattr(shown, name))
    if not hasattr(handler, "__name__"):  # `inspect` asks for it, too
        handler.__name__ = short_name(function)
