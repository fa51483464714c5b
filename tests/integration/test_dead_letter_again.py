"""A dead letter that fails again is the same letter, seen as it failed last; nothing hides it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import event, select, update

from holdfast.db.audit import Audit, Operator, verify
from holdfast.dlq import DeadLetterStore, capture, close, reopen
from holdfast.dlq.alerts import Alerts
from holdfast.dlq.store.closing import SYSTEM
from holdfast.dlq.store.counters import fold
from holdfast.dlq.store.groups import STATES, AlreadyOver, FailureGroups, GroupFilter
from holdfast.dlq.store.retention import prunable, prune
from holdfast.dlq.store.schema import group, message
from holdfast.dlq.store.stats import stats
from holdfast.headers import Headers, ReplayHeaders
from holdfast.message import Message
from holdfast.testing import VirtualClock
from tests.dead_letters import KINDS, count, emptied, failed, letter, opened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

    from holdfast.dlq import DeadLetter

ADA = Operator(actor="ada", reason="OPS-1")


@pytest.fixture(scope="module", params=KINDS)
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Open a database of each kind."""
    made = opened(request, tmp_path_factory.mktemp("again"))
    yield made
    made.dispose()


@pytest.fixture
def engine(database: Engine) -> Engine:
    """Return the database, empty."""
    return emptied(database)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Open a SQLite database, where the kind makes no difference."""
    from holdfast.db.engine import open_database
    from holdfast.dlq import create_tables

    made = open_database(f"sqlite:///{tmp_path_factory.mktemp('again')}/dlq.db")
    create_tables(made)
    yield made
    made.dispose()


@pytest.fixture
def small(file: Engine) -> Engine:
    """Return it, empty."""
    return emptied(file)


def replayed(first: DeadLetter, error: BaseException, **more: Any) -> DeadLetter:
    """Return the letter of a replayed copy of *first* that failed with *error*."""
    marks = ReplayHeaders(group="billing", plan="p", dlq_id=first.dlq_id, topic="orders")
    copy = first.message.with_(
        topic="orders.billing.replay",
        payload=more.pop("payload", first.message.payload),
        headers=marks.stamped(first.message.headers),
        id=more.pop("message_id", first.message.id),
    )
    handler = more.pop("handler", "shop.bill")
    return capture(copy, failed(error), group="billing", handler=handler, **more)


def rows(engine: Engine) -> list[Any]:
    """Return the stored letters."""
    with engine.connect() as db:
        return list(db.execute(select(message).order_by(message.c.seq)))


@pytest.mark.parametrize(
    "change", [{"payload": b'{"n": 2}'}, {"handler": "shop.billing.charge"}], ids=["edit", "rename"]
)
def test_a_replayed_letter_stays_itself(engine: Engine, change: dict[str, Any]) -> None:
    """Whether its payload was edited or its handler renamed since."""
    home, first = DeadLetterStore(engine), letter()
    home.put(first)
    home.put(replayed(first, ValueError("bad order"), **change))
    (row,) = rows(engine)
    assert row.dlq_id == first.dlq_id
    assert row.occurrences == 2
    assert bytes(row.payload) == first.message.payload
    assert sum(one.pending for one in FailureGroups(engine).listed()) == 1


def test_marks_of_a_replay_cannot_hide_another_message(engine: Engine) -> None:
    """Headers are only headers: a message that the letter is not becomes a letter of its own."""
    home, first = DeadLetterStore(engine), letter()
    home.put(first)
    home.put(replayed(first, KeyError("x"), message_id="somebody-else", payload=b"other"))
    assert sorted(row.message_id for row in rows(engine)) == ["id-1", "somebody-else"]
    assert sorted(one.pending for one in FailureGroups(engine).listed()) == [1, 1]


def test_a_failure_in_another_way_moves_the_letter(engine: Engine) -> None:
    """The operator sees the cause of now; the old one is in the history, and no ghost is left."""
    clock = VirtualClock()
    home = DeadLetterStore(engine, clock=clock)
    first = letter(error=failed(ValueError("no VAT")), clock=clock)
    home.put(first)
    for fold_before in (False, True):
        clock.advance(60)
        if fold_before:
            fold(engine, clock=clock)
        error = KeyError("price") if not fold_before else TypeError("None")
        home.put(replayed(first, error, clock=clock))
        (one,) = FailureGroups(engine, clock=clock).listed()
        assert one.title.startswith(type(error).__name__)
        assert (one.pending, one.total, one.last_seen) == (1, 1, clock.now().timestamp())
        (row,) = rows(engine)
        assert row.error_type == type(error).__name__
        assert row.group_id == one.group_id
        stored = home.get(first.dlq_id)
        assert stored is not None
        assert stored.failure.root.type == type(error).__name__
        assert stored.coordinates == first.coordinates
    assert [past.error.split(":")[0] for past in stored.history.failures] == [
        "ValueError", "KeyError", "TypeError",
    ]  # fmt: skip
    states = {one.error_type: one.state for one in FailureGroups(engine, clock=clock).listed(
        GroupFilter(states=("resolved", "new")))}  # fmt: skip
    assert states == {"ValueError": "resolved", "KeyError": "resolved", "TypeError": "new"}
    assert stats(engine, clock=clock).pending == 1
    assert sum(stats(engine, clock=clock).inflow) == 1


def test_a_known_letter_makes_no_group_of_its_own(engine: Engine) -> None:
    """A copy of an old failure, collected late, changes nothing that is seen."""
    clock = VirtualClock()
    home = DeadLetterStore(engine, clock=clock)
    early = letter(error=failed(KeyError("old")), clock=clock)
    clock.advance(60)
    home.put(letter(error=failed(ValueError("new")), clock=clock))
    home.put(early)
    assert count(engine, group) == 1
    (row,) = rows(engine)
    assert (row.error_type, row.occurrences) == ("ValueError", 2)


def test_a_letter_that_fails_alike_is_seen_again(small: Engine) -> None:
    """`last seen` moves although nothing is added to the count."""
    clock = VirtualClock()
    home, first = DeadLetterStore(small, clock=clock), letter(clock=clock)
    home.put(first)
    clock.advance(300)
    home.put(replayed(first, ValueError("bad order"), clock=clock))
    one = FailureGroups(small, clock=clock).listed()
    seen = {found.last_seen for found in one}
    assert clock.now().timestamp() in seen
    assert sum(found.pending for found in one) == 1


def test_timeouts_are_counted_over_all_failures(engine: Engine) -> None:
    """Whether it is slow or wrong is another question than what failed last."""
    home, first = DeadLetterStore(engine), letter(error=failed(TimeoutError("gateway")))
    home.put(first)
    home.put(replayed(first, TimeoutError("gateway")))
    home.put(replayed(first, ValueError("bad order")))
    stored = home.get(first.dlq_id)
    assert stored is not None
    assert (stored.history.timeouts, stored.history.attempts) == (2, 3)
    assert stored.failure.root.type == "ValueError"


def collected(found: DeadLetter) -> DeadLetter:
    """Return *found* as it comes from a topic."""
    return msgspec.structs.replace(found, origin="collected")


def test_a_failure_of_before_it_was_closed_does_not_open_a_letter_again(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Collected late, it goes to the history and the log; one of after that, or in doubt, opens."""
    early, clock = VirtualClock(), VirtualClock()
    clock.advance(300)
    home, first = DeadLetterStore(engine, clock=clock), letter(clock=clock)
    home.put(first)
    clock.advance(600)
    with engine.begin() as db:
        reason = "refunded by hand"
        close(db, [first.dlq_id], "discarded", actor="ada", reason=reason, clock=clock)
    fold(engine, clock=clock)
    clock.advance(600)
    for seconds in (0, 700):  # before the first one that was stored, and after it
        early.advance(seconds)
        home.put(collected(letter(error=failed(KeyError("price")), clock=early)))
    fold(engine, clock=clock)
    (row,) = rows(engine)
    assert (row.state, row.closed_by, row.due_at) == ("discarded", "ada", None)
    assert (row.occurrences, row.error_type) == (3, "ValueError")
    assert caplog.text.count(f"dead letter {first.dlq_id} stays discarded") == 2
    found = FailureGroups(engine, clock=clock).listed(GroupFilter(states=STATES))
    assert [one.state for one in found] == ["resolved"]
    early.advance(150)  # 50 s before it was closed, by a host whose clock may be slow
    home.put(collected(letter(clock=early)))
    (row,) = rows(engine)
    assert (row.state, row.closed_by) == ("pending", None)


