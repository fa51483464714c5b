"""`holdfast consume` and `holdfast keys`, as an operator uses them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from sqlalchemy import select

from holdfast import Message
from holdfast.brokers import connect
from holdfast.consumer import create_tables
from holdfast.consumer.schema import audit
from holdfast.db.engine import open_database
from holdfast.dlq.store.schema import message as letters
from holdfast.testing import wait_until

HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
SHOP = """
from holdfast.consumer import Consumer
from holdfast.dlq import dead_letter
from holdfast.errors import PoisonMessage

consumer = Consumer("sqlite:///broker.db?session=2", group="billing", database="sqlite:///app.db",
                    due_seconds=0.1, takeover_seconds=2.0)

@consumer.on("orders")
@dead_letter()
def bill(order: str) -> None:
    if order == "bad":
        raise PoisonMessage("bad")
    with open("handled.txt", "a") as file:
        file.write(order + "\\n")
"""


def publish(folder: Path, *orders: str) -> None:
    broker = connect(f"sqlite:///{folder}/broker.db")
    sink = broker.sink()
    sink.publish([Message.new("orders", order.encode(), key="ada") for order in orders])
    sink.close()
    broker.close()


def handled(folder: Path) -> list[str]:
    file = folder / "handled.txt"
    return file.read_text().split() if file.exists() else []


def keys(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HOLDFAST, "keys", *args, "--database", f"sqlite:///{folder}/app.db"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_workers_are_looked_after_and_a_held_key_is_released_by_hand(tmp_path: Path) -> None:
    """Two processes; a poison holds its key; the operator lets it go on; SIGTERM ends it all."""
    engine = open_database(f"sqlite:///{tmp_path}/app.db")
    create_tables(engine)
    (tmp_path / "shop.py").write_text(SHOP)
    publish(tmp_path, "one", "bad", "two", "three")
    process = subprocess.Popen(
        [HOLDFAST, "consume", "shop:consumer", "--workers", "2", "--log-level", "error"],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
        | {"HOLDFAST_SERVICE_VERSION": "1.4.2"},
    )
    try:
        wait_until(lambda: handled(tmp_path) == ["one"], deadline=90, what="the first")

        def parked() -> bool:
            found = json.loads(keys(tmp_path, "list", "--json").stdout)
            return [(k["key"], k["parked"]) for k in found] == [("ada", 2)]

        wait_until(parked, deadline=90, what="two parked behind the poison")
        shown = json.loads(keys(tmp_path, "show", "billing", "orders", "ada", "--json").stdout)
        assert len(shown) == 2
        second = ("--number", str(shown[0]["number"]))
        given = ("skip", "billing", "orders", "ada", *second, "--reason", "obsolete")
        unasked = keys(tmp_path, *given)
        assert unasked.returncode == 2
        assert shown[0]["message"] in unasked.stderr
        assert "add --yes" in " ".join(unasked.stderr.split())
        skipped = keys(tmp_path, *given, "--yes")
        assert skipped.returncode == 0, skipped.stderr
        done = keys(tmp_path, "release", "billing", "orders", "ada", "--reason", "seen to")
        assert done.returncode == 0, done.stderr
        wait_until(lambda: handled(tmp_path) == ["one", "three"], deadline=90, what="the rest")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
    with engine.connect() as db:
        entries = [(row.action, row.reason) for row in db.execute(select(audit))]
        versions = db.execute(select(letters.c.service_version)).scalars().all()
    assert versions == ["1.4.2", ""]
    assert entries == [
        ("discard", "obsolete"), ("keys.skip", "obsolete"), ("keys.release", "seen to"),
    ]  # fmt: skip
    shown = json.loads(keys(tmp_path, "audit", "--json").stdout)
    assert [entry["action"] for entry in shown] == ["release", "skip"]
    engine.dispose()


def test_nonsense_is_one_clear_sentence(tmp_path: Path) -> None:
    """A consumer that is not there, and a key that is not held."""
    create_tables(engine := open_database(f"sqlite:///{tmp_path}/app.db"))
    engine.dispose()
    wrong = subprocess.run(
        [HOLDFAST, "consume", "nowhere"], capture_output=True, text=True, check=False, timeout=60
    )
    assert wrong.returncode != 0
    assert "module:variable" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    missing = keys(tmp_path, "release", "billing", "orders", "eve", "--reason", "x")
    assert missing.returncode == 1
    assert "not held" in missing.stderr
    assert "Traceback" not in missing.stderr
