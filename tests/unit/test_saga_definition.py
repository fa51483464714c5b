"""A saga reads like the order of its steps, and nonsense is refused where it is written."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backoff import Backoff
from holdfast.errors import ConfigurationError
from holdfast.sagas import Graph, InvalidSaga, NodeKind, Saga
from holdfast.sagas.graph import Node, build

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.orm import Session


class OrderState(msgspec.Struct, frozen=True):
    order: str
    stock: str = ""


class ReserveStock(msgspec.Struct):
    order: str


class StockReserved(msgspec.Struct):
    reservation: str


class Approval(msgspec.Struct):
    by: str


def ask(state: OrderState) -> ReserveStock:
    return ReserveStock(state.order)


def new(**options: Any) -> Saga[OrderState]:
    return Saga("order", state=OrderState, **options)


def command(saga: Saga[OrderState], name: str, **options: Any) -> Callable[..., Any]:
    """Add a command step called *name*."""
    return saga.command("inventory", **{"compensate": None, **options})(named(name))


def named(name: str) -> Callable[[OrderState], ReserveStock]:
    def step(state: OrderState) -> ReserveStock:
        return ask(state)

    step.__name__ = name
    return step


def edges(saga: Saga[Any]) -> dict[str, set[str]]:
    return {node.name: set(node.after) for node in saga.graph}


def full() -> Saga[OrderState]:
    order = new(deadline="2h", version=3)

    @order.command(
        "inventory", compensate="release_stock", timeout="30s", retry=Backoff(attempts=5)
    )
    def reserve_stock(state: OrderState) -> ReserveStock:
        return ReserveStock(state.order)

    @order.reply(reserve_stock)
    def stock_reserved(state: OrderState, reply: StockReserved) -> OrderState:
        return msgspec.structs.replace(state, stock=reply.reservation)

    @order.compensation("inventory", timeout="10s")
    def release_stock(state: OrderState) -> ReserveStock:
        return ReserveStock(state.stock)

    @order.signal(timeout="3d")
    def approved(state: OrderState, approval: Approval) -> OrderState:
        return state

    @order.timer()
    def cooling_off(state: OrderState) -> timedelta:
        return timedelta(hours=1)

    @order.choice()
    def route(state: OrderState) -> Literal["express", "standard"]:
        return "express"

    with order.when(route, "express"):

        @order.command("courier", compensate=None)
        def book_courier(state: OrderState) -> ReserveStock:
            return ReserveStock(state.order)

    with order.when(route, "standard"):

        @order.command("post", compensate=None)
        def book_post(state: OrderState) -> ReserveStock:
            return ReserveStock(state.order)

    @order.local(pivot=True)
    def confirm(state: OrderState, session: Session) -> OrderState:
        return state

    @order.command("mail")
    def tell(state: OrderState) -> ReserveStock:
        return ReserveStock(state.order)

    return order


def test_steps_run_in_the_order_in_which_they_are_written() -> None:
    """Every kind of step has its place, and a case of a branch stands beside the others."""
    saga = full()
    assert edges(saga) == {
        "reserve_stock": set(),
        "approved": {"reserve_stock"},
        "cooling_off": {"approved"},
        "route": {"cooling_off"},
        "book_courier": {"route"},
        "book_post": {"route"},
        "confirm": {"route", "book_courier", "book_post"},
        "tell": {"confirm"},
    }
    graph = saga.graph
    assert graph.pivot == "confirm"
    assert graph.is_behind_pivot("tell")
    assert not graph.is_behind_pivot("confirm")
    assert graph["book_post"].when == (("route", "standard"),)
    assert graph["reserve_stock"].timeout == 30
    undo = graph["reserve_stock"].undo
    assert undo is not None
    assert (undo.name, undo.topic, undo.timeout) == ("release_stock", "inventory", 10)


def test_the_functions_stay_functions() -> None:
    """A test calls them like any other, and replies are decoded to what they ask for."""
    saga = full()
    step = saga.steps["reserve_stock"]
    state = OrderState("7")
    assert step.run(state) == ReserveStock("7")
    assert step.decode is not None
    assert step.fold is not None
    reply = step.decode(b'{"reservation": "r1"}')
    assert step.fold(state, reply) == OrderState("7", "r1")


def test_steps_of_a_parallel_block_wait_for_nobody_inside() -> None:
    """What follows waits for all of them; a sequence inside is one lane."""
    saga = new()
    command(saga, "first")
    with saga.parallel():
        command(saga, "a")
        with saga.sequence():
            command(saga, "b1")
            command(saga, "b2")
    command(saga, "last")
    assert edges(saga) == {
        "first": set(),
        "a": {"first"},
        "b1": {"first"},
        "b2": {"b1"},
        "last": {"a", "b2"},
    }


def test_a_step_can_be_placed_by_hand() -> None:
    """`after` takes names and functions; what follows waits for both ends."""
    saga = new()
    first = command(saga, "first")
    command(saga, "second")
    command(saga, "aside", after=first)
    command(saga, "last")
    assert edges(saga) == {
        "first": set(),
        "second": {"first"},
        "aside": {"first"},
        "last": {"second", "aside"},
    }


def test_an_empty_block_changes_nothing() -> None:
    """The order goes on behind it."""
    saga = new()
    command(saga, "first")
    with saga.parallel():
        pass
    command(saga, "last")
    assert edges(saga)["last"] == {"first"}


@pytest.mark.parametrize("kind", ["struct", "dataclass", "pydantic"])
def test_the_state_is_of_any_typed_kind(kind: str) -> None:
    """It is read back as what it was."""

    @dataclass
    class Plain:
        order: str

    class Model(pydantic.BaseModel):
        order: str

    state: type[Any] = {"struct": OrderState, "dataclass": Plain, "pydantic": Model}[kind]
    saga: Saga[Any] = Saga("order", state=state)
    assert saga.decode(b'{"order": "7"}') == state(order="7")


def check(saga: Saga[Any], problem: str) -> None:
    with pytest.raises(InvalidSaga, match=problem):
        _ = saga.graph


def test_what_cannot_be_undone_before_the_pivot_is_refused() -> None:
    """Saying that there is nothing to undo is enough, saying nothing is not."""
    saga = new()
    saga.command("inventory")(named("reserve"))
    check(saga, "step 'reserve' has no compensation: name one with compensate=")


def test_what_cannot_be_repeated_behind_the_pivot_is_refused() -> None:
    """There is only one way, so it has to be gone again and again."""
    saga = new()
    command(saga, "pay", pivot=True)
    saga.command("mail", retry=None)(named("tell"))
    check(saga, "'tell' comes after the pivot 'pay' and can only go forward: give it a retry")


def test_a_compensation_behind_the_pivot_is_refused() -> None:
    """It would never run."""
    saga = new()
    command(saga, "pay", pivot=True)
    saga.command("mail", compensate="untell")(named("tell"))
    saga.compensation("mail")(named("untell"))
    check(saga, "'tell' comes after the pivot 'pay' and is never undone")


def test_steps_that_wait_for_each_other_are_refused() -> None:
    """The circle is shown."""
    saga = new()
    command(saga, "a", after="b")
    command(saga, "b")
    command(saga, "c", after=("a",))
    check(saga, "circle: (a → b → a|b → a → b)")


def test_a_step_beside_the_pivot_is_refused() -> None:
    """Nobody could say whether it may still be undone."""
    saga = new()
    with saga.parallel():
        command(saga, "pay", pivot=True)
        command(saga, "other")
    check(saga, "'other' runs beside the pivot 'pay'")


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda s: None, "no steps"),
        (lambda s: command(s, "a", after="nowhere"), "after 'nowhere', which is no step"),
        (lambda s: command(s, "a", compensate="undo_a"), "'undo_a', which is not there"),
        (
            lambda s: (command(s, "a"), s.compensation("t")(named("undo_a"))),
            "no step names the compensation 'undo_a'",
        ),
        (
            lambda s: (command(s, "a", pivot=True), command(s, "b", pivot=True)),
            "'a' and 'b' are pivots",
        ),
        (lambda s: s.signal()(lambda state, came: state), "would wait for ever"),
    ],
)
def test_a_saga_that_cannot_work_is_refused(
    write: Callable[[Saga[OrderState]], Any], problem: str
) -> None:
    """The message names the step and the fix."""
    saga = new()
    write(saga)
    check(saga, problem)


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda s: (command(s, "a"), command(s, "a")), "two steps named 'a'"),
        (lambda s: command(s, "a", timeout="soon"), "timeout='soon'"),
        (lambda s: command(s, "a", timeout=None), "timeout=None"),
        (lambda s: command(s, "a", retry=3), "retry=3: pass a Backoff"),
        (lambda s: command(s, "a", colour="red"), "no option 'colour'"),
        (lambda s: s.local(timeout=3)(named("a")), "'a' is a local: it waits for no answer"),
        (lambda s: s.timer(compensate="b")(named("a")), "nothing to compensate"),
        (lambda s: s.reply("a")(lambda state, came: state), "no such command step"),
        (lambda s: s.choice()(named("a")), "does not say what it chooses from"),
        (lambda s: s.when("a", "b").__enter__(), "no such choice"),
        (lambda s: s.signal(timeout=3)(named("a")), "takes 1 arguments"),
        (lambda s: (command(s, "a"), s.graph, command(s, "b")), "in use already"),
        (lambda s: s.command("")(named("a")), "name it by a text"),
    ],
)
def test_nonsense_is_refused_where_it_is_written(
    write: Callable[[Saga[OrderState]], Any], problem: str
) -> None:
    """The decorator itself raises."""
    with pytest.raises(ConfigurationError, match=problem):
        write(new())


def test_a_case_that_is_never_chosen_is_refused() -> None:
    """Its steps could not be reached."""
    saga = new()

    @saga.choice()
    def route(state: OrderState) -> Literal["express", "standard"]:
        return "express"

    with saga.when(route, "overnight"):
        command(saga, "fly")
    check(saga, "'fly' can never run: 'route' does not choose 'overnight'")


def test_the_hash_is_of_the_shape_and_not_of_the_waits() -> None:
    """Another timeout keeps it; another step, place, topic or compensation does not."""

    def shape(**options: Any) -> str:
        saga = new()
        command(saga, "a")
        command(saga, "b", **options)
        return saga.graph.hash

    assert shape() == shape(timeout="5m", retry=None, deadline="1h")
    assert shape() != shape(pivot=True)
    assert shape() != shape(after=())
    assert len({shape(), full().graph.hash}) == 2


def test_the_diagram_shows_steps_cases_compensations_and_the_pivot() -> None:
    """It is a Mermaid flowchart in which no name can break the syntax."""
    lines = [line.strip() for line in full().diagram().splitlines()]
    assert lines[0] == "flowchart TD"
    assert "start((order v3))" in lines
    assert 's0[/"reserve_stock<br/>inventory"/]' in lines
    assert 'us0["release_stock"]:::undo' in lines
    assert 's3 -->|"express"| s4' in lines
    assert "s4 --> s6" in lines
    assert "s3 --> s6" not in lines  # s4 and s5 stand between
    assert "class s6 pivot" in lines
    odd = new()
    command(odd, 'say "hi"] --> x')
    assert '"hi"' not in odd.diagram()


NAMES = [f"s{number}" for number in range(8)]


@given(st.lists(st.sets(st.sampled_from(NAMES)), min_size=1, max_size=8))
def test_a_graph_is_either_in_order_or_refused(waits: list[set[str]]) -> None:
    """Each step comes after all that it waits for, directly or not."""
    names = NAMES[: len(waits)]
    nodes = [
        Node(
            name=name, kind=NodeKind.COMMAND, after=frozenset(after & set(names)), is_harmless=True
        )
        for name, after in zip(names, waits, strict=True)
    ]
    try:
        graph: Graph = build("any", 1, nodes)
    except InvalidSaga as error:
        assert "circle" in error.problem  # noqa: PT017 - the other way is right as well
        return
    order = list(graph.nodes)
    for node in graph:
        assert all(order.index(earlier) < order.index(node.name) for earlier in node.after)
        assert all(node.name in graph.descendants[far] for far in graph.ancestors[node.name])
        assert node.name not in graph.ancestors[node.name]
