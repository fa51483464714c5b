"""Builds what a cluster needs into dist/spark: the wheel, a zip for --py-files, and the job file.

Run it with `make spark-dist`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build(to: Path) -> list[Path]:
    """Build into the folder *to* and return what is there then; older builds are replaced."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        # From a copy: setuptools would leave its own build folder beside the sources.
        copy = Path(scratch) / "source"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", ".*_cache")
        shutil.copytree(ROOT, copy, ignore=ignored)
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, str(copy), "-w", str(to)], check=True)
    (wheel,) = to.glob("*.whl")
    # A wheel is a zip with the packages at its root: Spark wants the other name.
    shutil.copy(wheel, to / f"{'-'.join(wheel.name.split('-')[:2])}.zip")
    shutil.copy(Path(__file__).parent / "holdfast_job.py", to)
    return sorted(to.iterdir())


if __name__ == "__main__":
    for path in build(ROOT / "dist/spark"):
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
