"""Publishing only while the lease lasts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from holdfast.errors import UnknownTopic
from holdfast.message import Message
from holdfast.outbox.foresight import BySize, Foreseeing
from holdfast.outbox.leases import LeaseLost
from holdfast.outbox.shard_sinks import ShardSinks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from holdfast.caps import Caps
    from holdfast.errors import HoldfastError
    from holdfast.outbox.leases import Leases
    from holdfast.ports import Published, Sink


@runtime_checkable
class Hurried(Protocol):
    """A sink that can be told how long a batch may take."""

    def publish_within(self, messages: Sequence[Message], seconds: float) -> list[Published]:
        """Do as `publish`, but within *seconds*; then `BrokerDown`, with nothing on its way."""
        ...


@runtime_checkable
class Preparing(Protocol):
    """A sink that can get ready for `publish_within` beforehand."""

    def prepare(self) -> None:
        """Do now what its first call would take time for."""
        ...


class LeasedSink:
    """A sink that sends nothing once the relay's leases may be another's.

    Before each batch it asks the lease. What is under way when the lease ends is given up
    by a sink that can be hurried; the others give up after their own timeout.
    """

    def __init__(self, sink: Sink | ShardSinks, leases: Leases) -> None:
        self.caps: Caps = sink.caps
        self._sink = sink
        self._leases = leases
        self._publish = self._way(sink)
        self._foresight = sink if isinstance(sink, Foreseeing) else BySize(sink.caps)
        if isinstance(sink, Preparing):
            sink.prepare()

    def _way(self, sink: Sink | ShardSinks) -> Callable[[Sequence[Any], float], list[Published]]:
        """Return how *sink* publishes within some seconds."""
        if isinstance(sink, ShardSinks):
            return partial(sink.publish_under, self._leases)
        return sink.publish_within if isinstance(sink, Hurried) else _unhurried(sink)

    @property
    def is_hurried(self) -> bool:
        """Whether no publish takes longer than the lease lasts."""
        return isinstance(self._sink, (Hurried, ShardSinks))

    def room(self, topics: Collection[str]) -> int | None:
        """Return how many bytes a message may have in each of *topics*."""
        return self._foresight.room(topics)

    def refusal(self, message: Message) -> HoldfastError | None:
        """Return why the broker would refuse *message*, as far as can be told."""
        return self._foresight.refusal(message)

    def absent(self, topics: Collection[str]) -> dict[str, UnknownTopic]:
        """Return the errors of those of *topics* that surely do not exist; none if nobody knows."""
        if not isinstance(self._sink, Foreseeing) or self._foresight.room(topics) != 0:
            return {}
        found = {topic: self.refusal(Message.new(topic, b"")) for topic in topics}
        return {topic: why for topic, why in found.items() if isinstance(why, UnknownTopic)}

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Publish *messages*, or raise `LeaseLost` when it is too late for that."""
        left = self._leases.publishable
        if left <= 0:
            raise LeaseLost
        return self._publish(messages, left)

    def close(self) -> None:
        """Close the sink."""
        self._sink.close()


def _unhurried(sink: Sink) -> Callable[[Sequence[Message], float], list[Published]]:
    def publish(messages: Sequence[Message], _seconds: float) -> list[Published]:
        return sink.publish(messages)

    return publish
