"""Every example runs as printed, and shows what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str) -> str:
    """Run an example and return what it printed."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_outbox_example_keeps_order_through_a_parked_key() -> None:
    """The cured event comes before the one that waited, and the rolled-back one never."""
    lines = run("outbox_sqlite.py").splitlines()
    assert lines == [
        "published: 2",
        "arrived: [('ada', 'gift wrap'), ('bob', 'no hurry')]",
        "parked: orders/ada, 1 refused, 1 behind",
        "published: 2",
        "arrived: [('ada', 'shortened'), ('ada', 'by noon')]",
        "audit: ['release', 'edit']",
    ]
