"""Looks in bounded time: none takes longer than it may, and none is able to spoil the others.

A look that raises, or that does not come back in time, is a finding of its own: unseen. Looks run
in threads that are left behind when they hang; they only read.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.errors import is_wrong
from holdfast.errors import DependencyDown, HoldfastError, Transient
from holdfast.findings import Finding, Look, Severity, duration
from holdfast.scrubbing import text_of, told
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Sequence

_AT_ONCE = 4  # connections that a look at the whole may take from the database


class Looking:
    """Looks that run at once, a few at a time, in threads that nobody waits for too long."""

    def __init__(self, looks: Sequence[Look], clock: Clock = SYSTEM_CLOCK) -> None:
        self._looks = looks
        self._clock = clock
        self._turns = threading.Semaphore(_AT_ONCE)
        self._results: list[list[Finding] | Exception | None] = [None] * len(looks)
        self._done = [threading.Event() for _ in looks]
        for place in range(len(looks)):
            name = f"holdfast-look-{looks[place].check}"
            threading.Thread(target=self._run, args=(place,), name=name, daemon=True).start()

    def _run(self, place: int) -> None:
        with self._turns:
            try:
                self._results[place] = list(self._looks[place].run())
            except Exception as error:  # noqa: BLE001 - told as a finding: none spoils the others
                self._results[place] = error
            self._done[place].set()

    def findings(self, seconds: float, *, down: str | None = None) -> list[Finding]:
        """Return what was found within *seconds*, and what was not.

        With *down* a look that fails means that nobody answers, and that is the fix.
        """
        until = self._clock.monotonic() + seconds
        found: list[Finding] = []
        for place, look in enumerate(self._looks):
            self._done[place].wait(max(0.0, until - self._clock.monotonic()))
            result = self._results[place]
            if isinstance(result, list):
                found += result
            elif down is None:
                found.append(_unseen(look.check, result, seconds))
            elif result is not None and _is_wrong(result):
                raise result
            else:
                found.append(_down(look.check, result, seconds, down))
        return found


def _is_wrong(error: Exception) -> bool:
    """Whether the settings are wrong, which no waiting mends."""
    if isinstance(error, HoldfastError):
        return not isinstance(error, DependencyDown | Transient)
    return is_wrong(error)


def _unseen(check: str, error: Exception | None, seconds: float) -> Finding:
    late = f"it did not come to an end within {duration(seconds)}"
    return Finding(
        check=check,
        severity=Severity.UNSEEN,
        text=f"could not be looked at: {late if error is None else _words(error)}",
        fix="look again with more time:  --within 30s"
        if error is None
        else "use a user of the database that may read it, e.g. one that is granted pg_monitor"
        if isinstance(error, DBAPIError)
        else "see what it says, and look again",
    )


def _down(check: str, error: Exception | None, seconds: float, fix: str) -> Finding:
    late = f"no answer within {duration(seconds)}"
    return Finding(
        check=check,
        severity=Severity.DOWN,
        text=f"the {check} does not answer: {late if error is None else _words(error)}",
        fix=fix,
    )


def _words(error: Exception) -> str:
    if isinstance(error, DBAPIError) and error.orig is not None:
        return " ".join(mask(str(error.orig)).split())
    return " ".join((text_of if isinstance(error, HoldfastError) else told)(error).split())
