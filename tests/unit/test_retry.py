"""Retry: what is tried again, when, how often, and what is not."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import (
    AttemptTimeout,
    BrokerDown,
    CircuitOpen,
    ConfigurationError,
    PlanError,
    PoisonMessage,
    StaleDelivery,
    Transient,
)
from holdfast.call import Call, Stage
from holdfast.clock import SystemClock
from holdfast.layer import Layer
from holdfast.retry import (
    Backoff,
    Budget,
    Jitter,
    Remedy,
    Rules,
    checkpoint,
    remaining,
    retry,
    timeout,
)
from holdfast.testing import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.pipeline import Handler

STEADY = Backoff(first=1, ceiling=8, attempts=4, jitter=Jitter.NONE)


class Flaky:
    """Fails with the errors it is given, one a call, then returns its arguments."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors, self.calls = list(errors), 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return args


class Seen(Layer):
    """Notes the number of each attempt."""

    stage = Stage.ATTEMPT
    label = "@seen"

    def __init__(self) -> None:
        self.attempts: list[int] = []

    def enter(self, call: Call) -> None:
        self.attempts.append(call.attempt)


def on_virtual_time(handler: Handler) -> tuple[Callable[..., Any], VirtualClock]:
    clock = VirtualClock(auto=True)
    return handler.with_clock(clock), clock


def elapsed(clock: VirtualClock) -> float:
    return clock.monotonic() - VirtualClock().monotonic()


def test_a_passing_failure_is_tried_again_after_the_delays_of_the_policy() -> None:
    """Three failures cost 1, 2 and 4 seconds, and the caller sees only the result."""
    flaky = Flaky(*[ConnectionError("reset")] * 3)
    handler, clock = on_virtual_time(retry(STEADY)(flaky))
    assert handler("x") == ("x",)
    assert elapsed(clock) == 7


def test_the_last_error_leaves_unchanged_when_the_attempts_are_used_up() -> None:
    """No wrapper hides what happened."""
    errors = [ConnectionError(str(n)) for n in range(9)]
    flaky = Flaky(*errors)
    handler, _ = on_virtual_time(retry(STEADY)(flaky))
    with pytest.raises(ConnectionError) as caught:
        handler()
    assert caught.value is errors[3]
    assert flaky.calls == 4


@pytest.mark.parametrize(
    "error",
    [
        PoisonMessage("bad"),
        ConfigurationError("wrong"),
        BrokerDown("gone"),
        CircuitOpen("payments", None),
        StaleDelivery("not ours"),
        KeyboardInterrupt(),
        SystemExit(1),
        asyncio.CancelledError(),
        GeneratorExit(),
    ],
)
def test_what_no_retry_can_help_leaves_at_once(error: BaseException) -> None:
    """Poison, faults to fix, blameless ends and orders to stop: one call, no wait."""
    flaky = Flaky(error)
    handler, clock = on_virtual_time(retry(STEADY, on=None)(flaky))
    with pytest.raises(type(error)):
        handler()
    assert (flaky.calls, elapsed(clock)) == (1, 0)


@pytest.mark.parametrize("error", [PoisonMessage("bad"), BrokerDown("gone"), SystemExit(1)])
def test_on_does_not_override_a_declared_remedy(error: BaseException) -> None:
    """`on=…` is a guess about foreign errors; one that knows better, or an order to stop, wins."""
    flaky = Flaky(error)
    handler, _ = on_virtual_time(retry(STEADY, on=BaseException)(flaky))
    with pytest.raises(type(error)):
        handler()
    assert flaky.calls == 1


def test_an_unknown_error_gets_only_a_few_tries() -> None:
    """It is probably a bug: 3 tries, not the 10 of the policy."""
    flaky = Flaky(*[KeyError("price")] * 9)
    handler, _ = on_virtual_time(retry(Backoff(attempts=10))(flaky))
    with pytest.raises(KeyError):
        handler()
    assert flaky.calls == 3


def test_on_narrows_what_is_retried() -> None:
    """Types, tuples of types and predicates; everything else leaves at once."""
    for on in (KeyError, (KeyError, OSError), lambda error: isinstance(error, KeyError)):
        flaky = Flaky(*[KeyError()] * 3, ValueError("other"))
        handler, _ = on_virtual_time(retry(Backoff(attempts=9), on=on)(flaky))
        with pytest.raises(ValueError, match="other"):
            handler()
        assert flaky.calls == 4


