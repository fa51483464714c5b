"""The order saga on real tables: done or undone, whatever comes twice, late or never."""

from __future__ import annotations

import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from holdfast.consumer import Consumer, HandlerEnding
from holdfast.errors import NotFound
from holdfast.outbox import Outbox
from holdfast.sagas import DuplicateSaga, Participant, Sagas, SagaTimeout, store, writes
from holdfast.sagas.alerts import SagaAlerts
from holdfast.sagas.barrier import BarrierVerdict
from holdfast.sagas.counters import LATE_REPLIES
from holdfast.sagas.operations import SagaOperations
from holdfast.sagas.orchestrator import advance
from holdfast.sagas.schema import saga as saga_table
from holdfast.sagas.states import CancelRequested
from holdfast.sagas.store import Changes, SagaConflict
from tests.orchestrating import FAST, OrderState, Ship, Shop, order_saga

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast import Message

order = order_saga()


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """Open a shop on each kind of database."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        url = request.getfixturevalue(request.param).database("sagas")
    shop = Shop(url, order)
    yield shop
    shop.close()


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Shop]:
    """Open a shop on SQLite alone: what is looked at does not depend on the database."""
    shop = Shop(f"sqlite:///{tmp_path}/shop.db", order)
    yield shop
    shop.close()


def net(shop: Shop, name: str) -> dict[str, int]:
    """Return what stands of each kind of thing for order *name*."""
    total: dict[str, int] = {}
    for what, _, amount in shop.effects(name):
        kind = {"unstock": "stock", "refund": "money"}.get(what, what)
        total[kind] = total.get(kind, 0) + amount
    return total


def by_step(messages: list[Message], step: str) -> Message:
    return next(one for one in messages if one.headers.text("x-saga-step") == step)


def test_an_order_that_nobody_refuses_is_completed(shop: Shop) -> None:
    """Each effect happens once, replies are in the state, and no timer is left."""
    started = shop.start(order, OrderState("o1"), "o1")
    assert started.is_new
    assert shop.result("o1").status == "running"
    shop.settle()
    result = shop.result("o1")
    assert (result.status, result.has_ended) == ("completed", True)
    assert result.state == OrderState("o1", reservation="r-o1")
    assert net(shop, "o1") == {"stock": 1, "money": 10, "parcel": 1}
    assert shop.timers() == []


def test_an_order_that_cannot_be_shipped_is_undone(shop: Shop) -> None:
    """Stock and money are back, and the reason is kept."""
    shop.failing.add(("parcel", "o1"))
    shop.start(order, OrderState("o1"), "o1")
    shop.settle()
    result = shop.result("o1")
    assert result.status == "compensated"
    assert result.reason == "ship: no parcel for o1"
    assert net(shop, "o1") == {"stock": 0, "money": 0}
    assert shop.timers() == []


def test_everything_that_comes_twice_has_one_effect(shop: Shop) -> None:
    """Commands and replies alike, on the way forward and back."""
    shop.failing.add(("parcel", "bad"))
    for name in ("good", "bad"):
        shop.start(order, OrderState(name), name)
    shop.settle(twice=True)
    assert shop.result("good").status == "completed"
    assert shop.result("bad").status == "compensated"
    assert shop.effects("good").count(("stock", "good", 1)) == 1
    assert net(shop, "good") == {"stock": 1, "money": 10, "parcel": 1}
    assert sorted(shop.effects("bad")) == [
        ("money", "bad", 10), ("refund", "bad", -10), ("stock", "bad", 1), ("unstock", "bad", -1)
    ]  # fmt: skip


def test_without_the_barrier_what_comes_twice_happens_twice(
    embedded: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above sees the barrier, and not something else."""
    module = import_module("holdfast.sagas.participant")  # the package has a function of that name
    monkeypatch.setattr(module, "verdict", lambda *_: BarrierVerdict.EXECUTE)
    embedded.start(order, OrderState("o1"), "o1")
    embedded.settle(twice=True)
    assert embedded.effects("o1").count(("stock", "o1", 1)) == 2


