"""Many replies in one transaction: a bad one forfeits nothing, and each saga keeps its order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import event

from holdfast.idempotency import BatchRunner, InboxBatch
from tests.orchestrating import OrderState, Shop, order_saga

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast import Message

order = order_saga()
ORDERS = [f"o{number}" for number in range(6)]


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """Open a shop on each kind of database, in which every order waits for its replies."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        url = request.getfixturevalue(request.param).database("saga_batches")
    shop = Shop(url, order)
    yield shop
    shop.close()


def replies(shop: Shop) -> list[Message]:
    """Start the orders, let their commands be handled, and return what was replied."""
    for name in ORDERS:
        shop.start(order, OrderState(name), name)
    shop.deliver(*shop.published())
    return shop.published()


def taken(shop: Shop, messages: list[Message]) -> list[bool]:
    """Take *messages* as one batch, as a consumer does; return which of them were."""
    batch = InboxBatch(consumer="shop/order.replies", messages=messages)
    outcomes = BatchRunner(shop.engine).run_whole(batch, shop.sagas.take_replies)
    return [outcome.is_done for outcome in outcomes]


def test_the_replies_of_a_poll_share_a_transaction(shop: Shop) -> None:
    """Each saga has gone on by both of its replies, and none of them was committed alone."""
    came = replies(shop)
    commits: list[object] = []
    event.listen(shop.engine, "commit", commits.append)
    assert all(taken(shop, came))
    assert len(commits) == 1
    shop.settle()
    assert {shop.result(name).status for name in ORDERS} == {"completed"}
    assert {shop.result(name).state.reservation for name in ORDERS} == {f"r-{o}" for o in ORDERS}


def test_a_bad_reply_does_not_fail_its_neighbours(shop: Shop) -> None:
    """Also one for a saga that others of the batch are about; what it did is rolled back."""
    came = replies(shop)
    headers = came[3].headers.without(["x-saga-step"]).with_({"x-saga-step": "fly"})
    stock = next(one for one in came if one.headers.text("x-saga-step") == "reserve_stock")
    bad = [came[3].with_(id="bad", headers=headers), stock.with_(id="odd", payload=b"[]")]
    assert taken(shop, [*bad, *came]) == [False, False, *(True for _ in came)]
    shop.settle()
    assert {shop.result(name).status for name in ORDERS} == {"completed"}


def test_replies_of_one_saga_count_in_their_order(shop: Shop) -> None:
    """The history has them one after the other, and the last one sends what comes next, once."""
    came = replies(shop)
    last = shop.result(ORDERS[-1])
    assert all(taken(shop, list(reversed(came))))
    told = [one["event"] for one in shop.told(last.id) if one["event"]["type"] == "Answered"]
    expected = [
        one.headers.text("x-saga-step")
        for one in reversed(came)
        if one.headers.text("x-saga-id") == last.id
    ]
    assert [one["step"] for one in told] == expected
    assert len(expected) == 2
    sent = [one.headers.text("x-saga-step") for one in shop.published()]
    assert sent == ["ship"] * len(ORDERS)


def test_a_reply_that_comes_twice_in_a_batch_counts_once(shop: Shop) -> None:
    """The inbox sees it, and the saga hears it once."""
    came = replies(shop)
    assert all(taken(shop, [*came, *came]))
    first = shop.result(ORDERS[0])
    told = [one for one in shop.told(first.id) if one["event"]["type"] == "Answered"]
    assert len(told) == 2


def test_a_command_is_caused_by_the_reply_that_it_follows(shop: Shop) -> None:
    """Whatever else is in the batch: causation and correlation are those of its own saga."""
    came = replies(shop)
    assert all(taken(shop, came))
    by_saga = {one.headers.text("x-saga-id"): one for one in came}  # the last one of each
    for command in shop.published():
        cause = by_saga[command.headers.text("x-saga-id")]
        assert command.causation_id == cause.id
        assert command.correlation_id == cause.correlation_id


def test_replies_are_taken_in_batches(shop: Shop) -> None:
    """So a consumer that sagas are attached to does what is looked at above."""
    batch = shop.consumer.registrations["order.replies"].batch
    assert batch is not None
    assert batch.whole
    assert batch.size > 1
