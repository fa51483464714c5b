"""Members of groups whose deaths and rebalances show soon, by either driver."""

from __future__ import annotations

from typing import Any

SCHEMES = ("kafka", "kafka+confluent")
SILENCE = 2.5
"""Seconds without a poll after which a member is taken for dead."""
QUICK: dict[str, dict[str, Any]] = {
    "kafka": {
        "session_timeout_ms": 1500,
        "heartbeat_interval_ms": 100,
        "max_poll_interval_ms": int(SILENCE * 1000),
    },
    "kafka+confluent": {
        "session.timeout.ms": 1500,
        "heartbeat.interval.ms": 100,
        "max.poll.interval.ms": int(SILENCE * 1000),
        "fetch.wait.max.ms": 50,
    },
}
"""Settings of sources."""
STEADY: dict[str, dict[str, Any]] = {
    "kafka": {"session_timeout_ms": 60_000, "heartbeat_interval_ms": 100},
    "kafka+confluent": {
        "session.timeout.ms": 60_000,
        "heartbeat.interval.ms": 100,
        "fetch.wait.max.ms": 50,
    },
}
"""The same where nobody is to be taken for dead: rebalances show soon, silence does not."""
