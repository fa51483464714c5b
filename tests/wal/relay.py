"""A WAL relay process that dies where it is told to.

Usage: relay.py DATABASE FILE MOMENT NTH

Moments: `before` and `after` the batch is in the file, `deleted` (before the server is told)
and `confirmed`. It says when it hears SIGTERM. What was published is in FILE, a line each, on
disk before the broker's answer.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.outbox import LeaseTerms, Relay
from holdfast.outbox.wal import WalEngine
from holdfast.outbox.wal.protocol import ReplicationStream
from holdfast.ports import Caps, Ordering, Published, Settle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.message import Message


class File:
    """A sink to a file; kills its process at a moment of the nth batch or later."""

    caps = Caps(settle=Settle.INDIVIDUAL, ordering=Ordering.KEY)

    def __init__(self, path: Path, moment: str, nth: int) -> None:
        self._path, self._moment, self._nth = path, moment, nth
        self._batch = 0

    def reach(self, moment: str) -> None:
        """Die if this is the moment."""
        if moment == self._moment and self._batch >= self._nth:
            os.kill(os.getpid(), signal.SIGKILL)

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Append *messages*."""
        self._batch += 1
        self.reach("before")
        with self._path.open("ab") as file:
            file.write(b"".join((m.payload or b"") + b"\n" for m in messages))
            file.flush()
            os.fsync(file.fileno())
        self.reach("after")
        return [Published()] * len(messages)

    def close(self) -> None:
        """Nothing to release."""


def main(database: str, path: str, moment: str, nth: str) -> None:
    sink = File(Path(path), moment, int(nth))
    engine = WalEngine(database, sink, batch=7, terms=LeaseTerms(seconds=0.7))
    delete, beat = engine._cleaner._delete, ReplicationStream.beat

    def deleting(work: Any) -> Any:
        left = delete(work)
        sink.reach("deleted")
        return left

    def beating(stream: ReplicationStream, *, now: bool = False) -> None:
        beat(stream, now=now)
        sink.reach("confirmed")

    engine._cleaner._delete = deleting  # type: ignore[method-assign]
    ReplicationStream.beat = beating  # type: ignore[method-assign]
    running = Relay(engine)
    signal.signal(signal.SIGTERM, lambda *_: running.stop())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    running.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
