"""One namespace from root folders, complete and light."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
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
