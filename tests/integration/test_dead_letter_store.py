"""The store keeps every dead letter once, whole, and counts without making writers wait."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import func, select

from holdfast.cli.migrations import Migrations
from holdfast.database import open_database
from holdfast.dlq import StoreHome, capture, close, closed
from holdfast.dlq.schema import change, group, message
from holdfast.errors import DependencyDown
from holdfast.headers import Headers
from holdfast.message import Message
from holdfast.testing import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from holdfast.dlq import DeadLetter


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Open a fresh database of each kind with its tables."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/dlq.db"
    else:
        url = request.getfixturevalue(request.param).database("dlq")
    made = open_database(url)
    Migrations(made).upgrade()
    yield made
    made.dispose()


def failed(error: BaseException) -> BaseException:
    """Return *error* as raised here, with a frame of the application's own."""
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001
        return raised


def letter(number: int = 1, error: BaseException | None = None, **more: Any) -> DeadLetter:
    """Return a dead letter of message *number*."""
    clock = more.pop("clock", VirtualClock())
    headers = more.pop("headers", Headers([("x", b"\xff\x00"), ("x", "two"), ("n", None)]))
    payload = more.pop("payload", b'{"n": 1}')
    made = Message.new(
        "orders", payload, key=f"k{number}", headers=headers, ids=lambda: f"id-{number}"
    )
    return capture(
        made,
        failed(ValueError("bad order")) if error is None else error,
        group="billing",
        handler="shop.bill",
        clock=clock,
        **more,
    )


def count(engine: Engine, table: Any) -> int:
    """Return the number of rows of *table*."""
    with engine.connect() as db:
        return db.execute(select(func.count()).select_from(table)).scalar_one()


def test_what_was_put_comes_back_byte_for_byte(engine: Engine) -> None:
    """Payload, key and headers are the original's, also when they are no text."""
    home = StoreHome(engine)
    put = letter(payload=b"\xff\xfe\x00binary")
    home.put(put)
    got = home.get(put.dlq_id)
    assert got is not None
    assert got.message == put.message
    assert got.failure == put.failure
    assert got.culprit == put.culprit


def test_a_letter_put_twice_is_one_letter(engine: Engine) -> None:
    """A redelivery that fails the same time again, or a collector that starts over."""
    home = StoreHome(engine)
    put = letter()
    home.put(put)
    home.put(put)
    assert count(engine, message) == 1
    assert count(engine, change) == 1
    stored = home.get(put.dlq_id)
    assert stored is not None
    assert len(stored.history.failures) == 1


def test_a_new_failure_is_added_to_the_history_and_reopens(engine: Engine) -> None:
    """A discarded message that fails once more is pending again."""
    home, clock = StoreHome(engine), VirtualClock()
    first = letter(clock=clock)
    home.put(first)
    with engine.begin() as db:
        assert close(db, [first.dlq_id], "discarded", actor="ada", reason="test data") == [
            first.dlq_id
        ]
        assert closed(db, [first.dlq_id, "other"]) == {first.dlq_id}
    home.put(first)  # the old failure once more: nothing changes
    with engine.begin() as db:
        assert closed(db, [first.dlq_id]) == {first.dlq_id}
    clock.advance(5)
    again = letter(clock=clock)
    assert again.dlq_id == first.dlq_id
    home.put(again)
    with engine.begin() as db:
        assert closed(db, [first.dlq_id]) == set()
    stored = home.get(first.dlq_id)
    assert stored is not None
    assert len(stored.history.failures) == 2
    assert stored.history.attempts == 2


def test_a_letter_in_the_callers_transaction_rolls_back_with_it(engine: Engine) -> None:
    """The caller owns the transaction."""
    home = StoreHome(engine)
    put = letter()
    with pytest.raises(RuntimeError, match="no"), engine.begin() as db:
        home.put(put, db)
        raise RuntimeError("no")
    assert count(engine, message) == count(engine, group) == count(engine, change) == 0
    with engine.begin() as db:
        home.put(put, db)
    assert count(engine, message) == count(engine, group) == 1


def test_many_writers_of_the_same_letters_neither_lose_nor_double(engine: Engine) -> None:
    """Threads put overlapping letters of one group in different orders at once."""
    home = StoreHome(engine)
    letters = [letter(number) for number in range(12)]
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def write(order: list[DeadLetter]) -> None:
        start.wait()
        try:
            for one in order:
                home.put(one)
            home.put_all(order)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    orders = [letters, letters[::-1], letters[6:] + letters[:6], letters[::2] + letters[1::2]]
    threads = [threading.Thread(target=write, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert count(engine, message) == count(engine, change) == 12
    assert count(engine, group) == 1


def test_a_store_without_tables_says_what_to_run(tmp_path: Path) -> None:
    """Nothing is acknowledged, and the error names the command."""
    bare = open_database(f"sqlite:///{tmp_path}/bare.db")
    with pytest.raises(DependencyDown, match="holdfast db upgrade"):
        StoreHome(bare).put(letter())
    bare.dispose()
