"""Marks of a replay are only headers: they count where the plan and the way it came agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast import Message, PoisonMessage
from holdfast.consumer import Consumer, HandlerEnding
from holdfast.db.audit import Operator
from holdfast.dlq import DeadLetterStore, capture, dead_letter
from holdfast.dlq.replay import Plans, ReplayOptions, Selection, Sender, StopPolicy, freeze
from holdfast.headers import ReplayHeaders
from holdfast.idempotency import idempotent
from tests.consuming import Bench, running, until
from tests.dead_letters import failed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.orm import Session

    from holdfast.dlq import DeadLetter

ADA = Operator(actor="ada", reason="fixed")
AT_ONCE = StopPolicy(canary=0, ramp=(), patience=0.1)


@pytest.fixture(params=[True, False], ids=["with a database", "without a database"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker, and a consumer with and without a database."""
    made = Bench(tmp_path, f"sqlite:///{tmp_path}/app.db", database=request.param)
    yield made
    made.close()


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a consumer with a database."""
    made = Bench(tmp_path, f"sqlite:///{tmp_path}/app.db")
    yield made
    made.close()


def marked(via: str, body: bytes, *, key: str = "k", **marks: Any) -> Message:
    """Return a message to the topic *via* that says it was replayed."""
    given = {"group": "g", "plan": "p", "dlq_id": "d", "topic": via, **marks}
    message = Message.new(via, body, key=key)
    return message.with_(headers=ReplayHeaders(**given).stamped(message.headers))


def letter_of(bench: Bench, message: Message, *, group: str = "g") -> DeadLetter:
    """Dead-letter *message* as the handler of *group* would have; return the letter."""
    made = capture(message, failed(ValueError("a bug")), group=group, handler="h")
    DeadLetterStore(bench.engine).put(made)
    return made


def replayed(bench: Bench, *, group: str = "g", to_topic: str | None = None) -> Any:
    """Send the dead letters of *group* again, without waiting; return the plan."""
    terms = ReplayOptions(policy=AT_ONCE, to_topic=to_topic)
    plan = freeze(bench.engine, Selection(consumer_group=group), terms, ADA).plan
    Sender(bench.engine, bench.broker).run(plan.id)
    return plan


def test_a_header_never_chooses_a_handler(bench: Bench) -> None:
    """Who may only write to `clicks` does not reach the handler of `payments`."""
    bench.broker.create_topic("clicks")
    bench.broker.create_topic("payments")
    consumer, seen = bench.consumer(), []
    consumer.on("payments")(lambda payment: seen.append(("payments", payment)))
    consumer.on("clicks")(lambda click: seen.append(("clicks", click)))
    bench.send(marked("clicks", b"1", topic="payments"))
    with running(consumer):
        until(lambda: seen, "it came")
    assert seen == [("clicks", 1)]
    assert consumer.tally.unmarked == 1


@pytest.mark.parametrize("headers", [
    {"x-replay-group": "other"},
    {"x-replay-group": "other", "x-replay-plan": "p", "x-replay-dlq-id": "d",
     "x-replay-topic": "invoices"},
], ids=["the group alone", "copied from another topic"])  # fmt: skip
def test_a_copied_header_makes_no_group_drop_the_message(
    bench: Bench, headers: dict[str, str]
) -> None:
    """A service that sends on the headers of what it reads loses nothing by that."""
    consumer, seen = bench.consumer(), []

    @consumer.on("orders")
    def handle(order: str, message: Message) -> None:
        seen.append((order, message.is_replay))

    message = Message.new("orders", b"x", key="k")
    bench.send(message.with_(headers=message.headers.with_(headers)))
    with running(consumer):
        until(lambda: seen, "it was handled")
    assert seen == [("x", False)]
    assert (consumer.tally.unmarked, consumer.tally.skipped) == (1, 0)
    assert _metric(consumer, "unmarked") == 1


@pytest.mark.parametrize("way", ["orders", "orders.g.replay"])
@pytest.mark.parametrize("marks", [{}, {"group": "other"}], ids=["own group", "other group"])
def test_marks_of_a_plan_that_is_not_there_do_not_pass_the_quarantine(
    stored: Bench, way: str, marks: dict[str, str]
) -> None:
    """The key is held behind a dead letter; made-up marks overtake nothing."""
    consumer = stored.consumer()

    @consumer.on("orders")
    @dead_letter()
    @idempotent
    def handle(order: str, session: Session) -> None:
        if order == "bad":
            raise PoisonMessage("no")
        stored.note(session, order)

    stored.broker.create_topic("orders.g.replay")
    stored.publish("bad", key="k")
    with running(consumer):
        until(lambda: stored.held_keys, "the key is held")
        forged = marked("orders", b"later", **marks)
        stored.send(forged.with_(topic=way))
        until(lambda: stored.held, "it waits behind the dead letter")
    assert stored.effects == []


def test_marks_that_name_the_letter_of_another_message_are_not_believed(stored: Bench) -> None:
    """The plan is real and has the letter, but the message is another one."""
    consumer, seen = stored.consumer(), []

    @consumer.on("orders")
    def handle(order: str, message: Message) -> None:
        seen.append((order, message.is_replay))

    letter = letter_of(stored, Message.new("orders", b"bad", key="k"))
    plan = freeze(stored.engine, Selection(consumer_group="g"), ReplayOptions(), ADA).plan
    stored.send(marked("orders", b"another", plan=plan.id, dlq_id=letter.dlq_id))
    with running(consumer):
        until(lambda: seen, "it was handled")
    assert seen == [("another", False)]
    assert [row.state for row in stored.letters] == ["pending"]


def test_a_real_replay_that_somebody_copies_to_another_topic_is_an_ordinary_message(
    stored: Bench,
) -> None:
    """The plan has it, with the same id; it came by a topic to which no replay sent it."""
    stored.broker.create_topic("clicks")
    original = Message.new("orders", b"x", key="k")
    letter = letter_of(stored, original)
    plan = freeze(stored.engine, Selection(consumer_group="g"), ReplayOptions(), ADA).plan
    copy = marked("clicks", b"x", topic="orders", plan=plan.id, dlq_id=letter.dlq_id)
    stored.send(copy.with_(id=original.id))
    consumer, seen = stored.consumer(), []

    @consumer.on("clicks")
    def handle(click: str, message: Message) -> None:
        seen.append((click, message.is_replay))

    with running(consumer):
        until(lambda: seen, "it was handled")
    assert seen == [("x", False)]
    assert [row.state for row in stored.letters] == ["pending"]


def test_a_replay_for_another_group_is_passed_over_and_counted(bench: Bench) -> None:
    """Its plan has it for that group: here it is acknowledged, counted and told, not handled."""
    letter_of(bench, Message.new("orders", b"x", key="k"), group="other")
    replayed(bench, group="other", to_topic="shared")
    consumer = bench.consumer()
    seen: list[Any] = []
    consumer.on("orders")(seen.append)
    with running(consumer):
        until(lambda: consumer.tally.skipped == 1 and bench.lag == 0, "passed over")
    assert seen == []
    assert _metric(consumer, "skipped") == 1


@pytest.mark.parametrize("to_topic", [None, "shared", "repairs"])
def test_a_real_replay_is_handled_and_confirmed_by_whatever_topic_its_plan_sends_it(
    stored: Bench, to_topic: str | None
) -> None:
    """The private topic, the original one, or one that the operator named."""
    letter_of(stored, Message.new("orders", b"x", key="k"))
    stored.broker.create_topic("repairs")
    plan = replayed(stored, to_topic=to_topic)
    consumer, seen = stored.consumer(), []

    def handle(order: str, message: Message) -> None:
        seen.append((order, message.is_replay))

    consumer.on("repairs" if to_topic == "repairs" else "orders")(handle)
    with running(consumer):
        until(lambda: [row.state for row in stored.letters] == ["confirmed"], "confirmed")
    assert seen == [("x", True)]
    assert Plans(stored.engine).tally(plan)["confirmed"] == 1  # type: ignore[index]


def test_a_loop_of_ones_own_believes_no_more(bench: Bench) -> None:
    """Made-up marks change nothing; a replay for another group is not handled."""
    consumer = bench.consumer()
    seen: list[Any] = []
    consumer.on("orders")(seen.append)
    handler = consumer.handler("orders")
    forged = marked("orders", b"1", topic="payments", group="other")
    assert handler.handle(forged).ending is HandlerEnding.HANDLED
    letter_of(bench, Message.new("orders", b"x", key="k"), group="other")
    replayed(bench, group="other", to_topic="shared")
    source = bench.broker.source(["orders"], group="own-loop")
    (delivery,) = source.poll(10, 5.0)
    source.close()
    outcome = handler.handle(delivery.message)
    assert (outcome.ending, outcome.acknowledge) == (HandlerEnding.SKIPPED, True)
    assert seen == [1]


def test_a_forged_mark_gives_a_dead_letter_no_other_topic_nor_id(bench: Bench) -> None:
    """It would be replayed to the handler of that topic, or hide behind the letter of another."""
    victim = letter_of(bench, Message.new("payments", b"y", key="k"))
    message = marked("clicks", b"x", topic="payments", dlq_id=victim.dlq_id)
    letter = capture(message, failed(ValueError("no")), group="g", handler="h")
    assert (letter.message.topic, letter.lineage.replay_id) == ("clicks", None)
    assert letter.dlq_id != victim.dlq_id


def _metric(consumer: Consumer, outcome: str) -> float | None:
    labels = {"topic": "orders", "outcome": outcome}
    return consumer.metrics.registry.get_sample_value("holdfast_consumer_messages_total", labels)
