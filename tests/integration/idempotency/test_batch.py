"""Micro-batches: one transaction for many messages, and no poison forfeits the others."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, func, insert, select
from sqlalchemy.exc import DBAPIError, OperationalError

from holdfast import Message
from holdfast.idempotency import BatchOutcome, BatchRunner, IdempotencyConflict, InboxBatch
from holdfast.idempotency.schema import inbox
from holdfast.testing import VirtualClock
from tests.integration.idempotency.conftest import effects, together

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Engine
    from sqlalchemy.orm import Session

BILLING = "billing/shop.bill"


class Poison(Exception):
    """A handler cannot digest the message."""


def messages(count: int, *, bad: frozenset[int] = frozenset()) -> list[Message]:
    return [Message.new("orders", b"bad" if n in bad else f"m{n}".encode()) for n in range(count)]


def bill(session: Session, message: Message) -> None:
    session.execute(insert(effects).values(name=message.payload.decode()))  # type: ignore[union-attr]
    if message.payload == b"bad":
        raise Poison(message.id)


def bill_all(session: Session, batch: list[Message]) -> None:
    rows = [{"name": message.payload.decode()} for message in batch if message.payload]
    session.execute(insert(effects), rows)
    if any(message.payload == b"bad" for message in batch):
        raise Poison("one of these")


def names(engine: Engine) -> list[str]:
    with engine.connect() as db:
        return list(db.execute(select(effects.c.name).order_by(effects.c.id)).scalars())


def remembered(engine: Engine) -> int:
    with engine.connect() as db:
        return db.execute(select(func.count()).select_from(inbox)).scalar_one()


@pytest.fixture(params=["each", "whole"])
def run(request: pytest.FixtureRequest, database: Engine) -> Callable[..., list[BatchOutcome]]:
    """Run a batch by a handler of single messages, or by one of whole lists."""
    runner = BatchRunner(database)

    def run(batch: list[Message]) -> list[BatchOutcome]:
        given = InboxBatch(consumer=BILLING, messages=batch)
        if request.param == "each":
            return runner.run(given, bill)
        return runner.run_whole(given, bill_all)

    return run


def test_a_batch_is_handled_in_order_and_remembered(
    database: Engine, run: Callable[..., list[BatchOutcome]]
) -> None:
    batch = messages(20)
    assert all(outcome.is_done and not outcome.is_duplicate for outcome in run(batch))
    assert names(database) == [f"m{n}" for n in range(20)]
    assert all(outcome.is_duplicate for outcome in run(batch))
    assert len(names(database)) == remembered(database) == 20


def test_one_poison_does_not_forfeit_the_batch(
    database: Engine, run: Callable[..., list[BatchOutcome]]
) -> None:
    """The good ones are committed in order, the bad ones leave no trace and no memory."""
    bad = frozenset({0, 6, 7, 15})
    outcomes = run(messages(16, bad=bad))
    assert {n for n, outcome in enumerate(outcomes) if not outcome.is_done} == bad
    assert all(isinstance(outcomes[n].error, Poison) for n in bad)
    assert names(database) == [f"m{n}" for n in range(16) if n not in bad]
    assert remembered(database) == 12


def test_a_batch_of_nothing_but_poison_leaves_nothing(
    database: Engine, run: Callable[..., list[BatchOutcome]]
) -> None:
    outcomes = run(messages(3, bad=frozenset(range(3))))
    assert [outcome.is_done for outcome in outcomes] == [False] * 3
    assert names(database) == []
    assert remembered(database) == 0


def test_duplicates_and_conflicts_are_told_apart_from_new_ones(
    database: Engine, run: Callable[..., list[BatchOutcome]]
) -> None:
    old, new = messages(3), messages(2)
    run(old)
    other = old[1].with_(payload=b"other content")
    outcomes = run([old[0], new[0], other, new[1], old[2]])
    assert [outcome.is_duplicate for outcome in outcomes] == [True, False, False, False, True]
    assert isinstance(outcomes[2].error, IdempotencyConflict)
    assert outcomes[1].is_done
    assert outcomes[3].is_done
    assert len(names(database)) == 5


def test_a_message_that_is_twice_in_one_batch_is_handled_once(
    database: Engine, run: Callable[..., list[BatchOutcome]]
) -> None:
    one, two, bad = messages(3, bad=frozenset({2}))
    outcomes = run([one, two, one, bad, bad, two.with_(payload=b"other")])
    assert [outcome.is_duplicate for outcome in outcomes[:3]] == [False, False, True]
    assert isinstance(outcomes[3].error, Poison)
    assert isinstance(outcomes[4].error, Poison)
    assert isinstance(outcomes[5].error, IdempotencyConflict)
    assert names(database) == ["m0", "m1"]


def test_an_empty_batch_has_no_outcomes(run: Callable[..., list[BatchOutcome]]) -> None:
    assert run([]) == []


def test_a_batch_is_claimed_by_one_statement(database: Engine) -> None:
    runner = BatchRunner(database)
    runner.run(InboxBatch(consumer=BILLING, messages=messages(1)), bill)
    runner.run(InboxBatch(consumer=BILLING, messages=messages(1)), bill)
    seen: list[str] = []

    def note(*args: Any) -> None:
        seen.append(args[2])

    event.listen(database, "before_cursor_execute", note)
    runner.run_whole(InboxBatch(consumer=BILLING, messages=messages(200)), bill_all)
    event.remove(database, "before_cursor_execute", note)
    assert len([words for words in seen if "holdfast_inbox" in words]) == 1, seen


def test_rivals_with_the_same_batches_have_one_effect_each(database: Engine) -> None:
    """Batches that overlap in other orders wait for each other or begin again; none is lost."""
    all_ = messages(30)
    outcomes: list[list[BatchOutcome]] = []

    def rival(order: int) -> Callable[[], None]:
        def work() -> None:
            runner = BatchRunner(database)
            for start in range(0, 30, 10):
                part = all_[start : start + 10][::order]
                outcomes.append(runner.run(InboxBatch(consumer=BILLING, messages=part), bill))

        return work

    together(rival(1), rival(-1), rival(1), rival(-1))
    assert sorted(names(database)) == sorted(f"m{n}" for n in range(30))
    flat = [outcome for batch in outcomes for outcome in batch]
    assert all(outcome.is_done for outcome in flat)
    assert sum(not outcome.is_duplicate for outcome in flat) == 30


def test_a_deadlock_in_a_handler_begins_the_batch_again(database: Engine) -> None:
    class Victim(Exception):
        sqlstate = "40P01"

    tried: list[str] = []

    def sometimes(session: Session, message: Message) -> None:
        bill(session, message)
        tried.append(message.id)
        if len(tried) == 2:
            raise OperationalError("UPDATE", {}, Victim())

    runner = BatchRunner(database, clock=VirtualClock(auto=True))
    outcomes = runner.run(InboxBatch(consumer=BILLING, messages=messages(3)), sometimes)
    assert all(outcome.is_done for outcome in outcomes)
    assert names(database) == ["m0", "m1", "m2"]
    assert len(tried) == 5


def test_a_lost_connection_blames_nobody(database: Engine) -> None:
    def loses(session: Session, message: Message) -> None:
        bill(session, message)
        raise OperationalError("SELECT", {}, RuntimeError("gone"), connection_invalidated=True)

    runner = BatchRunner(database)
    with pytest.raises(OperationalError):
        runner.run(InboxBatch(consumer=BILLING, messages=messages(3)), loses)
    assert names(database) == []
    assert remembered(database) == 0


def test_what_ends_the_process_rolls_everything_back(database: Engine) -> None:
    def interrupted(session: Session, _given: Any) -> None:
        session.execute(insert(effects).values(name="half done"))
        raise KeyboardInterrupt

    runner = BatchRunner(database)
    for run in (runner.run, runner.run_whole):
        with pytest.raises(KeyboardInterrupt):
            run(InboxBatch(consumer=BILLING, messages=messages(2)), interrupted)
    assert names(database) == []
    assert remembered(database) == 0


def test_a_handler_that_swallows_an_error_of_the_database_fails_alone(database: Engine) -> None:
    """On PostgreSQL it has spoilt its transaction; the others commit, and none is lost."""

    def careless(session: Session, message: Message) -> None:
        bill(session, message)
        if message.payload == b"m2":
            with suppress(DBAPIError):
                session.connection().exec_driver_sql("SELECT * FROM no_such_table")

    outcomes = BatchRunner(database).run(
        InboxBatch(consumer=BILLING, messages=messages(3)), careless
    )
    done = [f"m{n}" for n, outcome in enumerate(outcomes) if outcome.is_done]
    assert names(database) == done
    assert remembered(database) == len(done)
    assert done == (["m0", "m1"] if database.dialect.name == "postgresql" else ["m0", "m1", "m2"])


def test_results_come_back_in_their_places(database: Engine) -> None:
    runner = BatchRunner(database)
    batch = InboxBatch(consumer=BILLING, messages=messages(3))
    outcomes = runner.run_whole(batch, lambda _session, these: [m.payload for m in these])
    assert [outcome.result for outcome in outcomes] == [b"m0", b"m1", b"m2"]


@pytest.mark.programs
def test_a_commit_that_one_message_spoils_keeps_the_others(
    engines: Callable[[str], Engine],
) -> None:
    """A deferred constraint fails only at the commit; halves find out whose it was."""
    database = engines("postgres")
    with database.begin() as db:
        db.exec_driver_sql("DROP TABLE IF EXISTS deferred")
        db.exec_driver_sql("CREATE TABLE deferred (name text UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        db.exec_driver_sql("INSERT INTO deferred VALUES ('m2')")

    def write(session: Session, message: Message) -> None:
        session.connection().exec_driver_sql(
            "INSERT INTO deferred VALUES (%s)",
            (message.payload.decode(),),  # type: ignore[union-attr]
        )

    outcomes = BatchRunner(database).run(InboxBatch(consumer=BILLING, messages=messages(5)), write)
    assert [outcome.is_done for outcome in outcomes] == [True, True, False, True, True]
    assert remembered(database) == 4
