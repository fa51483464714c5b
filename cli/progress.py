"""How far a drain is, on a terminal."""

from __future__ import annotations

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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Task

    from holdfast.outbox import Step


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Show events per second."""
        return Text("" if task.speed is None else f"{task.speed:,.0f}/s")


@contextmanager
def shown_progress(total: Callable[[], int]) -> Iterator[Callable[[Step], None]]:
    """Yield an observer of steps that draws a bar on a terminal, and does nothing elsewhere."""
    if not err.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("publishing"), BarColumn(), MofNCompleteColumn(), _Rate(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("publishing", total=total())
        yield lambda step: progress.advance(task, step.published + step.parked)
