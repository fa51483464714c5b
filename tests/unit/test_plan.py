"""Stacked decorators compile to one flat, checked plan."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import inspect
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import PlanError
from holdfast.call import Again, Call, Done, Stage
from holdfast.layer import Layer

if TYPE_CHECKING:
    from holdfast.pipeline import Handler


class Recording(Layer):
    """Notes every hook it sees."""

    stage = Stage.ATTEMPT
    label = "@recording"

    def __init__(self, log: list[str], name: str = "a") -> None:
        self.log, self.name = log, name

    def enter(self, call: Call) -> None:
        self.log.append(f"enter {self.name}")

    def leave(self, call: Call) -> None:
        self.log.append(f"leave {self.name}")

    def fail(self, call: Call, error: BaseException) -> None:
        self.log.append(f"fail {self.name}")


class AsyncRecording(Recording):
    async def enter(self, call: Call) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.log.append(f"enter {self.name}")

    async def leave(self, call: Call) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.log.append(f"leave {self.name}")


class Retry(Layer):
    stage = Stage.RETRY
    label = "@retry"

    def __init__(self, times: int) -> None:
        self.times = times

    def describe(self) -> str:
        return f"{self.times} times"

    def fail(self, call: Call, error: BaseException) -> Again | None:
        call.attempt += 1
        return Again() if call.attempt <= self.times else None


class Swallow(Layer):
    stage = Stage.SETTLE
    label = "@dead_letter"

    def fail(self, call: Call, error: BaseException) -> Done:
        return Done("dead")


class Skip(Layer):
    stage = Stage.DEDUP
    label = "@idempotent"

    def enter(self, call: Call) -> Done:
        return Done("seen")


class Outer(Recording):
    stage = Stage.TRACE
    label = "@outer"


def test_layers_run_outermost_first_and_leave_in_reverse() -> None:
    """The order read at the function is the order in which layers are entered."""
    log: list[str] = []

    @Recording(log, "a")
    @Recording(log, "b")
    def handler(value: int) -> int:
        log.append("handler")
        return value + 1

    assert handler(1) == 2
    assert log == ["enter a", "enter b", "handler", "leave b", "leave a"]


def test_a_retry_enters_only_the_layers_inside_it_again() -> None:
    """What is outside the retry sees one run, what is inside sees every attempt."""
    log: list[str] = []

    @Outer(log, "outer")
    @Retry(3)
    @Recording(log, "inner")
    def handler() -> str:
        if log.count("enter inner") < 3:
            raise ValueError("not yet")
        return "done"

    assert handler() == "done"
    assert log.count("enter outer") == log.count("leave outer") == 1
    assert log.count("enter inner") == 3
    assert log.count("fail inner") == 2


def test_an_exhausted_retry_lets_the_last_error_out() -> None:
    """The caller gets the handler's own exception, not a wrapper."""

    @Retry(2)
    def handler() -> None:
        raise ValueError("always")

    with pytest.raises(ValueError, match="always"):
        handler()


def test_a_swallowed_error_is_a_success_for_what_is_outside() -> None:
    """The settle layer decides once; tracing outside it leaves normally."""
    log: list[str] = []

    @Outer(log, "outer")
    @Swallow()
    def handler() -> None:
        raise ValueError("poison")

    assert handler() == "dead"
    assert log == ["enter outer", "leave outer"]


def test_a_duplicate_ends_the_run_before_the_handler() -> None:
    """A layer that answers Done keeps the handler from running."""

    @Skip()
    def handler() -> str:
        raise AssertionError("must not run")

    assert handler() == "seen"


def test_an_error_while_leaving_fails_the_layers_outside() -> None:
    """A commit that fails is a failed attempt, so the retry outside sees it."""
    log: list[str] = []

    class BadCommit(Layer):
        stage = Stage.TRANSACTION
        label = "transaction"

        def leave(self, call: Call) -> None:
            log.append("commit")
            if log.count("commit") == 1:
                raise ConnectionError("commit lost")

    @Retry(2)
    @BadCommit()
    def handler() -> str:
        return "done"

    assert handler() == "done"
    assert log == ["commit", "commit"]


