"""`sqlite:///file.db`: the embedded default, durable, shared by processes of one machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.brokers.embedded import EmbeddedBroker, FileStore
from holdfast.brokers.embedded.broker import EmbeddedSettings
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import InvalidUrl

if TYPE_CHECKING:
    from holdfast.urls import BrokerUrl


class SqliteBroker(EmbeddedBroker):
    """The embedded broker in a file. `sqlite:///a.db` is relative, `sqlite:////a.db` absolute.

    Every commit is on disk before a call returns (synchronous=FULL), so what was accepted
    or published survives the loss of power. Do not put the file on a network share.
    """

    def __init__(self, url: BrokerUrl, *, clock: Clock = SYSTEM_CLOCK, **native: Any) -> None:
        settings = EmbeddedSettings.read(url.options, native)
        if url.hosts or len(url.path) < 2:
            raise InvalidUrl(
                f"{url} names no file: write sqlite:///orders.db for a file in this folder, "
                "sqlite:////var/lib/orders.db for an absolute path"
            )
        store = FileStore(Path(url.path[1:]), clock, adopt=settings.adopt)
        super().__init__(str(url), store, clock, settings)
