"""Who works on a local step: renewed while it runs, taken over when its worker is gone, fenced."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import event, insert, select, update
from sqlalchemy.orm import Session  # noqa: TC002 - steps are looked at by annotation

from holdfast.sagas import Saga, Sagas, StepFailed
from holdfast.sagas.schema import timer
from holdfast.sagas.timers import WorkerTerms
from holdfast.testing import wait_until
from tests.orchestrating import OrderState, Shop, effects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DEADLINE = 60


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def open_shop(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[Saga[Any]], Shop]]:
    """Open shops on each kind of database."""
    yield from _opened(request, tmp_path)


@pytest.fixture(params=["postgres", "mariadb"])
def open_server(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[Saga[Any]], Shop]]:
    """Open shops where a step that runs keeps nobody else from writing."""
    yield from _opened(request, tmp_path)


def _opened(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[Saga[Any]], Shop]]:
    opened: list[Shop] = []

    def open_one(*sagas: Saga[Any]) -> Shop:
        if request.param == "sqlite":
            url = f"sqlite:///{tmp_path}/shop.db"
        else:
            url = request.getfixturevalue(request.param).database("saga_leases")
        opened.append(Shop(url, *sagas))
        return opened[-1]

    yield open_one
    for shop in opened:
        shop.close()


def stock_take(meet: Callable[[str, int], None]) -> Saga[OrderState]:
    """Return a saga of one local step, which meets something when it runs for the nth time."""
    saga = Saga("stock_take", state=OrderState)
    calls: Counter[str] = Counter()

    @saga.local(compensate=None, retry=None)
    def count(state: OrderState, session: Session) -> OrderState:
        session.execute(insert(effects).values(what="counted", owner=state.order, amount=1))
        calls[state.order] += 1
        meet(state.order, calls[state.order])
        return msgspec.structs.replace(state, notes=(*state.notes, "counted"))

    return saga


class Halt:
    """A place at which a step stands until it is let go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._go = threading.Event()

    def stand(self) -> None:
        self.reached.set()
        assert self._go.wait(DEADLINE)

    def let_go(self) -> None:
        self._go.set()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def leased_until(shop: Shop) -> float:
    with shop.engine.connect() as db:
        return float(db.execute(select(timer.c.until)).scalar_one())


def test_the_lease_of_a_step_is_renewed_while_it_runs(open_server: Callable[..., Shop]) -> None:
    """However long it takes, so nobody else begins it beside."""
    halt = Halt()
    saga = stock_take(lambda *_: halt.stand())
    shop = open_server(saga)
    shop.start(saga, OrderState("a"), "a")
    worker = Sagas(shop.engine, saga, terms=WorkerTerms(lease_seconds=1.5)).worker()
    running = in_thread(worker.step)
    try:
        assert halt.reached.wait(DEADLINE)
        first = leased_until(shop)
        wait_until(lambda: leased_until(shop) > first + 1, deadline=DEADLINE, what="a renewal")
        second = leased_until(shop)
        wait_until(lambda: leased_until(shop) > second, deadline=DEADLINE, what="another one")
    finally:
        halt.let_go()
        running.join()
    assert shop.result("a").status == "completed"
    assert shop.effects() == [("counted", "a", 1)]


def test_the_step_of_a_worker_that_is_gone_is_taken_over_and_fenced(
    open_server: Callable[..., Shop],
) -> None:
    """The worker that comes back changes nothing, though it is through first."""
    halts = {1: Halt(), 2: Halt()}
    saga = stock_take(lambda _, number: halts[number].stand())
    shop = open_server(saga)
    shop.start(saga, OrderState("a"), "a")
    frozen = in_thread(shop.worker.step)
    assert halts[1].reached.wait(DEADLINE)
    with shop.engine.begin() as db:  # its lease has run out, and nobody renews it
        db.execute(update(timer).values(until=0))
    successor = in_thread(shop.sagas.worker().step)
    assert halts[2].reached.wait(DEADLINE)
    halts[1].let_go()
    frozen.join()
    assert shop.effects() == []
    assert shop.result("a").status == "running"
    halts[2].let_go()
    successor.join()
    assert shop.effects() == [("counted", "a", 1)]
    assert shop.result("a").status == "completed"


def test_a_conflict_runs_the_step_again_and_blames_nobody(open_server: Callable[..., Shop]) -> None:
    """The saga changed meanwhile: what the step wrote is rolled back, its one attempt is left."""
    met: list[str] = []

    def meet(name: str, number: int) -> None:
        if number == 1:
            met.append(name)
            shop.sagas.signal(name, "hurry", "now")

    saga = stock_take(meet)

    @saga.signal(timeout="1d")
    def hurry(state: OrderState, how: str) -> OrderState:
        return msgspec.structs.replace(state, notes=(*state.notes, how))

    shop = open_server(saga)
    shop.start(saga, OrderState("a"), "a")
    assert shop.worker.step() == 1
    assert met == ["a"]
    result = shop.result("a")
    assert (result.status, result.state.notes) == ("completed", ("counted", "now"))
    assert shop.effects() == [("counted", "a", 1)]


