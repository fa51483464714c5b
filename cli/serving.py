"""Probes and metrics of a sidecar, served over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.outbox.endpoint import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from holdfast.outbox.probes import Probes


def served(
    address: str | None, probes: Probes, metrics: Callable[[], bytes], closing: ExitStack
) -> str:
    """Serve on *address* until *closing* ends; return the URL for a log line, "" without one."""
    if address is None:
        return ""
    endpoint = Endpoint(address, alive=probes.alive, ready=probes.ready, metrics=metrics)
    closing.callback(endpoint.stop)
    endpoint.start()
    return f", http://{endpoint.address}"
