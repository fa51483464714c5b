"""`make bench`: measure every subject beside its peer, print a table, write the results.

A subject is a module `bench_<name>.py` in this folder with `figures() -> Iterable[Figure]`.
`ONLY=core,redis` measures some and keeps the stored figures of the others. One that fails
keeps what it had measured and its older figures, the others go on, and the exit code is 1.

`reasons.json` says why goals are missed: the beginning of a figure's name, and the reason. A
reason goes when its goal is met; the profile beside a figure says where the time goes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

HERE = Path(__file__).parent
Row = dict[str, Any]
UNKNOWN = "Not explained yet; the profile is in the table."


def main() -> int:
    """Measure the chosen subjects and merge their figures into the results."""
    subjects = {path.stem.removeprefix("bench_"): path for path in HERE.glob("bench_*.py")}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help=f"some of: {', '.join(sorted(subjects))}")
    chosen = [name.strip() for name in parser.parse_args().only.split(",") if name.strip()]
    if unknown := [name for name in chosen if name not in subjects]:
        parser.error(f"no subject {', '.join(unknown)}; there are {', '.join(sorted(subjects))}")
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    os.environ["PYTHONPATH"] = str(HERE)  # programs that are started find their neighbours
    wide = None if sys.stdout.isatty() else 150
    bench = Bench(HERE, Console(width=wide))
    for name in chosen or sorted(subjects):
        bench.measure(name, subjects[name])
    return bench.conclude()


class Bench:
    """The stored results in *folder*, and the subjects measured now."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._results, self._report = folder / "results.json", folder / "RESULTS.md"
        self._console = console
        self._rows = _stored(self._results)
        self._failed: list[str] = []

    def measure(self, name: str, path: Path) -> None:
        """Measure one subject; what it yields is stored even if it fails later on."""
        self._console.rule(f"[bold]{name}")
        load, began, fresh = os.getloadavg()[0], time.monotonic(), {}
        try:
            for figure in _load(name, path).figures():
                row = {"subject": name, **asdict(figure), "load": round(load, 1)}
                fresh[figure.name] = row
                self._console.print(_line(row))
        except Exception:  # noqa: BLE001 - one subject's trouble is not the others'
            self._failed.append(name)
            self._console.print(traceback.format_exc(), markup=False)
        else:  # what it no longer measures goes
            self._rows = [row for row in self._rows if row.get("subject") != name]
        self._rows = [row for row in self._rows if row["name"] not in fresh] + [*fresh.values()]
        self._rows.sort(key=lambda row: (row.get("subject", ""), row["name"]))
        self._store()
        took = time.monotonic() - began
        after = os.getloadavg()[0]
        self._console.print(f"  [dim]{took:.0f} s, load {load:.1f} before and {after:.1f} after[/]")

    def conclude(self) -> int:
        """Print everything; return 1 if a subject failed."""
        self._console.print(_table(self._rows))
        for name in self._failed:
            self._console.print(f"[red]{name} failed[/]: its older figures are kept")
        return 1 if self._failed else 0

    def _store(self) -> None:
        self._results.write_text(json.dumps(self._rows, indent=2, ensure_ascii=False) + "\n")
        self._report.write_text(report(self._rows))


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return *rows* as the Markdown report."""
    lines = [
        "# Measured results",
        "",
        "Written by `make bench` from `results.json`. Ours and the peer are measured alternately",
        "in one run on a small shared machine: read the ratio, not the absolute figures. The load",
        "is the machine's, when the subject began.",
        "",
        "| subject | what | ours | peer | unit | ratio | goal | met | load | detail |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {' | '.join(cell.replace('|', '&#124;') for cell in _cells(row))} |" for row in rows
    ]
    return "\n".join([*lines, *missed(rows)]) + "\n"


def missed(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines about the *rows* that miss their goals, by reason; none if all are met."""
    reasons: dict[str, str] = json.loads((HERE / "reasons.json").read_text())
    groups: dict[str, list[str]] = {}
    for row in rows:
        if not row["met"]:
            name = row["name"]
            why = next((why for start, why in reasons.items() if name.startswith(start)), UNKNOWN)
            told = f"- {name}: {row['ratio']:.3g} (goal {row['goal']})"
            groups.setdefault(why, []).append(told)
    if groups:
        yield from ("", "## Goals that are missed, and why")
    for why, lines in groups.items():
        yield from ("", why, "", *lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row.get("subject", ""), row["name"], _number(row["ours"]), _number(row["peer"]),
        row["unit"], f"{row['ratio']:.3g}", row["goal"], "yes" if row["met"] else "**no**",
        str(row.get("load", "")), row["detail"],
    ]  # fmt: skip


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.4g}"


def _stored(path: Path) -> list[Row]:
    rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    return rows


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_{name}", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up there
    spec.loader.exec_module(module)
    return module


def _line(row: Row) -> str:
    mark = "[green]met[/]" if row["met"] else "[red]missed[/]"
    return (
        f"  {row['name']}: {_number(row['ours'])} against {_number(row['peer'])} {row['unit']}, "
        f"ratio {row['ratio']:.3g} (goal {row['goal']}) {mark}"
    )


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="Holdfast against peers and raw floors")
    for column in ("subject", "what", "ours", "peer", "unit", "ratio", "goal", "met", "load"):
        table.add_column(column)
    for row in rows:
        *cells, _detail = _cells(row)
        cells[7] = "[green]yes[/]" if row["met"] else "[red]no[/]"
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