def test_async_handlers_and_async_hooks_take_the_same_path() -> None:
    """One plan, both colours: hooks may be coroutines when the handler is one."""
    log: list[str] = []

    @Retry(2)
    @AsyncRecording(log, "a")
    async def handler(value: int) -> int:
        await asyncio.sleep(0)
        if log.count("enter a") == 1:
            raise ValueError("first time")
        return value

    assert inspect.isawaitable(pending := handler(7))
    assert asyncio.run(_awaited(pending)) == 7
    assert log == ["enter a", "fail a", "enter a", "leave a"]


async def _awaited(value: Any) -> Any:
    return await value


@pytest.mark.parametrize(
    ("outer", "inner", "reason"),
    [
        (Skip(), Retry(1), "never retried"),
        (Retry(1), Swallow(), "dead-lettered and then tried again"),
    ],
)
def test_a_wrong_order_is_refused_and_the_right_one_shown(
    outer: Layer, inner: Layer, reason: str
) -> None:
    """Dedup outside retry, or dead letter inside it, is an error that says how to fix it."""

    def handler() -> None: ...

    with pytest.raises(PlanError, match=reason) as caught:
        outer(inner(handler))
    lines = str(caught.value).splitlines()
    assert [line.strip() for line in lines[-2:]] == [inner.label, outer.label]
    assert "handler()" in lines[0]


def test_the_same_layer_twice_is_refused() -> None:
    """Two retries would multiply attempts."""
    with pytest.raises(PlanError, match="twice"):
        Retry(1)(Retry(2)(lambda: None))


def test_several_breakers_may_stand_side_by_side() -> None:
    """One breaker per dependency is the point of the stage."""

    class Breaker(Layer):
        stage = Stage.BREAKER
        label = "@circuit"

    assert Breaker()(Breaker()(lambda: "through"))() == "through"


def test_the_run_is_one_frame_deep_however_many_layers() -> None:
    """Between the caller and the handler stand the wrapper and the plan, nothing else."""
    depths: list[int] = []

    def handler() -> None:
        depths.append(len(inspect.stack(0)))

    stacked: Any = handler
    for _ in range(8):
        stacked = Recording([], "x")(stacked)
    one: Handler = Recording([], "x")(handler)
    one()
    stacked()
    assert depths[0] == depths[1]


def test_explain_prints_the_plan_outermost_first() -> None:
    """An operator can read what wraps a handler."""

    @Swallow()
    @Retry(3)
    def bill() -> None: ...

    assert bill.explain().splitlines() == [
        "bill:",
        "  @dead_letter",
        "    @retry 3 times",
        "      def bill",
    ]


def test_methods_can_be_decorated() -> None:
    """A handler may live on an object."""

    class Service:
        @Retry(1)
        def handle(self, value: int) -> tuple[Service, int]:
            return self, value

    service = Service()
    assert service.handle(3) == (service, 3)


def test_an_error_raised_in_fail_takes_the_place_of_the_first() -> None:
    """The layers outside see the new one, with the first as its context."""
    seen: list[BaseException] = []

    class Translate(Layer):
        stage = Stage.BREAKER
        label = "@translate"

        def fail(self, call: Call, error: BaseException) -> None:
            raise LookupError("translated")

    class Watch(Layer):
        stage = Stage.TRACE
        label = "@watch"

        def fail(self, call: Call, error: BaseException) -> None:
            seen.append(error)

    @Watch()
    @Translate()
    def handler() -> None:
        raise ValueError("first")

    with pytest.raises(LookupError) as caught:
        handler()
    assert seen == [caught.value]
    assert isinstance(caught.value.__context__, ValueError)


class Poll(Layer):
    """Runs the inside again until its result is good."""

    stage = Stage.RETRY
    label = "@poll"

    def leave(self, call: Call) -> Again | None:
        return Again() if call.result < 3 else None


