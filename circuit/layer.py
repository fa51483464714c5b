"""The circuit layer: asks the breaker before an attempt, tells it how the attempt went."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

from holdfast.call import Call, Refusal, Stage
from holdfast.circuit.policy import CircuitPolicy
from holdfast.circuit.registry import BREAKERS
from holdfast.classification import Classify, check_classify, recognise
from holdfast.clock import current_deadline
from holdfast.errors import CircuitOpen, ConfigurationError, Remedy
from holdfast.layer import Layer

if TYPE_CHECKING:
    from holdfast.circuit.breaker import Breaker

INNOCENT = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
"""Errors that, unless a rule knows better, speak of this program or its data."""


class Circuit(Layer):
    """Makes no attempt while the dependency is known to be down.

    An open circuit raises `CircuitOpen`, which is no attempt and nobody's fault. What
    counts against the dependency is decided by the error's remedy: RETRY and PAUSE do,
    DEAD_LETTER and FIX do not, for bad data is no outage. Where nothing is known, errors
    of Python's own that speak of bugs and bad values do not count, all others do. A
    duplicate, a cancelled task and another open circuit say nothing, and return a
    half-open permit unused; an attempt cut short by its `@timeout` is a failure.
    """

    stage: ClassVar[Stage] = Stage.BREAKER
    label: ClassVar[str] = "@circuit"

    def __init__(self, breaker: Breaker, *, classify: Classify | None = None) -> None:
        self.breaker = breaker
        self._classify = recognise if classify is None else classify

    @property
    def dependency(self) -> str:
        """The name of what is called inside."""
        return self.breaker.name

    def describe(self) -> str:
        """Say the dependency."""
        return self.breaker.name

    def enter(self, call: Call) -> None:
        """Ask for a permit."""
        standing = self.breaker.standing
        call.notes[self] = self.breaker.admit() if standing is None else standing

    def leave(self, call: Call) -> None:
        """Report a success; a duplicate made no call, so it reports nothing."""
        breaker, permit = self.breaker, call.notes[self]
        if call.duplicate:
            breaker.give_back(permit)
        elif not breaker.is_steady or permit is not breaker.standing:
            breaker.succeeded(permit)

    def fail(self, call: Call, error: BaseException) -> None:
        """Report a failure, if it is the dependency's; an answer that is refused is an answer."""
        if isinstance(error, Refusal):
            self.breaker.succeeded(call.notes[self])
        elif not call.duplicate and self.blames(error):
            self.breaker.failed(call.notes[self], error)
        else:
            self.breaker.give_back(call.notes[self])

    def blames(self, error: BaseException) -> bool:
        """Whether *error* counts against the dependency."""
        if isinstance(error, CircuitOpen | Refusal):
            return False
        if isinstance(error, asyncio.CancelledError):
            deadline = current_deadline()
            return deadline is not None and deadline.is_over()
        if not isinstance(error, Exception):
            return False
        if self._remedy(error) is None:
            return not isinstance(error, INNOCENT)
        return self.is_passing(error)

    def is_passing(self, error: BaseException) -> bool:
        """Whether *error* is known to be one that passes: no guess, as `blames` may be."""
        return self._remedy(error) in (Remedy.RETRY, Remedy.PAUSE)

    def _remedy(self, error: BaseException) -> Remedy | None:
        remedy: Remedy | None = self._classify(error)
        return recognise(error) if remedy is None else remedy


def circuit(
    name: str,
    *,
    policy: CircuitPolicy | None = None,
    breaker: Breaker | None = None,
    classify: Classify | None = None,
) -> Circuit:
    """Guard the decorated function by the breaker of dependency *name*.

    Functions that name the same dependency share one breaker. Pass *breaker* to keep one
    apart, *classify* to judge by yourself which errors are the dependency's.
    """
    if not isinstance(name, str) or not name:
        raise ConfigurationError(
            f"@circuit({name!r}): name the dependency, e.g. @circuit('payment-gateway')"
        )
    check_classify(classify, "@circuit")
    if policy is not None and not isinstance(policy, CircuitPolicy):
        raise ConfigurationError(
            f"@circuit(policy={policy!r}): pass a CircuitPolicy, e.g. "
            "CircuitPolicy(failure_rate=0.5, minimum_calls=10)"
        )
    if breaker is None:
        breaker = BREAKERS.get(name, policy)
    elif policy is not None or breaker.name != name:
        raise ConfigurationError(
            f"@circuit({name!r}, breaker={breaker.name!r}): a breaker has its own name and policy"
        )
    return Circuit(breaker, classify=classify)
