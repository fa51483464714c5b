"""The clock of the database, by which leases are counted, goes on evenly all year."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import select, text

from holdfast.db.clock import database_now
from holdfast.db.engine import open_database
from holdfast.db.sql import statements
from holdfast.idempotency import AttemptLog, create_tables

if TYPE_CHECKING:
    from tests.servers import MariaDB

SWITCH = 1792890000
"""25 October 2026, 01:00 UTC: it is three o'clock, and then two again."""
ZONE = (
    "INSERT IGNORE INTO mysql.time_zone (Time_zone_id, Use_leap_seconds) VALUES (9001, 'N')",
    "INSERT IGNORE INTO mysql.time_zone_name (Name, Time_zone_id) VALUES ('Two/Oclocks', 9001)",
    (
        "INSERT IGNORE INTO mysql.time_zone_transition_type (Time_zone_id, Transition_type_id, "
        "`Offset`, Is_DST, Abbreviation) VALUES (9001, 0, 7200, 1, 'S'), (9001, 1, 3600, 0, 'W')"
    ),
    (
        "INSERT IGNORE INTO mysql.time_zone_transition (Time_zone_id, Transition_time, "
        "Transition_type_id) VALUES (9001, 1774746000, 0), (9001, 1792890000, 1)"
    ),
)


def test_the_hour_that_comes_twice_is_counted_once_on_mariadb(mariadb: MariaDB) -> None:
    """Every clock says the same before and after summer time ends, whatever the session's zone."""
    engine = open_database(mariadb.database("clocks"))
    try:
        with engine.connect() as db:
            for statement in ZONE:
                db.execute(text(statement))
            db.commit()
            db.execute(text("SET time_zone = 'Two/Oclocks'"))
            clocks = [
                statements("holdfast.idempotency", "mysql")["now"],
                statements("holdfast.outbox", "mysql")["now"],
                select(database_now()),
            ]
            for moment in (SWITCH - 1800.25, SWITCH + 1800.25):
                db.execute(text(f"SET timestamp = {moment}"))
                local = db.execute(text("SELECT HOUR(NOW())")).scalar_one()
                assert local == 2
                assert [float(db.execute(one).scalar_one()) for one in clocks] == [moment] * 3
            db.rollback()
            db.invalidate()
    finally:
        engine.dispose()


def test_a_message_fails_for_as_long_as_it_does_when_the_hour_comes_twice(
    mariadb: MariaDB,
) -> None:
    """The deadline of its retries is counted by it."""
    engine = open_database(mariadb.database("failing"))
    create_tables(engine)
    ledger = AttemptLog(engine)
    try:
        with engine.connect() as db:
            for statement in ZONE:
                db.execute(text(statement))
            db.commit()
            db.execute(text("SET time_zone = 'Two/Oclocks'"))
            db.execute(text(f"SET timestamp = {SWITCH - 1800}"))
            ledger.failed("g/handle", "m", "down", connection=db)
            db.execute(text(f"SET timestamp = {SWITCH + 1800}"))
            standing = ledger.standing("g/handle", ["m"], connection=db)["m"]
            assert standing.failing_for == 3600.0
            db.rollback()
            db.invalidate()
    finally:
        engine.dispose()
