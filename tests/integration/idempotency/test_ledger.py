"""The attempt ledger: blame is exact, survives crashes, and good messages cost nothing."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import delete, event, func, select, text, update

from holdfast.errors import ConfigurationError
from holdfast.idempotency import AbandonedStart, AttemptLog, Inbox
from holdfast.idempotency.schema import attempt, owner, start
from tests.integration.idempotency.conftest import together

if TYPE_CHECKING:
    from sqlalchemy import Table
    from sqlalchemy.engine import Engine

ME, OTHER, THIRD = "owner-1", "owner-2", "owner-3"
BILLING = "billing/shop.bill"


@pytest.fixture
def ledger(database: Engine) -> AttemptLog:
    return AttemptLog(database)


def count(engine: Engine, table: Table) -> int:
    with engine.connect() as db:
        return db.execute(select(func.count()).select_from(table)).scalar_one()


def kill(engine: Engine, *owners: str) -> None:
    """Let *owners* have given their last sign of life long ago."""
    with engine.begin() as db:
        db.execute(update(owner).where(owner.c.owner.in_(owners)).values(until=1.0))


def test_good_messages_leave_nothing_behind(database: Engine, ledger: AttemptLog) -> None:
    ids = [f"m{n}" for n in range(100)]
    assert ledger.standing(BILLING, ids) == {}
    ledger.starting(BILLING, ids, ME)
    assert count(database, start) == 100
    ledger.finished(BILLING, ids, ME)
    assert count(database, start) == 0
    assert count(database, attempt) == 0


def test_a_batch_is_marked_and_finished_by_one_statement_each(database: Engine) -> None:
    """Whatever the size of the batch, and beside the sign of life that is due now and then."""
    seen: list[str] = []
    ledger = AttemptLog(database)
    ledger.alive(ME)

    def note(*args: Any) -> None:
        seen.extend(line for line in args[2].splitlines() if line.startswith(("INS", "DEL")))

    event.listen(database, "before_cursor_execute", note)
    ledger.starting(BILLING, [f"m{n}" for n in range(500)], ME)
    ledger.finished(BILLING, [f"m{n}" for n in range(500)], ME)
    event.remove(database, "before_cursor_execute", note)
    assert [words.split()[0] for words in seen] == ["INSERT", "DELETE"]


def test_failures_and_releases_are_counted_apart(ledger: AttemptLog) -> None:
    ledger.failed(BILLING, "m", ValueError("no amount"))
    ledger.released(BILLING, "m")
    standing = ledger.failed(BILLING, "m", ValueError("still none"))
    assert (standing.failed, standing.released, standing.crashed) == (2, 1, 0)
    assert standing.last_error == "ValueError: still none"
    assert standing.first_failed_at is not None
    assert standing.last_failed_at is not None
    assert standing.first_failed_at <= standing.last_failed_at
    assert not standing.is_suspect
    assert ledger.standing(BILLING, ["m", "other"]) == {"m": standing}
    assert ledger.standing("another/consumer", ["m"]) == {}


def test_a_failure_outlives_the_rollback_of_the_attempt_unless_it_joins_it(
    database: Engine, ledger: AttemptLog
) -> None:
    if database.dialect.name != "sqlite":  # SQLite has one writer at a time
        with database.connect() as db, db.begin() as attempt_:
            db.execute(text("SELECT 1"))
            ledger.failed(BILLING, "own", "error")
            attempt_.rollback()
        assert ledger.standing(BILLING, ["own"])["own"].failed == 1
    with database.connect() as db, db.begin() as attempt_:
        assert ledger.failed(BILLING, "joined", "error", connection=db).failed == 1
        attempt_.rollback()
    assert ledger.standing(BILLING, ["joined"]) == {}


def test_what_was_handled_is_forgotten(ledger: AttemptLog) -> None:
    ledger.failed(BILLING, "m", "error")
    ledger.failed(BILLING, "n", "error")
    ledger.forget(BILLING, ["m"])
    assert list(ledger.standing(BILLING, ["m", "n"])) == ["n"]


def test_a_living_owner_is_never_blamed(ledger: AttemptLog) -> None:
    ledger.starting(BILLING, ["m"], ME)
    assert ledger.orphans() == []
    assert ledger.standing(BILLING, ["m"], owner=ME) == {}


def test_a_suspect_that_was_handled_is_acquitted(database: Engine, ledger: AttemptLog) -> None:
    """It is settled and does not come again: nobody else would clear it of the suspicion."""
    done, unlike_a_uuid = "01a1ebf4-ee41-7000-bdab-41513dcd583f", "order 17, café"
    ledger.starting(BILLING, [done, unlike_a_uuid, "unfinished"], ME)
    ledger.starting("mail/shop.mail", [done], ME)
    kill(database, ME)
    assert len(ledger.orphans()) == 4
    assert ledger.acquit() == 0
    with database.begin() as db:
        assert Inbox().claim(db, BILLING, done)
        assert Inbox().claim(db, BILLING, unlike_a_uuid)
    assert ledger.acquit() == 2
    assert ledger.standing(BILLING, [done, unlike_a_uuid]) == {}
    assert ledger.standing(BILLING, ["unfinished"])["unfinished"].suspected == 1
    assert ledger.standing("mail/shop.mail", [done])[done].suspected == 1


def test_a_message_that_only_fails_is_no_suspect(database: Engine, ledger: AttemptLog) -> None:
    """What is remembered of its failures is its handler's to forget."""
    ledger.failed(BILLING, "m", "error")
    with database.begin() as db:
        assert Inbox().claim(db, BILLING, "m")
    assert ledger.acquit() == 0
    assert ledger.standing(BILLING, ["m"])["m"].failed == 1


