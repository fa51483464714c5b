"""How far long work is, on a terminal: bars with the time left; elsewhere nothing."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.cli.display import err
from holdfast.dlq.replay.item_state import ItemState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.dlq.replay.plan import PlanCounts, ReplayPlan


@contextmanager
def shown_replay(total: int) -> Iterator[Callable[[ReplayPlan, PlanCounts], None]]:
    """Yield an observer of a replay; what was confirmed counts, not what was sent."""
    if not err.is_terminal:
        yield lambda _plan, _counts: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.fields[state]:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("sent {task.fields[sent]:,}  failed again {task.fields[failed]:,}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("replay", total=total, state="draft", sent=0, failed=0)

        def observe(plan: ReplayPlan, counts: PlanCounts) -> None:
            progress.update(
                task,
                completed=counts[ItemState.CONFIRMED] + counts[ItemState.FAILED_AGAIN],
                state=plan.state.value,
                sent=counts.published,
                failed=counts[ItemState.FAILED_AGAIN],
            )

        yield observe


@contextmanager
def shown_work(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told how many are done; *total* is None where nobody knows."""
    if not err.is_terminal:
        yield lambda _done: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    of = "" if total is None else f" of {total:,}"
    columns = (BarColumn(), TextColumn("{task.completed:,.0f}" + f"{of} {what}"))
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)
