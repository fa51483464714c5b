"""Break a promise: messages count as settled when they are handed out."""

from typing import Any

from holdfast.brokers.embedded.cursor import CursorTable

advance = CursorTable.advance


def early(self: CursorTable, db: Any, state: Any) -> None:
    """Note the messages as handed out and settled at once."""
    advance(self, db, state)
    db.execute(
        "UPDATE hf_cursor SET committed = ? WHERE grp = ? AND lane = ?",
        (state.fetched, self._group, state.id),
    )


CursorTable.advance = early  # type: ignore[method-assign]
