"""Services that react to each other's events: done xor undone, and who did what is written down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from holdfast.backoff import Backoff
from holdfast.brokers import connect
from holdfast.consumer import Consumer, HandlerEnding
from holdfast.db import open_database
from holdfast.dlq import dead_letter
from holdfast.errors import ConfigurationError, NotFound, PoisonMessage
from holdfast.idempotency import idempotent
from holdfast.ids import new_id
from holdfast.message import Message, handling
from holdfast.outbox import LeaseEngine, Outbox, Relay
from holdfast.sagas import Reactions, StepFailed
from holdfast.testing import wait_until
from holdfast.tracing import CausationLoop, Lineage, LineageOutcome, trace
from holdfast.tracing.schema import lineage
from tests.choreographing import (
    Dance,
    OrderPlaced,
    PaymentProcessed,
    ShippingFailed,
    effects,
    flow,
    happened,
    make_tables,
    payment_service,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["sqlite", "postgres"])
def dance(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Dance]:
    """Open the services on each kind of database."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/dance.db"
    else:
        url = request.getfixturevalue(request.param).database("dance")
    opened = Dance(url)
    yield opened
    opened.close()


def rows(dance: Dance) -> list[tuple[str, str, str]]:
    """Return what is written down, as (type, outcome, service)."""
    with dance.engine.connect() as db:
        found = db.execute(select(lineage).order_by(lineage.c.seq))
        return [(row.type, row.outcome, row.service) for row in found]


def test_an_order_goes_from_service_to_service_and_every_event_is_written_down(
    dance: Dance,
) -> None:
    """Each came twice, and happened once; the chain is a tree by its causes."""
    placed = dance.place("ann")
    dance.settle(times=2)
    assert dance.effects() == ["charged", "sent"]
    assert rows(dance) == [
        ("OrderPlaced", "published", "shop"),
        ("PaymentProcessed", "published", "payment"),
        ("OrderPlaced", "handled", "payment"),
        ("ParcelSent", "published", "shipping"),
        ("PaymentProcessed", "handled", "shipping"),
        ("ParcelSent", "handled", "payment"),
    ]
    found = trace([dance.engine], placed.id, flow=flow)
    assert [one.type for one in found.chain.roots] == ["OrderPlaced"]
    [paid] = found.chain.children(found.chain.roots[0])
    assert (paid.type, paid.source, paid.key) == ("PaymentProcessed", "payment", "ann")
    assert found.missing == ()
    again = trace([dance.engine], paid.id)
    assert again.chain.correlation_id == placed.correlation_id


def test_mysql_keeps_marks_and_lineage_as_well(mariadb: Any) -> None:
    """The one path through every statement."""
    dance = Dance(mariadb.database("dance"))
    dance.unknown.add("bob")
    placed = dance.place("bob")
    dance.settle(times=2)
    assert dance.effects() == ["charged", "refunded"]
    assert trace([dance.engine], placed.id, flow=flow).missing == ()
    assert Lineage("shop").prune(dance.engine) == 0
    dance.close()


def test_what_cannot_be_shipped_is_paid_back_and_what_cannot_be_paid_is_not(dance: Dance) -> None:
    """A step that has failed had no effect, and nobody undoes it."""
    dance.unknown.add("bob")
    dance.poor.add("cid")
    dance.place("bob")
    poor = dance.place("cid")
    dance.settle()
    assert dance.effects("bob") == ["charged", "refunded"]
    assert dance.effects("cid") == []
    assert dance.money() == 0
    types = [one.type for one in trace([dance.engine], poor.id, flow=flow).chain.events]
    assert types == ["OrderPlaced", "PaymentFailed"]


def test_an_undoing_that_comes_first_does_nothing_and_keeps_the_late_step_from_happening(
    dance: Dance,
) -> None:
    """The events of one order come to payment in the wrong order."""
    dance.place("bob")
    [placed] = dance.published()
    failed = Message.new("shipments", b'{"order":"bob"}', key="bob", type="ShippingFailed")
    assert [one.ending for one in dance.deliver(failed)] == [HandlerEnding.HANDLED]
    assert [one.ending for one in dance.deliver(placed)] == [HandlerEnding.HANDLED]
    assert dance.effects() == []
    assert dance.published() == []


