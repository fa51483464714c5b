"""Break a promise: messages are acknowledged when they are polled, before any commit."""

from holdfast.consumer.runtime import Runtime
from holdfast.ports import Delivery

take = Runtime._take


def early(self: Runtime, batch: list[Delivery]) -> None:
    """Tell the broker that everything is done, then begin."""
    self.source.accept(batch)
    take(self, batch)


Runtime._take = early  # type: ignore[method-assign]
