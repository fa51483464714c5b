"""Sagas as processes: killed at random, deployed anew, helped by commands; the books always fit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from holdfast.db.audit import entries
from holdfast.sagas.operations import SagaOperations
from holdfast.testing import wait_until
from tests.saga_shop.orders import fails, moving, order_saga
from tests.saga_shop.run import GOING_ON, Plan, Shop, killed, names, orders_of
from tests.saga_shop.verdict import judge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# kafka-python reads its own schemas in a way that Python 3.11 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning")

BROKERS = ["rabbitmq", "kafka"]
KAFKA = "timeout=5&publish_within=5&session_timeout_ms=6000&heartbeat_interval_ms=500"


@pytest.fixture
def open_shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Shop]]:
    """Open a shop on PostgreSQL and a broker."""
    opened: list[Shop] = []

    def start(kind: str, prefix: str, **options: Any) -> Shop:
        postgres = request.getfixturevalue("postgres")
        broker = f"sqlite:///{tmp_path}/broker.db"
        if kind != "sqlite":
            options_ = "heartbeat=4" if kind == "rabbitmq" else KAFKA
            broker = f"{request.getfixturevalue(kind).url}?{options_}"
        shop = Shop(
            sagas_url=postgres.database(f"{prefix}_sagas"),
            books_url=postgres.database(f"{prefix}_books"),
            broker=broker, folder=tmp_path, prefix=f"{prefix}-{kind}", **options,
        )  # fmt: skip
        shop.open()
        opened.append(shop)
        return shop

    yield start
    for shop in opened:
        shop.close()


@pytest.mark.parametrize("kind", BROKERS)
def test_killed_at_random_every_order_is_done_or_undone(
    kind: str, open_shop: Callable[..., Shop], record_property: Callable[[str, object], None]
) -> None:
    """Stock and money are conserved exactly, with 30 % failing at each step."""
    shop = open_shop(kind, "short")
    for number in range(2):
        shop.run_sagas(f"sagas-{number}")
    plan = Plan(orders=32, kills=5)
    broken, summary = killed(shop, plan, place=orders_of(shop))
    record_property("verdict", summary)
    assert not broken, shop.report(broken)


@pytest.mark.chaos
@pytest.mark.parametrize("kind", BROKERS)
def test_a_thousand_orders_are_done_or_undone_under_many_kills(
    kind: str, open_shop: Callable[..., Shop], record_property: Callable[[str, object], None]
) -> None:
    """The same for long, with three orchestrators."""
    # Brokers give what a killed process had to another at once. A timeout that is shorter than the
    # queue would only send commands twice, and the queue would grow by that.
    shop = open_shop(kind, "long", customers=200, timeout="30s")
    for number in range(3):
        shop.run_sagas(f"sagas-{number}")
    # Bounds of what is hopeless, not of what is slow: alone on two cores it takes few minutes.
    plan = Plan(orders=1_000, kills=30, at_once=100, patience=1_500, bound=300)
    broken, summary = killed(shop, plan, place=orders_of(shop))
    record_property("verdict", summary)
    assert not broken, shop.report(broken)
    assert len(shop.started) == plan.orders, summary


@pytest.mark.chaos
def test_without_the_barrier_the_verdict_is_red(open_shop: Callable[..., Shop]) -> None:
    """So the runs above see the barrier, and not luck: commands are sent again all the time."""
    shop = open_shop("rabbitmq", "broken", timeout="20ms", breaks="barrier")
    for number in range(2):
        shop.run_sagas(f"sagas-{number}")
    broken, _ = killed(shop, Plan(orders=30, kills=2, bound=30), place=orders_of(shop))
    assert any("was done 2 times" in one for one in broken), broken


def test_a_new_definition_is_deployed_while_a_hundred_old_instances_run(
    open_shop: Callable[..., Shop],
) -> None:
    """Old and new programs take their own, though each gets replies to the other's sagas."""
    shop = open_shop("kafka", "deploy", customers=200, timeout="10m")
    old, new = orders_of(shop, 1), orders_of(shop, 2)
    shop.run_sagas("old", versions="1")
    for name in names(100):
        old(name)
    shop.run_sagas("new", versions="2")
    for number in range(20):
        new(f"new-{number}")
    shop.settle(150)
    broken = judge(shop.observed())
    assert not broken, shop.report(broken)
    assert shop.crew.ended == []
    for name, (version, _) in shop.versions().items():
        assert version == (2 if name.startswith("new") else 1), name


@pytest.mark.parametrize(("versions", "moves"), [("1,2", False), ("2", True)])
def test_the_old_program_is_killed_and_the_new_one_goes_on(
    versions: str, moves: bool, open_shop: Callable[..., Shop]
) -> None:
    """With the old definition instances finish as they began; by a migration they are moved."""
    shop = open_shop("sqlite", f"rolling_{len(versions)}", customers=100, timeout="10m")
    old, new = orders_of(shop, 1), orders_of(shop, 2)
    shop.run_sagas("old", versions="1")
    for name in names(40):
        old(name)
    wait_until(lambda: shop.effects() >= 20, deadline=120, what="the old program is at work")
    shop.crew.lose("old")
    left = [name for name, (_, status) in shop.versions().items() if status in GOING_ON]
    newer = order_saga(shop.prefix, 2)
    checked = SagaOperations(shop.engine).check([moving(newer) if moves else newer])
    assert all(one.is_fine == moves for one in checked), checked
    shop.run_sagas("new", versions=versions, moves=moves)
    for number in range(10):
        new(f"new-{number}")
    shop.settle(150)
    broken = judge(shop.observed())
    assert not broken, shop.report(broken)
    assert shop.crew.ended == []
    found = shop.versions()
    assert {found[name][0] for name in left} <= {2 if moves else 1}


def test_a_compensation_that_always_fails_is_ended_by_hand(open_shop: Callable[..., Shop]) -> None:
    """It is parked and paged, a command with a reason ends it, and the audit trail verifies."""
    shop = open_shop("sqlite", "by_hand", timeout="10m")
    shop.run_sagas("sagas")
    name = next(
        name for name in (f"stubborn-{number}" for number in range(1_000))
        if fails("parcel", name) and not fails("stock", name) and not fails("money", name)
    )  # fmt: skip
    orders_of(shop)(name)
    wait_until(lambda: shop.pager.exists() and shop.pager.read_text().endswith("}"),
               deadline=120, what="somebody is paged")  # fmt: skip
    alert = json.loads(shop.pager.read_text())
    assert (alert["alert"], alert["key"], alert["parked"]) == ("SagaParked", name, ["charge"])
    assert alert["last_error"] == f"the bank does not take {name} back"
    assert alert["reason"] == f"ship: no parcel for {name}"
    at = ("--database", shop.sagas_url)
    bare = shop.crew.run("saga", "mark-done", name, *at)
    assert bare.returncode != 0
    assert shop.versions()[name] == (1, "parked")
    done = shop.crew.run("saga", "mark-done", name, *at, "--reason", "by hand", "--actor", "ada")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: shop.versions()[name] == (1, "compensated"), deadline=120, what="its end")
    assert shop.settle(60) < 60
    whole = shop.crew.run("audit", "--verify", *at)
    assert whole.returncode == 0, whole.stderr
    with shop.engine.begin() as db:
        (entry,) = entries(db, limit=10)
        assert (entry.actor, entry.action, entry.reason) == ("ada", "saga.mark-done", "by hand")
        db.execute(text("UPDATE holdfast_audit SET reason = 'nothing'"))
    assert shop.crew.run("audit", "--verify", *at).returncode != 0
