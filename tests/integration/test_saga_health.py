"""Probes of a program that runs sagas: the timers count as much as the replies."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.orm import Session  # noqa: TC002 - steps are looked at by annotation

from holdfast.brokers import connect
from holdfast.consumer import Consumer
from holdfast.sagas import Saga, Sagas
from holdfast.sagas.monitoring import SagaHealth
from holdfast.sagas.timers import WorkerTerms
from holdfast.testing import wait_until
from tests.orchestrating import OrderState, Shop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DEADLINE = 60


class Program:
    """`Sagas.run` in a thread, and its probes."""

    def __init__(self, shop: Shop, saga: Saga[Any]) -> None:
        self.sagas = Sagas(shop.engine, saga, terms=WorkerTerms(idle_seconds=0.05))
        self.broker = connect("memory:")
        self.broker.create_topic(saga.replies, partitions=1)
        self.consumer = Consumer(self.broker, group="sagas", database=shop.engine)
        self.health = SagaHealth(self.sagas, self.consumer)
        self._thread = threading.Thread(target=self.sagas.run, args=[self.consumer])
        self._thread.start()
        wait_until(lambda: self.health.ready().good, deadline=DEADLINE, what="it is ready")

    def stop(self) -> None:
        self.consumer.stop()
        self._thread.join()
        self.broker.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[Saga[Any]], tuple[Shop, Program]]]:
    """Run a saga in this process."""
    opened: list[tuple[Shop, Program]] = []

    def start(saga: Saga[Any]) -> tuple[Shop, Program]:
        shop = Shop(f"sqlite:///{tmp_path}/shop.db", saga)
        opened.append((shop, Program(shop, saga)))
        return opened[-1]

    yield start
    for shop, program in opened:
        program.stop()
        shop.close()


def stepping(meet: Callable[[], None]) -> Saga[OrderState]:
    saga = Saga("stepping", state=OrderState)

    @saga.local(compensate=None)
    def step(state: OrderState, session: Session) -> OrderState:
        meet()
        return state

    return saga


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_timer_thread_is_not_alive(run: Callable[..., tuple[Shop, Program]]) -> None:
    """Replies are still polled for, and yet no saga would go on."""

    def die() -> None:
        raise KeyboardInterrupt

    saga = stepping(die)
    shop, program = run(saga)
    assert program.health.alive().good
    shop.start(saga, OrderState("a"), "a")
    wait_until(lambda: not program.health.alive().good, deadline=DEADLINE, what="it is noticed")
    assert program.health.alive().why == "the thread of the timers has died"


def test_an_outage_is_not_ready_and_yet_alive(run: Callable[..., tuple[Shop, Program]]) -> None:
    """And it is ready again once the database is back."""
    shop, program = run(stepping(lambda: None))
    with shop.engine.begin() as db:
        db.exec_driver_sql("ALTER TABLE holdfast_saga_timer RENAME TO away")
    words = "timers wait for the database"
    wait_until(lambda: words in program.health.ready().why, deadline=DEADLINE, what="it is noticed")
    assert program.health.alive().good
    with shop.engine.begin() as db:
        db.exec_driver_sql("ALTER TABLE away RENAME TO holdfast_saga_timer")
    wait_until(lambda: program.health.ready().good, deadline=DEADLINE, what="it is ready again")


def test_a_local_step_that_runs_is_finished_before_the_end(
    run: Callable[..., tuple[Shop, Program]],
) -> None:
    """Its effect is there when `run` returns."""
    begun, go = threading.Event(), threading.Event()

    def meet() -> None:
        begun.set()
        assert go.wait(DEADLINE)

    saga = stepping(meet)
    shop, program = run(saga)
    shop.start(saga, OrderState("a"), "a")
    assert begun.wait(DEADLINE)
    program.consumer.stop()
    go.set()
    program.stop()
    assert shop.result("a").status == "completed"
