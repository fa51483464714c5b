"""One trail for all that operators do: who it was is the system's word, and it is one chain."""

from __future__ import annotations

import json
import os
import pwd
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    DateTime,
    MetaData,
    String,
    Table,
    Text,
    column,
    delete,
    insert,
    select,
    table,
    text,
    update,
)

from holdfast.cli.migrations.history import VERSION_TABLE
from holdfast.clock import SYSTEM_CLOCK
from holdfast.consumer.parking.admin import ParkingAdmin
from holdfast.db.audit import (
    LETTERS,
    ORIGIN,
    OUTBOX,
    SAGAS,
    Audit,
    Head,
    Operator,
    audit,
    entries,
    head,
    sealed,
    verify,
)
from holdfast.db.engine import open_database
from holdfast.errors import ConfigurationError
from holdfast.testing import VirtualClock
from tests.dead_letters import KINDS
from tests.migrated import migrated
from tests.shell import shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

_MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
ADA = Operator(actor="ada", reason="fixed", account="ada (1000)@host")


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Open an empty database of each kind with the tables of all packages."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/audit.db"
    else:
        url = request.getfixturevalue(request.param).database("trail")
    engine = open_database(url)
    migrated(engine)
    yield engine
    engine.dispose()


def act(engine: Engine) -> None:
    """Have every package write an entry."""
    with engine.begin() as db:
        Audit(OUTBOX).append(db, ADA, "skip", "event 1", {})
        ParkingAdmin(engine)._record(db, ADA, "release", "g orders k", {})
        Audit(SAGAS).append(db, ADA, "retry", "saga 1", {})
        Audit().append(db, ADA, "discard", "group 1")


def test_all_packages_write_one_chain_with_account_and_database_user(database: Engine) -> None:
    """Each reads its own part; the whole is verified as one."""
    act(database)
    with database.connect() as db:
        whole = entries(db)
        assert verify(db).is_whole
        assert verify(db).checked == 4
        assert [one.action for one in entries(db, area=LETTERS)] == ["discard"]
        assert [one.action for one in entries(db, area=SAGAS)] == ["retry"]
        assert [one.action for one in entries(db, area=OUTBOX)] == ["skip"]
    assert [one.action for one in whole] == ["discard", "saga.retry", "keys.release", "outbox.skip"]
    assert {one.detail["account"] for one in whole} == {ADA.account}
    if database.dialect.name != "sqlite":
        (user,) = {one.detail["database_user"] for one in whole}
        assert user.startswith(database.url.username or "")
    assert [one.action for one in ParkingAdmin(database).audited()] == ["release"]


def test_two_emptied_tables_do_not_verify_as_whole(database: Engine) -> None:
    """A trail that was never written to does, for it has its head from the beginning."""
    with database.connect() as db:
        assert verify(db).is_whole
    act(database)
    with database.begin() as db:
        db.execute(delete(audit))
        db.execute(delete(head))
    with database.connect() as db:
        verdict = verify(db)
    assert not verdict.is_whole
    assert "emptied" in verdict.why


def test_a_chain_that_was_made_anew_does_not_lead_to_the_head_that_was_kept(
    database: Engine,
) -> None:
    """Whoever may write both tables can forge a chain, but not the past of it."""
    act(database)
    with database.connect() as db:
        found = verify(db)
        kept = Head.parse(f"{found.seq}:{found.head}")
        assert verify(db, kept).is_whole
    act(database)
    with database.connect() as db:
        assert verify(db, kept).is_whole
        later = verify(db)
    with database.begin() as db:
        _forge(db)
    with database.connect() as db:
        assert verify(db).is_whole
        assert "kept elsewhere" in verify(db, kept).why
        assert not verify(db, Head(seq=later.seq + 5, hash=later.head)).is_whole


def _forge(db: Any) -> None:
    """Write the chain again with another actor, and its head."""
    previous = ORIGIN
    for row in db.execute(select(audit).order_by(audit.c.seq)).mappings().all():
        forged = {**row, "actor": "mallory", "previous": previous}
        previous = forged["hash"] = sealed(forged)
        db.execute(update(audit).where(audit.c.seq == row["seq"]).values(**forged))
    db.execute(update(head).values(hash=previous))


@pytest.mark.parametrize("written", ["", "7", "x:" + ORIGIN, "3:abc", f"-1:{ORIGIN}"])
def test_a_head_that_is_none_is_refused(written: str) -> None:
    """The error shows how one is written."""
    with pytest.raises(ConfigurationError, match="SEQ:HASH"):
        Head.parse(written)


def test_a_pruned_trail_says_where_it_begins(database: Engine) -> None:
    """Old rows go with an entry that names the last of them; others who delete are found out."""
    clock = VirtualClock(start=SYSTEM_CLOCK.now() - timedelta(days=400))
    Audit(clock=clock).record(database, ADA, "discard", "old")
    act(database)
    with database.connect() as db:
        old = entries(db)[-1]
    assert Audit().prune(database, 365, ADA) == 1
    assert Audit().prune(database, 365, ADA) == 0
    with database.connect() as db:
        assert verify(db).is_whole
        assert verify(db, Head(seq=1, hash=old.hash)).is_whole
        assert entries(db, limit=1)[0].detail["up_to"] == 1
    with database.begin() as db:
        second = db.execute(select(audit).where(audit.c.seq == 2)).one()
        db.execute(delete(audit).where(audit.c.seq == 2))
        base = head.c.name == "base"
        db.execute(update(head).where(base).values(seq=2, hash=second.hash))
    with database.connect() as db:
        assert "no entry says so" in verify(db).why


