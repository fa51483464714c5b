"""The command teaches, and fails with one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from sqlalchemy.orm import Session

from holdfast.brokers import connect
from holdfast.database import open_database
from holdfast.outbox import Outbox, create_tables


def holdfast(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the installed command."""
    return subprocess.run(
        [Path(sys.executable).with_name("holdfast"), *args],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
    )


def test_help_lists_the_commands() -> None:
    """A newcomer finds the way from --help."""
    done = holdfast("--help")
    assert done.returncode == 0
    for command in ("relay", "lag", "brokers", "version"):
        assert command in done.stdout


def test_an_unknown_broker_is_one_sentence(tmp_path: Path) -> None:
    """No traceback, and the fix is named."""
    done = holdfast("relay", "--database", "sqlite:///a.db", "--broker", "kafak://h", cwd=tmp_path)
    assert done.returncode == 2
    assert "no broker adapter for scheme 'kafak'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_database_url_hides_its_password(tmp_path: Path) -> None:
    """Secrets are not printed, even in errors."""
    done = holdfast(
        "relay", "--database", "postgrsql://u:hunter2@h/d", "--broker", "memory:", cwd=tmp_path
    )
    assert done.returncode == 2
    assert "hunter2" not in done.stderr + done.stdout
    assert "is not a database URL" in done.stderr


def test_a_missing_outbox_table_is_one_sentence(tmp_path: Path) -> None:
    """The sidecar says which table is missing."""
    done = holdfast(
        "relay", "--once", "--database", "sqlite:///empty.db", "--broker", "memory:", cwd=tmp_path
    )
    assert done.returncode == 2
    assert "holdfast_outbox" in done.stderr
    assert "Traceback" not in done.stderr


def test_relay_once_publishes_what_was_committed(tmp_path: Path) -> None:
    """The sidecar moves committed events to the broker and says how many."""
    engine = open_database(f"sqlite:///{tmp_path}/shop.db")
    create_tables(engine)
    with Session(engine) as session, session.begin():
        for number in range(3):
            Outbox().add(session, {"number": number}, topic="orders", key="k")
    with Session(engine) as session:
        Outbox().add(session, {"number": 99}, topic="orders", key="k")
        session.rollback()
    engine.dispose()
    done = holdfast(
        "relay", "--once", "--database", "sqlite:///shop.db", "--broker", "sqlite:///b.db",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "published 3 events" in done.stdout
    shown = holdfast(
        "lag", "orders", "--broker", "sqlite:///b.db", "--group", "g", "--json", cwd=tmp_path
    )
    assert sum(row["lag"] for row in json.loads(shown.stdout)) == 3
    broker = connect(f"sqlite:///{tmp_path}/b.db")
    source = broker.source(["orders"], group="g")
    bodies = [delivery.message.payload for delivery in source.poll(10, 1.0)]
    assert bodies == [b'{"number":0}', b'{"number":1}', b'{"number":2}']
    source.close()
    broker.close()
