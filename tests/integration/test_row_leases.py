"""Leases in rows: one holder at a time, by the database's clock, and an old one writes no more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import BigInteger, Column, Double, Integer, MetaData, String, Table, insert, select

from holdfast.db.clock import database_now
from holdfast.db.engine import open_database
from holdfast.db.lease import LeaseColumns
from holdfast.db.transactions import transact
from holdfast.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Connection, Engine

job = Table(
    "job",
    MetaData(),
    Column("id", Integer, primary_key=True),
    Column("owner", String(64)),
    Column("until", Double, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("step", Integer, nullable=False),
)
LEASE = LeaseColumns(owner=job.c.owner, until=job.c.until, epoch=job.c.epoch)
RETURNING = LeaseColumns(until=job.c.until, epoch=job.c.epoch, rows_return=True)
ROW = job.c.id == 1
LONG, OVER = 60.0, -1.0


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Open a database with one job that nobody holds."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'jobs.db'}"
    else:
        url = request.getfixturevalue(request.param).database("row_leases")
    engine = open_database(url)
    job.metadata.create_all(engine)
    with engine.begin() as db:
        db.execute(insert(job), {"id": 1, "until": 0.0, "epoch": 0, "step": 0})
    yield engine
    engine.dispose()


@pytest.fixture
def db(engine: Engine) -> Iterator[Connection]:
    """Open one transaction."""
    with engine.begin() as db:
        yield db


def epoch(db: Connection) -> int:
    found = LEASE.look(db, ROW)
    assert found is not None
    return found.epoch


def test_a_held_row_is_refused_to_others_and_tells_its_holder(db: Connection) -> None:
    """Also to the holder itself: it has an epoch to renew by."""
    assert LEASE.take(db, ROW, owner="a", seconds=LONG)
    assert not LEASE.take(db, ROW, owner="b", seconds=LONG)
    assert not LEASE.take(db, ROW, owner="a", seconds=LONG)
    found = LEASE.look(db, ROW)
    assert found is not None
    assert (found.owner, found.epoch) == ("a", 1)
    assert 0 < found.remaining <= LONG


def test_of_many_that_ask_at_once_one_gets_the_row(engine: Engine) -> None:
    """Whatever their transactions saw before."""

    def ask(name: int) -> bool:
        return transact(engine, lambda db: LEASE.take(db, ROW, owner=str(name), seconds=LONG))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, range(8))) == 1


def test_a_lease_that_has_run_out_is_taken_over_and_its_holder_is_fenced(db: Connection) -> None:
    """It renews, writes and gives back nothing any more."""
    LEASE.take(db, ROW, owner="a", seconds=OVER)
    assert LEASE.take(db, ROW, owner="b", seconds=LONG)
    assert epoch(db) == 2
    assert not LEASE.verify(db, ROW, epoch=1)
    assert not LEASE.renew(db, ROW, epoch=1, seconds=LONG, step=7)
    assert not LEASE.release(db, ROW, epoch=1, step=7)
    assert not LEASE.renew(db, ROW, owner="a", seconds=LONG)
    assert LEASE.verify(db, ROW, owner="b", epoch=2)
    assert db.execute(select(job.c.step)).scalar_one() == 0
    assert not LEASE.take(db, ROW, owner="c", seconds=LONG)


def test_who_was_late_but_not_replaced_keeps_the_row(db: Connection) -> None:
    """Nobody else has begun, so nothing is lost by going on; what it writes commits with it."""
    LEASE.take(db, ROW, owner="a", seconds=OVER)
    assert LEASE.verify(db, ROW, owner="a", epoch=1)
    assert LEASE.renew(db, ROW, owner="a", epoch=1, seconds=LONG, step=3)
    assert not LEASE.take(db, ROW, owner="b", seconds=LONG)
    assert db.execute(select(job.c.step)).scalar_one() == 3


def test_what_is_given_back_is_free_at_once_and_a_late_renewal_leaves_it_so(
    db: Connection,
) -> None:
    """A heartbeat on its way does not lock the next one out; the epoch goes on growing."""
    LEASE.take(db, ROW, owner="a", seconds=LONG)
    assert LEASE.release(db, ROW, owner="a", epoch=1)
    assert not LEASE.renew(db, ROW, epoch=1, seconds=LONG)
    assert LEASE.take(db, ROW, owner="b", seconds=LONG)
    assert epoch(db) == 2


def test_an_epoch_grows_also_where_the_row_was_deleted_in_between(db: Connection) -> None:
    """A holder of before is fenced, though nothing remembers it."""
    RETURNING.take(db, ROW, seconds=LONG)
    first, began = epoch(db), db.scalar(select(database_now()))
    db.execute(job.delete())
    db.execute(insert(job), {"id": 1, "until": 0.0, "epoch": 0, "step": 0})
    # A lease lasts longer than this: SQLite's clock counts milliseconds.
    wait_until(lambda: db.scalar(select(database_now())) > began, what="the clock goes on")
    assert RETURNING.take(db, ROW, seconds=OVER)
    second = epoch(db)
    assert RETURNING.take(db, ROW, seconds=LONG)
    assert first < second < epoch(db)
    assert not RETURNING.verify(db, ROW, epoch=first)


def test_a_lease_without_a_name_is_nobody_s(db: Connection) -> None:
    """To renew or give back "whatever is there" would be another's."""
    with pytest.raises(TypeError, match="owner or its epoch"):
        LEASE.release(db, ROW)
    with pytest.raises(TypeError, match="owner or its epoch"):
        RETURNING.renew(db, ROW, owner="a", seconds=LONG)
