"""How far a drain is: a bar on a terminal, a line in the log now and then elsewhere."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from holdfast.cli.display import err
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.findings import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Task

    from holdfast.outbox import RelayStep


log = logging.getLogger("holdfast.cli")

_EVERY_SECONDS, _BACKLOG = 10.0, 10_000


class DrainLog:
    """An observer of steps that logs rate and remaining time while a backlog is drained.

    A backlog is what has 10,000 events or more; *waiting* counts them, once in ten seconds.
    """

    def __init__(self, waiting: Callable[[], int], *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._waiting = waiting
        self._clock = clock
        self._since = clock.monotonic()
        self._moved = 0
        self._is_draining = False

    def __call__(self, step: RelayStep) -> None:
        """Note what *step* moved, and say so if it is time."""
        self._moved += step.published + step.parked
        now = self._clock.monotonic()
        if now - self._since < _EVERY_SECONDS:
            return
        rate, left = self._moved / (now - self._since), self._waiting() if self._moved else 0
        self._since, self._moved = now, 0
        was_draining, self._is_draining = self._is_draining, left >= _BACKLOG
        if self._is_draining:
            log.info(
                "draining a backlog: %s events wait, %s/s, %s left at that rate",
                f"{left:,}", f"{rate:,.0f}", duration(left / rate),
                extra={"waiting": left, "rate": round(rate), "seconds": round(left / rate)},
            )  # fmt: skip
        elif was_draining:
            log.info("the backlog is drained: %s events wait", f"{left:,}")


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Show events per second."""
        return Text("" if task.speed is None else f"{task.speed:,.0f}/s")


@contextmanager
def shown_progress(total: Callable[[], int]) -> Iterator[Callable[[RelayStep], None]]:
    """Yield an observer of steps that draws a bar on a terminal, and logs elsewhere."""
    if not err.is_terminal:
        yield DrainLog(total)
        return
    columns = (TextColumn("publishing"), BarColumn(), MofNCompleteColumn(), _Rate(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("publishing", total=total())
        yield lambda step: progress.advance(task, step.published + step.parked)
