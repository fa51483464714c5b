"""One namespace from root folders, complete and light."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
NEEDS_A_DRIVER = {
    "holdfast.brokers.kafka.confluent",
    "holdfast.brokers.kafka.pure",
    "holdfast.testing.conformance",
}
"""Private halves that their package loads once the driver, or pytest, is there."""
OUTSIDE = {"tests", "examples", "docs", "benchmarks", "build", "deploy"}


def test_every_package_folder_is_declared() -> None:
    """A folder with an __init__ that is not in pyproject.toml would not be installed."""
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("__init__.py")
        if not OUTSIDE & set(path.relative_to(ROOT).parts)
        and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    }
    tools = SETTINGS["tool"]["setuptools"]
    assert set(tools["package-dir"].values()) == folders
    assert set(tools["package-dir"]) == set(tools["packages"])


def test_no_driver_is_imported_by_the_base_package() -> None:
    """Importing Holdfast and every subpackage works without any extra."""
    packages = SETTINGS["tool"]["setuptools"]["packages"]
    code = (
        "import importlib, sys\n"
        "blocked = ['psycopg', 'pymysql', 'kafka', 'confluent_kafka', 'pika', 'redis', 'nats',"
        " 'pyspark', 'starlette', 'pydantic', 'pytest']\n"
        "for name in blocked: sys.modules[name] = None\n"
        f"for name in {[p for p in packages if p not in NEEDS_A_DRIVER]!r}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
