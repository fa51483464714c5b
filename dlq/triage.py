"""Triage: what happens next to a dead letter, decided by rules and never by accident.

The built-in rules: what does not decode waits for code; what does not validate waits for
better data; timeouts and lost connections are tried again by themselves, later and later,
a limited number of times; what nobody knows raises an alert.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from holdfast.backoff import Backoff, Jitter
from holdfast.dlq.capture.exceptions import traced
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


log = logging.getLogger("holdfast.dlq")


class TriageVerdict(Enum):
    """What is to be done."""

    CODE = "hold for code"
    DATA = "hold for data"
    RETRY = "retry"
    ALERT = "alert"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a rule sees of a dead letter; never its payload."""

    error_type: str
    error_text: str
    stage: str
    kind: str
    topic: str
    type: str
    consumer_group: str
    handler: str
    tenant: str | None
    retries: int
    """How often it was tried again by itself."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of your own, e.g. `Rule("declined", lambda c: "Declined" in c.error_type, DATA)`."""

    name: str
    matches: Callable[[Case], bool]
    verdict: TriageVerdict

    def __post_init__(self) -> None:
        if not callable(self.matches) or not isinstance(self.verdict, TriageVerdict):
            raise ConfigurationError(
                f"Rule({self.name!r}): give a predicate of the case and a TriageVerdict"
            )


DELAYS = Backoff(first=60.0, ceiling=6 * 3600.0, factor=4.0, attempts=6, jitter=Jitter.EQUAL)
"""After a minute, then 4, 16, 64 minutes, up to 6 hours: five automatic retries."""

_BUGS = ("AttributeError", "ImportError", "IndexError", "KeyError", "ModuleNotFoundError",
         "NameError", "NotImplementedError", "TypeError")  # fmt: skip
_PASSING = ("transient", "timeout", "dependency")


@dataclass(frozen=True, slots=True, kw_only=True)
class Triage:
    """The rules of a store: the user's first, in order, then the built-in ones.

    *delays* says when a retry is due and when to give up; then it is an alert.
    """

    rules: Sequence[Rule] = ()
    delays: Backoff = field(default=DELAYS)

    def verdict(self, case: Case) -> tuple[TriageVerdict, str]:
        """Return what to do about *case*, and the name of the rule that said so."""
        for rule in self.rules:
            try:
                if rule.matches(case):
                    return rule.verdict, rule.name
            except Exception as error:  # noqa: BLE001 - told; the next rule is asked
                log.error("triage rule %r failed and is skipped\n%s", rule.name, traced(error))  # noqa: TRY400
        return built_in(case), "built-in"

    def judge(self, row: dict[str, Any], now: float) -> dict[str, Any]:
        """Return the columns that the verdict on *row* sets."""
        verdict, _ = self.verdict(case_of(row))
        due = None
        if verdict is TriageVerdict.RETRY:
            delay = self.delays.delay(row["retries"] + 1)
            if delay is None:
                verdict = TriageVerdict.ALERT  # it had all its chances
            else:
                due = now + delay
        return {"verdict": verdict.value, "due_at": due}


def built_in(case: Case) -> TriageVerdict:
    """Return what the built-in rules say."""
    if case.stage == "deserialize":
        return TriageVerdict.CODE
    if case.stage == "validate":
        return TriageVerdict.DATA
    if case.stage == "crash":
        return TriageVerdict.CODE
    if case.kind in _PASSING:
        return TriageVerdict.RETRY
    if case.error_type.rpartition(".")[2] in _BUGS:
        return TriageVerdict.CODE
    return TriageVerdict.DATA if case.kind == "poison" else TriageVerdict.ALERT


def case_of(row: dict[str, Any]) -> Case:
    """Return what rules see of *row*."""
    return Case(
        error_type=row["error_type"],
        error_text=row["error_text"],
        stage=row["stage"],
        kind=row["class"],
        topic=row["topic"],
        type=row["type"],
        consumer_group=row["consumer_group"],
        handler=row["handler"],
        tenant=row["tenant"],
        retries=row["retries"],
    )


BUILT_IN = Triage()
