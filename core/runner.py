"""The runner: calls of a function through the hooks of its layers, in a single frame."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.layer import Again, Call, Done, Later, Layer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
        own = (layer for layer in layers if type(layer).scrub is not Layer.scrub)
        scrubber = next(own, None)
        self._scrub = None if scrubber is None else scrubber.scrub
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
