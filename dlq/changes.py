"""Changes of the figures: appended by whoever stores or closes, folded by somebody later."""

from __future__ import annotations

from typing import Any


def change_row(row: Any, kind: str, at: float, n: int = 1) -> dict[str, Any]:
    """Return one change of the figures of the group of *row*."""
    return {
        "group_id": row["group_id"],
        "kind": kind,
        "n": n,
        "at": at,
        "key_hash": row["key_hash"],
        "tenant": row["tenant"],
        "version": row["service_version"],
    }
