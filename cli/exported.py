"""What a command's /metrics shows beside its own figures: circuits and the dead-letter store."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY

from holdfast.circuit import BREAKERS, CircuitMetrics
from holdfast.dlq.gauges import StoreGauges

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

    from holdfast.dlq.topic.collector import Uncollected

log = logging.getLogger("holdfast.cli")


def export_circuits() -> None:
    """Show every circuit of this process, unless the application does."""
    try:
        BREAKERS.watch(CircuitMetrics().add)
    except ValueError:
        log.debug("the application exports its circuits itself")


def export_store(engine: Engine | None, uncollected: Uncollected | None = None) -> None:
    """Show the dead letters in *engine* and on topics, unless the application does."""
    try:
        StoreGauges(engine, uncollected=uncollected, registry=REGISTRY)
    except ValueError:
        log.debug("the application exports its dead letters itself")