def test_what_a_consumer_stores_failed_just_now_whatever_its_clock_says(engine: Engine) -> None:
    """A host whose clock is three minutes behind hides no failure: its message is acknowledged."""
    slow, clock = VirtualClock(), VirtualClock()
    home, first = DeadLetterStore(engine, clock=clock), letter(clock=clock)
    home.put(first)
    clock.advance(300)
    with engine.begin() as db:
        close(db, [first.dlq_id], "discarded", actor="ada", reason="void", clock=clock)
    slow.advance(120)
    home.put(letter(clock=slow))
    (row,) = rows(engine)
    assert (row.state, row.closed_by, row.occurrences) == ("pending", None, 2)
    assert stats(engine, clock=clock).pending == 1


@pytest.mark.parametrize("number", ["9" * 20, "9" * 5000, "٣", "-1", ""])
def test_no_count_in_a_header_keeps_a_letter_from_being_stored(engine: Engine, number: str) -> None:
    """Whoever wrote it: the message is dead-lettered all the same."""
    marks = {"x-replay-group": "billing", "x-replay-count": number, "x-replay-plan": "p",
             "x-replay-dlq-id": "d", "x-replay-topic": "orders"}  # fmt: skip
    made = Message.new("orders", b"x", key="k").with_(headers=Headers(marks))
    DeadLetterStore(engine).put(
        capture(made, ValueError("bad"), group="billing", handler="shop.bill")
    )
    assert [row.replay_count for row in rows(engine)] == [1]


