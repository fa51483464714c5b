"""The demo keeps its promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_the_demo_loses_nothing_and_repeats_nothing() -> None:
    """`make demo` exits 0 and says so, although every process was killed several times."""
    done = subprocess.run(
        [sys.executable, DEMO], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost = 0, duplicate effects = 0" in done.stdout
    assert "0 × SIGKILL" not in done.stdout
