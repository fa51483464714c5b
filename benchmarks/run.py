"""`make bench`: measure every subject beside its peer, print a table, write the results.

A subject is a module `bench_<name>.py` in this folder with `figures() -> Iterable[Figure]`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from types import ModuleType

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
REPORT = HERE / "RESULTS.md"


def main() -> int:
    """Run the chosen subjects and merge their figures into the results."""
    subjects = {path.stem.removeprefix("bench_"): path for path in HERE.glob("bench_*.py")}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(subjects), help="measure one subject")
    chosen = parser.parse_args().only
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    console = Console()
    results = {row["name"]: row for row in _stored()}
    for name in [chosen] if chosen else sorted(subjects):
        console.rule(f"[bold]{name}")
        for figure in _load(name, subjects[name]).figures():
            row = {"subject": name, **asdict(figure)}
            results[figure.name] = row
            console.print(_line(row))
    rows = sorted(results.values(), key=lambda row: (row.get("subject", ""), row["name"]))
    RESULTS.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    REPORT.write_text(report(rows))
    console.print(_table(rows))
    return 0


def report(rows: list[dict[str, Any]]) -> str:
    """Return *rows* as the Markdown report."""
    lines = [
        "# Measured results",
        "",
        "Written by `make bench` from `results.json`. Ours and the peer are measured alternately",
        "in one run on a small shared machine: read the ratio, not the absolute figures.",
        "",
        "| subject | what | ours | peer | unit | ratio | goal | met | detail |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.get('subject', '')} | {r['name']} | {r['ours']:,.4g} | {r['peer']:,.4g} "
        f"| {r['unit']} | {r['ratio']:.3g} | {r['goal']} | {'yes' if r['met'] else '**no**'} "
        f"| {r['detail']} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def _stored() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return rows


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_{name}", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _line(row: dict[str, Any]) -> str:
    mark = "[green]met[/]" if row["met"] else "[red]missed[/]"
    return (
        f"  {row['name']}: {row['ours']:,.4g} against {row['peer']:,.4g} {row['unit']}, "
        f"ratio {row['ratio']:.3g} (goal {row['goal']}) {mark}"
    )


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Holdfast against peers and raw floors")
    for column in ("subject", "what", "ours", "peer", "unit", "ratio", "goal", "met"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row.get("subject", ""),
            row["name"],
            f"{row['ours']:,.4g}",
            f"{row['peer']:,.4g}",
            row["unit"],
            f"{row['ratio']:.3g}",
            row["goal"],
            "[green]yes[/]" if row["met"] else "[red]no[/]",
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
