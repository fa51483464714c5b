"""Triage of generated dead letters: rows a second, CPU-seconds and memory, beside hand-written.

`HOLDFAST_BENCH_RECORDS` sets the size, 5,000,000 unless given; the line of growth goes from a
fifth of it to four times it. Every side runs in a process of its own, JVM and workers included.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from figures import Figure, Goal
from holdfast.spark_jobs.generator import Recipe, generate

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDS = int(os.environ.get("HOLDFAST_BENCH_RECORDS", "5000000"))
HERE = Path(__file__).parent
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one run cost."""

    records: int
    seconds: float
    cpu: float
    peak_mb: float
    groups: int

    @property
    def rate(self) -> float:
        """Records a second, from the start of the process to its end."""
        return self.records / self.seconds

    def __str__(self) -> str:
        return f"{self.rate:,.0f}/s, {self.cpu:.1f} CPU-s, {self.peak_mb:,.0f} MB"


def figures() -> Iterator[Figure]:
    """Measure every side at the main size, and ours at the small and the large one."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        main = made(Path(folder) / "main", RECORDS)
        names = ("ours_duckdb", "plain_duckdb", "plain_polars", "ours_spark", "plain_spark")
        sides = {name: measured(name, main, RECORDS) for name in names}
        for ours, peer in (("ours_duckdb", "plain_duckdb"), ("ours_duckdb", "plain_polars"),
                           ("ours_spark", "plain_spark")):  # fmt: skip
            yield cost(f"triage CPU of {RECORDS:,}: {ours} / {peer}", sides[ours], sides[peer])
        small = made(Path(folder) / "small", RECORDS // 5)
        large = made(Path(folder) / "large", RECORDS * 4)
        for name in ("ours_duckdb", "ours_spark"):
            one = measured(name, small, RECORDS // 5)
            many = measured(name, large, RECORDS * 4)
            yield growth(name, one, many)


def made(folder: Path, records: int) -> Path:
    """Return the letters of a generated folder."""
    return generate(folder, Recipe(records=records, entities=200_000, unknown_share=0.01)).letters


def measured(side: str, letters: Path, records: int) -> Measured:
    """Run *side* in a process of its own and look at all of its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    command = [sys.executable, str(HERE / "spark_peers.py"), side, str(letters)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, _memory(process.pid))
        time.sleep(_LOOK_SECONDS)
    seconds = time.monotonic() - began
    assert process.stdout is not None
    said = process.stdout.read()
    process.stdout.close()
    assert process.returncode == 0, side
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = json.loads(said.splitlines()[-1])
    run = Measured(records=records, seconds=seconds, cpu=cpu, peak_mb=peak, groups=found["groups"])
    print(f"  {side} {records:,}: {run}, {run.groups:,} groups")
    return run


def _memory(pid: int) -> float:
    """Return the MB of *pid* and everything that it started."""
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * 4096
            for task in Path(f"/proc/{one}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
        except (OSError, ValueError):
            continue
    return total / 1_000_000


def cost(name: str, ours: Measured, peer: Measured) -> Figure:
    """Compare CPU-seconds: wall time says more about the neighbours."""
    ratio, goal = ours.cpu / peer.cpu, Goal(at_most=1.2)
    return Figure(
        name=name, ours=ours.cpu, peer=peer.cpu, unit="CPU-s", ratio=ratio, goal=str(goal),
        met=goal.met(ratio), detail=f"ours {ours}; by hand {peer}",
    )  # fmt: skip


def growth(name: str, small: Measured, large: Measured) -> Figure:
    """Compare the cost of a record in many with that in few: 1 is linear, below is better."""
    goal = Goal(at_most=1.2)
    ours, peer = (1e6 * run.cpu / run.records for run in (large, small))
    return Figure(
        name=f"{name}: a record of {large.records:,} / of {small.records:,}", ours=ours, peer=peer,
        unit="CPU-µs", ratio=ours / peer, goal=str(goal), met=goal.met(ours / peer),
        detail=f"memory {small.peak_mb:,.0f} MB → {large.peak_mb:,.0f} MB",
    )  # fmt: skip
