"""`make bench` keeps what it measured, whatever else happens."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

if TYPE_CHECKING:
    from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SUBJECT = """
from figures import Figure

def figures():
    for name in {names}:
        yield Figure(name=name, ours=2.0, peer=1.0, unit="x", ratio={ratio}, goal="≥ 1",
                     met=True, detail="a | b")
    {end}
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the script that `make bench` runs."""
    # A subject that is written twice in a second would be taken for its compiled former self.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("bench_run", BENCHMARKS / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_run", module)
    spec.loader.exec_module(module)
    return module


def subject(folder: Path, name: str, *names: str, ratio: float = 2.0, end: str = "pass") -> Path:
    path = folder / f"bench_{name}.py"
    path.write_text(SUBJECT.format(names=list(names), ratio=ratio, end=end))
    return path


def bench(run: ModuleType, folder: Path) -> Any:
    return run.Bench(folder, Console(file=io.StringIO()))


def stored(folder: Path) -> dict[str, float]:
    return {row["name"]: row["ratio"] for row in json.loads((folder / "results.json").read_text())}


def test_measuring_one_subject_keeps_the_figures_of_the_others(
    run: ModuleType, tmp_path: Path
) -> None:
    """What the subject no longer measures goes; what it measures is replaced."""
    first = bench(run, tmp_path)
    first.measure("a", subject(tmp_path, "a", "a1", "a2"))
    first.measure("b", subject(tmp_path, "b", "b1"))
    second = bench(run, tmp_path)
    second.measure("a", subject(tmp_path, "a", "a2", "a3", ratio=3.0))
    assert stored(tmp_path) == {"a2": 3.0, "a3": 3.0, "b1": 2.0}
    assert second.conclude() == 0


def test_a_subject_that_fails_loses_nothing(run: ModuleType, tmp_path: Path) -> None:
    """Its older figures stay, the new ones count, the others go on, and the end says so."""
    bench(run, tmp_path).measure("a", subject(tmp_path, "a", "a1", "a2"))
    second = bench(run, tmp_path)
    second.measure("a", subject(tmp_path, "a", "a1", ratio=3.0, end="raise OSError('no server')"))
    second.measure("b", subject(tmp_path, "b", "b1"))
    assert stored(tmp_path) == {"a1": 3.0, "a2": 2.0, "b1": 2.0}
    assert second.conclude() == 1


def test_the_report_is_what_is_stored(run: ModuleType, tmp_path: Path) -> None:
    """One line per figure, and a detail cannot break the table."""
    bench(run, tmp_path).measure("a", subject(tmp_path, "a", "a1"))
    [line] = [x for x in (tmp_path / "RESULTS.md").read_text().splitlines() if "a1" in x]
    assert line.count("|") == 11
    assert "a &#124; b" in line


def test_the_committed_results_have_every_field(run: ModuleType) -> None:
    """Other programs read them; the report is rendered from them."""
    rows = json.loads((BENCHMARKS / "results.json").read_text())
    for row in rows:
        assert {"name", "ours", "peer", "unit", "ratio", "goal", "met", "detail"} <= set(row)
        assert row["name"] in run.report([row])


def test_a_goal_that_is_missed_is_told_with_its_reason(run: ModuleType) -> None:
    """The committed results have a reason for each of theirs, and what is met has none."""
    rows = json.loads((BENCHMARKS / "results.json").read_text())
    _, _, told = run.report(rows).partition("## Goals that are missed")
    for row in rows:
        assert (f"- {row['name']}: " in told) == (not row["met"]), row["name"]
    assert run.UNKNOWN not in told
    assert "Goals that are missed" not in run.report([row for row in rows if row["met"]])