def test_a_saga_starts_if_and_only_if_its_transaction_commits(shop: Shop) -> None:
    """A rollback leaves neither a saga nor a command."""
    with Session(shop.engine) as session:
        order.start(session, OrderState("o1"), key="o1")
        session.rollback()
    assert shop.published() == []
    with pytest.raises(NotFound):
        shop.result("o1")


def test_a_second_start_gives_the_running_saga(shop: Shop) -> None:
    """With another state it is refused; after the end the key is free again."""
    first = shop.start(order, OrderState("o1"), "o1")
    again = shop.start(order, OrderState("o1"), "o1")
    assert (again.id, again.is_new) == (first.id, False)
    with pytest.raises(DuplicateSaga, match="'o1' is running already"):
        shop.start(order, OrderState("o1", amount=99), "o1")
    shop.settle()
    assert shop.start(order, OrderState("o1", amount=99), "o1").is_new


def test_a_participant_that_never_answers_is_asked_again_and_then_undone(shop: Shop) -> None:
    """And when its commands come in the end, they are refused."""
    shop.start(order, OrderState("o1"), "o1")
    commands = shop.published()
    lost = by_step(commands, "charge")
    shop.deliver(by_step(commands, "reserve_stock"))
    shop.deliver(*shop.published())
    assert shop.let_fire("timeout", "charge") == 1
    assert shop.let_fire("retry", "charge") == 1
    second = by_step(shop.published(), "charge")
    key = "x-saga-idempotency-key"
    assert second.headers.text(key) == lost.headers.text(key)
    assert second.headers.text("x-saga-attempt") == "2"
    shop.let_fire("timeout", "charge")
    shop.settle()
    result = shop.result("o1")
    assert result.status == "compensated"
    assert result.reason == "charge: it was not answered in time"
    shop.deliver(lost, second)
    shop.settle()
    assert net(shop, "o1") == {"stock": 0}
    late = [one for one in shop.told(result.id) if one["event"].get("answer") == "failed"]
    assert [one["effects"][0]["type"] for one in late] == ["Ignore", "Ignore"]


def test_a_late_success_of_the_first_attempt_completes_the_step(shop: Shop) -> None:
    """The second attempt is then answered from memory."""
    shop.start(order, OrderState("o1"), "o1")
    commands = shop.published()
    shop.let_fire("timeout", "charge")
    shop.let_fire("retry", "charge")
    shop.deliver(*commands)
    shop.settle()
    assert shop.result("o1").status == "completed"
    assert net(shop, "o1") == {"stock": 1, "money": 10, "parcel": 1}


def test_a_second_attempt_is_answered_with_the_reply_of_the_first(embedded: Shop) -> None:
    """Payload, type and content type are the same: any program can read either."""
    embedded.start(order, OrderState("o1"), "o1")
    first = embedded.published()
    embedded.let_fire("timeout", "reserve_stock")
    embedded.let_fire("retry", "reserve_stock")
    second = embedded.published()
    embedded.deliver(by_step(first, "reserve_stock"), by_step(second, "reserve_stock"))
    replies = [one for one in embedded.published() if one.headers.text("x-saga-answer")]
    assert [one.headers.text("x-saga-attempt") for one in replies] == ["1", "2"]
    assert len({(one.payload, one.type, one.content_type) for one in replies}) == 1
    assert (replies[1].type, replies[1].content_type) == ("StockReserved", "application/json")


def test_a_command_whose_handling_may_pass_is_tried_again(embedded: Shop) -> None:
    """A passing error of the participant's own is no dead letter, and no failed step."""
    consumer = Consumer(embedded.broker, group="parcels", database=embedded.engine)
    parcels = Participant(retry=FAST)
    tried: list[str] = []

    @parcels.command
    def ship(command: Ship, session: Session) -> None:
        tried.append(command.order)
        if len(tried) == 1:
            raise TimeoutError("the carrier is slow")

    parcels.attach(consumer, "shipping")
    embedded.start(order, OrderState("o1"), "o1")
    embedded.deliver(*embedded.published())
    embedded.deliver(*embedded.published())
    (command,) = embedded.published()
    outcome = consumer.handler("shipping").handle(command)
    assert (outcome.ending, tried) == (HandlerEnding.HANDLED, ["o1", "o1"])
    embedded.settle()
    assert embedded.result("o1").status == "completed"


