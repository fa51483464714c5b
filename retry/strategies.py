"""tenacity's `wait_*`, `stop_*` and `retry_*` objects, taken as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tenacity import RetryCallState
    from tenacity.retry import retry_base
    from tenacity.stop import stop_base
    from tenacity.wait import wait_base

    from holdfast.call import Call

    Wait = wait_base
    """How long to wait: tenacity's `wait_*`, and sums of them."""
    Stop = stop_base
    """When to give up: tenacity's `stop_*`, joined by | and &."""
    Condition = (
        type[BaseException] | tuple[type[BaseException], ...] | Callable[[Any], object] | retry_base
    )
    """What is retried: error types, a predicate of the error, or tenacity's `retry_*`."""


def is_strategy(value: object, base: str) -> bool:
    """Whether *value* is a tenacity object of the kind *base*, e.g. 'wait_base'."""
    return any(
        kind.__name__ == base and kind.__module__.startswith("tenacity.")
        for kind in type(value).__mro__
    )


def check_wait(value: object) -> None:
    """Refuse what is no wait of tenacity."""
    if isinstance(value, int) and value > 0:
        raise ConfigurationError(
            f"@retry({value!r}): say how often and how long, @retry(Backoff(attempts={value!r}))"
        )
    if not is_strategy(value, "wait_base"):
        raise ConfigurationError(
            f"@retry({value!r}): the policy is a Backoff, a tenacity wait_* object, or any object "
            "with delay(attempt, previous)"
        )


def check_stop(value: object) -> None:
    """Refuse what is no stop of tenacity."""
    if not is_strategy(value, "stop_base"):
        raise ConfigurationError(f"@retry(stop={value!r}): use one of tenacity's stop_* objects")


def check_condition(value: object) -> None:
    """Refuse a condition that could only be asked by awaiting it."""
    if is_strategy(value, "async_retry_base"):
        raise ConfigurationError(
            f"@retry(on={value!r}): use the retry_* objects of tenacity itself, not those of "
            "tenacity.asyncio; they serve async functions too"
        )
    for part in getattr(value, "retries", ()):
        check_condition(part)


def new_state(call: Call) -> RetryCallState:
    """Return the state that tenacity's objects look at, on the clock of *call*."""
    import tenacity

    state = tenacity.RetryCallState(tenacity.Retrying(), None, call.args, call.kwargs)
    now = call.clock.monotonic()
    state.start_time = now if call.failing_since is None else min(now, call.failing_since)
    return state


def note_outcome(
    state: RetryCallState, call: Call, *, value: Any, has_exception: bool
) -> RetryCallState:
    """Put the outcome of the attempt into *state*."""
    import tenacity

    state.attempt_number = call.attempt
    state.outcome = tenacity.Future.construct(call.attempt, value, has_exception)
    state.outcome_timestamp = call.clock.monotonic()
    return state


def wait(state: RetryCallState, seconds: float, stop: Callable[..., Any] | None) -> float | None:
    """Return *seconds*, or None if *stop* says so; the state remembers what comes."""
    state.upcoming_sleep = seconds
    if stop is not None and stop(state):
        return None
    state.idle_for += seconds
    return seconds
