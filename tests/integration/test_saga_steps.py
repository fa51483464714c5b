"""Local steps, signals, waits and choices on real tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pytest
from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from holdfast.backoff import Backoff
from holdfast.errors import ConfigurationError
from holdfast.sagas import (
    DefinitionChanged,
    Saga,
    Sagas,
    StepFailed,
    is_locked,
    lock_resource,
    unlock_resource,
)
from holdfast.sagas.schema import history, lock, step, timer
from tests.orchestrating import FAST, OrderState, Ship, Shop, effects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def open_shop(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[Saga[Any]], Shop]]:
    """Open shops on each kind of database."""
    opened: list[Shop] = []

    def open_one(*sagas: Saga[Any]) -> Shop:
        if request.param == "sqlite":
            url = f"sqlite:///{tmp_path}/shop.db"
        else:
            url = request.getfixturevalue(request.param).database("saga_steps")
        opened.append(Shop(url, *sagas))
        return opened[-1]

    yield open_one
    for shop in opened:
        shop.close()


class Trouble:
    """What the local steps run into."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.calls = 0

    def meet(self) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)


def booking(trouble: Trouble) -> Saga[OrderState]:
    saga = Saga("booking", state=OrderState, deadline="1h")

    @saga.local(compensate="unbook", retry=FAST)
    def book(state: OrderState, session: Session) -> OrderState:
        session.execute(insert(effects).values(what="booked", owner=state.order, amount=1))
        trouble.meet()
        return msgspec.structs.replace(state, notes=(*state.notes, "booked"))

    @saga.local_compensation(retry=FAST)
    def unbook(state: OrderState, session: Session) -> OrderState:
        session.execute(insert(effects).values(what="unbooked", owner=state.order, amount=-1))
        return msgspec.structs.replace(state, notes=(*state.notes, "unbooked"))

    @saga.signal(timeout="1d")
    def approved(state: OrderState, by: str) -> OrderState:
        return msgspec.structs.replace(state, notes=(*state.notes, f"by {by}"))

    @saga.timer()
    def cooling_off(state: OrderState) -> str:
        return "2h"

    @saga.choice()
    def route(state: OrderState) -> Literal["parcel", "letter"]:
        return "parcel" if state.amount > 5 else "letter"

    with saga.when(route, "parcel"):

        @saga.command("shipping", compensate=None)
        def send_parcel(state: OrderState) -> Ship:
            return Ship(state.order)

    with saga.when(route, "letter"):

        @saga.local(compensate=None)
        def send_letter(state: OrderState, session: Session) -> OrderState:
            return msgspec.structs.replace(state, notes=(*state.notes, "letter"))

    return saga


def test_every_kind_of_step_runs_in_its_turn(open_shop: Callable[..., Shop]) -> None:
    """Local steps change the state, signals are waited for, waits pass, cases are chosen."""
    saga = booking(Trouble())
    shop = open_shop(saga)
    shop.start(saga, OrderState("a"), "a")
    shop.start(saga, OrderState("b", amount=1), "b")
    shop.settle()
    assert shop.timers() == [("", "deadline")] * 2 + [("approved", "timeout")] * 2
    for name in ("a", "b"):
        shop.sagas.signal(name, "approved", "eve")
    shop.settle()
    assert ("cooling_off", "sleep") in shop.timers()
    shop.let_fire("sleep")
    shop.settle()
    assert shop.result("a").state.notes == ("booked", "by eve")
    assert shop.result("b").state.notes == ("booked", "by eve", "letter")
    assert {shop.result(name).status for name in "ab"} == {"completed"}
    assert shop.effects("a") == [("booked", "a", 1), ("parcel", "a", 1)]
    assert shop.timers() == []


def test_a_signal_that_comes_early_is_taken_up_in_its_turn(open_shop: Callable[..., Shop]) -> None:
    """It survives in a table until then, and comes only once."""
    saga = booking(Trouble())
    shop = open_shop(saga)
    shop.start(saga, OrderState("a"), "a")
    shop.sagas.signal("a", "approved", "eve")
    shop.sagas.signal("a", "approved", "mallory")
    shop.settle()
    assert shop.result("a").state.notes == ("booked", "by eve")
    assert ("cooling_off", "sleep") in shop.timers()