def test_a_compensation_that_always_fails_is_parked(shop: Shop) -> None:
    """The rest is undone, and the saga waits for a human with a reason."""
    shop.failing |= {("parcel", "o1"), ("refund", "o1")}
    shop.start(order, OrderState("o1"), "o1")
    shop.settle()
    result = shop.result("o1")
    assert (result.status, result.parked) == ("parked", ("charge",))
    assert net(shop, "o1") == {"stock": 0, "money": 10}
    assert not result.has_ended


class Pager:
    """A hook that is deaf at first, if it is told so."""

    def __init__(self, *, deaf_for: int = 0) -> None:
        self.heard: list[dict[str, Any]] = []
        self.deaf_for = deaf_for

    def tell(self, alert: dict[str, Any]) -> None:
        if self.deaf_for:
            self.deaf_for -= 1
            raise ConnectionError("nobody answers")
        self.heard.append(alert)


def test_a_parked_saga_is_told_until_the_hook_hears_it(shop: Shop) -> None:
    """Once then, with everything needed and nothing of the state."""
    shop.failing |= {("parcel", "o1"), ("refund", "o1")}
    shop.start(order, OrderState("o1", amount=4711), "o1")
    shop.settle()
    pager = Pager(deaf_for=1)
    alerts = SagaAlerts(shop.engine, [pager])
    assert [alerts.run_once() for _ in range(3)] == [0, 1, 0]
    (alert,) = pager.heard
    assert (alert["alert"], alert["key"], alert["parked"]) == ("SagaParked", "o1", ["charge"])
    assert alert["last_error"] == "no refund for o1"
    assert alert["next"][0] == f"holdfast saga show {alert['id']}"
    assert "4711" not in str(alert)


def test_a_saga_past_its_deadline_is_told_once_and_listed(embedded: Shop) -> None:
    """One that has a deadline still ahead is neither."""
    for name in ("late", "in time"):
        embedded.start(order, OrderState(name), name)
    for name, moment in (("late", 1.0), ("in time", 1e12)):
        own = saga_table.c.business_key == name
        with embedded.engine.begin() as db:
            db.execute(update(saga_table).where(own).values(deadline_at=moment))
    pager = Pager()
    alerts = SagaAlerts(embedded.engine, [pager])
    assert [alerts.run_once() for _ in range(2)] == [1, 0]
    assert [(one["alert"], one["key"]) for one in pager.heard] == [("SagaOverdue", "late")]
    listed = SagaOperations(embedded.engine).list(overdue=True)
    assert [one.key for one in listed] == ["late"]


def test_a_reply_to_a_saga_that_has_ended_is_counted_and_told(embedded: Shop) -> None:
    """It changes nothing, and is not dropped silently: what it is about may stand."""
    embedded.start(order, OrderState("o1"), "o1")
    embedded.deliver(*embedded.published())
    replies = [one for one in embedded.published() if one.headers.text("x-saga-answer")]
    embedded.deliver(*replies)
    embedded.settle()
    assert embedded.result("o1").status == "completed"
    pager = Pager(deaf_for=0)
    sagas = Sagas(embedded.engine, order, hooks=[pager])
    counted = LATE_REPLIES.labels("order")._value.get()
    with Session(embedded.engine) as session, session.begin():
        sagas.take_replies(session, replies)
    assert LATE_REPLIES.labels("order")._value.get() == counted + 2
    sagas.worker().alert()
    told = [(one["alert"], one["key"], one["step"], one["status"]) for one in pager.heard]
    assert sorted(told) == [
        ("SagaLateReply", "o1", "charge", "completed"),
        ("SagaLateReply", "o1", "reserve_stock", "completed"),
    ]
    assert embedded.result("o1").status == "completed"


def test_who_was_overtaken_writes_nothing(shop: Shop) -> None:
    """The revision that was read is the only one that may be written over."""
    shop.start(order, OrderState("o1"), "o1")
    with shop.engine.begin() as db:
        read = store.latest(db, "order", "o1")
    assert read is not None
    shop.settle()
    overtaken = Changes(read, read)
    overtaken.follow(read.progress, read.data, [], None)
    with pytest.raises(SagaConflict), shop.engine.begin() as db:
        writes.write(db, [overtaken])
    assert shop.result("o1").status == "completed"


