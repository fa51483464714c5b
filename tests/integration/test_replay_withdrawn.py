"""A replayed copy takes effect only while its plan claims it and its letter is open."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from holdfast import PoisonMessage, Transient
from holdfast.db.audit import Operator
from holdfast.dlq import close, dead_letter
from holdfast.dlq.replay import Plans, ReplayOptions, Selection, Sender, StopPolicy, freeze
from holdfast.dlq.replay.schema import item
from holdfast.idempotency import idempotent
from holdfast.retry import Backoff, retry
from tests.consuming import Bench, running, until
from tests.dead_letters import KINDS
from tests.shell import shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.orm import Session

    from holdfast.consumer import Consumer

ADA = Operator(actor="ada", reason="must never take effect")
UNWATCHED = ("--canary", "0", "--ramp", "", "--patience", "1s", "--reason", "fixed", "--yes")


class Shop:
    """A consumer whose one message has failed, and the command of its operators."""

    def __init__(self, folder: Path, url: str) -> None:
        self.bench = Bench(folder, url)
        self.url = url
        self.broker = f"sqlite:///{self.bench.broker_file}"
        self.bench.publish("bad", key=None)
        with running(self.consumer(broken=True)):
            until(lambda: self.bench.letters, "it is a dead letter")
        (self.letter,) = self.bench.letters

    def consumer(
        self, *, broken: bool = False, began: Any = None, go_on: threading.Event | None = None
    ) -> Consumer:
        """Return the consumer, its handler *broken* or mended."""
        consumer = self.bench.consumer()

        @consumer.on("orders")
        @dead_letter()
        @idempotent
        def handle(order: str, session: Session) -> None:
            if broken:
                raise PoisonMessage("a bug")
            self.bench.note(session, order)
            if began is not None and go_on is not None:
                began.set()
                go_on.wait(90)

        return consumer

    def dlq(self, *args: str) -> Any:
        """Run `holdfast dlq` for a script; return what it says."""
        said = shell("dlq", *args, "--database", self.url, "--json")
        assert "Traceback" not in said.stdout + said.stderr, said
        lines = [line for line in said.stdout.splitlines() if line.strip()]
        return json.loads("\n".join(lines)) if lines else None

    def send(self) -> str:
        """Replay while nobody consumes; return the plan."""
        shell("dlq", "replay", "--topic", "orders", *UNWATCHED, "--database", self.url,
              "--broker", self.broker)  # fmt: skip
        (plan,) = Plans(self.bench.engine).latest(limit=1)
        assert plan.sent == 1
        return plan.id

    @property
    def items(self) -> list[str]:
        """The stored states of all items, plan by plan."""
        with self.bench.engine.connect() as db:
            return list(db.execute(select(item.c.state).order_by(item.c.plan_id)).scalars())


@pytest.fixture(params=KINDS)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """Open a shop on each database."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/app.db"
    else:
        url = request.getfixturevalue(request.param).database("withdrawn")
    made = Shop(tmp_path, url)
    yield made
    made.bench.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Shop]:
    """Open a shop on SQLite."""
    made = Shop(tmp_path, f"sqlite:///{tmp_path}/app.db")
    yield made
    made.bench.close()


def test_a_discarded_letter_never_takes_effect_also_if_its_replay_is_on_its_way(
    shop: Shop,
) -> None:
    """Sent while the consumer is down, aborted, discarded: the copy comes and is not handled."""
    plan = shop.send()
    said = shop.dlq("plans", "abort", plan, "--reason", "wrong group")
    assert said["on_their_way"] == 1
    shop.dlq("discard", "--id", shop.letter.dlq_id, "--reason", "must never take effect", "--yes")
    consumer = shop.consumer()
    with running(consumer):
        until(lambda: consumer.tally.withdrawn == 1, "the copy came")
    assert shop.bench.effects == []
    assert [row.state for row in shop.bench.letters] == ["discarded"]
    assert shop.items == ["skipped"], "the plan keeps that the copy came"


