"""Rows that the stream will never tell: the table is the truth, so they are looked for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.outbox.wal.frames import position
from holdfast.sql import statements

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

    from holdfast.clock import Clock
    from holdfast.outbox.missing import MissingTopics
    from holdfast.outbox.wal.cleaner import Cleaner

log = logging.getLogger("holdfast.outbox.wal")

_LOOK_SECONDS = 5.0


class Leftovers:
    """Looks now and then for rows that are older than all that is finished and still there.

    They come from a publication that lacked the table for a while, from a commit that could
    not be seen yet when the slot began, or from a deletion that failed.
    """

    def __init__(self, engine: Engine, cleaner: Cleaner, *, clock: Clock) -> None:
        self._engine = engine
        self._cleaner = cleaner
        self._clock = clock
        self._sql = statements("holdfast.outbox.wal", "postgresql")
        self._looked = clock.monotonic()
        self._seqs: list[int] = []
        self._end = 0

    def found(self, finished: int, missing: MissingTopics) -> bool:
        """Whether rows are left behind; everything before the position *finished* is done.

        Rows of topics that are *missing* are meant to wait.
        """
        if self._seqs:
            return finished >= self._end and self._still_there()
        now = self._clock.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            with self._engine.connect() as db:
                oldest = db.execute(self._sql["oldest"], {"held": list(missing.topics)})
                self._seqs = list(oldest.scalars())
                # Later than the rows: their commits lie before it.
                self._end = position(db.execute(self._sql["log_end"]).scalar_one())
        return False

    def _still_there(self) -> bool:
        self._cleaner.settle()
        known = self._cleaner.unfinished
        asked, self._seqs = [seq for seq in self._seqs if seq not in known], []
        listed = "{" + ",".join(map(str, asked)) + "}"
        with self._engine.connect() as db:
            left = list(db.execute(self._sql["present"], {"seqs": listed}).scalars())
        if left:
            log.warning(
                "%d outbox rows (from seq %d on) never came by the stream: reading the table again",
                len(left), left[0],
            )  # fmt: skip
        return bool(left)
