"""tenacity's own objects, taken as they are."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tenacity
import tenacity.asyncio

from holdfast import ConfigurationError, ResultRejected
from holdfast.retry import Backoff, Jitter, retry
from holdfast.testing import VirtualClock


class Script:
    """Answers with one item after the other; an exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.calls = list(answers), 0

    def __call__(self) -> Any:
        self.calls += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


def run(layer: Any, script: Script) -> tuple[Any, float]:
    """Return the result, or the error, and the virtual seconds it took."""
    clock = VirtualClock(auto=True)
    start = clock.monotonic()
    try:
        result = layer(script).with_clock(clock)()
    except Exception as error:  # noqa: BLE001 - the error is what is looked at
        result = error
    return result, clock.monotonic() - start


@pytest.mark.parametrize(
    ("wait", "seconds"),
    [
        (tenacity.wait_fixed(2), 6),
        (tenacity.wait_none(), 0),
        (tenacity.wait_incrementing(start=1, increment=2), 9),
        (tenacity.wait_exponential(multiplier=1, max=3), 6),
        (tenacity.wait_chain(tenacity.wait_fixed(1), tenacity.wait_fixed(5)), 11),
        (tenacity.wait_fixed(1) + tenacity.wait_fixed(2), 9),
        (tenacity.wait_exception(lambda error: len(str(error))), 9),
    ],
)
def test_waits_decide_the_delays(wait: Any, seconds: float) -> None:
    """Three failures wait what tenacity would wait."""
    script = Script(*[ConnectionError("abc")] * 3, "done")
    assert run(retry(wait), script) == ("done", seconds)


def test_arguments_have_tenacity_s_names() -> None:
    """`wait=` and `stop=` read as they do there."""
    script = Script(*[ConnectionError()] * 9)
    layer = retry(wait=tenacity.wait_fixed(2), stop=tenacity.stop_after_attempt(4))
    result, seconds = run(layer, script)
    assert isinstance(result, ConnectionError)
    assert (script.calls, seconds) == (4, 6)
    with pytest.raises(ConfigurationError, match="both say how long to wait"):
        retry(Backoff(), wait=tenacity.wait_fixed(1))  # type: ignore[call-overload]


def test_random_waits_stay_in_their_range() -> None:
    """The drawing is left to tenacity."""
    script = Script(ConnectionError(), "done")
    result, seconds = run(retry(tenacity.wait_random_exponential(multiplier=1, max=4)), script)
    assert result == "done"
    assert 0 <= seconds <= 4


@pytest.mark.parametrize(
    ("stop", "calls"),
    [
        (tenacity.stop_after_attempt(3), 3),
        (tenacity.stop_after_delay(5), 4),
        (tenacity.stop_before_delay(5), 3),
        (tenacity.stop_after_attempt(9) | tenacity.stop_after_delay(3), 3),
        (tenacity.stop_after_attempt(2) & tenacity.stop_after_delay(3), 3),
    ],
)
def test_stops_decide_the_end_on_our_clock(stop: Any, calls: int) -> None:
    """Delays are measured by the plan's clock, so virtual time works too."""
    script = Script(ConnectionError("down"))
    result, _ = run(retry(tenacity.wait_fixed(2), stop=stop), script)
    assert isinstance(result, ConnectionError)
    assert script.calls == calls


def test_a_stop_goes_with_our_own_backoff() -> None:
    """The two may be mixed."""
    script = Script(ConnectionError("down"))
    policy = Backoff(first=1, ceiling=4, jitter=Jitter.NONE)
    _, seconds = run(retry(policy, stop=tenacity.stop_after_attempt(4)), script)
    assert (script.calls, seconds) == (4, 7)


@pytest.mark.parametrize(
    ("condition", "calls"),
    [
        (tenacity.retry_if_exception_type(KeyError), 3),
        (tenacity.retry_if_not_exception_type(KeyError), 1),
        (tenacity.retry_if_exception_message(match="price"), 1),
        (tenacity.retry_if_exception(lambda error: "price" in str(error)), 3),
        (
            tenacity.retry_if_exception_type(OSError) | tenacity.retry_if_exception_type(KeyError),
            3,
        ),
        (tenacity.retry_never, 1),
    ],
)
def test_conditions_decide_what_is_retried(condition: Any, calls: int) -> None:
    """They take the place of our classification."""
    script = Script(KeyError("price"))
    policy = Backoff(attempts=3)
    run(retry(policy, on=condition), script)
    assert script.calls == calls


def test_a_result_can_be_refused_until_it_is_good() -> None:
    """`retry_if_result` polls."""
    script = Script(None, None, "ready")
    condition = tenacity.retry_if_result(lambda result: result is None)
    assert run(retry(tenacity.wait_fixed(1), on=condition), script) == ("ready", 2)


def test_a_result_that_never_gets_good_is_an_error_that_carries_it() -> None:
    """Not a silent success."""
    script = Script("pending")
    condition = tenacity.retry_if_result(lambda result: result == "pending")
    result, _ = run(retry(Backoff(attempts=3), on=condition), script)
    assert isinstance(result, ResultRejected)
    assert (result.result, result.attempts, script.calls) == ("pending", 3, 3)


def test_conditions_that_must_be_awaited_are_refused() -> None:
    """Their plain twins serve async functions too."""
    condition = tenacity.asyncio.retry_if_exception(lambda error: True)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=re.escape("tenacity.asyncio")):
        retry(on=condition)
