"""A capture process that dies where it is told to.

Usage: capture.py DATABASE SERVER FILE MOMENT NTH

Moments: `before` and `after` the batch is in the file, `kept` (the slot is, the stream has
not begun) and `told` (the server is told how far we are). What was published is in FILE, a
line of JSON each, on disk before the broker's answer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.outbox import Relay
from holdfast.outbox.cdc import Cdc
from holdfast.outbox.cdc.events import change_event
from holdfast.outbox.wal.protocol import ReplicationStream
from holdfast.outbox.wal.slot import ReplicationSlot
from holdfast.ports import Caps, Ordering, Published, Settle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        events = [change_event(message) for message in messages]
        lines = [json.dumps([event.op, event.key, event.after]) for event in events]
        with self._path.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        self.reach("after")
        return [Published()] * len(messages)

    def close(self) -> None:
        """Nothing to release."""


def main(database: str, server: str, path: str, moment: str, nth: str) -> None:
    sink = File(Path(path), moment, int(nth))
    _after(ReplicationSlot, "keep", lambda: sink.reach("kept"))
    _after(ReplicationStream, "beat", lambda: sink.reach("told"))
    running = Relay(Cdc(database, sink, tables=["item"], server=server, batch=5))
    signal.signal(signal.SIGTERM, lambda *_: running.stop())
    running.run()


def _after(kind: type, name: str, then: Callable[[], None]) -> None:
    original: Any = getattr(kind, name)

    def done(*given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        then()
        return result

    setattr(kind, name, done)


if __name__ == "__main__":
    main(*sys.argv[1:])
