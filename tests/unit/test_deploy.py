"""What is deployed beside the relay speaks of things that the relay really has."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client import REGISTRY, generate_latest

from holdfast.cli.app import COMMANDS
from holdfast.cli.dlq import COMMANDS as DLQ
from holdfast.db.engine import open_database
from holdfast.outbox.relay.monitoring import Backlog, BacklogSample, RelayMetrics, Sampler, SlotLag
from holdfast.outbox.relay.relay import Health

DEPLOY = Path(__file__).parents[2] / "deploy"
FULL = BacklogSample(
    waiting=1,
    is_exact=True,
    oldest_seconds=1.0,
    delayed=0,
    overdue_seconds=0.0,
    parked=0,
    slot=SlotLag(is_lost=False, retained=2.0, unconfirmed=1.0, safe=3.0),
)


class Sampled(Sampler):
    """A sampler that has a sample."""

    @property
    def latest(self) -> BacklogSample:
        """Return what a full outbox shows."""
        return FULL


def exported() -> str:
    """Return everything that a relay exports."""
    engine = open_database("sqlite://")
    metrics = RelayMetrics(Health(), Sampled(Backlog(engine)), shards=lambda: 0)
    text = metrics.text().decode()
    engine.dispose()
    return text


def test_alerts_and_dashboard_use_only_series_that_exist() -> None:
    """A renamed metric would silence an alert without anybody noticing."""
    page = exported() + generate_latest(REGISTRY).decode()  # the endpoint serves both
    there = set(re.findall(r"^(holdfast_\w+)", page, re.MULTILINE))
    for name in ("prometheus-alerts.yaml", "grafana-relay.json"):
        used = set(re.findall(r"\bholdfast_\w+", (DEPLOY / name).read_text()))
        assert used, name
        assert used <= there, name


def test_whatever_keeps_events_in_the_outbox_is_alerted_by_its_cause() -> None:
    """The age of the outbox tells that something is wrong; these tell what."""
    rules = (DEPLOY / "prometheus-alerts.yaml").read_text()
    asked = " ".join(re.findall(r"^ +expr: (.+)$", rules, re.MULTILINE))
    for series in ("holdfast_relay_outage", "holdfast_relay_hindered",
                   "holdfast_relay_missing_topics", "holdfast_outbox_parked"):  # fmt: skip
        assert series in asked, series


def test_every_series_starts_at_zero() -> None:
    """A rate over a counter that appears only with its first event would miss that event."""
    lines = exported().splitlines()
    for series in ("holdfast_relay_published_total", "holdfast_relay_parked_total",
                   "holdfast_relay_outage", "holdfast_relay_leases_owned",
                   "holdfast_relay_hindered", "holdfast_relay_missing_topics",
                   "holdfast_relay_step_seconds_count"):  # fmt: skip
        assert f"{series} 0.0" in lines


def test_the_dashboard_is_json_with_distinct_panels() -> None:
    """Grafana imports it as it is."""
    board = json.loads((DEPLOY / "grafana-relay.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) > 0


def test_the_commands_that_are_deployed_have_the_flags_they_use() -> None:
    """Unit and manifest start the relay as it can be started."""
    [relay] = [late.load() for late in COMMANDS if late.name == "relay"]
    known = {flag for option in relay.params for flag in option.opts}
    for name in ("holdfast-relay.service", "kubernetes-sidecar.yaml"):
        text = (DEPLOY / name).read_text()
        line = next(line for line in text.splitlines() if "--http" in line)
        assert set(re.findall(r"--[a-z-]+", line)) <= known, name


def test_what_looks_after_dead_letters_has_the_flags_it_uses() -> None:
    """Units and manifest start the commands as they can be started."""
    commands = {late.name: late.load() for late in DLQ}
    lines = [
        line
        for path in (*DEPLOY.glob("holdfast-dlq-*.service"), DEPLOY / "kubernetes-dlq.yaml")
        for line in path.read_text().splitlines()
        if "ExecStart=" in line or "args:" in line
    ]
    assert len(lines) == 6
    for line in lines:
        name = re.findall(r"dlq,? (\w+)", line)[0]
        known = {flag for option in commands[name].params for flag in option.opts}
        assert set(re.findall(r"--[a-z-]+", line)) <= known, line