def test_rules_decide_by_type_and_predicate_then_fall_back() -> None:
    """A classification of one's own keeps the defaults for everything else."""

    class Declined(ConnectionError): ...

    rules = Rules({Declined: Remedy.DEAD_LETTER, lambda e: "busy" in str(e): Remedy.RETRY})
    for error, calls in ((Declined(), 1), (ValueError("busy"), 4), (ConnectionError(), 4)):
        flaky = Flaky(*[error] * 9)
        handler, _ = on_virtual_time(retry(STEADY, classify=rules)(flaky))
        with pytest.raises(type(error)):
            handler()
        assert flaky.calls == calls


def test_attempts_are_counted_from_where_the_call_stood() -> None:
    """A message on its third delivery has two of four attempts left, not four more."""
    seen = Seen()
    flaky = Flaky(*[ConnectionError()] * 9)
    handler, _ = on_virtual_time(retry(STEADY)(seen(flaky)))
    with pytest.raises(ConnectionError):
        handler.plan.run(Call((), {}, attempt=3))  # type: ignore[attr-defined]
    assert seen.attempts == [3, 4]


def test_the_deadline_bounds_all_attempts_and_waits_together() -> None:
    """A wait that would not leave time for an attempt is not begun."""
    flaky = Flaky(*[ConnectionError()] * 9)
    handler, clock = on_virtual_time(retry(STEADY, deadline=4)(flaky))
    with pytest.raises(ConnectionError):
        handler()
    assert (flaky.calls, elapsed(clock)) == (3, 3)
    assert remaining() is None


def test_the_deadline_of_a_message_counts_from_its_first_failure() -> None:
    """Each run of it gets what the runs before have left."""
    flaky = Flaky(*[ConnectionError()] * 9)
    handler, clock = on_virtual_time(retry(STEADY, deadline=14)(flaky))
    since = clock.monotonic() - 10
    with pytest.raises(ConnectionError):
        handler.plan.run(Call((), {}, failing_since=since))  # type: ignore[attr-defined]
    assert (flaky.calls, elapsed(clock)) == (3, 3)


def test_a_message_taken_up_after_its_deadline_gets_one_whole_attempt() -> None:
    """It was parked, and nobody was there: it is not given up without a try."""
    left: list[float | None] = []

    def fails() -> None:
        left.append(remaining())
        raise ConnectionError

    handler, clock = on_virtual_time(retry(STEADY, deadline=4)(fails))
    since = clock.monotonic() - 3600
    with pytest.raises(ConnectionError):
        handler.plan.run(Call((), {}, failing_since=since))  # type: ignore[attr-defined]
    assert left == [4]


@pytest.mark.parametrize(
    "value",
    [
        "Mon, 01 Jan 99999999999999999999 00:00:00 GMT",
        "Mon, 01 Jan 2024 00:00:00 +99999999999999",
        "9" * 400,
        10**400,
        "soon",
        "",
    ],
)
def test_a_retry_after_beyond_all_bounds_asks_for_nothing(value: Any) -> None:
    """Nonsense of the other side is no error of ours."""
    flaky = Flaky(Transient("slow down"))
    flaky.errors[0].retry_after = value  # type: ignore[attr-defined]
    handler, clock = on_virtual_time(retry(STEADY)(flaky))
    handler()
    assert (flaky.calls, elapsed(clock)) == (2, 1)


def test_a_retry_inside_other_limited_work_keeps_to_its_limit() -> None:
    """The inner retry gives up when the outer one has no time left for it."""
    flaky = Flaky(*[ConnectionError()] * 99)
    clock = VirtualClock(auto=True)
    inner = retry(Backoff(first=1, ceiling=1, jitter=Jitter.NONE))(flaky).with_clock(clock)

    @retry(STEADY, deadline=3, on=KeyError)
    def outer() -> None:
        inner()

    with pytest.raises(ConnectionError):
        outer.with_clock(clock)()
    assert elapsed(clock) == 2


