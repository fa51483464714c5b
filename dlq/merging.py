"""A stored letter that fails again: what of its row changes, and which figures.

What is on top is the latest failure, in the group of that failure; the earlier ones stay in
the history. The original message, and where it came from, never change.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.columns import document
from holdfast.dlq.changes import change_row
from holdfast.dlq.letter import MOST_FAILURES, Occurrence
from holdfast.dlq.rows import (
    PENDING,
    exact_of,
    is_of,
    occurrences,
    read_envelope,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.dlq.letter import DeadLetter
    from holdfast.dlq.rows import Row
    from holdfast.dlq.triage import Triage

log = logging.getLogger("holdfast.dlq")
_MOST_SKEW = 60.0  # seconds by which the clocks of two hosts may differ
_LATE = ("collected", "imported")
"""Letters of these origins may be stored long after the failure; others are stored with it."""
_FAILURE = (
    "group_id", "fingerprint", "handler", "service_version", "stage", "class", "error_type",
    "error_text",
)  # fmt: skip


def is_same_message(stored: Row, row: Row) -> bool:
    """Whether *row* is of the message in *stored*: marks of a replay are only headers."""
    if stored["consumer_group"] != row["consumer_group"]:
        return False
    return _source(stored) == _source(row) and is_of(stored, _id(row))


def _id(row: Row) -> str:
    """Return the id of the message in *row*, whole."""
    own: str = row["message_id"]
    return own if row["exact"] is None else exact_of(row["exact"]).get("id", own)


def _source(row: Row) -> str:
    """Return the source of the message in *row*, whole."""
    own: str = row["source"]
    return own if row["exact"] is None else exact_of(row["exact"]).get("source", own)


def merged(
    stored: Row, letter: DeadLetter, row: dict[str, Any], triage: Triage | None, now: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the columns to set in *stored* and the changes of figures; nothing if it is known."""
    kept = occurrences(stored["history"])
    fresh = _fresh(letter.history.failures, kept, stored["occurrences"])
    if not fresh:
        return {}, []
    together = sorted((*kept, *fresh), key=lambda one: one.at)[-MOST_FAILURES:]
    values: dict[str, Any] = {
        "attempts": whole(stored["attempts"] + sum(one.attempts for one in fresh)),
        "occurrences": stored["occurrences"] + len(fresh),
        "first_failed_at": min(stored["first_failed_at"], row["first_failed_at"]),
        "last_failed_at": max(stored["last_failed_at"], row["last_failed_at"]),
        "history": document(together),
        "replay_count": max(stored["replay_count"], row["replay_count"]),
    }
    if stored["state"] != PENDING and _is_past(letter, fresh, stored["closed_at"]):
        log.warning("dead letter %s stays %s: by the clock of its host it failed before that, and "
                    "only arrives now", row["dlq_id"], stored["state"])  # fmt: skip
        return values, []
    if triage is not None:
        # It failed again: the next automatic retry is further away, and they are counted.
        values |= triage.judge({**row, "retries": stored["retries"]}, now)
    reopened = stored["state"] != PENDING
    if reopened:
        values |= {"state": PENDING, "stored_at": now}
        values |= dict.fromkeys(("closed_at", "closed_by", "closed_reason"))
    known = read_envelope(stored["envelope"])
    known = msgspec.structs.replace(known, timeouts=known.timeouts + letter.history.timeouts)
    # What was collected late, or has an envelope of a newer version on top, changes no more.
    if row["last_failed_at"] >= stored["last_failed_at"] and known.newer is None:
        known = msgspec.structs.replace(known, culprit=letter.culprit, failure=letter.failure)
        values |= {name: row[name] for name in _FAILURE}
    values["envelope"] = document(known)
    return values, _changes(stored, {**stored, **values}, now, reopened=reopened)


def _is_past(letter: DeadLetter, fresh: Sequence[Occurrence], closed_at: float | None) -> bool:
    """Whether all of *fresh* happened before the letter was closed and only arrive now.

    Never for what a consumer stores itself: whatever its clock says, it failed just now. In
    doubt, for hosts have clocks of their own, it failed after that and is shown again.
    """
    if letter.origin not in _LATE or letter.newer is not None or closed_at is None:
        return False
    return max(one.at for one in fresh) < closed_at - _MOST_SKEW


def _changes(before: Row, after: Row, now: float, *, reopened: bool) -> list[dict[str, Any]]:
    if before["group_id"] == after["group_id"]:
        # Nothing is added by one that was pending; that it was seen is said all the same.
        return [change_row(after, "reopened" if reopened else "arrived", now, int(reopened))]
    came = change_row(after, "arrived", now)
    if reopened:
        return [came]
    return [change_row(before, "arrived", before["stored_at"], -1), came]


def _fresh(given: Sequence[Occurrence], kept: Sequence[Occurrence], count: int) -> list[Occurrence]:
    """Return what the row does not know yet; failures older than all it keeps were known."""
    known = {one.id for one in kept}
    oldest = min((one.at for one in kept), default=0.0) if count > len(kept) else 0.0
    return [one for one in given if one.id not in known and one.at >= oldest]
