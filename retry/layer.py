"""The retry layer: which failures are tried again in place, when, and how often."""

from __future__ import annotations

import logging
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
    runtime_checkable,
)

import msgspec

from holdfast.backoff import Backoff
from holdfast.call import Again, Call, Refusal, Stage
from holdfast.classification import Classify, check_classify, declared, recognise
from holdfast.clock import Deadline, begin, current_deadline, end, is_seconds, within
from holdfast.errors import ConfigurationError, Remedy, ResultRejected
from holdfast.layer import Layer, is_function
from holdfast.retry import strategies
from holdfast.retry.asked import AskedToWait, asked_wait
from holdfast.retry.budget import Budget, BudgetSpent

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from contextvars import Token

    from holdfast.pipeline import Handler

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("holdfast.retry")

UNKNOWN_ATTEMPTS = 3
"""How often an error is tried that nobody knows anything about."""

PATIENCE = 300.0
"""The longest Retry-After that is waited for in place when no deadline says otherwise."""

LONGEST_ASKED = 86_400.0
"""The same for a message: it waits outside this process, and is nobody's fault."""

DEFAULT = Backoff(first=0.1, ceiling=30, attempts=5)


@runtime_checkable
class RetryPolicy(Protocol):
    """How long to wait between attempts; `Backoff` is one."""

    def delay(self, attempt: int, previous: float | None = None) -> float | None:
        """Return the seconds to wait after failed *attempt* (from 1); None means give up."""
        ...


class Progress(msgspec.Struct):
    """What a retry knows about one call."""

    previous: float | None = None
    deadline: Deadline | None = None
    token: Token[Deadline | None] | None = None
    state: Any = None
    is_last: bool = False
    """Whether the time for all attempts was over before this one."""
    refusal: Refusal | None = None
    """Why the last attempt counts for nothing, if it returned."""


