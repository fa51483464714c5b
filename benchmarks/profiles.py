"""Where the time of a missed goal goes: a profile beside the figure."""

from __future__ import annotations

import cProfile
import pstats
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from figures import Figure

_LINES = 8
_COLLECT = ("~", 0, "<built-in method gc.collect>")


def explained(figure: Figure, work: Callable[[], object]) -> Figure:
    """Return *figure*; with a profile of *work* in its detail if the goal was missed."""

    def profile() -> str:
        profiler = cProfile.Profile()
        profiler.runcall(work)
        return f"profile of the main thread: {top(profiler)}"

    return told(figure, profile)


def told(figure: Figure, why: Callable[[], str]) -> Figure:
    """Return *figure*; with what *why* tells in its detail if the goal was missed."""
    return figure if figure.met else replace(figure, detail=f"{figure.detail}; {why()}")


def top(profile: cProfile.Profile | str) -> str:
    """Return the functions that took the most time of their own, in one line.

    A text is the name of a file that another process has left its profile in.
    """
    found = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    # The benches collect garbage before they look at the clock: no part of what they measure.
    stats = {place: row for place, row in found.items() if place != _COLLECT}
    total = sum(own for _, _, own, _, _ in stats.values()) or 1.0
    rows = sorted(stats.items(), key=lambda item: item[1][2], reverse=True)[:_LINES]
    return ", ".join(
        f"{100 * own / total:.0f} % {Path(file).name}:{name}"
        for (file, _, name), (_, _, own, _, _) in rows
    )


@contextmanager
def profiled(file: str) -> Iterator[None]:
    """Leave in *file* where the CPU of the threads that begin and end meanwhile went."""
    found: list[cProfile.Profile] = []
    run = threading.Thread.run

    def watched(thread: threading.Thread) -> None:
        profiler = cProfile.Profile(time.thread_time)
        found.append(profiler)
        profiler.runcall(run, thread)

    mine = cProfile.Profile(time.thread_time)
    found.append(mine)
    threading.Thread.run = watched  # type: ignore[method-assign]
    mine.enable()
    try:
        yield
    finally:
        mine.disable()
        threading.Thread.run = run  # type: ignore[method-assign]
        stats = pstats.Stats(mine)
        for one in found[1:]:
            one.create_stats()
            if one.stats:
                stats.add(one)
        stats.dump_stats(file)
