"""Automatic retries need nobody: what is due is sent, and what a stop left is due again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select, update

from holdfast.db.audit import Operator, entries
from holdfast.dlq import dead_letter
from holdfast.dlq.replay import EndingKind, Plans, ReplayOptions, Selection, StopPolicy
from holdfast.dlq.replay.auto_retry import Retrying
from holdfast.dlq.replay.schema import plan as plans
from holdfast.dlq.replay.sender import Pace
from holdfast.dlq.replay.survey import survey
from holdfast.dlq.store.schema import message
from holdfast.errors import Transient
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.consumer import Consumer

TIMER = Operator(actor="timer", reason="automatic retry")
FAST = Pace(batch=10, lease_seconds=1.0, poll_seconds=0.02)
HOLDFAST = str(Path(sys.executable).with_name("holdfast"))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a database in files."""
    made = Bench(tmp_path, f"sqlite:///{tmp_path}/app.db")
    yield made
    made.close()


def shop(bench: Bench, broken: set[str], done: list[str]) -> Consumer:
    """Return a consumer that cannot reach something for the orders in *broken*."""
    consumer = bench.consumer()

    @consumer.on("orders")
    @dead_letter()
    def handle(order: str) -> None:
        if order in broken:
            raise Transient("no answer")
        done.append(order)

    return consumer


def dead(bench: Bench, *orders: str) -> None:
    """Have the group fail at *orders*, each of a key of its own, whose retries are due at once."""
    for order in orders:
        bench.publish(order, key=order)
    with running(shop(bench, set(orders), [])):
        until(lambda: bench.lag == 0, "all are dead letters")
    with bench.engine.begin() as db:
        db.execute(update(message).values(due_at=1.0))


def test_retries_have_a_limit_of_their_own(bench: Bench) -> None:
    """The cap on replays is one on what people try: no retry that triage allows is parked by it."""
    dead(bench, "a")
    with bench.engine.begin() as db:
        db.execute(update(message).values(retries=4, replay_count=4))
        left = survey(db, Selection(due=True), ReplayOptions())
        assert (len(left.letters), left.aside) == (1, [])
        db.execute(update(message).values(retries=1, replay_count=4))
        ((_, state, why),) = survey(db, Selection(due=True), ReplayOptions()).aside
        assert (state.value, why) == ("parked", "replayed 3 times already")


def retrying(bench: Bench, **more: Any) -> Retrying:
    """Return what sends the retries."""
    terms = ReplayOptions(policy=StopPolicy(canary=1, ramp=(), patience=more.pop("patience", 60.0)))
    return Retrying(bench.engine, bench.broker, TIMER, terms=terms, pace=FAST, **more)


def test_what_is_due_is_sent_and_confirmed_by_itself(bench: Bench) -> None:
    """A round with nothing due does nothing and leaves no plan."""
    dead(bench, "a", "b", "c")
    done: list[str] = []
    with running(shop(bench, set(), done)):
        first = retrying(bench).round()
        again = retrying(bench).round()
    assert ([one.kind for one in first], again) == ([EndingKind.CONFIRMED], [])
    assert sorted(done) == ["a", "b", "c"]
    assert {row.state for row in bench.letters} == {"confirmed"}
    assert len(Plans(bench.engine).latest()) == 1


def test_a_retry_that_fails_stops_and_gives_the_rest_back(bench: Bench) -> None:
    """The rest is due again with all its tries; the failed one later, by triage."""
    dead(bench, "a", "b", "c")
    with running(shop(bench, {"a", "b", "c"}, [])):
        (ending,) = retrying(bench).round()
    assert ending.kind is EndingKind.STOPPED
    tries = sorted(row.retries for row in bench.letters)
    assert tries == [0, 0, 1]
    assert all(row.due_at is not None and row.due_at > 1.0 for row in bench.letters)
    assert Plans(bench.engine).latest(active=True) == []
    with bench.engine.connect() as db:
        assert "replay.abort" in [one.action for one in entries(db)]
        db_due = update(message).values(due_at=1.0)
    with bench.engine.begin() as db:
        db.execute(db_due)
    done: list[str] = []
    with running(shop(bench, set(), done)):
        assert [one.kind for one in retrying(bench).round()] == [EndingKind.CONFIRMED]
    assert sorted(done) == ["a", "b", "c"]


def test_a_plan_that_a_stop_interrupted_is_sent_on_by_the_next_round(bench: Bench) -> None:
    """Nobody confirms the canary while the sender is asked to end: nothing is lost by that."""
    dead(bench, "a", "b", "c")
    stopping = threading.Event()
    found: list[Any] = []
    sender = threading.Thread(
        target=lambda: found.extend(retrying(bench, stopping=stopping).round())
    )
    sender.start()

    def is_out() -> bool:
        with bench.engine.connect() as db:
            return db.execute(select(plans.c.sent)).scalars().all() == [1]

    until(is_out, "the canary is out")
    stopping.set()
    sender.join(90)
    assert [one.kind for one in found] == [EndingKind.PAUSED]
    done: list[str] = []
    with running(shop(bench, set(), done)):
        assert [one.kind for one in retrying(bench).round()] == [EndingKind.CONFIRMED]
    assert sorted(done) == ["a", "b", "c"]
    assert len(Plans(bench.engine).latest()) == 1


def test_what_an_operator_paused_is_left_alone(bench: Bench) -> None:
    """Whoever paused it goes on with it."""
    dead(bench, "a")
    (ending,) = retrying(bench, patience=0.2).round()
    assert ending.kind is EndingKind.UNCONFIRMED
    desk = Plans(bench.engine)
    (plan,) = desk.latest(active=True)
    desk.pause(plan, Operator(actor="ada", reason="let me look"))
    assert retrying(bench).round() == []
    assert [one.state for one in desk.latest()] == ["paused"]


@pytest.mark.programs
def test_the_command_retries_until_it_is_asked_to_end(bench: Bench, tmp_path: Path) -> None:
    """`holdfast dlq replay --due --every` ends with 0 on SIGTERM."""
    dead(bench, "a")
    command = [
        HOLDFAST, "dlq", "replay", "--due", "--every", "1s", "--reason", "automatic retry",
        "--database", str(bench.engine.url), "--broker", f"sqlite:///{bench.broker_file}",
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    with running(shop(bench, set(), [])):
        process = subprocess.Popen(command, env=environment, cwd=tmp_path)
        try:
            until(lambda: {row.state for row in bench.letters} == {"confirmed"}, "retried")
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.wait()
