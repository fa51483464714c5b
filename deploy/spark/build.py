"""Builds what a cluster needs into dist/spark: wheel, zip for --py-files, job file, environment.

Run it with `make spark-dist`. `EXTRAS=kafka,postgres` says for which clients the packed environment
has room; without it, for those of all brokers and databases that jobs reach.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = "holdfast-env.tar.gz"
EXTRAS = "postgres,mysql,kafka,rabbitmq,redis,nats,crypto,parquet"
BESIDES = ("pandas>=2.2,<3",)
"""What PySpark wants on executors; PySpark itself is part of the cluster."""


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


def pack(wheel: Path, *, extras: str = EXTRAS) -> Path:
    """Pack an environment with *wheel* and what its *extras* need beside it, for `--archives`.

    Its interpreter is a link to this one: nodes need the same Python at the same path.
    """
    import venv_pack  # type: ignore[import-untyped]

    packed = wheel.parent / ENVIRONMENT
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "env"
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        python = place / "bin/python"
        wanted = [f"{wheel}[{extras}]" if extras else str(wheel), *BESIDES]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *wanted], check=True)
        # Nobody installs anything on an executor.
        subprocess.run([str(python), "-m", "pip", "uninstall", "-qy", "pip", "setuptools"],
                       check=True)  # fmt: skip
        venv_pack.pack(prefix=str(place), output=str(packed), force=True)
    return packed


if __name__ == "__main__":
    built = build(ROOT / "dist/spark")
    pack(next(one for one in built if one.suffix == ".whl"),
         extras=os.environ.get("EXTRAS", EXTRAS))  # fmt: skip
    for path in sorted((ROOT / "dist/spark").iterdir()):
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