class Retry(Layer):
    """Runs what is inside again after a passing failure, in the same process.

    Poison and errors that need a fix go out at once; so do blameless ones (an open circuit,
    a dependency that is down, a delivery that belongs to somebody else): they are no
    attempts. KeyboardInterrupt, SystemExit and a cancelled task are never retried. The last
    error leaves unchanged. `call.attempt` goes on counting from where it stood, so retries
    of every kind share one count.
    """

    stage: ClassVar[Stage] = Stage.RETRY
    label: ClassVar[str] = "@retry"

    def __init__(
        self,
        policy: RetryPolicy | strategies.Wait | None = None,
        *,
        stop: strategies.Stop | None = None,
        on: strategies.Condition | None = None,
        budget: Budget | str | None = None,
        deadline: float | None = None,
        classify: Classify | None = None,
    ) -> None:
        if policy is None:
            policy = DEFAULT if stop is None else Backoff(first=DEFAULT.first, ceiling=30)
        if not isinstance(policy, RetryPolicy):
            strategies.check_wait(policy)
        if stop is not None:
            strategies.check_stop(stop)
        check_classify(classify, "@retry")
        if deadline is not None and not is_seconds(deadline):
            raise ConfigurationError(f"@retry(deadline={deadline!r}): use seconds above 0, or None")
        if on is not None and classify is not None:
            raise ConfigurationError("@retry(on=…, classify=…): both decide what to retry; use one")
        if budget is not None and not isinstance(budget, Budget | str):
            raise ConfigurationError(
                f"@retry(budget={budget!r}): use a Budget, or the name of the dependency"
            )
        self.policy, self.stop, self.deadline = policy, stop, deadline
        self.budget = Budget.named(budget) if isinstance(budget, str) else budget
        strategies.check_condition(on)
        self._asks_condition = strategies.is_strategy(on, "retry_base")
        self._on: Callable[[Any], Any] | None = _condition(on)
        self._classify = recognise if classify is None else classify
        own = isinstance(policy, RetryPolicy)
        self._keeps_state = not own or stop is not None or self._asks_condition
        self._times = self._keeps_state or deadline is not None
        self._randomness: random.Random = getattr(policy, "randomness", DEFAULT.randomness)

    def describe(self) -> str:
        """Say the policy and the limits."""
        parts = [_policy_text(self.policy)]
        if self.stop is not None:
            parts.append(_name(self.stop))
        if self.deadline is not None:
            parts.append(f"within {self.deadline:g} s")
        if self.budget is not None:
            parts.append(f"budget {self.budget.name or 'of its own'}")
        return ", ".join(parts)

    def hook(self, name: str, *, is_async: bool) -> Callable[..., Any] | None:
        """Leave out the hooks that these settings do not need."""
        if name == "enter" and not self._times and self.budget is None:
            return None
        if name == "leave" and self.deadline is None:
            return None
        return super().hook(name, is_async=is_async)

    def enter(self, call: Call) -> None:
        """Start the clock of the whole call, and count it for the budget."""
        budget = self.budget
        if budget is not None:
            budget.deposit()
        if self._times:
            self._begin(call)

    def inside(self) -> Layer | None:
        """Ask a condition on the result before anything commits what led to it."""
        return Accepting(self) if self._asks_condition else None

    def leave(self, call: Call) -> None:
        """End the time of the call."""
        end(call.notes[self].token)

    def fail(self, call: Call, error: BaseException) -> Again | None:
        """Decide whether the failed attempt is followed by another."""
        progress = call.notes.get(self)
        if progress is None:
            progress = self._begin(call)
        again = None
        if isinstance(error, Refusal) and error is progress.refusal:
            progress.refusal = None
            again = self._schedule(call, progress, None)
            if again is None:
                _finish(progress)
                raise ResultRejected(call.result, call.attempt) from None
        elif isinstance(error, Exception):
            if self._keeps_state:
                strategies.note_outcome(progress.state, call, value=error, has_exception=True)
            if self._is_wanted(call, progress, error):
                again = self._schedule(call, progress, error)
        if again is None:
            _finish(progress)
        return again

    def _begin(self, call: Call) -> Progress:
        progress = call.notes[self] = Progress()
        if self._keeps_state:
            progress.state = strategies.new_state(call)
        if self.deadline is not None:
            seconds = self.deadline
            since = call.failing_since
            if since is not None:  # over all its runs
                left = seconds - max(0.0, call.clock.monotonic() - since)
                progress.is_last = left <= 0
                # One that was taken up too late gets a whole attempt still, its last.
                seconds = seconds if progress.is_last else left
            progress.deadline = within(seconds, call.clock)
            progress.token = begin(progress.deadline)
        return progress

    def refuses(self, call: Call) -> Refusal | None:
        """Return why the result of *call* is not accepted, None if it is."""
        progress: Progress | None = call.notes.get(self)
        state = strategies.new_state(call) if progress is None else progress.state
        strategies.note_outcome(state, call, value=call.result, has_exception=False)
        if self._on is None or not self._on(state):
            return None
        refusal = Refusal()
        if progress is not None:
            progress.refusal = refusal
        return refusal

    def _is_wanted(self, call: Call, progress: Progress, error: Exception) -> bool:
        if self._on is not None:
            own = declared(error)
            if own is not None and own is not Remedy.RETRY:
                return False
            return bool(self._on(progress.state if self._asks_condition else error))
        remedy = self._classify(error)
        if remedy is None:
            remedy = recognise(error)
        if remedy is None:
            return call.attempt < UNKNOWN_ATTEMPTS
        return bool(remedy is Remedy.RETRY)

    def _schedule(self, call: Call, progress: Progress, error: Exception | None) -> Again | None:
        """Return when to try again, None to give up.

        The budget is asked last: a retry that will not happen costs nothing.
        """
        own = self._own_delay(call, progress)
        if own is None:
            return None
        deadline = progress.deadline or current_deadline()
        left = None if deadline is None else deadline.remaining()
        delay = None if progress.is_last else self._at_least_asked(own, error, left, call)
        if delay is None or (left is not None and delay >= left):
            log.warning("no time is left to retry%s: %s", _whose(call), call.told(error))
            return None
        if self.budget is not None and not self.budget.withdraw():
            log.warning("the retry budget %s is spent%s: %s",
                        self.budget.name, _whose(call), call.told(error))  # fmt: skip
            if call.message is None:
                return None
            _finish(progress)
            raise BudgetSpent(self.budget.name) from error
        if log.isEnabledFor(logging.INFO):
            log.info("attempt %d failed%s, next in %.3f s: %s",
                     call.attempt, _whose(call), delay, call.told(error))  # fmt: skip
        progress.previous = own
        call.attempt += 1
        return Again(delay)

    def _own_delay(self, call: Call, progress: Progress) -> float | None:
        if isinstance(self.policy, RetryPolicy):
            seconds = self.policy.delay(call.attempt, progress.previous)
        else:
            seconds = float(self.policy(progress.state))
        if seconds is None or not self._keeps_state:
            return seconds
        return strategies.wait(progress.state, seconds, self.stop)

    def _at_least_asked(
        self, own: float, error: Exception | None, left: float | None, call: Call
    ) -> float | None:
        """Return *own* or the wait the other side asked for, spread a little above it."""
        asked = None if error is None else asked_wait(error, call.clock.now)
        if asked is None:
            return own
        if left is None and call.message is not None and PATIENCE <= asked < LONGEST_ASKED:
            if not call.suspends:
                raise AskedToWait(asked) from error
        elif asked >= (PATIENCE if left is None else left):
            return None
        spread = asked / 4 if left is None else min(asked / 4, (left - asked) / 2)
        return max(own, asked + self._randomness.uniform(0, spread))


