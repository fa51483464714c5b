"""What follows from what: spans, metrics, correlation and logs, and which event came of which.

What comes in are requests and events, as services publish and handle them; what goes out is the
chain of a correlation as a tree, and what a declared flow misses in it. A row of the lineage
commits with the event that it is about, or not at all: no crash and no sampling leaves a gap.
"""

from typing import TYPE_CHECKING

from holdfast.extras import lazily
from holdfast.tracing.setup import setup
from holdfast.tracing.switch import disable, disable_metrics, enable, enable_metrics

if TYPE_CHECKING:
    from holdfast.tracing.chain import Chain, Handling, LineageEvent, MissingEvent, Traced, trace
    from holdfast.tracing.edge import (
        CorrelationMiddleware,
        WsgiCorrelationMiddleware,
        correlated,
        current_correlation,
    )
    from holdfast.tracing.flow import Expectation, Flow, InvalidFlow
    from holdfast.tracing.lineage import CausationLoop, Lineage, LineageOutcome, LineageRecord
    from holdfast.tracing.logs import JsonFormatter, LogContext, setup_logging
    from holdfast.tracing.schema import create_tables, metadata

__all__ = [
    "CausationLoop",
    "Chain",
    "CorrelationMiddleware",
    "Expectation",
    "Flow",
    "Handling",
    "InvalidFlow",
    "JsonFormatter",
    "Lineage",
    "LineageEvent",
    "LineageOutcome",
    "LineageRecord",
    "LogContext",
    "MissingEvent",
    "Traced",
    "WsgiCorrelationMiddleware",
    "correlated",
    "create_tables",
    "current_correlation",
    "disable",
    "disable_metrics",
    "enable",
    "enable_metrics",
    "metadata",
    "setup",
    "setup_logging",
    "trace",
]

# Each part is used alone: SQLAlchemy takes its time, and correlation and logs need none of it.
__getattr__ = lazily(
    __name__,
    {
        "chain": "Chain Handling LineageEvent MissingEvent Traced trace",
        "edge": "CorrelationMiddleware WsgiCorrelationMiddleware correlated current_correlation",
        "flow": "Expectation Flow InvalidFlow",
        "lineage": "CausationLoop Lineage LineageOutcome LineageRecord",
        "logs": "JsonFormatter LogContext setup_logging",
        "schema": "create_tables metadata",
    },
)