def test_messages_that_died_in_company_are_only_suspects(
    database: Engine, ledger: AttemptLog
) -> None:
    ledger.starting(BILLING, ["a", "b"], ME)
    ledger.starting("mail/shop.mail", ["a"], ME)
    kill(database, ME)
    assert len(ledger.orphans()) == 3
    standing = ledger.standing(BILLING, ["a", "b"])
    assert {id_: (s.crashed, s.suspected) for id_, s in standing.items()} == {
        "a": (0, 1),
        "b": (0, 1),
    }
    assert all(found.is_suspect for found in standing.values())
    assert ledger.orphans() == []
    assert count(database, start) == count(database, owner) == 0


def test_what_was_settled_elsewhere_is_not_suspected_when_its_process_is_found_dead(
    database: Engine, ledger: AttemptLog
) -> None:
    """It does not come again, so nobody else would forget it; its company stays company."""
    ledger.starting("c", ["settled", "other"], "first")
    assert ledger.standing("c", ["settled"])["settled"].begun == 1
    ledger.forget("c", ["settled"])
    assert ledger.standing("c", ["settled"]) == {}
    kill(database, "first")
    assert len(ledger.orphans()) == 2
    assert count(database, attempt) == 1
    other = ledger.standing("c", ["other"])["other"]
    assert (other.suspected, other.crashed) == (1, 0)


def test_a_suspect_that_ran_apart_and_was_settled_keeps_the_others_innocent(
    database: Engine, ledger: AttemptLog
) -> None:
    """What waited for it had not begun, whoever settled it."""
    ledger.starting("c", ["waits"], "first")
    ledger.starting("c", ["settled"], "first", alone=True)
    ledger.forget("c", ["settled"])
    kill(database, "first")
    assert {orphan.innocent for orphan in ledger.orphans()} == {True}
    assert count(database, attempt) == 0