def test_the_effect_of_a_local_step_is_that_of_the_attempt_that_succeeded(
    open_shop: Callable[..., Shop],
) -> None:
    """What an attempt wrote that raised is rolled back."""
    trouble = Trouble()
    trouble.errors.append(RuntimeError("a bug"))
    saga = booking(trouble)
    shop = open_shop(saga)
    shop.start(saga, OrderState("a"), "a")
    shop.settle()
    shop.let_fire("retry")
    shop.settle()
    assert trouble.calls == 2
    assert shop.effects() == [("booked", "a", 1)]
    assert shop.result("a").state.notes == ("booked",)


@pytest.mark.parametrize("kind", [RuntimeError, StepFailed])
def test_what_is_kept_of_an_error_holds_no_secret(
    open_shop: Callable[..., Shop], kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in the tables nor in the log."""
    trouble = Trouble()
    trouble.errors += [kind("refused by postgresql://shop:hunter2@db/shop") for _ in range(2)]
    saga = booking(trouble)
    shop = open_shop(saga)
    shop.start(saga, OrderState("a"), "a")
    with caplog.at_level("INFO", "holdfast"):
        shop.settle()
        shop.let_fire("retry")
        shop.settle()
    result = shop.result("a")
    assert result.status == "compensated"
    assert "refused by" in result.reason
    with shop.engine.connect() as db:
        kept = [*db.execute(select(step.c.error)), *db.execute(select(history.c.event))]
    assert "refused by" in str(kept)
    assert "hunter2" not in f"{kept} {result.reason} {caplog.text}"


def test_a_local_step_that_fails_for_good_is_not_tried_again(
    open_shop: Callable[..., Shop],
) -> None:
    """Its own writes are gone, and there is nothing to undo."""
    trouble = Trouble()
    trouble.errors.append(StepFailed("sold out"))
    saga = booking(trouble)
    shop = open_shop(saga)
    shop.start(saga, OrderState("a"), "a")
    shop.settle()
    result = shop.result("a")
    assert (result.status, result.reason) == ("compensated", "book: sold out")
    assert (trouble.calls, shop.effects()) == (1, [])


def test_the_deadline_of_the_saga_undoes_what_was_done(open_shop: Callable[..., Shop]) -> None:
    """Local compensations commit with the word that they are done, too."""
    saga = booking(Trouble())
    shop = open_shop(saga)
    shop.start(saga, OrderState("a"), "a")
    shop.settle()
    shop.let_fire("deadline")
    shop.settle()
    result = shop.result("a")
    assert result.status == "compensated"
    assert result.reason == "the deadline of the saga has passed"
    assert result.state.notes == ("booked", "unbooked")
    assert [what for what, _, _ in shop.effects()] == ["booked", "unbooked"]


def test_two_workers_run_a_local_step_once(open_shop: Callable[..., Shop]) -> None:
    """Only one of them gets the lease."""
    trouble = Trouble()
    saga = booking(trouble)
    shop = open_shop(saga)
    for number in range(5):
        shop.start(saga, OrderState(str(number)), str(number))
    other = shop.sagas.worker()
    while shop.worker.step() + other.step():
        pass
    assert trouble.calls == 5
    assert len(shop.effects()) == 5


def test_a_definition_that_changed_under_its_version_is_refused(
    open_shop: Callable[..., Shop],
) -> None:
    """Running instances would not find their way in it."""
    saga = booking(Trouble())
    shop = open_shop(saga)
    shop.start(saga, OrderState("a"), "a")
    changed = Saga("booking", state=OrderState)

    @changed.local(compensate=None)
    def other(state: OrderState, session: Session) -> OrderState:
        return state

    with pytest.raises(DefinitionChanged, match="still version 1: give the new shape the next"):
        Sagas(shop.engine, changed).signal("a", "approved")


def test_a_step_that_returns_something_else_fails_its_own_step(
    open_shop: Callable[..., Shop],
) -> None:
    """The saga turns back with a reason that names the step and the type."""
    saga: Saga[OrderState] = Saga("odd", state=OrderState)

    @saga.local(compensate=None, retry=None)
    def forgetful(state: OrderState, session: Session) -> OrderState:
        return None  # type: ignore[return-value]

    shop = open_shop(saga)
    shop.start(saga, OrderState("a"), "a")
    shop.settle()
    result = shop.result("a")
    assert result.status == "compensated"
    assert "forgetful gave a NoneType: return the state, a OrderState" in result.reason


def test_a_state_that_cannot_be_stored_is_refused_at_the_start(
    open_shop: Callable[..., Shop],
) -> None:
    """The caller hears of it, before the commit."""
    saga = booking(Trouble())
    shop = open_shop(saga)
    with pytest.raises(Exception, match="return the state, a OrderState"):
        shop.start(saga, {"order": "a"}, "a")
    with pytest.raises(ConfigurationError, match="name it by a text"):
        shop.start(saga, OrderState("a"), "")


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_a_worker_that_was_overtaken_in_a_local_step_rolls_back(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Its lease ran out while it slept in the step, and another one did the work meanwhile."""
    saga: Saga[OrderState] = Saga("slow", state=OrderState)
    asleep = [True]

    @saga.local(compensate=None, retry=None)
    def book(state: OrderState, session: Session) -> OrderState:
        session.execute(insert(effects).values(what="booked", owner=state.order, amount=1))
        if asleep:
            asleep.clear()
            with shop.engine.begin() as db:
                db.execute(update(timer).values(until=0))
            assert shop.sagas.worker().step() == 1
            assert shop.result("a").status == "completed"
        return state

    shop = Shop(request.getfixturevalue(kind).database("saga_sleep"), saga)
    shop.start(saga, OrderState("a"), "a")
    assert shop.worker.step() == 1
    assert shop.effects() == [("booked", "a", 1)]
    assert shop.result("a").status == "completed"
    assert shop.timers() == []
    shop.close()


def test_a_resource_is_one_sagas_at_a_time(open_shop: Callable[..., Shop]) -> None:
    """The other one waits by its retries; the end of the first releases it, and fences grow."""
    saga: Saga[OrderState] = Saga("locking", state=OrderState)
    fences: dict[str, int] = {}

    @saga.local(compensate=None, retry=Backoff(first=0.001, ceiling=0.002))
    def take_seat(state: OrderState, session: Session) -> OrderState:
        fences[state.order] = lock_resource(session, "seat 1", expires="1h")
        assert is_locked(session, "seat 1", fences[state.order])
        return state

    @saga.signal(timeout="1d")
    def paid(state: OrderState, by: str) -> OrderState:
        return state

    shop = open_shop(saga)
    for name in ("a", "b"):
        shop.start(saga, OrderState(name), name)
        shop.worker.step()
    assert list(fences) == ["a"]
    shop.sagas.signal("a", "paid", "card")
    assert shop.result("a").status == "completed"
    shop.let_fire("retry")
    shop.settle()
    assert fences["b"] > fences["a"]
    with Session(shop.engine) as session, pytest.raises(ConfigurationError, match="in one of its"):
        lock_resource(session, "seat 1", expires="1h")


def test_a_resource_can_be_released_before_the_end(open_shop: Callable[..., Shop]) -> None:
    """The next one has it at once, though the first still runs."""
    saga: Saga[OrderState] = Saga("brief", state=OrderState)
    fences: dict[str, int] = {}

    @saga.local(compensate=None)
    def take_and_leave(state: OrderState, session: Session) -> OrderState:
        fences[state.order] = lock_resource(session, "seat 1", expires="1h")
        unlock_resource(session, "seat 1")
        assert not is_locked(session, "seat 1", fences[state.order])
        return state

    @saga.signal(timeout="1d")
    def paid(state: OrderState, by: str) -> OrderState:
        return state

    shop = open_shop(saga)
    for name in ("a", "b"):
        shop.start(saga, OrderState(name), name)
        shop.worker.step()
    assert [shop.result(name).status for name in ("a", "b")] == ["running", "running"]
    assert fences["b"] > fences["a"]


def test_a_lock_ends_by_itself(open_shop: Callable[..., Shop]) -> None:
    """Its first holder knows by its fence that it is too late."""
    saga: Saga[OrderState] = Saga("locking", state=OrderState)
    fences: dict[str, int] = {}
    seen: list[bool] = []

    @saga.local(compensate=None)
    def take_seat(state: OrderState, session: Session) -> OrderState:
        fences[state.order] = lock_resource(session, "seat 1", expires="1h")
        return state

    @saga.signal(timeout="1d")
    def paid(state: OrderState, by: str) -> OrderState:
        return state

    @saga.local(compensate=None)
    def look(state: OrderState, session: Session) -> OrderState:
        seen.append(is_locked(session, "seat 1", fences[state.order]))
        return state

    shop = open_shop(saga)
    shop.start(saga, OrderState("a"), "a")
    shop.worker.step()
    with shop.engine.begin() as db:
        db.execute(update(lock).values(until=0))
    shop.start(saga, OrderState("b"), "b")
    shop.worker.step()
    assert fences["b"] > fences["a"]
    shop.sagas.signal("a", "paid", "card")
    shop.worker.step()
    assert seen == [False]
