"""What a lost slot took along: events without a row were nowhere else."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.outbox.wal.frames import position_text

if TYPE_CHECKING:
    from holdfast.outbox.wal.slot import Export, Slot

log = logging.getLogger("holdfast.outbox.wal")


class Losses:
    """Says when events of `WalOutbox` are lost, and counts how often.

    Only the log held them, so nobody knows how many there were. Without *messages* a new
    slot costs nothing: the table has everything.
    """

    def __init__(self, *, messages: bool) -> None:
        self._messages = messages
        self._count = self._told = 0

    def note(self, slot: Slot, export: Export) -> None:
        """Note that *slot* is new and begins at *export*."""
        if not self._messages or slot.is_first:
            return
        self._count += 1
        name, begins = slot.names.slot, position_text(export.position)
        if slot.confirmed:
            log.error(
                "EVENTS ARE LOST: replication slot %s was made anew; whatever WalOutbox emitted "
                "between %s and %s of the log is gone, how much is unknown: find out by what "
                "your service wrote then, and emit it again",
                name, position_text(slot.confirmed), begins,
            )  # fmt: skip
        else:
            log.error(
                "EVENTS MAY BE LOST: replication slot %s was missing though publication %s is "
                "there (a failover, a restore, a dropped slot?); whatever WalOutbox emitted "
                "before %s of the log and no relay published is gone, how much is unknown",
                name, slot.names.publication, begins,
            )  # fmt: skip

    def untold(self) -> int:
        """Return how many there were since this was asked last."""
        count = self._count  # the opening's thread may add to it meanwhile
        told, self._told = self._told, count
        return count - told
