"""The metrics of dead letters: counted from 0, few labels, and the alerts use what exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import update

from holdfast.brokers import connect
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterStore, DeadLetterTopic, create_tables
from holdfast.dlq.gauges import StoreGauges
from holdfast.dlq.metrics import DlqMetrics
from holdfast.dlq.replay import ReplayOptions, Selection, freeze
from holdfast.dlq.replay.schema import item, plan
from holdfast.dlq.topic.collector import DAY, Uncollected
from holdfast.dlq.topic.topic import COLLECTOR
from holdfast.errors import BrokerDown
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


def test_a_letter_with_hostile_names_is_counted_and_the_page_is_whole() -> None:
    """The application serves its registry itself; one lone surrogate would end every scrape."""
    registry = CollectorRegistry()
    DlqMetrics(registry).put(letter(topic="t\ud800", group="g\udfff"))
    said = generate_latest(registry).decode()
    assert r'group="g\\udfff",topic="t\\ud800"} 1.0' in said


def test_the_alerts_use_only_series_that_exist(tmp_path: Path) -> None:
    """A renamed metric would silence an alert without anybody noticing."""
    registry = CollectorRegistry()
    DlqMetrics(registry).watch("billing", "orders")
    engine = open_database(f"sqlite:///{tmp_path}/x.db")
    create_tables(engine)
    DeadLetterStore(engine).put(letter())
    StoreGauges(engine, registry=registry)
    said = generate_latest(registry).decode()
    engine.dispose()
    there = set(re.findall(r"^(holdfast_\w+)", said, re.MULTILINE))
    used = set(re.findall(r"\bholdfast_\w+", ALERTS.read_text()))
    assert used
    assert used <= there
    assert 'holdfast_dlq_open{topic="orders"} 1.0' in said
    assert "holdfast_dlq_expiring_24h 0.0" in said
    assert "fingerprint" not in said


def seen(gauges: StoreGauges) -> dict[str, float]:
    """Return the first figure of each name."""
    return {metric.name: metric.samples[0].value for metric in gauges.collect()}


def test_letters_that_nobody_collects_are_seen_before_the_broker_forgets_them() -> None:
    """By number and by how long none was collected; a day before the retention they count."""
    clock, broker = VirtualClock(), connect("memory:")
    topic = "orders.billing.dlq"
    waiting = Uncollected(
        broker=broker, topics=[topic, "none.yet.dlq"], retention={"*": 7 * DAY}, clock=clock
    )
    gauges = StoreGauges(None, uncollected=waiting, every=0, clock=clock)

    def found() -> tuple[float, float, float]:
        now = seen(gauges)
        return (now["holdfast_dlq_uncollected"], now["holdfast_dlq_uncollected_seconds"],
                now["holdfast_dlq_expiring_24h"])  # fmt: skip

    assert found() == (0, 0, 0)
    home = DeadLetterTopic.on(broker)
    for number in range(3):
        home.put(letter(number))
    assert found() == (3, 0, 0)
    clock.advance(6.5 * DAY)
    assert found() == (3, 6.5 * DAY, 3)
    source = broker.source([topic], group=COLLECTOR)
    batch = source.poll(10, 1.0)
    source.accept(batch[:1])
    source.close()
    assert found() == (2, 0, 0)
    broker.close()


def test_a_broker_that_is_down_hides_no_figure_of_the_store(tmp_path: Path) -> None:
    """What is on topics is not known then, and that is said."""
    engine = open_database(f"sqlite:///{tmp_path}/x.db")
    create_tables(engine)

    class Down:
        def lag(self, *_: object) -> None:
            raise BrokerDown("no answer")

    down: Any = Down()
    waiting = Uncollected(broker=down, topics=["orders.billing.dlq"])
    found = seen(StoreGauges(engine, uncollected=waiting))
    engine.dispose()
    assert found["holdfast_dlq_sampled"] == 0
    assert found["holdfast_dlq_open"] == 0
    assert "holdfast_dlq_uncollected" not in found


def test_a_store_that_is_down_is_shown_as_such(tmp_path: Path) -> None:
    """The scrape goes on, and the next sample recovers."""
    clock = VirtualClock()
    engine = open_database(f"sqlite:///{tmp_path}/x.db")
    gauges = StoreGauges(engine, clock=clock)
    assert seen(gauges)["holdfast_dlq_sampled"] == 0.0
    assert "holdfast_dlq_open" not in seen(gauges)
    create_tables(engine)
    assert "holdfast_dlq_open" not in seen(gauges)  # not asked again so soon
    clock.advance(16)
    assert next(iter(gauges.collect())).samples[0].value == 1.0
    engine.dispose()


def test_a_replay_that_nobody_confirms_is_seen(tmp_path: Path) -> None:
    """The age counts from the last outcome; what is not sent yet does not wait for one."""
    clock = VirtualClock()
    engine = open_database(f"sqlite:///{tmp_path}/x.db")
    create_tables(engine)
    DeadLetterStore(engine).put_all([letter(number) for number in range(3)])
    ada = Operator(actor="ada", reason="fixed")
    made = freeze(engine, Selection(consumer_group="billing"), ReplayOptions(), ada).plan
    gauges = StoreGauges(engine, clock=clock, every=0)

    def found() -> tuple[float, float]:
        values = seen(gauges)
        return (values["holdfast_replay_unconfirmed"],
                values["holdfast_replay_unconfirmed_seconds"])  # fmt: skip

    assert found() == (0, 0)
    with engine.begin() as db:
        db.execute(update(plan).values(sent=2))
    assert found() == (2, 0)
    clock.advance(1801)
    assert found() == (2, 1801)
    with engine.begin() as db:
        first = (item.c.plan_id == made.id) & (item.c.position == 0)
        db.execute(update(item).where(first).values(state="confirmed", live=None))
    assert found() == (1, 0)
    engine.dispose()
