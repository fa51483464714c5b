"""What a relay logs while it drains a backlog."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.brokers import connect
from holdfast.cli import progress
from holdfast.cli.progress import DrainLog, shown_progress
from holdfast.db.engine import open_database
from holdfast.outbox import Event, Outbox, RelayStep, create_tables
from holdfast.outbox.relay.service import RelayService, RelaySettings
from holdfast.testing import VirtualClock

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_drain_is_told_with_rate_and_remaining_time(caplog: pytest.LogCaptureFixture) -> None:
    """Once in ten seconds, and once more when it is over."""
    caplog.set_level(logging.INFO, "holdfast.cli")
    clock, left = VirtualClock(), 5_000_000
    drain = DrainLog(lambda: left, clock=clock)
    for _ in range(20):
        clock.advance(1)
        drain(RelayStep(published=10_000))
    left = 12
    for _ in range(10):
        clock.advance(1)
        drain(RelayStep(published=1))
    assert caplog.messages == [
        "draining a backlog: 5,000,000 events wait, 10,000/s, 8 min left at that rate",
        "draining a backlog: 5,000,000 events wait, 10,000/s, 8 min left at that rate",
        "the backlog is drained: 12 events wait",
    ]


def test_a_relay_without_a_backlog_asks_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """An idle one does not even count the rows."""
    caplog.set_level(logging.INFO, "holdfast.cli")
    clock, asked = VirtualClock(), []
    drain = DrainLog(lambda: len(asked.append(1) or asked), clock=clock)  # type: ignore[func-returns-value]
    for _ in range(50):
        clock.advance(1)
        drain(RelayStep(idle=True))
    assert not asked
    clock.advance(10)
    drain(RelayStep(published=5))
    assert (asked, caplog.messages) == ([1], [])


def test_the_relay_logs_it_where_no_terminal_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From cron, say, with --once."""
    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_BACKLOG", 1)
    caplog.set_level(logging.INFO, "holdfast.cli")
    shop, to = f"sqlite:///{tmp_path}/s.db", f"sqlite:///{tmp_path}/b.db"
    engine, broker = open_database(shop), connect(to)
    create_tables(engine)
    broker.create_topic("t")
    broker.close()
    with engine.begin() as db:
        Outbox().add_all(db, [Event(body=n, topic="t") for n in range(40)])
    engine.dispose()
    with (
        RelayService(RelaySettings(database=shop, broker=to, batch=10)) as service,
        shown_progress(service.waiting) as observe,
    ):
        assert service.run_once(observe).published == 40
    assert "draining a backlog: 30 events wait" in caplog.text
    assert "the backlog is drained" in caplog.text
