"""What the end of a command means to a script: one table for all commands."""

from __future__ import annotations

EXIT_NOT_FOUND = 1
EXIT_FIX = 2
EXIT_DOWN = 3
EXIT_UNFINISHED = 4
EXIT_STOPPED = 5
EXIT_UNCONFIRMED = 6
EXIT_PARTLY = 7
EXIT_PAUSED = 8
EXIT_INTERRUPTED = 130

MEANINGS = {
    0: "done",
    EXIT_NOT_FOUND: "nothing found, or the answer is no",
    EXIT_FIX: "fix the command or its settings; nothing was done",
    EXIT_DOWN: "database or broker down, try again",
    EXIT_UNFINISHED: "ended before it was done; the next run goes on",
    EXIT_STOPPED: "the replay was stopped by a stop condition",
    EXIT_UNCONFIRMED: "sent, but not all confirmed",
    EXIT_PARTLY: "done, but some failed again or were set aside",
    EXIT_PAUSED: "paused, aborted, or waits for approval",
    EXIT_INTERRUPTED: "interrupted; what it did so far is kept",
}
"""`holdfast doctor`: 0 nothing is wrong, 1 something is, 3 the database or the broker is down."""

TOLD = "Exit codes: " + " · ".join(f"{code} {words}" for code, words in MEANINGS.items())
