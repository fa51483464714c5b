"""Fixtures of the whole suite."""

from __future__ import annotations

from typing import Any

pytest_plugins = ["tests.servers.fixtures"]


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
        for test, text in verdicts:
            terminalreporter.write_line(f"{test}: {text}")
