"""Signals to programs that have just been started.

A signal that comes before its handler ends a process with the signal's number, and a test that
asserts a clean end fails on a busy machine.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.testing import wait_until

if TYPE_CHECKING:
    import subprocess


def hears(pid: int, number: signal.Signals = signal.SIGTERM) -> bool:
    """Whether process *pid* has a handler of its own for the signal, as the kernel knows it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def wait_until_heard(
    process: subprocess.Popen[bytes] | subprocess.Popen[str],
    number: signal.Signals = signal.SIGTERM,
) -> None:
    """Return once *process* would hear the signal, or has ended."""
    wait_until(
        lambda: process.poll() is not None or hears(process.pid, number),
        deadline=90,
        what=f"it hears {number.name}",
    )
