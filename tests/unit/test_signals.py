"""Signals end a program whatever its main thread is doing."""

from __future__ import annotations

import signal
import subprocess
import sys

HEARD = """
import os, signal, threading
from holdfast.signals import signals_heard

event = threading.Event()
with signals_heard(lambda number: event.set()):
    with event._cond:  # as inside event.wait(), which every idle loop of ours calls
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(100_000))  # a handler in this thread would run by now, and wait for ever
    assert event.wait(60)
print("heard")
os.kill(os.getpid(), signal.SIGTERM)
sum(range(100_000))
"""


def test_a_signal_is_heard_while_the_main_thread_holds_what_it_waits_for() -> None:
    """And afterwards the signals mean what they meant before."""
    done = subprocess.run(
        [sys.executable, "-c", HEARD], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "heard", done.stderr
    assert done.returncode == -signal.SIGTERM
