"""A WAL relay process that dies where it is told to.

Usage: relay.py DATABASE FILE MOMENT NTH [table-less]

Moments: `before` and `after` the batch is in the file, `deleted` (before the server is told)
and `confirmed`. What was published is in FILE, a line each, on disk before the broker's answer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.caps import Caps, Ordering, Settle
from holdfast.outbox import LeaseTerms, Relay
from holdfast.outbox.wal import WalEngine
from holdfast.outbox.wal.stream import Stream
from holdfast.ports import Published

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.message import Message


class File:
    """A sink to a file; kills its process at a moment of the nth batch or later."""

    caps = Caps(settle=Settle.INDIVIDUAL, ordering=Ordering.KEY)

    def __init__(self, path: Path, moment: str, nth: int) -> None:
        self._path, self._moment, self._nth = path, moment, nth
        self._batch = 0
        self.told: threading.Event | None = None
        """Set when the server was told how far we are."""

    def reach(self, moment: str, *, heard: bool = True) -> None:
        """Die if this is the moment; *heard* lets the server hear from us once more before."""
        if moment == self._moment and self._batch >= self._nth:
            if heard and self.told is not None:
                self.told.clear()
                self.told.wait(5)
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


def main(database: str, path: str, moment: str, nth: str, mode: str = "") -> None:
    sink = File(Path(path), moment, int(nth))
    if mode:  # everything comes by the stream
        sink.told = threading.Event()
    engine = WalEngine(database, sink, batch=7, messages=bool(mode), terms=LeaseTerms(seconds=0.7))
    delete, beat = engine._cleaner._delete, Stream.beat

    def deleting(work: Any) -> Any:
        left = delete(work)
        sink.reach("deleted", heard=False)
        return left

    def beating(stream: Stream, *, now: bool = False) -> None:
        before = stream._sent
        beat(stream, now=now)
        if stream._sent != before and sink.told is not None:
            sink.told.set()
        sink.reach("confirmed", heard=False)

    engine._cleaner._delete = deleting  # type: ignore[method-assign]
    Stream.beat = beating  # type: ignore[method-assign]
    running = Relay(engine)
    signal.signal(signal.SIGTERM, lambda *_: running.stop())
    running.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