def test_only_the_edited_copy_runs_when_the_one_before_is_still_on_its_way(
    shop: Shop, tmp_path: Path
) -> None:
    """Abort, edit, replay: the unedited copy comes first, and is not handled."""
    shop.dlq("plans", "abort", shop.send(), "--reason", "wrong total")
    (tmp_path / "fixed").write_text("good")
    shop.dlq("edit", shop.letter.dlq_id, "--payload-file", str(tmp_path / "fixed"),
             "--reason", "fixed")  # fmt: skip
    shop.send()
    consumer = shop.consumer()
    with running(consumer):
        until(lambda: consumer.tally.handled == 1, "the edited copy was handled")
        until(lambda: consumer.tally.withdrawn == 1, "the copy before was not")
    assert shop.bench.effects == ["good"]
    assert [row.state for row in shop.bench.letters] == ["confirmed"]
    assert len(shop.bench.letters) == 1


def test_an_abort_while_the_handler_runs_takes_its_effect_back(shop: Shop) -> None:
    """What is decided before the commit holds."""
    plan = shop.send()
    began, go_on = threading.Event(), threading.Event()
    consumer = shop.consumer(began=began, go_on=go_on)
    with running(consumer):
        assert began.wait(60)
        if shop.bench.engine.dialect.name == "sqlite":
            go_on.set()  # only one writes at a time: the abort would come after
            until(lambda: consumer.tally.handled == 1, "it was handled")
            assert shop.bench.effects == ["bad"]
            return
        plans = Plans(shop.bench.engine)
        plans.abort(plans.find(plan), ADA)
        with shop.bench.engine.begin() as db:
            close(db, [shop.letter.dlq_id], "discarded", actor="ada", reason="never")
        go_on.set()
        until(lambda: consumer.tally.withdrawn == 1, "it was taken back")
    assert shop.bench.effects == []
    assert [row.state for row in shop.bench.letters] == ["discarded"]


def test_an_abort_between_two_attempts_ends_the_message(shop: Shop) -> None:
    """Nobody holds a lock while a retry waits; what was decided by then holds, on SQLite too."""
    plan = shop.send()
    failed, go_on = threading.Event(), threading.Event()
    consumer = shop.bench.consumer()

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.1, ceiling=0.1, attempts=10_000))
    @idempotent
    def handle(order: str, session: Session) -> None:
        if not go_on.is_set():
            failed.set()
            raise Transient("not yet")
        shop.bench.note(session, order)

    with running(consumer):
        assert failed.wait(60)
        plans = Plans(shop.bench.engine)
        plans.abort(plans.find(plan), ADA)
        with shop.bench.engine.begin() as db:
            close(db, [shop.letter.dlq_id], "discarded", actor="ada", reason="never")
        go_on.set()
        tally = consumer.tally
        until(lambda: tally.withdrawn + tally.handled == 1, "the next attempt")
    assert shop.bench.effects == []
    assert [row.state for row in shop.bench.letters] == ["discarded"]


def test_a_copy_of_what_was_handled_is_not_handled_again_also_without_dedup(small: Shop) -> None:
    """A sender that crashed sends twice: the plan knows what is confirmed."""
    consumer, seen = small.bench.consumer(), []

    @consumer.on("orders")
    def handle(order: str) -> None:
        seen.append(order)

    terms = ReplayOptions(policy=StopPolicy(canary=0, ramp=(), patience=0.1))
    plan = freeze(small.bench.engine, Selection(consumer_group="g"), terms, ADA).plan
    Sender(small.bench.engine, small.bench.broker).run(plan.id)
    source = small.bench.broker.source(["orders.g.replay"], group="observer")
    (delivery,) = source.poll(10, 5.0)
    source.close()
    small.bench.send(delivery.message.with_(topic="orders.g.replay"))
    with running(consumer):
        until(lambda: consumer.tally.duplicates == 1, "both copies came")
    assert seen == ["bad"]
    assert small.items == ["confirmed"]


def test_abort_says_how_many_are_on_their_way(small: Shop) -> None:
    """To a person, too."""
    plan = small.send()
    said = shell("dlq", "plans", "abort", plan, "--reason", "no", "--database", small.url)
    assert "1 are on their way" in said.stdout