def test_a_saga_that_keeps_changing_waits_without_blame(open_server: Callable[..., Shop]) -> None:
    """After some conflicts in a row it is left for later; neither its timer nor its step pays."""
    calls: list[int] = []

    def meet(name: str, number: int) -> None:
        calls.append(number)
        if number <= 6:
            with shop.engine.begin() as db:
                db.exec_driver_sql("UPDATE holdfast_saga SET revision = revision + 1")

    saga = stock_take(meet)
    shop = open_server(saga)
    shop.start(saga, OrderState("a"), "a")
    assert shop.worker.step() == 1
    assert calls == [1, 2, 3, 4, 5, 6]
    with shop.engine.begin() as db:
        left = db.execute(select(timer.c.tries, timer.c.owner)).one()
        db.execute(update(timer).values(due=0))
    assert tuple(left) == (0, None)
    assert shop.worker.step() == 1
    assert shop.result("a").status == "completed"


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count every step as quick, however slow the machine is."""
    monkeypatch.setattr("holdfast.sagas.timers._TOGETHER_SECONDS", 3600.0)
    monkeypatch.setattr("holdfast.sagas.timers._SLOW_SECONDS", 3600.0)


@pytest.mark.usefixtures("unhurried")
def test_quick_local_steps_share_a_transaction(open_shop: Callable[..., Shop]) -> None:
    """One to take them and one to run them all."""
    saga = stock_take(lambda *_: None)
    shop = open_shop(saga)
    for number in range(8):
        shop.start(saga, OrderState(f"o{number}"), f"o{number}")
    commits: list[object] = []
    event.listen(shop.engine, "commit", commits.append)
    assert shop.worker.step() == 8
    assert len(commits) == 2
    assert len(shop.effects()) == 8
    assert {shop.result(f"o{number}").status for number in range(8)} == {"completed"}


@pytest.mark.parametrize("limit", ["_TOGETHER_SECONDS", "_SLOW_SECONDS"])
def test_slow_local_steps_have_transactions_of_their_own(
    open_shop: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """What one has locked is free again before the next one begins."""
    monkeypatch.setattr(f"holdfast.sagas.timers.{limit}", -1.0)
    saga = stock_take(lambda *_: None)
    shop = open_shop(saga)
    shop.start(saga, OrderState("known"), "known")
    shop.settle()
    for number in range(4):
        shop.start(saga, OrderState(f"o{number}"), f"o{number}")
    commits: list[object] = []
    event.listen(shop.engine, "commit", commits.append)
    assert shop.worker.step() == 4
    assert len(commits) == 5
    assert len(shop.effects()) == 5


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("error", [StepFailed("no"), RuntimeError("a bug")])
def test_a_step_that_fails_forfeits_no_other(
    open_shop: Callable[..., Shop], error: Exception
) -> None:
    """What it wrote is gone, and what the others did counts once."""

    def meet(name: str, _: int) -> None:
        if name == "o3":
            raise error

    saga = stock_take(meet)
    shop = open_shop(saga)
    for number in range(6):
        shop.start(saga, OrderState(f"o{number}"), f"o{number}")
    shop.settle()
    statuses = [shop.result(f"o{number}").status for number in range(6)]
    assert statuses == [*["completed"] * 3, "compensated", *["completed"] * 2]
    assert sorted(owner for _, owner, _ in shop.effects()) == ["o0", "o1", "o2", "o4", "o5"]


@pytest.mark.usefixtures("unhurried")
def test_steps_of_one_saga_that_share_a_transaction_see_each_other(
    open_shop: Callable[..., Shop],
) -> None:
    """What one made of the state the next one starts from."""
    saga: Saga[OrderState] = Saga("twins", state=OrderState)

    with saga.parallel():

        @saga.local(compensate=None)
        def left(state: OrderState, session: Session) -> OrderState:
            return msgspec.structs.replace(state, notes=(*state.notes, "left"))

        @saga.local(compensate=None)
        def right(state: OrderState, session: Session) -> OrderState:
            return msgspec.structs.replace(state, notes=(*state.notes, "right"))

    shop = open_shop(saga)
    shop.start(saga, OrderState("a"), "a")
    shop.settle()
    result = shop.result("a")
    assert (result.status, sorted(result.state.notes)) == ("completed", ["left", "right"])


@pytest.mark.usefixtures("unhurried")
def test_a_worker_that_stops_gives_back_what_it_has_not_begun(
    open_shop: Callable[..., Shop],
) -> None:
    """So others need not wait for its leases."""

    def meet(name: str, number: int) -> None:
        if name == "o1" and number == 1:
            raise StepFailed("not together")
        if name == "o0" and number == 2:
            shop.worker.stop()

    saga = stock_take(meet)
    shop = open_shop(saga)
    for number in range(4):
        shop.start(saga, OrderState(f"o{number}"), f"o{number}")
    assert shop.worker.step() == 4
    assert shop.effects() == [("counted", "o0", 1)]
    assert shop.sagas.worker().step() == 3
    assert len(shop.effects()) == 4
