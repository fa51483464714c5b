"""A replay does not repeat an effect that dedup has forgotten."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import Message, PoisonMessage
from holdfast.db.audit import Operator
from holdfast.dlq import DeadLetterStore, capture, dead_letter
from holdfast.dlq.replay import Plans, ReplayOptions, Selection, StopPolicy, freeze
from holdfast.idempotency import idempotent
from tests.consuming import Bench, running, until
from tests.dead_letters import KINDS, failed
from tests.shell import shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.orm import Session

    from holdfast.consumer import Consumer

ADA = Operator(actor="ada", reason="fixed")


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a consumer on each database."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/app.db"
    else:
        url = request.getfixturevalue(request.param).database("memory")
    made = Bench(tmp_path, url)
    yield made
    made.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a consumer on SQLite."""
    made = Bench(tmp_path, f"sqlite:///{tmp_path}/app.db")
    yield made
    made.close()


def billing(bench: Bench, *, broken: bool, batch: int | None = None) -> Consumer:
    """Return the consumer, its handler *broken* or mended, which remembers for two days."""
    consumer = bench.consumer(quarantine=False)

    @consumer.on("orders", batch=batch)
    @dead_letter()
    @idempotent(window="2d")
    def handle(order: str, session: Session) -> None:
        if broken:
            raise PoisonMessage("a bug")
        bench.note(session, order)

    return consumer


@pytest.mark.parametrize("batch", [None, 10], ids=["single", "batch"])
@pytest.mark.parametrize("key", [None, "k"])
def test_a_letter_is_closed_when_its_own_message_comes_again_and_is_handled(
    bench: Bench, key: str | None, batch: int | None
) -> None:
    """It was redelivered: the effect is there, and a replay after pruning would repeat it."""
    message, other = (Message.new("orders", body, key=key) for body in (b"x", b"y"))
    bench.send(message, other)
    with running(billing(bench, broken=True)):
        until(lambda: len(bench.letters) == 2, "both are dead letters")
    claim = freeze(bench.engine, Selection(consumer_group="g"), ReplayOptions(), ADA).plan
    bench.send(message)
    with running(billing(bench, broken=False, batch=batch)):
        until(lambda: bench.effects == ["x"] and bench.lag == 0, "it was handled")
    states = {row.message_id: row.state for row in bench.letters}
    assert states == {message.id: "confirmed", other.id: "pending"}
    assert Plans(bench.engine).tally(claim)["confirmed"] == 1  # type: ignore[index]


def test_a_letter_of_other_content_under_the_same_id_stays_open(small: Bench) -> None:
    """That one is another message: the handled one does not end it."""
    message = Message.new("orders", b"x")
    conflict = capture(
        message.with_(payload=b"other"), failed(ValueError("conflict")), group="g", handler="orders"
    )
    DeadLetterStore(small.engine).put(conflict)
    small.send(message)
    with running(billing(small, broken=False)):
        until(lambda: small.effects == ["x"], "it was handled")
    assert [row.state for row in small.letters] == ["pending"]


class Desk:
    """Dead letters of two ages, of a consumer that remembers for two days."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.url = bench.engine.url.render_as_string(hide_password=False)
        self.broker = f"sqlite:///{bench.broker_file}"
        with running(billing(bench, broken=False)) as consumer:
            until(lambda: consumer.running is not None, "it runs")
            bench.publish("first", key="a")
            until(lambda: bench.effects == ["first"], "it is known by the inbox")
        now = datetime.now(UTC)
        for days, key in ((1, "new"), (3, "old")):
            made = Message.new("orders", key.encode(), key=key, time=now - timedelta(days=days))
            letter = capture(made, failed(ValueError("x")), group="g", handler="orders")
            DeadLetterStore(bench.engine).put(letter)

    def replay(self, *args: str) -> Any:
        """Run `holdfast dlq replay`; return what it says."""
        said = shell("dlq", "replay", "--topic", "orders", *args, "--database", self.url, "--json")
        assert "Traceback" not in said.stdout + said.stderr, said
        return json.loads(said.stdout)

    def send(self, *args: str) -> Any:
        """Replay without waiting for anybody."""
        return self.replay(*args, "--broker", self.broker, "--reason", "fixed", "--yes", "--canary",
                           "0", "--ramp", "", "--patience", "1s")  # fmt: skip


def test_what_is_older_than_its_consumer_remembers_is_held_unless_told_otherwise(
    bench: Bench,
) -> None:
    """The window is the handler's own, from the inbox; the dry run says what is beyond it."""
    desk = Desk(bench)
    dry = desk.replay("--dry-run")
    assert (dry["dedup_window"], dry["beyond_window"]) == (2 * 86400, 1)
    assert (dry["count"], dry["aside"]) == (1, {"held": 1})
    assert "remembers 2 days" in dry["aside_examples"][0][1]
    anyway = desk.replay("--dry-run", "--beyond-window")
    assert (anyway["count"], anyway["beyond_window"], anyway["aside"]) == (2, 1, {})
    desk.send()
    (plan,) = Plans(bench.engine).latest(limit=1)
    assert (plan.total, plan.sent) == (1, 1)
    desk.send("--beyond-window")
    (plan,) = Plans(bench.engine).latest(limit=1)
    assert (plan.total, plan.sent) == (1, 1)


def test_a_window_that_this_database_does_not_know_can_be_told(small: Bench) -> None:
    """Of consumers whose inbox is elsewhere; else nothing is held for its age."""
    made = Message.new("orders", b"x", key="k", time=datetime.now(UTC) - timedelta(days=3))
    DeadLetterStore(small.engine).put(
        capture(made, failed(ValueError("x")), group="elsewhere", handler="h")
    )
    url = small.engine.url.render_as_string(hide_password=False)
    ask = ("dlq", "replay", "--group", "elsewhere", "--dry-run", "--json", "--database", url)
    assert json.loads(shell(*ask).stdout)["count"] == 1
    told = json.loads(shell(*ask, "--dedup-window", "2d").stdout)
    assert (told["count"], told["beyond_window"]) == (0, 1)


def test_terms_without_a_memory_hold_nothing_for_its_age(small: Bench) -> None:
    """Programs that make plans say so themselves."""
    made = Message.new("orders", b"x", time=datetime.now(UTC) - timedelta(days=999))
    DeadLetterStore(small.engine).put(
        capture(made, failed(ValueError("x")), group="g", handler="orders")
    )
    frozen = freeze(
        small.engine, Selection(consumer_group="g"), ReplayOptions(policy=StopPolicy()), ADA
    )
    assert frozen.plan.total == 1