def test_a_second_event_about_a_step_that_was_done_or_failed(dance: Dance) -> None:
    """What was done is not done again; what has failed is tried again by another event."""
    dance.place("ann")
    dance.settle()
    dance.place("ann")
    dance.settle()
    assert dance.effects("ann") == ["charged", "sent"]
    dance.poor.add("cid")
    dance.place("cid")
    dance.settle()
    dance.poor.clear()
    dance.place("cid")
    dance.settle()
    assert dance.effects("cid") == ["charged", "sent"]


def test_an_undoing_that_fails_is_a_dead_letter_and_a_step_that_fails_for_now_comes_again(
    dance: Dance,
) -> None:
    """Neither is silent."""
    soon = Backoff(first=0.001, attempts=3)
    reactions = Reactions("bank", outbox=Outbox(source="bank"), retry=soon)
    calls: list[str] = []

    @reactions.on()
    def debit(event: OrderPlaced, session: Session) -> None:
        calls.append("debit")
        if len(calls) == 1:
            raise StepFailed("closed at night", again=True)

    @reactions.undo(debit)
    def credit(event: ShippingFailed, session: Session) -> None:
        raise StepFailed("the account is gone")

    consumer = Consumer(dance.broker, group="bank", database=dance.engine)
    reactions.attach(consumer, "orders")
    reactions.attach(consumer, "shipments")
    order = Message.new("orders", b'{"order":"ann"}', key="ann", type="OrderPlaced")
    assert consumer.handler("orders").handle(order).ending is HandlerEnding.HANDLED
    assert calls == ["debit", "debit"]
    failed = Message.new("shipments", b'{"order":"ann"}', key="ann", type="ShippingFailed")
    outcome = consumer.handler("shipments").handle(failed)
    assert outcome.ending is HandlerEnding.DEAD_LETTERED
    assert "debit of ann cannot be undone: the account is gone" in str(outcome.error)


def test_what_is_missing_is_named_with_since_when_and_why(dance: Dance) -> None:
    """First nobody has handled it, then it is a dead letter, then all is there."""
    placed = dance.place("ann")
    [message] = dance.published()
    waiting = trace([dance.engine], placed.id, flow=flow)
    [missing] = waiting.missing
    assert missing.any_of == ("PaymentProcessed", "PaymentFailed")
    assert (missing.after, missing.is_overdue) == (placed.id, False)
    assert missing.why == "no service has handled OrderPlaced yet"
    dance.deliver(message.with_(payload=b"{}"))  # as if another version had published it
    with dance.engine.begin() as db:
        db.execute(update(lineage).values(time=lineage.c.time - 660))
    late = trace([dance.engine], placed.id, flow=flow)
    [missing] = late.missing
    assert late.is_overdue
    assert missing.overdue_seconds is not None
    assert missing.overdue_seconds > 59
    assert "OrderPlaced is a dead letter of payment" in missing.why
    assert "order" in missing.why
    assert [one.outcome for one in late.chain.events[0].handlings] == [LineageOutcome.DEAD_LETTERED]
    with pytest.raises(NotFound, match="nothing is written about 'nobody'"):
        trace([dance.engine], "nobody")


def test_the_parts_that_several_databases_know_make_one_chain(dance: Dance, tmp_path: Path) -> None:
    """Each service knows what it published and handled."""
    placed = dance.place("ann")
    other = open_database(f"sqlite:///{tmp_path}/other.db")
    make_tables(other)
    payment = payment_service(Lineage("payment"), set())
    consumer = Consumer(dance.broker, group="p", database=other, lineage=Lineage("payment"))
    payment.attach(consumer, "orders")
    assert consumer.handler("orders").handle(dance.published()[0]).acknowledge
    assert [one.type for one in trace([dance.engine], placed.id).chain.events] == ["OrderPlaced"]
    both = trace([dance.engine, other], placed.id)
    assert [one.type for one in both.chain.events] == ["OrderPlaced", "PaymentProcessed"]
    assert [one.service for one in both.chain.events[0].handlings] == ["payment"]
    other.dispose()


