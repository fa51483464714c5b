"""What the end of a replay means to a script."""

from __future__ import annotations

from holdfast.dlq.replay.ending import EndingKind

EXIT_STOPPED = 5
EXIT_UNCONFIRMED = 6
EXIT_PARTLY = 7
EXIT_PAUSED = 8

CODES = {
    EndingKind.CONFIRMED: 0,
    EndingKind.STOPPED: EXIT_STOPPED,
    EndingKind.UNCONFIRMED: EXIT_UNCONFIRMED,
    EndingKind.PARTLY: EXIT_PARTLY,
    EndingKind.PAUSED: EXIT_PAUSED,
    EndingKind.ABORTED: EXIT_PAUSED,
}
