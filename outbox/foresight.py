"""What a broker would refuse, found before anything is sent.

Once a later event of the same key is on its way, a refusal comes too late: that one is
stored first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from holdfast.errors import HoldfastError, MessageTooLarge, UnknownTopic
from holdfast.outbox.rows import staged

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from holdfast.caps import Caps
    from holdfast.message import Message
    from holdfast.outbox.missing import MissingTopics
    from holdfast.outbox.outcome import Refused
    from holdfast.outbox.rows import Row

_SPARE = 4096  # bytes that keys and CloudEvents headers are allowed for before a close look


@runtime_checkable
class Foreseeing(Protocol):
    """A sink that knows more of what its broker refuses than `caps` can say."""

    def room(self, topics: Collection[str]) -> int | None:
        """Return how many bytes a message may have in each of *topics*; None: no limit known."""
        ...

    def refusal(self, message: Message) -> HoldfastError | None:
        """Return why the broker would refuse *message*, as far as can be told; None if it won't."""
        ...


class BySize:
    """What can be told of any sink: its limit for a message."""

    def __init__(self, caps: Caps) -> None:
        self._limit = caps.max_message

    def room(self, _topics: Collection[str]) -> int | None:
        """Return the limit, which is that of all topics."""
        return self._limit

    def refusal(self, message: Message) -> HoldfastError | None:
        """Return the error for a message that is too large."""
        packed: str = getattr(message, "packed", "")
        size = len(message.payload or b"") + len(message.key or b"") + len(packed.encode())
        fits = self._limit is None or size <= self._limit
        return None if fits else MessageTooLarge(size, self._limit or 0)


def precheck(
    rows: Sequence[Row], sink: Foreseeing, missing: MissingTopics
) -> tuple[list[Row], list[Refused]]:
    """Return the rows to publish, and those to park: what would be refused, and what follows.

    Rows of a topic that does not exist are in neither, and the topic is noted as *missing*.
    """
    if not rows:
        return [], []
    limit = sink.room({row[2] for row in rows})
    if limit is None or not _may_exceed(rows, limit):
        return list(rows), []
    absent: dict[str, UnknownTopic] = {}
    fine: list[Row] = []
    refused: list[Refused] = []
    blocked: set[tuple[str, str]] = set()
    for row in rows:
        key = None if row.key is None else (row.topic, row.key)
        if row.topic in absent:
            continue
        error = sink.refusal(staged(row)) if _may_exceed((row,), limit) else None
        if isinstance(error, UnknownTopic):
            absent[row.topic] = error
            continue
        if error is not None or key in blocked:
            refused.append((row, error))
            if key is not None:
                blocked.add(key)
        else:
            fine.append(row)
    missing.note(absent)
    return fine, refused


def _may_exceed(rows: Sequence[Row], limit: int) -> bool:
    # The largest parts of all rows together: seldom more than one row has, and quickly found.
    payload = max([0 if (body := row[4]) is None else len(body) for row in rows])
    return payload + max([len(row[5]) for row in rows]) > limit - _SPARE
