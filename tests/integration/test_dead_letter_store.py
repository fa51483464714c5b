"""The store keeps every dead letter once, whole, and counts without making writers wait."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterStore, close, closed, create_tables
from holdfast.dlq.store.schema import change, group, message
from holdfast.errors import DependencyDown
from holdfast.headers import Headers
from holdfast.testing import VirtualClock
from tests.dead_letters import KINDS, count, emptied, letter, opened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from holdfast.dlq import DeadLetter
    from tests.servers import MariaDB


HEADERS = Headers([("x", b"\xff\x00"), ("x", "two"), ("n", None)])


@pytest.fixture(scope="module", params=KINDS)
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Open a database of each kind."""
    made = opened(request, tmp_path_factory.mktemp("store"))
    yield made
    made.dispose()


@pytest.fixture
def engine(database: Engine) -> Engine:
    """Return the database, empty."""
    return emptied(database)


def test_what_was_put_comes_back_byte_for_byte(engine: Engine) -> None:
    """Payload, key and headers are the original's, also when they are no text."""
    home = DeadLetterStore(engine)
    put = letter(payload=b"\xff\xfe\x00binary", headers=HEADERS)
    home.put(put)
    got = home.get(put.dlq_id)
    assert got is not None
    assert got.message == put.message
    assert got.failure == put.failure
    assert got.culprit == put.culprit


def test_a_letter_put_twice_is_one_letter(engine: Engine) -> None:
    """A redelivery that fails the same time again, or a collector that starts over."""
    home = DeadLetterStore(engine)
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
    home, clock = DeadLetterStore(engine), VirtualClock()
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
    home = DeadLetterStore(engine)
    put = letter()
    with engine.connect() as db:
        home.put(put, db)
        db.rollback()
    assert count(engine, message) == count(engine, group) == count(engine, change) == 0
    with engine.begin() as db:
        home.put(put, db)
    assert count(engine, message) == count(engine, group) == 1


def test_many_writers_of_the_same_letters_neither_lose_nor_double(engine: Engine) -> None:
    """Threads put overlapping letters of one group in different orders at once."""
    home = DeadLetterStore(engine)
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
        DeadLetterStore(bare).put(letter())
    bare.dispose()


def test_a_message_larger_than_the_server_takes_is_refused_with_the_setting(
    mariadb: MariaDB,
) -> None:
    """MySQL's max_allowed_packet: nothing is stored, nothing may be acknowledged, others go on."""
    url = mariadb.database("packets")
    admin = open_database(url)
    create_tables(admin)
    with admin.connect() as db:
        usual = db.exec_driver_sql("SELECT @@global.max_allowed_packet").scalar_one()
        db.exec_driver_sql("SET GLOBAL max_allowed_packet = 1048576")
    engine = open_database(url)
    try:
        home = DeadLetterStore(engine)
        with pytest.raises(DependencyDown, match="max_allowed_packet"):
            home.put(letter(1, payload=b"x" * 3_000_000))
        home.put(letter(2))
        assert count(engine, message) == 1
    finally:
        with admin.connect() as db:
            db.exec_driver_sql(f"SET GLOBAL max_allowed_packet = {int(usual)}")
        engine.dispose()
        admin.dispose()
