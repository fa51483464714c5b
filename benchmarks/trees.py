"""What a process and everything that it started has cost: a JVM ends after its parent, unwaited."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def _tree(pid: int) -> Iterator[int]:
    """Yield *pid* and everything that it started."""
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        yield one
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
        except (OSError, ValueError):
            continue  # it has ended


def memory(pid: int) -> float:
    """Return the MB of *pid* and everything that it started."""
    total = 0
    for one in _tree(pid):
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * 4096
        except (OSError, ValueError):
            continue
    return total / 1_000_000


def cpu(pid: int) -> float:
    """Return the CPU-seconds of *pid* and everything that it started, ended or not."""
    total = 0
    for one in _tree(pid):
        try:
            after_name = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, after_name[11:15]))
        except (OSError, ValueError):
            continue
    return total / os.sysconf("SC_CLK_TCK")