def test_retry_after_is_a_floor_that_is_spread() -> None:
    """Never sooner than asked, and not everybody at the same moment."""
    waits = set()
    for seed in range(20):
        policy = Backoff(first=0.1, ceiling=1, randomness=random.Random(seed))
        flaky = Flaky(Transient("slow down", retry_after=8))
        handler, clock = on_virtual_time(retry(policy)(flaky))
        handler()
        waits.add(elapsed(clock))
    assert min(waits) >= 8
    assert max(waits) <= 10
    assert len(waits) > 10


def test_a_retry_after_beyond_the_deadline_gives_up_at_once() -> None:
    """Asking sooner than allowed would be rude, waiting in vain useless."""
    flaky = Flaky(Transient("slow down", retry_after=60))
    handler, clock = on_virtual_time(retry(STEADY, deadline=30)(flaky))
    with pytest.raises(Transient):
        handler()
    assert (flaky.calls, elapsed(clock)) == (1, 0)


def test_a_retry_after_of_a_day_is_not_slept_through() -> None:
    """Without a deadline there is still an end to patience in place."""
    flaky = Flaky(Transient("maintenance", retry_after=86_400))
    handler, clock = on_virtual_time(retry(STEADY)(flaky))
    with pytest.raises(Transient):
        handler()
    assert elapsed(clock) == 0


def test_a_spent_budget_ends_the_retries_and_is_paid_when_scheduling() -> None:
    """Two retries are left in the budget; the third failure goes out."""
    clock = VirtualClock(auto=True)
    budget = Budget(ratio=0, per_second=2, window=1, clock=VirtualClock())
    flaky = Flaky(*[ConnectionError()] * 9)
    handler = retry(STEADY, budget=budget)(flaky).with_clock(clock)
    with pytest.raises(ConnectionError):
        handler()
    assert flaky.calls == 3
    assert budget.balance() == 0


def test_a_retry_that_the_deadline_forbids_costs_no_budget() -> None:
    """The budget is asked last."""
    budget = Budget(ratio=0, per_second=5, window=1, clock=VirtualClock())
    handler, _ = on_virtual_time(
        retry(STEADY, budget=budget, deadline=0.5)(Flaky(ConnectionError()))
    )
    with pytest.raises(ConnectionError):
        handler()
    assert budget.balance() == 5


def test_async_functions_and_methods_are_retried_alike() -> None:
    """One layer, both colours."""
    flaky = Flaky(ConnectionError(), ConnectionError())

    class Service:
        @retry(STEADY)
        async def call(self, value: int) -> Any:
            return flaky(value)

    Service.call = Service.call.with_clock(VirtualClock(auto=True))  # type: ignore[method-assign]

    async def main() -> Any:
        return await Service().call(7)

    assert asyncio.run(main()) == (7,)
    assert flaky.calls == 3


def test_a_cancelled_wait_tells_the_layers_outside() -> None:
    """A task cancelled between two attempts must not leave a span or a lease behind."""
    log: list[str] = []

    class Outer(Layer):
        stage = Stage.TRACE
        label = "@outer"

        def fail(self, call: Call, error: BaseException) -> None:
            log.append(type(error).__name__)

    @Outer()
    @retry(Backoff(first=60, ceiling=60, jitter=Jitter.NONE))
    async def handler() -> None:
        raise ConnectionError

    async def main() -> None:
        clock = VirtualClock()
        task = asyncio.ensure_future(handler.with_clock(clock)())
        while not clock.sleepers:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert log == ["CancelledError"]


def test_an_async_attempt_that_hangs_is_cut_and_retried() -> None:
    """The task is not cancelled as a whole: the attempt fails with AttemptTimeout."""
    calls: list[int] = []

    @retry(Backoff(first=0.001, ceiling=0.001, attempts=3))
    @timeout(0.01)
    async def handler() -> str:
        calls.append(1)
        if len(calls) < 3:
            await asyncio.Event().wait()
        return "done"

    async def main() -> str:
        result: str = await handler()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        return result

    assert asyncio.run(main()) == "done"


def test_an_async_timeout_names_its_limit_and_its_cause() -> None:
    """AttemptTimeout is a TimeoutError, raised from the cancellation."""

    @timeout(0.01)
    async def handler() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        with pytest.raises(TimeoutError) as caught:
            await handler()
        assert isinstance(caught.value, AttemptTimeout)
        assert caught.value.seconds == 0.01
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)

    asyncio.run(main())