def test_of_two_who_lock_nothing_the_slower_is_told_of_a_conflict(shop: Shop) -> None:
    """Whatever he would write beside the saga: nothing of it reaches a table."""
    shop.start(order, OrderState("o1"), "o1")
    with shop.engine.connect() as db:
        read = store.latest(db, "order", "o1")
    assert read is not None
    cancelled = CancelRequested("too expensive")
    found: list[BaseException | None] = []

    def overtaken() -> None:
        try:
            with shop.engine.begin() as db:
                advance(db, order, read, cancelled, outbox=Outbox(source="slow"))
        except Exception as error:  # noqa: BLE001 - which one is the question
            found.append(error)
        else:
            found.append(None)

    thread = threading.Thread(target=overtaken)
    with shop.engine.begin() as db:
        advance(db, order, read, cancelled, outbox=Outbox(source="quick"))
        thread.start()  # it may get as far as the row, and waits there for the commit
    thread.join(90)
    overtaken()  # and once more, long after the other
    assert [type(error) for error in found] == [SagaConflict, SagaConflict]
    shop.settle()
    assert shop.result("o1").status == "compensated"
    assert len({one["event"]["type"] for one in shop.told(read.id)}) > 1


def test_a_reply_to_nothing_is_poison(embedded: Shop) -> None:
    """It goes to the dead letters with what is wrong with it."""
    embedded.start(order, OrderState("o1"), "o1")
    embedded.deliver(*embedded.published())
    reply = embedded.published()[0]
    stray = reply.with_(
        id="stray", headers=reply.headers.without(["x-saga-id"]).with_({"x-saga-id": "nobody"})
    )
    bare = reply.with_(id="bare", headers=reply.headers.without(["x-saga-id"]))
    wrong = reply.with_(
        id="wrong", headers=reply.headers.without(["x-saga-step"]).with_({"x-saga-step": "fly"})
    )
    outcomes = embedded.deliver(stray, bare, wrong)
    assert {outcome.ending for outcome in outcomes} == {HandlerEnding.DEAD_LETTERED}
    told = [str(outcome.error) for outcome in outcomes]
    assert "not there: 'nobody'" in told[0]
    assert "lacks the header x-saga-id" in told[1]
    assert "has no step 'fly'" in told[2]


def test_a_reply_of_the_wrong_shape_is_poison_and_its_step_unknown(embedded: Shop) -> None:
    """Nothing of it is taken up; the step is undone in the end."""
    embedded.start(order, OrderState("o1"), "o1")
    embedded.deliver(*embedded.published())
    replies = embedded.published()
    bad = by_step(replies, "reserve_stock").with_(payload=b'{"reservation": 7}')
    outcome = embedded.deliver(bad, by_step(replies, "charge"))[0]
    assert outcome.ending is HandlerEnding.DEAD_LETTERED
    embedded.let_fire("timeout", "reserve_stock")
    embedded.let_fire("retry", "reserve_stock")
    embedded.settle()
    assert embedded.result("o1").status == "completed"


def test_a_result_is_waited_for_until_a_deadline(embedded: Shop) -> None:
    """A saga that is not through goes on all the same."""
    embedded.start(order, OrderState("o1"), "o1")
    with pytest.raises(SagaTimeout, match="still running"):
        embedded.sagas.wait("o1", 0.01)
    embedded.settle()
    assert embedded.sagas.wait("o1", 5).status == "completed"


def test_timers_of_versions_that_are_not_known_are_left_to_others(embedded: Shop) -> None:
    """A worker of the new version does not touch what it does not have."""
    embedded.start(order, OrderState("o1"), "o1")
    newer: Any = order_saga(version=2)
    others = Sagas(embedded.engine, newer).worker()
    embedded.let_fire("nothing")
    with embedded.engine.begin() as db:
        db.exec_driver_sql("UPDATE holdfast_saga_timer SET due = 0")
    assert others.step() == 0
    assert embedded.worker.step() == 2