class Accepting(Layer):
    """Asks the condition of a retry while the transaction, claim or lease can still be undone."""

    stage: ClassVar[Stage] = Stage.RESULT
    label: ClassVar[str] = "accept"

    def __init__(self, retry: Retry) -> None:
        self._retry = retry

    def leave(self, call: Call) -> None:
        """Fail the attempt whose result is refused."""
        refusal = self._retry.refuses(call)
        if refusal is not None:
            raise refusal


class RetryOptions(TypedDict, total=False):
    """What `@retry` takes beside its policy."""

    stop: strategies.Stop | None
    on: strategies.Condition | None
    budget: Budget | str | None
    deadline: float | None
    classify: Classify | None


@overload
def retry(  # type: ignore[overload-overlap]  # a wait can be called, too: it is asked first
    policy: RetryPolicy | strategies.Wait | None = None, **options: Unpack[RetryOptions]
) -> Retry: ...
@overload
def retry(*, wait: strategies.Wait, **options: Unpack[RetryOptions]) -> Retry: ...
@overload
def retry(function: Callable[P, R], /) -> Handler[P, R]: ...


def retry(
    policy: RetryPolicy | strategies.Wait | Callable[..., Any] | None = None,
    *,
    wait: strategies.Wait | None = None,
    **options: Unpack[RetryOptions],
) -> Retry | Handler[..., Any]:
    """Retry the decorated function after passing failures; with or without parentheses.

    *policy* is a `Backoff`, a tenacity `wait_*` (also as *wait*), or an object with `delay`;
    *stop* a tenacity `stop_*`. *on* narrows what is retried to error types, a predicate or a
    tenacity `retry_*`; *classify* replaces the judgement of errors. *deadline* bounds all
    attempts and waits together, in seconds; those of a message count from its first failure,
    also when it waits outside this process. The time of one attempt is bounded by `@timeout`.
    *budget* is a `Budget`, or the name of a dependency whose budget is shared.
    """
    if is_function(policy):
        return Retry()(policy)
    if wait is not None and policy is not None:
        raise ConfigurationError("@retry(policy, wait=…): both say how long to wait; use one")
    return Retry(cast("RetryPolicy", policy) if wait is None else wait, **options)


def _condition(on: Any) -> Callable[[Any], Any] | None:
    kinds = on if isinstance(on, tuple) else (on,)
    if all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
        return lambda error: isinstance(error, kinds)
    if on is None or (callable(on) and not isinstance(on, type)):
        return on
    raise ConfigurationError(
        f"@retry(on={on!r}): use error types, one or a tuple of them, a predicate of the error, "
        "or a tenacity retry_*"
    )


def _finish(progress: Progress) -> None:
    if progress.token is not None:
        end(progress.token)
        progress.token = None


def _whose(call: Call) -> str:
    return "" if call.message is None else f" for message {call.message.id}"


def _policy_text(policy: object) -> str:
    if not isinstance(policy, Backoff):
        return _name(policy)
    limit = "" if policy.attempts is None else f"up to {policy.attempts} attempts, "
    spread = f"{policy.first:g} s to {policy.ceiling:g} s apart"
    return f"{limit}{spread}, {policy.jitter.value} jitter"


def _name(value: object) -> str:
    return type(value).__name__
