"""The alert rules are what Prometheus takes, and fire when they should."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.servers.install import program

ROOT = Path(__file__).parents[2]
RULES = sorted((ROOT / "deploy").glob("prometheus-*.yaml"))
TESTS = sorted((ROOT / "tests" / "alerts").glob("*.yaml"))


def promtool(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Prometheus' own checker."""
    return subprocess.run(
        [program("promtool"), *argv], capture_output=True, text=True, check=False, timeout=120
    )


def test_prometheus_takes_the_rules() -> None:
    """All files, with as many rules as they have."""
    done = promtool("check", "rules", *RULES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS") == len(RULES) >= 4


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_an_alert_fires_in_its_time_and_not_before(path: Path) -> None:
    """By the figures of a made-up hour."""
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_threshold_that_is_wrong_is_found(tmp_path: Path) -> None:
    """The checks can fail."""
    (tmp_path / "tests" / "alerts").mkdir(parents=True)
    (tmp_path / "deploy").mkdir()
    rules = (ROOT / "deploy" / "prometheus-dlq-alerts.yaml").read_text()
    assert "* 60 > 10" in rules
    wrong = tmp_path / "deploy" / "prometheus-dlq-alerts.yaml"
    wrong.write_text(rules.replace("* 60 > 10", "* 60 > 100"))
    test = tmp_path / "tests" / "alerts" / "dead-letters.yaml"
    test.write_text((ROOT / "tests" / "alerts" / "dead-letters.yaml").read_text())
    done = promtool("test", "rules", test)
    assert done.returncode != 0
    assert "DlqBurst" in done.stdout + done.stderr
