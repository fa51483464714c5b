"""The runbook: a section for each alert that is deployed."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "runbook.md").read_text()
PARTS = ["Meaning", "First look", "Commands", "Fix"]


def sections() -> dict[str, str]:
    """Return the text of each alert's section."""
    found = re.split(r"^#{2,3} (.+)$", PAGE, flags=re.MULTILINE)[1:]
    pairs = zip(found[::2], found[1::2], strict=True)
    return {name: text for name, text in pairs if "- **Meaning**" in text}


def alerts() -> dict[str, str]:
    """Return the rule of each alert that is deployed."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "deploy").glob("*alerts.yaml")):
        _, *rules = re.split(r"^ +- alert: ", path.read_text(), flags=re.MULTILINE)
        found |= {rule.split()[0]: rule for rule in rules}
    assert len(found) > 30
    return found


def test_every_alert_has_its_section() -> None:
    """And no section speaks of an alert that is gone."""
    assert set(sections()) == set(alerts())


DEMANDED = {
    "DlqBurst": "* 60 > 10", "DlqPending": "> 100", "DlqWaiting": "> 3600",
    "DlqInflowHigh": "> 2 *", "DlqInflowCritical": "> 5 *", "ConsumerLag": "> 1000",
    "ConsumerLagCritical": "> 10000", "ConsumerDataLossAhead": "> 0.8 *",
    "HoldfastOutboxOld": "oldest_age_seconds", "HoldfastParked": "outbox_parked",
    "HoldfastSlotRunsOut": "slot_safe_bytes", "ConsumerCircuitOpen": "circuit_state",
    "SagaParked": 'status="parked"', "SagaOverdue": "saga_overdue",
}  # fmt: skip


def test_what_must_wake_somebody_is_an_alert_with_its_threshold() -> None:
    """Dead letters, lag, data loss, outbox, keys, slot, circuits, sagas."""
    there = alerts()
    for name, threshold in DEMANDED.items():
        (rule,) = re.findall(r"^ +expr: (.+)$", there[name], re.MULTILINE)
        assert threshold in rule, name


def test_every_alert_is_seen_firing_and_silent() -> None:
    """By promtool, with the figures of a made-up hour."""
    told = "".join(path.read_text() for path in sorted((ROOT / "tests" / "alerts").glob("*.yaml")))
    asked = re.findall(r'expr: ALERTS\{alertname="(\w+)".+\n.+\n +exp_samples:(.*)', told)
    fires = {name for name, nothing in asked if not nothing}
    assert set(alerts()) - fires == set()
    assert set(alerts()) - {name for name, nothing in asked if nothing} == set()


def test_every_section_says_what_it_means_where_to_look_and_what_to_do() -> None:
    """In this order, each in its line."""
    for name, text in sections().items():
        assert re.findall(r"^- \*\*(.+?)\*\*: ", text, re.MULTILINE) == PARTS, name
        assert "`holdfast " in text, name
