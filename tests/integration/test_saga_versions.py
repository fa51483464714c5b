"""Several versions at once: nobody touches what he does not know, and nothing is lost by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from holdfast.consumer import Consumer, HandlerEnding
from holdfast.sagas import DefinitionChanged, Saga, Sagas
from holdfast.sagas.operations import SagaOperations
from tests.orchestrating import FAST, OrderState, Ship, Shop, order_saga

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast import Message

order = order_saga()


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """Open a shop on each kind of database, whose worker knows version 1."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        url = request.getfixturevalue(request.param).database("saga_versions")
    shop = Shop(url, order)
    yield shop
    shop.close()


class NewState(msgspec.Struct, frozen=True):
    order: str
    cents: int
    reservation: str = ""


def newer(*, skip: tuple[str, ...] = ()) -> Saga[NewState]:
    """Return version 2: it counts in cents, and asks for a label before it ships."""
    saga = Saga("order", state=NewState, version=2)
    with saga.parallel():

        @saga.command("inventory", compensate="release_stock", retry=FAST)
        def reserve_stock(state: NewState) -> dict[str, str]:
            return {"order": state.order}

        @saga.command("payment", compensate="refund", retry=FAST)
        def charge(state: NewState) -> dict[str, Any]:
            return {"order": state.order, "amount": state.cents // 100}

    @saga.compensation("inventory", retry=FAST)
    def release_stock(state: NewState) -> dict[str, str]:
        return {"order": state.order}

    @saga.compensation("payment", retry=FAST)
    def refund(state: NewState) -> dict[str, Any]:
        return {"order": state.order, "amount": state.cents // 100}

    @saga.local(compensate=None)
    def label(state: NewState, session: Any) -> NewState:
        return msgspec.structs.replace(state, reservation="labelled")

    @saga.command("shipping", compensate=None, retry=FAST)
    def ship(state: NewState) -> Ship:
        return Ship(state.order)

    @saga.migrate(from_version=1, skip=skip)
    def from_euros(old: OrderState) -> NewState:
        return NewState(old.order, cents=old.amount * 100)

    return saga


def replies(shop: Shop) -> list[Message]:
    """Let the participants answer what was sent, and return the answers."""
    shop.deliver(*shop.published())
    return shop.published()


def elsewhere(shop: Shop, *sagas: Saga[Any]) -> tuple[Sagas, Consumer]:
    """Return another program on the same database, with other versions."""
    other = Sagas(shop.engine, *sagas)
    consumer = Consumer(shop.broker, group="shop", database=shop.engine)
    other.attach(consumer)
    return other, consumer


def test_a_reply_that_comes_to_a_program_without_the_version_is_taken_by_one_that_has_it(
    shop: Shop,
) -> None:
    """It is neither lost nor poison, and waits for no timeout."""
    _, consumer = elsewhere(shop, order_saga(version=2))
    shop.start(order, OrderState("o1"), "o1")
    for reply in replies(shop):
        outcome = consumer.handler(reply.topic).handle(reply)
        assert outcome.ending is HandlerEnding.HANDLED
    assert shop.result("o1").state.reservation == ""
    shop.settle()
    assert shop.result("o1").status == "completed"
    assert shop.result("o1").state.reservation == "r-o1"
    assert shop.timers() == []


def test_a_kept_reply_that_is_poison_is_told_in_the_history(shop: Shop) -> None:
    """It is not tried for ever, and the saga times out as if it had not come."""
    _, consumer = elsewhere(shop, order_saga(version=2))
    shop.start(order, OrderState("o1"), "o1")
    (reply,) = (one for one in replies(shop) if one.headers.text("x-saga-step") == "reserve_stock")
    bad = reply.with_(payload=b'{"reservation": 7}')
    consumer.handler(reply.topic).handle(bad)
    assert shop.worker.step() == 1
    (told,) = (one for one in shop.told(shop.result("o1").id) if one["event"]["type"] == "Answered")
    assert "the reply was refused" in told["effects"][0]["reason"]
    assert ("reserve_stock", "reply") not in shop.timers()
    stray = reply.headers.without(["x-saga-step"]).with_({"x-saga-step": "fly"})
    outcome = consumer.handler(reply.topic).handle(reply.with_(id="stray", headers=stray))
    assert outcome.ending is HandlerEnding.DEAD_LETTERED


def test_a_late_reply_to_a_version_that_is_gone_is_written_down(shop: Shop) -> None:
    """Its saga has ended, so nobody needs the definition."""
    shop.start(order, OrderState("o1"), "o1")
    late = replies(shop)
    shop.deliver(*late)
    shop.settle()
    ended = shop.result("o1")
    _, consumer = elsewhere(shop, order_saga(version=2))
    consumer.handler(late[0].topic).handle(late[0].with_(id="late"))
    assert shop.told(ended.id)[-1]["effects"][0]["reason"] == "the saga is completed already"
    assert shop.timers() == []


def test_a_saga_is_moved_by_its_migration_where_the_old_version_is_gone(shop: Shop) -> None:
    """What was done is not done again, what is new is done, and the state is the new one."""
    shop.start(order, OrderState("o1", amount=7), "o1")
    shop.start(order, OrderState("idle"), "idle")
    answers = [one for one in replies(shop) if shop.result("o1").id in str(one.headers)]
    new = newer()
    sagas, consumer = elsewhere(shop, new)
    for reply in answers:
        consumer.handler(reply.topic).handle(reply)
    result = sagas.result("o1")
    assert (result.version, result.state.cents) == (2, 700)
    assert sagas.result("idle").version == 1
    assert sagas.worker().step() == 1
    for message in replies(shop):
        consumer.handler(message.topic).handle(message)
    assert sagas.result("o1").status == "completed"
    assert sagas.result("o1").state == NewState("o1", cents=700, reservation="labelled")
    assert sorted(shop.effects("o1")) == [("money", "o1", 7), ("parcel", "o1", 1),
                                          ("stock", "o1", 1)]  # fmt: skip
    told = [one["event"] for one in shop.told(sagas.result("o1").id)]
    assert {"type": "Migrated", "from_version": 1, "to_version": 2} in told


def test_a_saga_that_cannot_be_moved_waits_unchanged_for_its_own_version(shop: Shop) -> None:
    """And goes on there as if nothing had been."""
    shop.start(order, OrderState("o1"), "o1")
    shop.deliver(*replies(shop))  # it is being shipped, and version 2 wants a label before that
    sagas, consumer = elsewhere(shop, newer())
    (reply,) = replies(shop)
    assert consumer.handler(reply.topic).handle(reply).ending is HandlerEnding.HANDLED
    assert sagas.worker().step() == 1  # it tries, and leaves it
    assert shop.result("o1").version == 1
    with shop.engine.begin() as db:
        db.exec_driver_sql("UPDATE holdfast_saga_timer SET due = 0")
    shop.settle()
    assert shop.result("o1").status == "completed"


def test_the_check_says_what_becomes_of_each(shop: Shop) -> None:
    """It tries the migration on every state, and changes nothing."""
    shop.start(order, OrderState("shipping"), "shipping")
    shop.deliver(*replies(shop))
    shop.start(order, OrderState("fresh"), "fresh")
    operations = SagaOperations(shop.engine)

    def check(*sagas: Saga[Any]) -> dict[str, tuple[bool, tuple[str, ...]]]:
        return {one.verdict: (one.is_fine, one.keys) for one in operations.check(sagas)}

    both = check(order, newer())
    assert list(both) == ["goes on as it began"]
    assert sorted(both["goes on as it began"][1]) == ["fresh", "shipping"]
    (waits,) = check(order_saga(version=2))
    assert waits == "waits until a worker has version 1: keep its definition"
    cannot, can = check(newer())
    assert "cannot be moved: step 'label' comes before 'ship'" in cannot
    assert check(newer())[cannot] == (False, ("shipping",))
    assert (can, check(newer())[can]) == ("is moved to version 2", (True, ("fresh",)))
    assert list(check(newer(skip=("label",)))) == ["is moved to version 2"]
    broken = newer(skip=("label",))
    broken._migrations.clear()

    @broken.migrate(from_version=1)
    def forgetful(old: OrderState) -> NewState:
        return {"order": old.order}["cents"]  # type: ignore[return-value]

    (why,) = {verdict for verdict in check(broken) if "KeyError" in verdict}
    assert why == "cannot be moved: its migration failed: KeyError: 'cents'"
    assert {shop.result(key).version for key in ("fresh", "shipping")} == {1}


def test_a_state_that_a_definition_cannot_read_any_more_is_told_by_the_check(shop: Shop) -> None:
    """The shape is the same, so nothing else would tell before the first reply."""
    shop.start(order, OrderState("o1"), "o1")
    other = Saga("order", state=NewState)
    other._nodes, other._functions, other._undos = order._nodes, order._functions, order._undos
    other._compensated_by = order._compensated_by
    (one,) = SagaOperations(shop.engine).check([other])
    assert not one.is_fine
    assert one.verdict.startswith("its state cannot be read: ")


def changed() -> Saga[OrderState]:
    """Return the order saga with another shape, under the same version."""
    saga = Saga("order", state=OrderState)

    @saga.command("shipping", compensate=None)
    def ship(state: OrderState) -> Ship:
        return Ship(state.order)

    return saga


def test_a_definition_that_was_changed_under_its_version_is_refused_before_it_runs(
    shop: Shop,
) -> None:
    """While old instances run; afterwards nobody is in its way."""
    shop.start(order, OrderState("o1"), "o1")
    with pytest.raises(DefinitionChanged, match="'order' was changed, but is still version 1"):
        Sagas(shop.engine, changed()).run(Consumer(shop.broker, group="shop", database=shop.engine))
    (refused,) = SagaOperations(shop.engine).check([changed()])
    assert refused.verdict == "is refused: the shape changed, give it another version than 1"
    _, consumer = elsewhere(shop, changed())
    for reply in replies(shop):  # one that runs all the same does no harm
        assert consumer.handler(reply.topic).handle(reply).ending is HandlerEnding.HANDLED
    shop.settle()
    assert shop.result("o1").status == "completed"
    with shop.engine.connect() as db:
        Sagas(shop.engine, changed()).definitions.require_unchanged(db)
