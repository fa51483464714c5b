"""Nobody can change, drop, add or move an audit row without being found out."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import delete, insert, select, update

from holdfast.db.audit import Audit, Operator, entries, verify
from holdfast.dlq.store.schema import audit, audit_head
from holdfast.errors import ConfigurationError
from tests.dead_letters import KINDS, emptied, opened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

OPERATOR = Operator(actor="ada", reason="fixed in 1.4.2 – »ж«", ticket="OPS-1")


@pytest.fixture(scope="module", params=KINDS)
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Open a database of each kind."""
    made = opened(request, tmp_path_factory.mktemp("audit"))
    yield made
    made.dispose()


@pytest.fixture
def engine(database: Engine) -> Engine:
    """Return the database with five entries."""
    emptied(database)
    for number in range(5):
        detail = {"count": number, "x": "é\x00"}
        Audit().record(database, OPERATOR, "discard", f"group-{number}", detail)
    return database


def test_an_honest_trail_is_whole(engine: Engine) -> None:
    """Every entry is found as it was written, newest first."""
    with engine.connect() as db:
        verdict = verify(db)
        newest = entries(db, limit=1)[0]
    assert verdict.is_whole, verdict.why
    assert verdict.checked == 5
    assert newest.subject == "group-4"
    assert newest.detail["ticket"] == "OPS-1"
    assert newest.hash == verdict.head


@pytest.mark.parametrize("column", ["actor", "action", "subject", "reason", "detail", "at"])
def test_a_changed_row_is_found(engine: Engine, column: str) -> None:
    """Whatever is changed, the first broken row is named."""
    with engine.begin() as db:
        db.execute(update(audit).where(audit.c.seq == 3).values({column: "0"}))
    with engine.connect() as db:
        verdict = verify(db)
    assert verdict.broken == 3
    assert "changed" in verdict.why


@pytest.mark.parametrize("seq", [0, -7])
def test_a_row_before_the_first_is_found(engine: Engine, seq: int) -> None:
    """It would be shown in the trail, so it must not pass."""
    with engine.begin() as db:
        row = dict(db.execute(select(audit).where(audit.c.seq == 1)).mappings().one())
        db.execute(insert(audit), {**row, "seq": seq})
    with engine.connect() as db:
        assert "added" in verify(db).why


def test_a_row_that_was_changed_and_sealed_again_is_found(engine: Engine) -> None:
    """The next row still holds the old hash."""
    from holdfast.db.audit import sealed

    with engine.begin() as db:
        row = dict(db.execute(select(audit).where(audit.c.seq == 2)).mappings().one())
        row["actor"] = "mallory"
        row["hash"] = sealed(row)
        db.execute(update(audit).where(audit.c.seq == 2).values(**row))
        forged = row["hash"]
    with engine.connect() as db:
        assert verify(db).broken == 3
    with engine.begin() as db:  # and the link mended, which row 3 has sealed, too
        db.execute(update(audit).where(audit.c.seq == 3).values(previous=forged))
    with engine.connect() as db:
        assert verify(db).broken == 3


@pytest.mark.parametrize("gone", [1, 3])
def test_a_removed_row_is_found(engine: Engine, gone: int) -> None:
    """A gap is named by the row that lacks."""
    with engine.begin() as db:
        db.execute(delete(audit).where(audit.c.seq == gone))
    with engine.connect() as db:
        assert verify(db).broken == gone


def test_a_cut_end_is_found(engine: Engine) -> None:
    """The head was kept apart."""
    with engine.begin() as db:
        db.execute(delete(audit).where(audit.c.seq > 3))
    with engine.connect() as db:
        verdict = verify(db)
    assert verdict.broken == 4
    assert "ends at row 3" in verdict.why


def test_an_emptied_trail_is_found(engine: Engine) -> None:
    """Deleting everything is the plainest tampering."""
    with engine.begin() as db:
        db.execute(delete(audit))
    with engine.connect() as db:
        assert verify(db).broken == 1
        assert db.execute(select(audit_head.c.seq)).scalar_one() == 5


def test_swapped_rows_are_found(engine: Engine) -> None:
    """Order is part of the chain."""
    with engine.begin() as db:
        rows = {row["seq"]: dict(row) for row in db.execute(select(audit)).mappings()}
        db.execute(delete(audit).where(audit.c.seq.in_((2, 3))))
        for old, new in ((2, 3), (3, 2)):
            db.execute(insert(audit), {**rows[old], "seq": new})
    with engine.connect() as db:
        assert verify(db).broken == 2


def test_entries_written_at_once_form_one_chain(engine: Engine) -> None:
    """Appenders take turns; none fails and none is lost."""
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def write(who: int) -> None:
        start.wait()
        try:
            for number in range(5):
                Audit().record(engine, OPERATOR, "ack", f"{who}-{number}")
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with engine.connect() as db:
        verdict = verify(db)
    assert verdict.is_whole, verdict.why
    assert verdict.checked == 25


def test_an_act_that_rolls_back_leaves_no_entry(engine: Engine) -> None:
    """Entry and act commit together."""
    with engine.connect() as db:
        Audit().append(db, OPERATOR, "discard", "group-9")
        db.rollback()
    with engine.connect() as db:
        assert verify(db).checked == 5


@pytest.mark.parametrize("given", [{"actor": " ", "reason": "x"}, {"actor": "a", "reason": ""}])
def test_nothing_is_done_without_a_name_and_a_reason(given: dict[str, str]) -> None:
    """Blank ones are refused."""
    with pytest.raises(ConfigurationError, match="is empty"):
        Operator(**given)