def test_the_trails_of_older_versions_become_one(database: Engine) -> None:
    """The chain of the dead letters stays as it was, so a kept head stays true; others follow."""
    _rewind(database)
    migrated(database)
    with database.connect() as db:
        found = entries(db)
        verdict = verify(db)
        assert verdict.is_whole, verdict.why
        assert verify(db, Head(seq=1, hash=found[-1].hash)).is_whole
    assert [one.seq for one in found] == [3, 2, 1]
    assert found[-1].action == "discard"
    assert {one.action for one in found[:2]} == {"outbox.skip", "keys.release"}
    assert {one.at for one in found[:2]} == {"2026-01-02T03:04:05.000000+00:00"}
    with database.connect() as db:
        skip = entries(db, area=OUTBOX)[0]
    assert (skip.actor, skip.subject, skip.detail["n"]) == ("bob", "event 9", 1)
    act(database)
    with database.connect() as db:
        assert verify(db).checked == 7


def _rewind(database: Engine) -> None:
    """Make the tables those of the revisions before, with a row in each trail."""
    with database.begin() as db:
        Audit().append(db, ADA, "discard", "group 1")
        row = dict(db.execute(select(audit)).mappings().one())
        db.execute(text("DROP TABLE holdfast_audit"))
        db.execute(text("DROP TABLE holdfast_audit_head"))
        old = MetaData()
        chained = Table("holdfast_dlq_audit", old, *(_copy(one) for one in audit.columns))
        plain = [_plain(name, old) for name in ("holdfast_outbox_audit", "holdfast_held_audit")]
        old.create_all(db)
        db.execute(insert(chained), row)
        heads = table("holdfast_dlq_head", column("name"), column("seq"), column("hash"))
        db.execute(insert(heads), {"name": "audit", "seq": 1, "hash": row["hash"]})
        for one, action, subject in zip(plain, ("skip", "release"), ("event 9", "k"), strict=True):
            db.execute(insert(one), {
                "seq": 1, "at": _MOMENT, "actor": "bob", "action": action, "subject": subject,
                "reason": "why", "detail": {"n": 1},
            })  # fmt: skip
        versions = table(VERSION_TABLE, column("version_num"))
        for branch, to in (("dlq", "dlq_0006"), ("outbox", "outbox_0001"),
                           ("consumer", "consumer_0001")):  # fmt: skip
            ours = versions.c.version_num.startswith(f"{branch}_")
            db.execute(update(versions).where(ours).values(version_num=to))


def _copy(one: Column[Any]) -> Column[Any]:
    return Column(one.name, one.type, primary_key=one.primary_key, autoincrement=False)


def _plain(name: str, metadata: MetaData) -> Table:
    return Table(
        name, metadata, Column("seq", BigInteger, primary_key=True, autoincrement=False),
        Column("at", DateTime(timezone=True)), Column("actor", String(255)),
        Column("action", String(32)), Column("subject", String(600)), Column("reason", Text),
        Column("detail", JSON),
    )  # fmt: skip


def test_the_account_is_the_systems_word_whatever_the_environment_says(tmp_path: Path) -> None:
    """$LOGNAME names nobody else; the command shows the whole trail and checks it."""
    url = f"sqlite:///{tmp_path}/a.db"
    engine = open_database(url)
    migrated(engine)
    Audit().record(engine, ADA, "outbox.skip", "event 1")
    pretended = {"LOGNAME": "mallory", "USER": "mallory", "LNAME": "mallory", "USERNAME": "mallory"}
    prune = ("outbox", "prune", "--database", url, "--reason", "x", "--older-than", "1d", "--yes")
    pruned = shell(*prune, **pretended)
    assert pruned.returncode == 0, pruned.stderr
    shared = shell("circuits", "open", "nowhere", "--database", url, "--reason", "x", **pretended)
    assert "no process shares" in shared.stderr
    clock = VirtualClock(start=SYSTEM_CLOCK.now() - timedelta(days=3))
    with engine.begin() as db:
        db.execute(delete(audit))
        db.execute(update(head).values(seq=0, hash=ORIGIN))
    Audit(clock=clock).record(engine, ADA, "outbox.skip", "event 1")
    unasked = shell(*prune[:-1], **pretended)
    assert (unasked.returncode, "Delete 1 entries" in unasked.stderr) == (2, True)
    assert shell(*prune, **pretended).returncode == 0
    shown = json.loads(shell("audit", "--database", url, "--json").stdout)
    own = pwd.getpwuid(os.getuid()).pw_name
    assert shown[0]["actor"] == own
    assert shown[0]["detail"]["account"].startswith(f"{own} ({os.getuid()})@")
    checked = shell("audit", "--database", url, "--verify")
    assert checked.returncode == 0
    kept = checked.stdout.strip().rpartition(" ")[2]
    again = shell("dlq", "audit", "--database", url, "--verify", "--head", kept)
    assert again.returncode == 0, again.stdout
    forged = f"{kept.partition(':')[0]}:{'f' * 64}"
    assert shell("audit", "--database", url, "--verify", "--head", forged).returncode == 1
    engine.dispose()
