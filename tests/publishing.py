"""Publishing as a relay does it, and what became of a key's order on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.errors import BrokerDown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.message import Message
    from holdfast.ports import Sink


@dataclass(slots=True)
class Passage:
    """Messages that go out in order per key, whatever the sink refuses, until all are stored."""

    left: list[Message]
    refused: int = 0
    overtaken: list[Message] = field(default_factory=list)
    """Stored although an earlier one of its key was refused: their order is lost for good."""

    def step(self, sink: Sink, most: int = 10_000) -> None:
        """Publish what is left once; of each key what follows a refused message goes again."""
        batch: Sequence[Message] = self.left[:most]
        try:
            results = sink.publish(batch)
        except BrokerDown:
            return
        behind: set[bytes | None] = set()
        again: list[Message] = []
        for message, result in zip(batch, results, strict=True):
            if result.error is not None:
                self.refused += 1
                behind.add(message.key)
                again.append(message)
            elif message.key in behind:
                self.overtaken.append(message)
                again.append(message)
        self.left = [*again, *self.left[most:]]
