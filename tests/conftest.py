"""Fixtures of the whole suite."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

pytest_plugins = ["tests.servers.fixtures"]

# A busy machine is no counterexample; in CI every run tries the same examples.
settings.register_profile(
    "holdfast",
    deadline=None,
    derandomize="CI" in os.environ,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("holdfast")

# A parallel run hands these out first, so that no worker ends long after the others.
SLOWEST = (
    "test_chain",
    "test_kafka_broker",
    "test_kafka_adapter",
    "test_outbox_checker",
    "test_rabbitmq_broker",
    "test_nats_broker",
    "test_redis_broker",
    "test_wal_faults",
    "test_replay_story",
    "test_servers",
    "test_sabotage",
    "test_cli",
    "test_sidecar",
    "test_debezium",
    "test_demo",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a parallel run, put the slowest modules first and the unit tests last."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _rank(item.path))


def _rank(path: Path) -> tuple[bool, int]:
    known = SLOWEST.index(path.stem) if path.stem in SLOWEST else len(SLOWEST)
    return path.parent.name == "unit", known


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show what the checkers observed: the duplicates are counted, not hidden."""
    passed = terminalreporter.stats.get("passed", [])
    verdicts = [
        (report.nodeid.rpartition("::")[2], text)
        for report in passed
        for name, text in getattr(report, "user_properties", ())
        if name == "verdict" and report.when == "call"
    ]
    if verdicts:
        terminalreporter.section("what the checkers observed")
        # By the last parameter first: engines that publish to one broker stand beside each other.
        for test, text in sorted(verdicts, key=lambda found: found[0].rpartition("-")[::-1]):
            terminalreporter.write_line(f"{test}: {text}")
