"""Publishing only while the slot is ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.outbox.leased_sink import Hurried
from holdfast.outbox.wal.faults import DatabaseDown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.caps import Caps
    from holdfast.message import Message
    from holdfast.ports import Published, Sink


class OwnedSink:
    """A sink that sends nothing once the slot may be another's: *left* tells the seconds.

    A capture that was frozen would send old states of rows after its successor's newer
    ones. What is under way when the time ends is given up by a sink that can be hurried.
    """

    def __init__(self, sink: Sink, left: Callable[[], float]) -> None:
        self.caps: Caps = sink.caps
        self._sink = sink
        self._left = left

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Publish *messages*, or raise `DatabaseDown` when it is too late for that."""
        left = self._left()
        if left <= 0:
            raise DatabaseDown("publishing: the slot may be another's by now")
        if isinstance(self._sink, Hurried):
            return self._sink.publish_within(messages, left)
        return self._sink.publish(messages)

    def close(self) -> None:
        """Close the sink."""
        self._sink.close()
