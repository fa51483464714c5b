"""The packed environment of `make spark-dist` runs where it was unpacked."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.chaos
@pytest.mark.timeout(1800)  # it installs packages
def test_the_packed_environment_has_what_executors_need_and_runs_elsewhere(tmp_path: Path) -> None:
    """Unpacked in another folder, its Python finds Holdfast, Arrow and pandas in itself."""
    sys.path.insert(0, str(ROOT / "deploy/spark"))
    try:
        from build import ENVIRONMENT, build, pack  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    built = build(tmp_path / "dist")
    packed = pack(next(one for one in built if one.suffix == ".whl"), extras="parquet")
    assert packed == tmp_path / "dist" / ENVIRONMENT
    place = tmp_path / "node/env"
    place.mkdir(parents=True)
    with tarfile.open(packed) as file:
        # Ours, and its interpreter is a link to elsewhere.
        file.extractall(place, filter="fully_trusted")  # noqa: S202
    asked = "import holdfast.spark_jobs.records as r, pandas, pyarrow; print(r.__file__)"
    done = subprocess.run(
        [str(place / "bin/python"), "-c", asked], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(place))
    missing = subprocess.run(
        [str(place / "bin/python"), "-c", "import pyspark"], capture_output=True, check=False
    )
    assert missing.returncode == 1  # it is part of the cluster