def test_what_is_settled_while_it_is_being_suspected_leaves_nothing_behind(
    database: Engine, ledger: AttemptLog
) -> None:
    """Whoever settles it waits for the one who blames it, and forgets the blame as well."""
    ledger.starting("c", ["settled", "other"], "first")
    kill(database, "first")
    settling = threading.Thread(target=ledger.forget, args=("c", ["settled"]))
    with database.begin() as db:
        assert len(ledger.orphans(connection=db)) == 2
        settling.start()
        settling.join(0.5)  # pacing: it waits now; without that it would be done in a moment
    settling.join(90)
    assert not settling.is_alive()
    assert ledger.standing("c", ["settled"]) == {}
    assert ledger.standing("c", ["other"])["other"].suspected == 1


def test_a_message_that_died_alone_has_crashed(database: Engine, ledger: AttemptLog) -> None:
    """Every further lone start that ends in death counts, whoever the owner was."""
    for crashes, name in enumerate((ME, OTHER, THIRD), start=1):
        ledger.starting(BILLING, ["m"], name)
        kill(database, name)
        assert ledger.orphans() == [
            AbandonedStart(consumer=BILLING, message_id="m", owner=name, alone=True)
        ]
        assert ledger.standing(BILLING, ["m"])["m"].crashed == crashes


def test_what_waited_while_a_suspect_ran_alone_is_innocent(
    database: Engine, ledger: AttemptLog
) -> None:
    ledger.starting(BILLING, ["suspect", "waiting"], ME)
    ledger.starting(BILLING, ["suspect"], ME, alone=True)
    kill(database, ME)
    ledger.orphans()
    standing = ledger.standing(BILLING, ["suspect", "waiting"])
    assert list(standing) == ["suspect"]
    assert standing["suspect"].crashed == 1


def test_a_crash_survives_what_comes_after_until_it_is_forgotten(
    database: Engine, ledger: AttemptLog
) -> None:
    ledger.starting(BILLING, ["m"], ME)
    kill(database, ME)
    ledger.orphans()
    ledger.starting(BILLING, ["m"], OTHER)
    ledger.finished(BILLING, ["m"], OTHER)
    assert ledger.standing(BILLING, ["m"])["m"].crashed == 1
    ledger.forget(BILLING, ["m"])
    assert ledger.standing(BILLING, ["m"]) == {}


def test_a_start_of_another_process_is_seen_before_its_end_is_known(ledger: AttemptLog) -> None:
    """A redelivered message is a suspect although the owner may still be alive."""
    ledger.starting(BILLING, ["m", "n"], OTHER)
    ledger.starting(BILLING, ["m"], THIRD, alone=True)
    ledger.starting(BILLING, ["m"], ME)
    standing = ledger.standing(BILLING, ["m", "n"], owner=ME)
    assert (standing["m"].begun, standing["m"].begun_alone) == (2, 1)
    assert (standing["n"].begun, standing["n"].begun_alone) == (1, 0)
    assert standing["n"].is_suspect


def test_a_failed_message_that_is_begun_elsewhere_shows_both(ledger: AttemptLog) -> None:
    ledger.failed(BILLING, "m", "error")
    ledger.starting(BILLING, ["m"], OTHER)
    standing = ledger.standing(BILLING, ["m"], owner=ME)["m"]
    assert (standing.failed, standing.begun) == (1, 1)


def test_an_owner_that_departs_leaves_no_blame(database: Engine, ledger: AttemptLog) -> None:
    ledger.starting(BILLING, ["m"], ME)
    ledger.depart(ME)
    assert ledger.orphans() == []
    assert count(database, start) == count(database, owner) == 0


def test_an_owner_that_was_believed_dead_may_return(database: Engine, ledger: AttemptLog) -> None:
    ledger.starting(BILLING, ["m"], ME)
    kill(database, ME)
    ledger.orphans()
    ledger.finished(BILLING, ["m"], ME)
    ledger.alive(ME)
    ledger.starting(BILLING, ["n"], ME)
    assert ledger.orphans() == []


