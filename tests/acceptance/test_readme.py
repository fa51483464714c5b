"""The README's quickstart does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    """Return the README's fenced blocks of *language*."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )


def test_the_quickstart_runs_as_printed(tmp_path: Path) -> None:
    """A newcomer who copies files and commands sees the printed output."""
    for code in blocks("python"):
        name = re.match(r"# (\w+\.py)\n", code)
        assert name, "each Python block starts with its file name"
        (tmp_path / name[1]).write_text(code)
    (session,) = blocks("console")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for step in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", session, re.MULTILINE):
        command, expected = step
        done = subprocess.run(
            command.split(),
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == expected


def test_the_two_commands_of_the_readme_exist() -> None:
    """`make demo` and `make test` are targets."""
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
        assert f"make {target}" in (ROOT / "README.md").read_text()