def test_services_that_react_in_a_circle_are_stopped_as_poison(dance: Dance) -> None:
    """The message that would go round once more is a dead letter that names the circle."""
    known = Lineage("ping", most_depth=6)
    reactions = Reactions(
        "ping", outbox=Outbox(source="ping", lineage=known), key=lambda event: new_id()
    )

    @reactions.on(topic="payments")
    def pay(event: OrderPlaced, session: Session) -> PaymentProcessed:
        return PaymentProcessed(event.order)

    @reactions.on(topic="orders")
    def order_again(event: PaymentProcessed, session: Session) -> OrderPlaced:
        return OrderPlaced(event.order)

    circle = Consumer(dance.broker, group="ping", database=dance.engine, lineage=known)
    reactions.attach(circle, "orders")
    reactions.attach(circle, "payments")
    dance.place("ann")
    endings = []
    for _ in range(20):
        messages = dance.published()
        outcomes = [circle.handler(one.topic).handle(one) for one in messages]
        endings += outcomes
        if not messages:
            break
    assert [one.ending for one in endings] == [HandlerEnding.HANDLED] * 5 + [
        HandlerEnding.DEAD_LETTERED
    ]
    assert isinstance(endings[-1].error, CausationLoop)
    told = "OrderPlaced → PaymentProcessed → OrderPlaced"
    assert f"longer than 6 events and goes round: {told}" in str(endings[-1].error)


def test_nothing_is_written_of_what_is_rolled_back_and_nothing_without_a_lineage(
    dance: Dance,
) -> None:
    """The rows belong to the caller's transaction; off means off."""
    with Session(dance.engine) as session:
        dance.shop.add(session, OrderPlaced("ann"), topic="orders", key="ann")
        session.rollback()
    with Session(dance.engine) as session, session.begin():
        plain = Outbox(source="shop").add(session, OrderPlaced("b"), topic="orders", key="b")
    assert rows(dance) == []
    assert len(plain.headers) == 0
    shallow = Outbox(lineage=Lineage("s", most_depth=2))
    with Session(dance.engine) as session, session.begin():
        with handling(plain):
            made = shallow.add(session, {}, topic="t")
        with handling(made), pytest.raises(CausationLoop, match="longer than 2 events"):
            shallow.add(session, {}, topic="t")


def test_what_is_older_than_the_retention_is_deleted(dance: Dance) -> None:
    """And nothing else."""
    dance.place("old")
    with dance.engine.begin() as db:
        db.execute(update(lineage).values(at=lineage.c.at - 3600))
    dance.place("new")
    assert Lineage("shop", retention="30m").prune(dance.engine) == 1
    with dance.engine.connect() as db:
        assert db.execute(select(lineage.c.message_key)).scalars().all() == ["new"]


@pytest.mark.parametrize("batch", [None, 10])
def test_many_messages_of_one_batch_are_written_down(dance: Dance, batch: int | None) -> None:
    """Those that fail are not, the others are, each once."""
    consumer = Consumer(dance.broker, group="many", database=dance.engine, lineage=Lineage("many"))

    @consumer.on("orders", batch=batch)
    @dead_letter()
    @idempotent()
    def take(event: OrderPlaced, session: Session) -> None:
        if event.order == "o3":
            raise PoisonMessage("no")
        happened(session, "taken", event.order, 1)

    for number in range(6):
        dance.place(f"o{number}")
    Relay(LeaseEngine(dance.engine, dance.broker.sink())).run_once()
    consumer.run(until_idle=True)
    found = [(type_, outcome) for type_, outcome, service in rows(dance) if service == "many"]
    assert sorted(found) == [("OrderPlaced", "dead-lettered")] + [("OrderPlaced", "handled")] * 5


PROGRAM = """
import os, sys
from sqlalchemy import event
from sqlalchemy.orm import Session
from holdfast.consumer import Consumer
from holdfast.db import open_database
from holdfast.tracing import Lineage
from tests.choreographing import effects, payment_service

engine = open_database(os.environ["DANCE"])
consumer = Consumer("sqlite:///" + os.environ["BROKER"], group="payment", database=engine,
                    lineage=Lineage("payment"), takeover_seconds=1.0)
payment_service(Lineage("payment"), set()).attach(consumer, "orders")
ran = []

@event.listens_for(engine, "before_cursor_execute")
def noted(connection, cursor, statement, *rest):
    if "dance_effects" in statement:
        ran.append(statement)

def die(session):
    if ran and not session.in_nested_transaction():
        os._exit(9)

if sys.argv[1] != "whole":
    event.listen(Session, sys.argv[1], die)
consumer.run(until_idle=True)
"""