def test_a_cancellation_from_outside_stays_a_cancellation() -> None:
    """Only our own cut becomes AttemptTimeout."""

    @retry(STEADY)
    @timeout(60)
    async def handler() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.ensure_future(handler())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_sync_attempt_is_told_its_time_and_never_interrupted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The late result counts, and the overrun is logged."""
    clock = VirtualClock(auto=True)
    left: list[float | None] = []

    @timeout(5)
    def handler() -> str:
        left.append(remaining())
        clock.sleep(7)
        left.append(remaining())
        return "done late"

    assert handler.with_clock(clock)() == "done late"
    assert left == [5, 0]
    assert "longer than its limit of 5 s" in caplog.text
    assert remaining() is None


def test_a_checkpoint_ends_an_attempt_whose_time_is_up() -> None:
    """Cooperation: the attempt fails where it can, and is retried with a fresh limit."""
    clock = VirtualClock(auto=True)
    calls: list[float | None] = []

    @retry(STEADY)
    @timeout(5)
    def handler() -> None:
        calls.append(remaining())
        clock.sleep(6 if len(calls) == 1 else 1)
        checkpoint()

    handler.with_clock(clock)()
    assert calls == [5, 5]


def test_each_attempt_gets_at_most_what_the_deadline_leaves() -> None:
    """The last attempt's slice is shorter than its own timeout."""
    clock = VirtualClock(auto=True)
    left: list[float | None] = []

    @retry(Backoff(first=1, ceiling=1, jitter=Jitter.NONE), deadline=10)
    @timeout(5)
    def handler() -> None:
        left.append(remaining())
        clock.sleep(4)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        handler.with_clock(clock)()
    assert left == [5, 5]  # 10 s - 4 - 1 = 5, and after the second attempt 1 s is no time


def test_describe_says_policy_and_limits() -> None:
    """`explain()` shows what an operator wants to know."""

    @retry(STEADY, deadline=60, budget=Budget(name="payments"))
    @timeout(5)
    def bill() -> None: ...

    text = bill.explain()
    assert "up to 4 attempts, 1 s to 8 s apart" in text
    assert "within 60 s" in text
    assert "budget payments" in text
    assert "5 s for each attempt" in text


@pytest.mark.parametrize(
    ("write", "fix"),
    [
        (lambda: retry(3), "Backoff"),
        (lambda: retry(stop=3), "stop_"),
        (lambda: retry(deadline=0), "deadline"),
        (lambda: retry(budget=3), "name of the dependency"),  # type: ignore[arg-type]
        (lambda: retry(on="ValueError"), "error types"),
        (lambda: retry(on=KeyError, classify=lambda e: None), "use one"),
        (lambda: timeout(0), "above 0"),
        (lambda: timeout(float("nan")), "above 0"),
        (lambda: Budget(ratio=-1), "ratio"),
        (lambda: Budget(window=0), "window"),
        (lambda: Rules({"x": Remedy.RETRY}), "error types"),  # type: ignore[dict-item]
    ],
)
def test_nonsense_is_refused_when_it_is_written(write: Callable[[], object], fix: str) -> None:
    """The message says what to write instead."""
    with pytest.raises(ConfigurationError, match=fix):
        write()


def test_a_generator_function_is_refused() -> None:
    """It would not have run yet when the retry believes it succeeded."""

    def rows() -> Any:
        yield 1

    with pytest.raises(PlanError, match="generator"):
        retry()(rows)


def test_the_system_clock_is_the_default() -> None:
    """Nobody has to name a clock."""
    assert isinstance(retry()(lambda: None).plan.clock, SystemClock)


def test_parentheses_may_be_left_out() -> None:
    """`@retry` alone means the default policy, also above other decorators and on methods."""
    calls = []

    class Shop:
        @retry
        @timeout(5)
        def sell(self, item: str) -> str:
            calls.append(item)
            if len(calls) == 1:
                raise ConnectionError
            return item

    assert Shop().sell("tea") == "tea"
    assert calls == ["tea", "tea"]
    assert "up to 5 attempts" in Shop.sell.explain()
