"""`holdfast inbox`: operators see what is remembered, and forget only on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from holdfast import Message
from holdfast.consumer import create_tables
from holdfast.db import audit
from holdfast.db.engine import open_database
from holdfast.idempotency import AttemptLog, Inbox
from holdfast.idempotency.schema import inbox

BILLING = "billing/shop.bill"


def holdfast(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command."""
    return subprocess.run(
        [Path(sys.executable).with_name("holdfast"), "inbox", *args],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        input="",
        env={**os.environ, "HOLDFAST_DATABASE": "sqlite:///shop.db", "COLUMNS": "200"},
    )


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Let a consumer have handled six messages, three of them long ago."""
    engine = open_database(f"sqlite:///{tmp_path}/shop.db")
    create_tables(engine)
    memory = Inbox(window="14d")
    with Session(engine) as session, session.begin():
        for n in range(3):
            memory.claim(session, BILLING, f"old-{n}")
    with engine.begin() as db:
        db.execute(update(inbox).values(handled_at=inbox.c.handled_at - 15 * 86400))
    with Session(engine) as session, session.begin():
        for n in range(3):
            memory.claim(session, BILLING, f"new-{n}")
    ledger = AttemptLog(engine)
    ledger.starting(BILLING, ["new-9"], "owner")
    ledger.failed(BILLING, "new-9", "error")
    engine.dispose()
    return tmp_path


def test_stats_show_what_each_consumer_remembers(shop: Path) -> None:
    done = holdfast(shop, "stats")
    assert done.returncode == 0, done.stderr
    for words in (BILLING, "2w", "in flight 1", "failing 1", "holdfast inbox prune"):
        assert words in done.stdout
    found = json.loads(holdfast(shop, "stats", "--json").stdout)
    (consumer,) = found["consumers"]
    assert (consumer["consumer"], consumer["remembered"], consumer["overdue"]) == (BILLING, 6, 3)
    assert (found["in_flight"], found["failing"], found["suspects"]) == (1, 1, 0)


def test_prune_removes_what_is_beyond_the_window(shop: Path) -> None:
    refused = holdfast(shop, "prune")
    assert refused.returncode == 2
    assert f"{BILLING}: 3 beyond its window" in refused.stderr
    pruned = holdfast(shop, "prune", "--step", "2", "--yes", "--json")
    assert json.loads(pruned.stdout) == {BILLING: 3}
    assert "nothing to prune" in holdfast(shop, "prune").stdout
    found = json.loads(holdfast(shop, "stats", "--json").stdout)
    assert found["consumers"][0]["remembered"] == 3


def test_forget_asks_first_and_lets_a_message_be_handled_again(shop: Path) -> None:
    why = ("--reason", "undone by hand", "--actor", "ada")
    refused = holdfast(shop, "forget", BILLING, "new-1", *why)
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    done = holdfast(shop, "forget", BILLING, "new-1", "never-seen", "--yes", *why)
    assert done.returncode == 0, done.stderr
    assert "forgot 1 of 2" in done.stdout
    again = holdfast(shop, "forget", BILLING, "new-1", "--yes", *why)
    assert again.returncode == 1
    assert "remembers none" in again.stderr


def test_who_forgot_what_and_why_is_in_the_audit_trail(shop: Path) -> None:
    """Once, with actor, reason and ids, in a chain that is whole; without a reason nothing."""
    silent = holdfast(shop, "forget", BILLING, "new-1", "--yes")
    assert silent.returncode == 2
    assert "--reason" in silent.stderr
    empty = holdfast(shop, "forget", BILLING, "new-1", "--yes", "--reason", " ")
    assert empty.returncode == 2
    assert "reason is empty" in empty.stderr
    why = ("--reason", "undone by hand", "--actor", "ada", "--yes")
    holdfast(shop, "forget", BILLING, "new-1", "new-2", *why)
    holdfast(shop, "forget", BILLING, "new-1", *why)  # it is forgotten already
    engine = open_database(f"sqlite:///{shop}/shop.db")
    with engine.connect() as db:
        (entry,) = audit.entries(db)
        assert audit.verify(db).is_whole
    engine.dispose()
    assert (entry.actor, entry.reason, entry.subject) == ("ada", "undone by hand", BILLING)
    assert (entry.action, entry.detail["messages"]) == ("inbox.forget", ["new-1", "new-2"])


def test_an_unknown_consumer_or_a_missing_table_is_one_sentence(shop: Path) -> None:
    for args in (
        ("prune", "--consumer", "nobody"),
        ("forget", "nobody", "m", "--yes", "--reason", "x"),
    ):
        done = holdfast(shop, *args)
        assert done.returncode == 1
        assert "holdfast inbox stats" in done.stderr
        assert "Traceback" not in done.stderr
    empty = holdfast(shop, "stats", "--database", "sqlite:///empty.db")
    assert empty.returncode == 2
    assert "holdfast db upgrade" in empty.stderr


def test_rename_gives_the_memory_to_another_name_and_is_audited(shop: Path) -> None:
    """A topic has a new name: what was handled is known under it, and who moved it, too."""
    given = ("rename", BILLING, "billing/orders", "--reason", "the topic has a new name")
    unasked = holdfast(shop, *given)
    assert unasked.returncode == 2
    assert "add --yes" in " ".join(unasked.stderr.split())
    done = holdfast(shop, *given, "--actor", "ada", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "old": BILLING, "new": "billing/orders", "remembered": 6, "attempts": 1,
    }  # fmt: skip
    stats = json.loads(holdfast(shop, "stats", "--json").stdout)
    assert [(one["consumer"], one["remembered"]) for one in stats["consumers"]] == [
        ("billing/orders", 6)
    ]
    engine = open_database(f"sqlite:///{shop}/shop.db")
    with engine.connect() as db:
        [entry] = audit.entries(db)
    assert (entry.actor, entry.action, entry.subject) == ("ada", "inbox.rename", BILLING)
    assert entry.detail["new"] == "billing/orders"
    engine.dispose()


def test_a_message_with_a_source_is_forgotten_by_both(shop: Path) -> None:
    engine = open_database(f"sqlite:///{shop}/shop.db")
    order = Message.new("orders", b"{}", source="shop")
    with Session(engine) as session, session.begin():
        assert Inbox(window="14d").claim_many(session, BILLING, [order])[0].is_new
    given = ("forget", BILLING, order.id, "--reason", "undone", "--yes")
    wrong = holdfast(shop, *given)
    assert wrong.returncode == 1
    assert "--source" in wrong.stderr
    assert holdfast(shop, *given, "--source", "shop").returncode == 0
    with Session(engine) as session, session.begin():
        assert Inbox(window="14d").claim_many(session, BILLING, [order])[0].is_new
    engine.dispose()
