"""A sender that ends, waits or is told something else goes on where it was, and not blindly."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select, update

from holdfast.brokers import connect
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.dlq.replay import (
    EndingKind,
    Plans,
    Rate,
    ReplayOptions,
    Selection,
    Sender,
    StopPolicy,
    freeze,
)
from holdfast.dlq.replay.lease import PlanLease, TakenPlan
from holdfast.dlq.replay.plan import NotNow
from holdfast.dlq.replay.publisher import PlanPublisher
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.schema import plan as plan_table
from holdfast.dlq.replay.sender import Pace
from holdfast.dlq.replay.survey import surveyed
from holdfast.dlq.store.schema import audit
from holdfast.ids import new_id
from holdfast.testing import VirtualClock, wait_until
from tests.dead_letters import count
from tests.integration.test_replay import ADA, BOB, FAST, Broken, Shop
from tests.migrated import migrated

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.dlq.replay.plan import PlanCounts, ReplayPlan

AT_ONCE = ReplayOptions(policy=StopPolicy(canary=0, ramp=()))


_BATCH = 20
_SENDER = f"""
import os, signal, sys
from holdfast.brokers import connect
from holdfast.brokers.embedded.sink import EmbeddedSink
from holdfast.db.engine import open_database
from holdfast.dlq.replay import Sender
from holdfast.dlq.replay.sender import Pace
publish, batches = EmbeddedSink.publish, iter(range(1, 100))
def publish_and_die(sink, messages):
    results = publish(sink, messages)
    if next(batches) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return results
