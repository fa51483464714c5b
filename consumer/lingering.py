"""A signal ends the process, also when a client library never comes back."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.consumer.runtime import Runtime

log = logging.getLogger("holdfast.consumer")
_GRACE_SECONDS = 15.0
_HURRIED_SECONDS = 3.0
_EXIT_UNFINISHED = 4


def end_if_it_lingers(runtime: Runtime, ended: threading.Event, *, drain_seconds: float) -> None:
    """End this process unless *ended* is set soon after the drain, or after a second signal.

    The thread that polls cannot be woken inside a client that spins or hangs. What it had in
    hand is not acknowledged, so it comes again.
    """
    poller = threading.main_thread()

    def watch() -> None:
        runtime.hurry.wait(drain_seconds + _GRACE_SECONDS)
        if ended.wait(_HURRIED_SECONDS):
            return
        frame = sys._current_frames().get(poller.ident or 0)
        where = "".join(traceback.format_stack(frame, limit=12)) if frame else "unknown\n"
        log.error("ending without what is still in hand; nothing is lost, it comes again. The "
                  "poll thread was here:\n%s", where)  # fmt: skip
        logging.shutdown()
        os._exit(_EXIT_UNFINISHED)

    threading.Thread(target=watch, name="holdfast-end", daemon=True).start()