@pytest.mark.programs
@pytest.mark.parametrize("moment", ["before_commit", "after_commit"])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_crash_leaves_effect_event_and_lineage_together_or_none_of_them(
    kind: str, moment: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The process dies right before the commit, or right after it and before the ack."""
    own = f"sqlite:///{tmp_path}/dance.db"
    url = own if kind == "sqlite" else request.getfixturevalue(kind).database("dance_crash")
    dance = Dance(url)
    broker = connect(f"sqlite:///{tmp_path}/broker.db")
    broker.create_topic("orders", partitions=1)
    placed = dance.place("ann")
    Relay(LeaseEngine(dance.engine, broker.sink())).run_once()
    (tmp_path / "program.py").write_text(PROGRAM)
    shown = {"DANCE": url, "BROKER": f"{tmp_path}/broker.db?session=2", "PYTHONPATH": str(ROOT)}

    def run(how: str) -> int:
        return subprocess.run(
            [sys.executable, tmp_path / "program.py", how],
            env=os.environ | shown, timeout=120, check=False,
        ).returncode  # fmt: skip

    assert run(moment) == 9
    done = moment == "after_commit"
    with dance.engine.connect() as db:
        assert len(db.execute(select(effects)).all()) == done
    found = [("PaymentProcessed", "published", "payment"), ("OrderPlaced", "handled", "payment")]
    assert rows(dance)[1:] == (found if done else [])
    # It comes again once the broker has taken the lane from the process that is dead.
    wait_until(lambda: run("whole") == 0 and rows(dance)[1:] == found, deadline=60)
    assert dance.effects() == ["charged"]
    assert trace([dance.engine], placed.id).chain.events[1].type == "PaymentProcessed"
    broker.close()
    dance.close()


def reactions(**options: Any) -> Reactions:
    return Reactions("r", outbox=Outbox(), **options)


def _no_annotation() -> None:
    @reactions().on()
    def react(event, session):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        ...


def _twice() -> None:
    own = reactions()
    own.on()(_placed)
    own.on()(_placed)


def _placed(event: OrderPlaced, session: Session) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (_no_annotation, "does not say which event it reacts to"),
        (_twice, "reacts to 'OrderPlaced' already"),
        (lambda: reactions().undo(_placed), "there is no such step above"),
        (lambda: Lineage("s", most_depth=1), "use 2 or more"),
        (lambda: Lineage("s", retention="0s"), "above 0"),
        (lambda: Consumer("memory:", group="g", lineage=Lineage("s")), "give the consumer a data"),
        (lambda: Consumer("memory:", group="g", lineage="shop"), "pass a holdfast.tracing.Lineage"),  # type: ignore[arg-type]
    ],
)
def test_nonsense_is_refused_with_the_fix(wrong: Callable[[], object], told: str) -> None:
    """When it is written, not when the first event comes."""
    with pytest.raises(ConfigurationError, match=told):
        wrong()


def test_events_without_a_key_or_a_topic_to_answer_on_say_so(dance: Dance) -> None:
    """Both name the fix."""
    own = reactions()
    own.on()(lambda_paid)
    with Session(dance.engine) as session, session.begin():
        keyless = Message.new("orders", b'{"order":"a"}', type="OrderPlaced")
        with pytest.raises(PoisonMessage, match="has no key: r cannot tell what it is about"):
            own.handle(session, keyless, keyless.payload)
        keyed = Message.new("orders", b'{"order":"a"}', key="a", type="OrderPlaced")
        with pytest.raises(ConfigurationError, match="give on\\(\\) or undo\\(\\) a topic="):
            own.handle(session, keyed, keyed.payload)


def lambda_paid(event: OrderPlaced, session: Session) -> PaymentProcessed:
    return PaymentProcessed(event.order)