def test_a_problem_that_returns_after_a_prune_is_told_again(engine: Engine) -> None:
    """Also when the message that it was first seen with is gone."""
    told: list[dict[str, Any]] = []

    class Hook:
        def tell(self, alert: dict[str, Any]) -> None:
            told.append(alert)

    clock = VirtualClock()
    home, alerts = DeadLetterStore(engine, clock=clock), Alerts(engine, [Hook()], clock=clock)
    error = failed(RuntimeError("what is this"))
    home.put(letter(1, error, clock=clock))
    assert alerts.run_once() == 1
    with engine.begin() as db:
        close(db, [letter(1, error).dlq_id], "discarded", actor="ada", reason="odd", clock=clock)
    clock.advance(3600)
    assert prune(engine, older_than=0, operator=ADA, clock=clock) == 1
    home.put(letter(2, error, clock=clock))
    assert alerts.run_once() == 1
    assert told[-1]["state"] == "regressed"


def test_a_problem_that_is_over_cannot_be_hushed(small: Engine) -> None:
    """An ack or a mute that comes too late would hide its return."""
    home, groups = DeadLetterStore(small), FailureGroups(small)
    error = failed(RuntimeError("what is this"))
    home.put(letter(1, error))
    (one,) = groups.listed()
    with small.begin() as db:
        close(db, [letter(1, error).dlq_id], "discarded", actor="ada", reason="odd")
    for folded in (False, True):
        if folded:
            fold(small)
        with pytest.raises(AlreadyOver, match="nothing pending"):
            groups.acknowledge(one.group_id, ADA)
        with pytest.raises(AlreadyOver):
            groups.mute(one.group_id, ADA, until=VirtualClock().now().replace(year=2200))
    home.put(letter(2, error))
    assert groups.find(one.group_id).state == "regressed"


def test_what_the_loop_cap_parked_is_never_pruned(engine: Engine) -> None:
    """Nobody has decided; a person's own word is another thing."""
    home = DeadLetterStore(engine)
    home.put_all([letter(1), letter(2)])
    with engine.begin() as db:
        close(db, [letter(1).dlq_id], "parked", actor=SYSTEM, reason="replayed 3 times")
        close(db, [letter(2).dlq_id], "parked", actor="ada", reason="too old to matter")
        db.execute(update(message).values(closed_at=1.0))
    assert prunable(engine, older_than=0) == 1
    assert prune(engine, older_than=0, operator=ADA) == 1
    assert [row.message_id for row in rows(engine)] == ["id-1"]


def test_a_letter_that_holds_a_key_is_never_pruned(engine: Engine) -> None:
    """It alone can let the key go; a consumer that is down has not heard yet."""
    from holdfast.consumer.parking.store import ParkedKey, ParkedMessages, hash_of
    from holdfast.consumer.schema import held_key, metadata

    DeadLetterStore(engine).put_all([letter(1), letter(2)])
    metadata.create_all(engine)
    try:
        with engine.begin() as db:
            key = ParkedKey("orders", hash_of(b"k1", ""), b"k1")
            ParkedMessages("billing").hold(db, key, dlq_id=letter(1).dlq_id, note="x")
            ids = [letter(1).dlq_id, letter(2).dlq_id]
            close(db, ids, "discarded", actor="ada", reason="x")
            db.execute(update(message).values(closed_at=1.0))
        assert prune(engine, older_than=0, operator=ADA) == 1
        with engine.begin() as db:
            db.execute(held_key.delete())
        assert prune(engine, older_than=0, operator=ADA) == 1
    finally:
        shared = {"holdfast_audit", "holdfast_audit_head"}
        own = [table for table in metadata.sorted_tables if table.name not in shared]
        metadata.drop_all(engine, tables=own)


def test_a_reopened_letter_has_all_its_replays_and_counts_as_parked_no_more(engine: Engine) -> None:
    """What was confirmed was handled and stays closed."""
    DeadLetterStore(engine).put_all([letter(1), letter(2)])
    with engine.begin() as db:
        db.execute(update(message).values(replay_count=3))
        close(db, [letter(1).dlq_id], "parked", actor=SYSTEM, reason="replayed 3 times")
        close(db, [letter(2).dlq_id], "confirmed", actor="plan p", reason="handled")
    assert stats(engine).parked == 1
    with engine.begin() as db:
        assert reopen(db, [letter(1).dlq_id, letter(2).dlq_id]) == [letter(1).dlq_id]
    found = {row.message_id: (row.state, row.replay_count) for row in rows(engine)}
    assert found == {"id-1": ("pending", 0), "id-2": ("confirmed", 3)}
    assert (stats(engine).parked, stats(engine).pending) == (0, 1)


def test_an_audit_is_verified_while_others_write(engine: Engine) -> None:
    """Work going on is no tampering: an entry comes after each statement of the check."""
    Audit().record(engine, ADA, "note", "group")
    with engine.connect() as db:

        def write(*_: Any) -> None:
            Audit().record(engine, ADA, "note", "group")

        if engine.dialect.name != "sqlite":  # there a check and a write take turns anyway
            event.listen(db, "after_cursor_execute", write)
        verdict = verify(db)
    assert verdict.is_whole, verdict.why
    assert verdict.checked >= 1
