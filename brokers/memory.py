"""`memory:`: the embedded broker within one process, for tests and examples."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from holdfast.brokers.embedded import EmbeddedBroker, MemoryStore
from holdfast.brokers.embedded.broker import EmbeddedSettings
from holdfast.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from holdfast.urls import BrokerUrl

_named: dict[str, MemoryStore] = {}
_naming = threading.Lock()


class MemoryBroker(EmbeddedBroker):
    """The same semantics as `sqlite:` without a file; all is gone with the process.

    `memory:` is private to the object; `memory:name` is shared within the process.
    """

    def __init__(self, url: BrokerUrl, *, clock: Clock = SYSTEM_CLOCK, **native: Any) -> None:
        settings = EmbeddedSettings.read(url.options, native)
        name = url.path.strip("/")
        with _naming:
            store = _named.setdefault(name, MemoryStore(clock)) if name else MemoryStore(clock)
        super().__init__(str(url), store, clock, settings)
