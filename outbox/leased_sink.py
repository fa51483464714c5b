"""Publishing only while the lease lasts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from holdfast.outbox.leases import LeaseLost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.caps import Caps
    from holdfast.message import Message
    from holdfast.outbox.leases import Leases
    from holdfast.ports import Published, Sink


@runtime_checkable
class Hurried(Protocol):
    """A sink that can be told how long a batch may take."""

    def publish_within(self, messages: Sequence[Message], seconds: float) -> list[Published]:
        """Do as `publish`, but within *seconds*; then `BrokerDown`, with nothing on its way."""
        ...


class LeasedSink:
    """A sink that sends nothing once the relay's leases may be another's.

    Before each batch it asks the lease. What is under way when the lease ends is given up
    by a sink that can be hurried; the others give up after their own timeout.
    """

    def __init__(self, sink: Sink, leases: Leases) -> None:
        self.caps: Caps = sink.caps
        self._sink = sink
        self._leases = leases
        self._hurried = sink if isinstance(sink, Hurried) else None

    @property
    def is_hurried(self) -> bool:
        """Whether no publish takes longer than the lease lasts."""
        return self._hurried is not None

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Publish *messages*, or raise `LeaseLost` when it is too late for that."""
        left = self._leases.publishable
        if left <= 0:
            raise LeaseLost
        if self._hurried is None:
            return self._sink.publish(messages)
        return self._hurried.publish_within(messages, left)

    def close(self) -> None:
        """Close the sink."""
        self._sink.close()
