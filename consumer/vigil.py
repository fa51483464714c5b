"""Signs of life while handlers run in a loop of the user's own, where no clerk gives them."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from holdfast.scrubbing import told

if TYPE_CHECKING:
    from holdfast.clock import Clock
    from holdfast.idempotency import Ledger

log = logging.getLogger("holdfast.consumer")


class Vigil:
    """Keeps *owner* known as alive inside its `with` block; any thread may enter it.

    Without it a handler that takes its time would be taken for a crash. One thread, which
    ends by itself when nothing has run for a while.
    """

    def __init__(self, ledger: Ledger, owner: str, clock: Clock) -> None:
        self._ledger, self._owner, self._clock = ledger, owner, clock
        self._every = ledger.owner_seconds / 3
        self._lock = threading.Lock()
        self._inside = 0
        self._thread: threading.Thread | None = None
        self._never = threading.Event()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="holdfast-vigil", daemon=True
                )
                self._thread.start()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1

    def _run(self) -> None:
        while not self._clock.wait(self._never, self._every):
            with self._lock:
                if not self._inside:
                    self._thread = None
                    return
            try:
                self._ledger.alive(self._owner)
            except SQLAlchemyError as error:
                log.warning("no sign of life reached the database: %s", told(error))