EmbeddedSink.publish = publish_and_die
database, broker, plan = sys.argv[1:]
pace = Pace(batch={_BATCH}, lease_seconds=1.0)
Sender(open_database(database), connect(broker), pace=pace).run(plan)
"""


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    """Open a shop on SQLite, where the database makes no difference."""
    engine = open_database(f"sqlite:///{tmp_path}/shop.db")
    migrated(engine)
    yield Shop(engine, tmp_path)
    engine.dispose()


def test_what_fails_during_a_pause_stops_the_plan_and_only_a_stop_forgives(shop: Shop) -> None:
    """The operator who paused has not seen these failures; she who resumes a stop has."""
    shop.fail(20, keys=20)
    plan = shop.freeze(ReplayOptions(policy=StopPolicy(canary=0, ramp=(0.5,))))

    def pause_at_the_gate(found: ReplayPlan, _: PlanCounts) -> None:
        if found.sent == 10:
            shop.plans.pause(shop.plans.find(found.id), BOB)

    sender = Sender(shop.engine, shop.broker, pace=FAST, observe=pause_at_the_gate)
    assert sender.run(plan.id).kind is EndingKind.PAUSED
    shop.billing.broken = lambda _: True
    with shop.billing.running("orders.billing.replay"):
        wait_until(lambda: shop.items(plan.id).get("failed_again") == 10)
        assert shop.plans.resume(shop.plans.find(plan.id), ADA).forgiven == 0
        ending = shop.send(plan.id)
        assert ending.kind is EndingKind.STOPPED
        assert "10 of the last 10 failed again" in ending.reason
        assert shop.plans.find(plan.id).sent == 10
        shop.billing.broken = lambda _: False
        assert shop.plans.resume(shop.plans.find(plan.id), ADA).forgiven == 10
        assert shop.send(plan.id).kind is EndingKind.PARTLY
    assert shop.items(plan.id) == {"confirmed": 10, "failed_again": 10}


def test_after_an_outage_only_what_is_still_open_is_sent_again(shop: Shop) -> None:
    """What was confirmed or held meanwhile is not."""
    shop.fail(5)
    plan = shop.freeze(AT_ONCE)

    def meanwhile() -> None:
        with shop.engine.begin() as db:
            settled = item.c.position < 3
            db.execute(update(item).where(settled).values(state="confirmed", live=None))

    broker = Broken(shop.broker, meanwhile)
    with shop.billing.running("orders.billing.replay"):
        sender = Sender(shop.engine, broker, pace=FAST)  # type: ignore[arg-type]
        assert sender.run(plan.id).kind is EndingKind.CONFIRMED
    assert broker.published == 2


def test_a_pause_during_an_outage_leaves_no_batch_out(shop: Shop) -> None:
    """The next batch is in hand already, and must not go in place of the one that did not."""
    shop.fail(25)
    plan = shop.freeze(AT_ONCE)
    broker = Broken(shop.broker, lambda: shop.plans.pause(shop.plans.find(plan.id), BOB))
    ending = Sender(shop.engine, broker, pace=FAST).run(plan.id)  # type: ignore[arg-type]
    assert (ending.kind, broker.published) == (EndingKind.PAUSED, 0)
    assert shop.plans.find(plan.id).sent == 0
    shop.plans.resume(shop.plans.find(plan.id), BOB)
    with shop.billing.running("orders.billing.replay"):
        assert shop.send(plan.id).kind is EndingKind.CONFIRMED


def test_a_pause_while_a_batch_is_on_its_way_keeps_the_one_that_waits_behind_it(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender hears of it as it renews its lease, and takes back what has not begun."""
    shop.fail(40, keys=40)
    plan = shop.freeze(AT_ONCE)
    published: list[int] = []
    heard = threading.Event()
    withdraw = PlanPublisher.withdraw

    def noted(publisher: PlanPublisher) -> None:
        withdraw(publisher)
        heard.set()

    monkeypatch.setattr(PlanPublisher, "withdraw", noted)

    def renewed() -> None:
        before = shop.plans.find(plan.id).until
        wait_until(lambda: shop.plans.find(plan.id).until != before)

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(shop.broker, name)

        def sink(self) -> Any:
            inner = shop.broker.sink()

            class Sink:
                caps, close = inner.caps, inner.close

                def publish(self, messages: Any) -> Any:
                    published.append(len(messages))
                    if len(published) == 3:
                        renewed()  # the batch before is marked
                        renewed()  # it waits for this one
                        shop.plans.pause(shop.plans.find(plan.id), BOB)
                        assert heard.wait(60)
                    return inner.publish(messages)

            return Sink()

    pace = Pace(batch=5, lease_seconds=6.0, poll_seconds=0.01)
    ending = Sender(shop.engine, Slow(), pace=pace).run(plan.id)  # type: ignore[arg-type]
    assert ending.kind is EndingKind.PAUSED
    assert (published, shop.plans.find(plan.id).sent) == ([5, 5, 5], 15)


def test_a_plan_that_is_being_sent_is_not_resumed_nor_changed(shop: Shop) -> None:
    """Its name is the short one that the list shows."""
    shop.fail(3)
    plan = shop.freeze(AT_ONCE)
    with shop.engine.begin() as db:
        db.execute(update(plan_table).values(state="running"))
    lease = PlanLease.take(shop.engine, plan.id, seconds=600)
    entries = count(shop.engine, audit)
    plans = Plans(shop.engine, clock=VirtualClock(auto=True))
    with pytest.raises(TakenPlan, match=f"plan {plan.short} is being sent"):
        plans.resume(plans.find(plan.id), BOB, rate=Rate.parse("7/s"))
    assert plans.find(plan.id).rate == Rate()
    assert count(shop.engine, audit) == entries
    lease.release()