def test_a_mark_without_an_owner_is_found_as_well(database: Engine, ledger: AttemptLog) -> None:
    """An owner was buried while it began something: it gets one more term, then is judged."""
    ledger.starting(BILLING, ["m"], ME)
    with database.begin() as db:
        db.execute(delete(owner))
    assert ledger.orphans() == []
    kill(database, ME)
    assert [orphan.message_id for orphan in ledger.orphans()] == ["m"]
    assert count(database, start) == 0


def test_several_processes_that_look_for_orphans_blame_once(database: Engine) -> None:
    for n in range(6):
        AttemptLog(database).starting(BILLING, ["m", "n"] if n % 2 else ["n", "o"], f"dead-{n}")
    kill(database, *(f"dead-{n}" for n in range(6)))
    found: list[AbandonedStart] = []

    def sweep() -> None:
        found.extend(AttemptLog(database).orphans())

    together(sweep, sweep, sweep, sweep)
    sweep()
    assert len(found) == 12
    standing = AttemptLog(database).standing(BILLING, ["m", "n", "o"])
    assert {id_: s.suspected for id_, s in standing.items()} == {"m": 3, "n": 6, "o": 3}


def test_owners_at_work_do_not_disturb_each_other(database: Engine) -> None:
    """Marks, ends and failures of the same messages by many owners at once: nothing is lost."""
    ids = [f"m{n}" for n in range(20)]

    def work(name: str, order: int) -> None:
        mine = AttemptLog(database)
        for _ in range(10):
            mine.starting(BILLING, ids[::order], name)
            mine.failed(BILLING, "m7", "error")
            mine.finished(BILLING, ids[::order], name)

    together(*(partial(work, f"o{n}", 1 if n % 2 else -1) for n in range(4)))
    assert AttemptLog(database).standing(BILLING, ["m7"])["m7"].failed == 40
    assert count(database, start) == 0


def test_several_pruners_share_the_work(database: Engine) -> None:
    ledger = AttemptLog(database)
    with database.begin() as db:
        for n in range(120):
            ledger.failed(f"c{n % 3}", f"m{n}", "error", connection=db)
        db.execute(update(attempt).values(changed_at=1.0))
        ledger.failed("c1", "young", "error", connection=db)
    pruned: list[int] = []

    def prune() -> None:
        pruned.append(AttemptLog(database).prune(older_than=3600))

    together(prune, prune, prune, prune)
    prune()
    assert sum(pruned) == 120
    assert count(database, attempt) == 1


@pytest.mark.parametrize(
    "name",
    ["x" * 400, "nul\0inside", "surrogate\ud800", "quote'\"\\", "ünïcode 漢字", "tab\tline\n"],
    ids=["long", "nul", "surrogate", "quotes", "unicode", "control"],
)
def test_every_id_and_error_can_be_kept(ledger: AttemptLog, name: str) -> None:
    ledger.starting(BILLING, [name], OTHER)
    standing = ledger.failed(name, name, RuntimeError(name * 20))
    assert standing.failed == 1
    assert ledger.standing(BILLING, [name])[name].begun == 1
    ledger.finished(BILLING, [name], OTHER)
    assert ledger.standing(BILLING, [name]) == {}
    ledger.forget(name, [name])
    assert ledger.standing(name, [name]) == {}


def test_ids_that_differ_in_case_alone_are_two(ledger: AttemptLog) -> None:
    ledger.failed(BILLING, "abc", "error")
    assert ledger.standing(BILLING, ["ABC"]) == {}


def test_nonsense_is_refused(ledger: AttemptLog, database: Engine) -> None:
    with pytest.raises(ConfigurationError, match="owner_seconds"):
        AttemptLog(database, owner_seconds=0)
    ledger.starting(BILLING, [], ME)
    ledger.finished(BILLING, [], ME)
    ledger.forget(BILLING, [])
    assert ledger.standing(BILLING, []) == {}
