"""The metrics of dead letters: counted from 0, few labels, and the alerts use what exists."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import update

from holdfast.database import open_database
from holdfast.dlq import StoreHome, create_tables
from holdfast.dlq.audit import Warrant
from holdfast.dlq.gauges import StoreGauges
from holdfast.dlq.metrics import DlqMetrics
from holdfast.dlq.replay import Selection, Terms, freeze
from holdfast.dlq.replay.schema import item, plan
from holdfast.testing import VirtualClock
from tests.dead_letters import letter

ALERTS = Path(__file__).parents[2] / "deploy" / "prometheus-dlq-alerts.yaml"


def test_every_series_starts_at_zero() -> None:
    """A rate over a counter that appears with its first event would miss that event."""
    registry = CollectorRegistry()
    DlqMetrics(registry).watch("billing", "orders")
    lines = generate_latest(registry).decode().splitlines()
    for series in (
        'holdfast_dlq_messages_total{class="poison",group="billing",topic="orders"}',
        'holdfast_dlq_write_failures_total{home="store"}',
        "holdfast_dlq_groups_new_total",
        'holdfast_replay_messages_total{result="failed_again"}',
        'holdfast_dlq_consumed_total{group="billing"}',
    ):
        assert f"{series} 0.0" in lines


def test_the_alerts_use_only_series_that_exist(tmp_path: Path) -> None:
    """A renamed metric would silence an alert without anybody noticing."""
    registry = CollectorRegistry()
    DlqMetrics(registry).watch("billing", "orders")
    engine = open_database(f"sqlite:///{tmp_path}/x.db")
    create_tables(engine)
    StoreHome(engine).put(letter())
    StoreGauges(engine, retention={"orders": 0.5}, registry=registry)
    said = generate_latest(registry).decode()
    engine.dispose()
    there = set(re.findall(r"^(holdfast_\w+)", said, re.MULTILINE))
    used = set(re.findall(r"\bholdfast_\w+", ALERTS.read_text()))
    assert used
    assert used <= there
    assert 'holdfast_dlq_open{topic="orders"} 1.0' in said
    assert "holdfast_dlq_expiring_24h 1.0" in said
    assert "fingerprint" not in said


def test_a_store_that_is_down_is_shown_as_such(tmp_path: Path) -> None:
    """The scrape goes on, and the next sample recovers."""
    clock = VirtualClock()
    engine = open_database(f"sqlite:///{tmp_path}/x.db")
    gauges = StoreGauges(engine, clock=clock)
    assert [metric.samples[0].value for metric in gauges.collect()] == [0.0]
    create_tables(engine)
    assert len(list(gauges.collect())) == 1  # not asked again so soon
    clock.advance(16)
    assert next(iter(gauges.collect())).samples[0].value == 1.0
    engine.dispose()


def test_a_replay_that_nobody_confirms_is_seen(tmp_path: Path) -> None:
    """The age counts from the last outcome; what is not sent yet does not wait for one."""
    clock = VirtualClock()
    engine = open_database(f"sqlite:///{tmp_path}/x.db")
    create_tables(engine)
    StoreHome(engine).put_all([letter(number) for number in range(3)])
    ada = Warrant(actor="ada", reason="fixed")
    made = freeze(engine, Selection(consumer_group="billing"), Terms(), ada).plan
    gauges = StoreGauges(engine, clock=clock, every=0)

    def seen() -> tuple[float, float]:
        values = {metric.name: metric.samples[0].value for metric in gauges.collect()}
        return (values["holdfast_replay_unconfirmed"],
                values["holdfast_replay_unconfirmed_seconds"])  # fmt: skip

    assert seen() == (0, 0)
    with engine.begin() as db:
        db.execute(update(plan).values(sent=2))
    assert seen() == (2, 0)
    clock.advance(1801)
    assert seen() == (2, 1801)
    with engine.begin() as db:
        first = (item.c.plan_id == made.id) & (item.c.position == 0)
        db.execute(update(item).where(first).values(state="confirmed", live=None))
    assert seen() == (1, 0)
    engine.dispose()