def test_a_layer_that_leaves_may_run_the_inside_again() -> None:
    """It sees the result, in both colours."""
    log: list[str] = []
    results = iter([1, 2, 3, 1, 2, 3])

    @Poll()
    @Recording(log, "inner")
    def handler() -> int:
        return next(results)

    @Poll()
    async def other() -> int:
        return next(results)

    assert handler() == 3
    assert log.count("enter inner") == log.count("leave inner") == 3
    assert asyncio.run(_awaited(other())) == 3


def test_a_hook_for_async_stands_in_around_async_functions_only() -> None:
    """A layer can await there, and need not here."""
    log: list[str] = []

    class Both(Recording):
        async def enter_async(self, call: Call) -> None:
            await asyncio.sleep(0)
            log.append("entered async")

    def plain() -> None: ...

    async def other() -> None: ...

    Both(log)(plain)()
    asyncio.run(_awaited(Both(log)(other)()))
    assert log == ["enter a", "leave a", "entered async", "leave a"]


def test_an_object_with_an_async_call_is_awaited() -> None:
    """Or its errors would be raised where no layer sees them."""

    class Service:
        async def __call__(self, value: int) -> int:
            if value:
                raise ValueError("seen")
            return value

    handler = Swallow()(Service())
    assert asyncio.run(_awaited(handler(1))) == "dead"
    assert asyncio.run(_awaited(handler(0))) == 0


def test_keyword_arguments_reach_the_function_on_every_path() -> None:
    """With and without hooks, at first and again."""

    def handler(*, value: int, failing: list[int]) -> int:
        if failing:
            raise ValueError(failing.pop())
        return value

    assert Retry(2)(handler)(value=1, failing=[]) == 1
    assert Retry(2)(handler)(value=2, failing=[1]) == 2
    assert Retry(2)(Recording([])(handler))(value=3, failing=[]) == 3
    assert Retry(2)(Recording([])(handler))(value=4, failing=[1]) == 4


def test_no_garbage_is_left_by_a_failed_call() -> None:
    """Frames and tracebacks do not keep each other, and what the handler held, alive."""

    class Held: ...

    @Retry(2)
    def handler() -> None:
        held.append(weakref.ref(local := Held()))
        raise ValueError(local)

    held: list[weakref.ref[Held]] = []
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            handler()
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


@Retry(2)
def plain(number: int = 1) -> int:
    """Return the next number."""
    return number + 1


@Retry(2)
async def coloured(number: int) -> int:
    """Return the number."""
    return number


class Waiting:
    """An object that is called like an async def."""

    async def __call__(self, number: int) -> int:
        """Return the number."""
        return number


def test_a_decorated_function_keeps_its_colour() -> None:
    """Whoever asks `inspect` or asyncio gets the function's own answer, also for methods."""

    class Shop:
        sell = Retry(2)(plain.plan.function)
        stock = Retry(2)(coloured.plan.function)

    for handler in (coloured, Shop().stock, Retry(2)(Waiting())):
        assert inspect.iscoroutinefunction(handler)
    for handler in (plain, Shop().sell):
        assert not inspect.iscoroutinefunction(handler)
    for handler in (plain, coloured):
        assert inspect.signature(handler) == inspect.signature(handler.plan.function)
        assert handler.__doc__
        assert not inspect.isgeneratorfunction(handler)


def test_a_decorated_function_is_pickled_and_copied_as_functions_are() -> None:
    """By name: what comes back is the handler itself, with its layers."""
    for handler in (plain, coloured):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(handler, protocol)) is handler  # noqa: S301
        assert copy.copy(handler) is handler
        assert copy.deepcopy([handler]) == [handler]
    with pytest.raises(pickle.PicklingError, match="decorate a def of a module"):
        pickle.dumps(Retry(2)(functools.partial(print, 1)))


def test_a_decorated_function_shows_what_stands_around_it() -> None:
    """In a log or a debugger."""
    assert repr(coloured) == f"<Handler {Retry.label} async def coloured>"
    assert repr(plain) == f"<Handler {Retry.label} def plain>"
