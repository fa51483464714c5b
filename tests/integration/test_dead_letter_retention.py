"""Only closed messages expire; open ones are warned about before the broker eats them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.db.audit import Operator, entries, verify
from holdfast.db.transactions import committed
from holdfast.dlq import CaptureSettings, DeadLetterStore, close
from holdfast.dlq.store.groups import FailureGroups, GroupFilter
from holdfast.dlq.store.retention import prune
from holdfast.dlq.store.schema import message
from holdfast.dlq.topic.collector import DAY
from holdfast.errors import ConfigurationError
from holdfast.testing import VirtualClock
from tests.dead_letters import KINDS, count, emptied, letter, opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.engine import Engine

OPERATOR = Operator(actor="ada", reason="retention")


@pytest.fixture(scope="module", params=KINDS)
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Open a database of each kind."""
    made = opened(request, tmp_path_factory.mktemp("retention"))
    yield made
    made.dispose()


@pytest.fixture
def engine(database: Engine) -> Engine:
    """Return the database, empty."""
    return emptied(database)


def test_open_messages_never_expire(engine: Engine) -> None:
    """However old they are; closed ones go, with an entry, and the figures stay."""
    clock = VirtualClock()
    home = DeadLetterStore(engine, clock=clock)
    letters = [letter(n, clock=clock, origin=CaptureSettings(retention=1.0)) for n in range(3)]
    letters += [letter(n, clock=clock) for n in range(3, 6)]
    home.put_all(letters)
    with engine.begin() as db:
        for one in (letters[0], letters[3]):
            close(db, [one.dlq_id], "discarded", actor="ada", reason="x", clock=clock)
    clock.advance(10)
    assert prune(engine, older_than=DAY, operator=OPERATOR, clock=clock) == 1  # its own expiry
    clock.advance(40 * DAY)
    assert prune(engine, older_than=DAY, operator=OPERATOR, clock=clock) == 1
    assert prune(engine, older_than=0, operator=OPERATOR, clock=clock) == 0
    assert count(engine, message) == 4
    (seen,) = FailureGroups(engine, clock=clock).listed(GroupFilter())
    assert (seen.pending, seen.discarded, seen.total) == (4, 2, 6)
    with engine.connect() as db:
        assert [entry.action for entry in entries(db)] == ["prune", "prune"]
        assert verify(db).is_whole


def test_a_negative_age_is_refused(engine: Engine) -> None:
    """It would delete what is closed in the future."""
    with pytest.raises(ConfigurationError, match="0 or more"):
        prune(engine, older_than=-1, operator=OPERATOR)


def test_pruning_beside_writers_neither_fails_nor_loses(engine: Engine) -> None:
    """Writers, closers and pruners at once: every open message stays."""
    home = DeadLetterStore(engine)
    errors: list[BaseException] = []

    def guarded(task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    def write(first: int) -> None:
        for number in range(first, first + 15):
            one = letter(number)
            home.put(one)
            if number % 3 == 0:
                committed(
                    engine,
                    lambda db, name=one.dlq_id: close(
                        db, [name], "discarded", actor="ada", reason="x"
                    ),
                )

    def clear() -> None:
        for _ in range(6):
            prune(engine, older_than=0, operator=OPERATOR)

    tasks = [lambda: write(0), lambda: write(100), clear, clear]
    threads = [threading.Thread(target=guarded, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    prune(engine, older_than=0, operator=OPERATOR)
    (seen,) = FailureGroups(engine).listed()
    assert (seen.pending, seen.discarded) == (20, 10)
    with engine.connect() as db:
        assert verify(db).is_whole