def test_a_sender_follows_another_rate_while_it_sends(shop: Shop) -> None:
    """An operator slows a replay down, or lets it go, from any other place."""
    shop.fail(30)
    terms = ReplayOptions(policy=StopPolicy(canary=0, ramp=()), rate=Rate.parse("1/h"))
    plan = shop.freeze(terms)
    endings: list[Any] = []

    def send() -> None:
        engine, broker = open_database(str(shop.engine.url)), connect(shop.url)
        endings.append(Sender(engine, broker, pace=FAST).run(plan.id))
        broker.close()
        engine.dispose()

    thread = threading.Thread(target=send)
    with shop.billing.running("orders.billing.replay"):
        thread.start()
        try:
            wait_until(lambda: shop.plans.find(plan.id).sent == 1)
            quick = shop.plans.slow(shop.plans.find(plan.id), BOB, Rate.parse("1000/s"))
            assert quick.rate == Rate.parse("1000/s")
            wait_until(lambda: endings, deadline=90, what="the rest is sent at the new rate")
        finally:
            if not endings:
                shop.plans.abort(shop.plans.find(plan.id), BOB)
            thread.join()
    assert endings[0].kind is EndingKind.CONFIRMED
    with shop.engine.connect() as db:
        actions = db.execute(select(audit.c.action)).scalars().all()
    assert actions.count("replay.rate") == 1


def test_a_survey_keeps_no_writer_waiting_and_waits_for_none(shop: Shop) -> None:
    """On SQLite there is one writer; who only looks is not it."""
    shop.fail(5)
    impatient = open_database(str(shop.engine.url), connect_args={"timeout": 0.1})
    with shop.engine.begin():
        found = surveyed(impatient, Selection(consumer_group="billing"), ReplayOptions())
    impatient.dispose()
    assert len(found.letters) == 5


def test_nobody_approves_from_the_account_that_made_the_plan(shop: Shop) -> None:
    """Another name is easily given; where an account is shared, that is said and kept."""
    shop.fail(3)
    maker = Operator(actor="ada", reason="fixed", account="ops@host")
    terms = ReplayOptions(policy=StopPolicy(), approve_above=1)
    plan = freeze(shop.engine, Selection(consumer_group="billing"), terms, maker).plan
    bob = Operator(actor="bob", reason="looks right", account="ops@host")
    with pytest.raises(NotNow, match="--shared-account"):
        shop.plans.approve(plan, bob)
    carl = Operator(actor="carl", reason="looks right", account="carl@host")
    assert shop.plans.approve(plan, carl).approved_by == "carl"
    shop.plans.abort(shop.plans.find(plan.id), maker)
    plan = freeze(shop.engine, Selection(consumer_group="billing"), terms, maker).plan
    assert shop.plans.approve(plan, bob, shared_account=True).approved_by == "bob"
    with shop.engine.connect() as db:
        chosen = select(audit.c.detail).where(audit.c.action == "replay.approve")
        details = db.execute(chosen.order_by(audit.c.seq)).scalars().all()
    assert ['"shared_account":true' in text for text in details] == [False, True]


@pytest.mark.programs
def test_a_killed_sender_repeats_two_batches_at_most_and_leaves_none_out(shop: Shop) -> None:
    """It dies when the broker has taken a batch and nothing is marked of it; the next goes on."""
    shop.fail(400)
    plan = shop.freeze(AT_ONCE)
    command = [sys.executable, "-P", "-c", _SENDER,
               shop.engine.url.render_as_string(), shop.url, plan.id]  # fmt: skip
    assert subprocess.run(command, timeout=300, check=False).returncode == -signal.SIGKILL
    killed = shop.plans.find(plan.id)
    assert 0 < killed.sent < plan.total, "it was killed on its way"
    taken = _published(shop)
    assert killed.sent <= len(taken) <= killed.sent + 2 * _BATCH
    with shop.billing.running("orders.billing.replay"):
        assert shop.send(plan.id, replace(FAST, batch=_BATCH)).kind is EndingKind.CONFIRMED
    every = _published(shop)
    assert len(set(every)) == plan.total
    assert len(every) <= plan.total + 2 * _BATCH
    assert sum(map(len, shop.effects().values())) == plan.total


def _published(shop: Shop) -> list[str]:
    """Return the ids of all messages that the replay's topic has."""
    source = shop.broker.source(["orders.billing.replay"], group=new_id())
    found: list[str] = []
    while deliveries := source.poll(500, 0.2):
        found += [delivery.message.id for delivery in deliveries]
        source.accept(deliveries)
    source.close()
    return found
