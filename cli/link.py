"""The link between `holdfast consume` and its worker processes: a socket pair, one line each way.

The parent asks, the worker answers with its vital signs and metrics. A worker whose parent
is gone hears the end of the link and drains, so that nothing runs unsupervised.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("holdfast.cli")
_ANSWER_SECONDS = 3.0


class Family(msgspec.Struct, frozen=True):
    """One metric with its samples: name, labels and value."""

    name: str
    help: str
    kind: str
    samples: list[tuple[str, dict[str, str], float | None]]
    """None for a value that JSON does not know."""


class Report(msgspec.Struct, frozen=True):
    """What a worker says about itself."""

    number: int = 0
    alive: bool = False
    why_alive: str = "starting"
    ready: bool = False
    why_ready: str = "starting"
    families: list[Family] = []


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Report).decode


class Asking:
    """The parent's end."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(_ANSWER_SECONDS)
        self._end = end
        self._lines = end.makefile("rb")
        self._number = 0
        self._lock = threading.Lock()

    def ask(self) -> Report | None:
        """Return the worker's report; None if it does not answer, as while it starts."""
        with self._lock:
            self._number += 1
            try:
                self._end.sendall(b"%d\n" % self._number)
                while line := self._lines.readline():
                    report = _decode(line)
                    if report.number == self._number:  # not the late answer to an earlier one
                        return report
            except (OSError, ValueError, msgspec.DecodeError):
                # A timeout spoils the buffered reader; the socket itself is still good.
                with suppress(OSError):
                    self._lines = self._end.makefile("rb")
        return None

    def close(self) -> None:
        """End the link."""
        self._lines.close()
        self._end.close()


def answer(descriptor: int, report: Callable[[int], Report], orphaned: Callable[[], None]) -> None:
    """Answer on *descriptor* in a thread; call *orphaned* once the parent is gone."""
    end = socket.socket(fileno=descriptor)

    def serve() -> None:
        try:
            with end, end.makefile("rb") as lines:
                for line in lines:
                    end.sendall(_encode(report(int(line))) + b"\n")
        except (OSError, ValueError) as error:
            log.debug("the link to the parent ended: %s", error)
        log.warning("the parent process is gone: this worker finishes what is in hand and ends")
        orphaned()

    threading.Thread(target=serve, name="holdfast-link", daemon=True).start()
