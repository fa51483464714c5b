"""Groups show problems; their figures are exact however the changes were folded."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from holdfast.clock import SYSTEM_CLOCK
from holdfast.db.audit import Operator, entries, verify
from holdfast.dlq import DeadLetterStore, close
from holdfast.dlq.capture.capture import CaptureSettings
from holdfast.dlq.store.counters import fold
from holdfast.dlq.store.groups import (
    AlreadyOver,
    FailureGroup,
    FailureGroups,
    GroupFilter,
    NoSuchGroup,
    StillOpen,
)
from holdfast.dlq.store.schema import change
from holdfast.dlq.store.stats import stats
from holdfast.errors import ConfigurationError
from holdfast.headers import Headers
from holdfast.testing import VirtualClock
from tests.dead_letters import KINDS, count, emptied, failed, letter, opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.engine import Engine

OPERATOR = Operator(actor="ada", reason="OPS-1")


@pytest.fixture(scope="module", params=KINDS)
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Open a database of each kind."""
    made = opened(request, tmp_path_factory.mktemp("groups"))
    yield made
    made.dispose()


@pytest.fixture
def engine(database: Engine) -> Engine:
    """Return the database, empty."""
    return emptied(database)


def test_problems_are_listed_not_messages(engine: Engine) -> None:
    """Three causes on many messages are three groups, the largest first."""
    home = DeadLetterStore(engine)
    origin = CaptureSettings(service_version="1.4.1", tenant="tenant")
    for number in range(9):
        error = [ValueError("a"), KeyError("b"), TypeError("c")][min(number // 2, 2)]
        headers = Headers({"tenant": f"t{number % 2}"})
        home.put(letter(number, failed(error), origin=origin, headers=headers))
    for _ in range(2):
        groups = FailureGroups(engine).listed()
        assert [one.pending for one in groups] == [5, 2, 2]
        assert groups[0].error_type == "TypeError"
        first = groups[0]
        assert (first.keys, first.tenants, first.versions) == (5, 2, ("1.4.1",))
        assert sum(first.trend) == 5
        assert first.hints["by"] == "stack"
        assert first.state == "new"
        fold(engine)  # and once more, folded
    assert count(engine, change) == 0


def test_stats_say_the_same_before_and_after_a_fold(engine: Engine) -> None:
    """The figures do not depend on housekeeping."""
    home = DeadLetterStore(engine)
    letters = [letter(number) for number in range(6)]
    letters += [letter(9, topic="other")]
    home.put_all(letters)
    with engine.begin() as db:
        close(db, [letters[0].dlq_id], "confirmed", actor="holdfast", reason="replayed")
        close(db, [letters[1].dlq_id], "parked", actor="ada", reason="later")
    before = stats(engine)
    fold(engine)
    after = stats(engine)
    for seen in (before, after):
        assert (seen.pending, seen.confirmed, seen.parked, seen.discarded) == (5, 1, 1, 0)
        assert seen.by_topic == {"orders": 4, "other": 1}
        assert sum(seen.inflow) == 7
        assert sum(seen.outflow) == 2
        assert seen.oldest_seconds is not None
        assert seen.new_today == 2


def test_folds_at_the_same_time_count_once(engine: Engine) -> None:
    """Folders and writers at work together leave exact figures."""
    home = DeadLetterStore(engine)
    errors: list[BaseException] = []

    def run(task: object) -> None:
        try:
            task()  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    def write(first: int) -> None:
        for number in range(first, first + 20):
            home.put(letter(number))

    tasks = [lambda: [fold(engine) for _ in range(6)]] * 2
    tasks += [lambda: write(0), lambda: write(100)]  # type: ignore[list-item]
    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert FailureGroups(engine).listed()[0].pending == 40
    fold(engine)
    assert FailureGroups(engine).listed()[0].pending == 40


@pytest.mark.parametrize("folded", [True, False])
def test_a_group_closes_by_itself_and_comes_back_as_regressed(engine: Engine, folded: bool) -> None:
    """It is resolved when the last message is closed, not before; a recurrence reopens it."""
    home, groups, clock = DeadLetterStore(engine), FailureGroups(engine), VirtualClock()
    letters = [letter(number, clock=clock) for number in range(2)]
    home.put_all(letters)
    name = groups.listed()[0].group_id

    def closed(one: int) -> None:
        with engine.begin() as db:
            close(db, [letters[one].dlq_id], "discarded", actor="ada", reason="test data")
        if folded:
            fold(engine)

    closed(0)
    assert groups.find(name).state == "new"
    with pytest.raises(StillOpen, match="1 pending"):
        groups.resolve(name, OPERATOR)
    closed(1)
    assert groups.find(name).state == "resolved"
    assert groups.listed() == []
    fold(engine)
    home.put(letter(7, clock=clock))
    if folded:
        fold(engine)
    back = groups.listed()[0]
    assert (back.group_id, back.state, back.pending) == (name, "regressed", 1)


def test_a_recurrence_is_seen_before_a_fold_and_what_is_said_of_it_stays(engine: Engine) -> None:
    """An acknowledged problem that closed and came back is regressed, until somebody says more."""
    home, groups, clock = DeadLetterStore(engine), FailureGroups(engine), VirtualClock()
    first = letter(1, clock=clock)
    home.put(first)
    name = groups.listed()[0].group_id
    groups.acknowledge(name, OPERATOR)
    with engine.begin() as db:
        close(db, [first.dlq_id], "discarded", actor="ada", reason="test data")
    home.put(letter(2, clock=clock))
    assert groups.find(name).state == "regressed"
    assert groups.acknowledge(name, OPERATOR).state == "acknowledged"
    fold(engine)
    assert groups.find(name).state == "acknowledged"


class Interrupted(FailureGroups):
    """Somebody else acts, and folds, while an operator is about to say something."""

    def __init__(self, engine: Engine, meanwhile: Callable[[], object]) -> None:
        super().__init__(engine)
        self._meanwhile: Callable[[], object] | None = meanwhile
        self._all = engine

    def find(self, name: str) -> FailureGroup:
        """Return what was there before the others acted."""
        found = super().find(name)
        if self._meanwhile is not None:
            self._meanwhile()
            self._meanwhile = None
            fold(self._all)
        return found


def test_a_problem_that_returns_while_it_is_resolved_is_not_hidden(engine: Engine) -> None:
    """Resolved is what has nothing pending at the moment of saying so."""
    home, first = DeadLetterStore(engine), letter(1)
    home.put(first)
    with engine.begin() as db:
        close(db, [first.dlq_id], "discarded", actor="ada", reason="test data")
    (found,) = FailureGroups(engine).listed(GroupFilter(states=("resolved",)))
    late = Interrupted(engine, lambda: home.put(letter(2)))
    with pytest.raises(StillOpen):
        late.resolve(found.group_id, OPERATOR)
    assert [one.state for one in FailureGroups(engine).listed()] == ["regressed"]


@pytest.mark.parametrize(
    "hush",
    [
        lambda groups, name: groups.acknowledge(name, OPERATOR),
        lambda groups, name: groups.mute(
            name, OPERATOR, until=SYSTEM_CLOCK.now() + timedelta(hours=1)
        ),
    ],
    ids=["acknowledged", "muted"],
)
def test_a_problem_that_closes_while_it_is_hushed_can_return(
    engine: Engine, hush: Callable[[FailureGroups, str], FailureGroup]
) -> None:
    """What is said too late is refused: its recurrence is news."""
    home, first = DeadLetterStore(engine), letter(1)
    home.put(first)
    (found,) = FailureGroups(engine).listed()

    def closing() -> None:
        with engine.begin() as db:
            close(db, [first.dlq_id], "discarded", actor="ada", reason="test data")

    late = Interrupted(engine, closing)
    with pytest.raises(AlreadyOver):
        hush(late, found.group_id)
    home.put(letter(2))
    assert [one.state for one in FailureGroups(engine).listed()] == ["regressed"]


def test_values_that_are_known_take_no_room_of_new_ones(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is one of different values, however often each of them comes."""
    monkeypatch.setattr("holdfast.dlq.store.counters.MOST_HITS", 8)
    home = DeadLetterStore(engine)
    for numbers in (range(5), range(8), range(10)):
        home.put_all([letter(100 * len(numbers) + n, key=f"k{n}") for n in numbers])
        fold(engine)
    assert FailureGroups(engine).listed()[0].keys == 8


def test_figures_that_are_not_complete_say_so(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a burst not every change is looked at for keys and tenants."""
    DeadLetterStore(engine).put_all([letter(n) for n in range(6)])
    assert FailureGroups(engine).listed()[0].keys_text == "6"
    monkeypatch.setattr("holdfast.dlq.store.counters.RECENT", 4)
    monkeypatch.setattr("holdfast.dlq.store.groups.RECENT", 4)
    assert FailureGroups(engine).listed()[0].keys_text == "4+"
    fold(engine)
    assert FailureGroups(engine).listed()[0].keys_text == "6"


def test_what_was_said_about_a_group_is_kept_and_audited(engine: Engine) -> None:
    """Owner, note and mute stand with the group; the mute ends by itself."""
    clock = VirtualClock()
    groups = FailureGroups(engine, clock=clock)
    DeadLetterStore(engine, clock=clock).put(letter(clock=clock))
    name = groups.listed()[0].group_id
    assert groups.acknowledge(name[:6], OPERATOR, owner="bob").owner == "bob"
    assert groups.annotate(name, OPERATOR, note="bad deploy").note == "bad deploy"
    until = clock.now() + timedelta(hours=1)
    assert groups.mute(name, OPERATOR, until=until).state == "muted"
    clock.advance(3601)
    assert groups.find(name).state == "new"
    with engine.connect() as db:
        assert [e.action for e in entries(db)] == ["mute", "note", "acknowledge"]
        assert verify(db).is_whole
    with pytest.raises(ConfigurationError, match="to come"):
        groups.mute(name, OPERATOR, until=clock.now() - timedelta(seconds=1))


@pytest.mark.parametrize("name", ["", "zz", "%", "_", "../x"])
def test_a_group_that_is_not_there_is_named(engine: Engine, name: str) -> None:
    """The error says where to look; wildcards match nothing."""
    DeadLetterStore(engine).put(letter())
    with pytest.raises(NoSuchGroup, match="holdfast dlq groups"):
        FailureGroups(engine).find(name)


def test_an_unknown_state_is_refused() -> None:
    """The error lists the states."""
    with pytest.raises(ConfigurationError, match="acknowledged"):
        GroupFilter(states=("gone",))
