"""Signals end a program whatever its main thread is doing."""

from __future__ import annotations

import signal
import subprocess
import sys

HEARD = """
import os, signal, threading
from holdfast.concurrency import signals_heard

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


TWICE = """
import os, signal, threading, time
from holdfast.concurrency import MOMENT, signals_heard
from holdfast.testing import VirtualClock

heard, clock = [], VirtualClock()
with signals_heard(heard.append, clock=clock):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
        sum(range(100_000))
    while not heard:
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    sum(range(100_000))
    assert len(heard) == 1, heard
    until = time.monotonic() + 60
    while len(heard) < 2 and time.monotonic() < until:
        clock.advance(MOMENT)
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(100_000))
print("insisted" if len(heard) > 1 else heard)
"""


def test_a_signal_that_follows_within_a_moment_is_the_same_wish() -> None:
    """Only one that comes later insists."""
    done = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "insisted", done.stderr
