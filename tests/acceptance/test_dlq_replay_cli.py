"""`holdfast dlq replay`, `simulate`, `edit` and `plans` say what is, and keep secrets."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import select, update

from holdfast.brokers import connect
from holdfast.cli import display
from holdfast.cli.migrations import Migrations
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.dlq import CaptureSettings, DeadLetterStore
from holdfast.dlq.protection.vault import MARK, Vault
from holdfast.dlq.replay import Plans, ReplayOptions, Selection, StopPolicy, freeze
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.schema import plan as plan_table
from holdfast.dlq.store.schema import message, revision
from tests.dead_letters import failed, letter
from tests.shell import shell

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

ADA = Operator(actor="ada", reason="fixed")
MASTER = bytes(range(32))
BODY = b'{"customer": "c-1", "name": "Ada", "n": 1}'
SEND = ("--reason", "fixed", "--yes", "--canary", "0", "--ramp", "", "--patience", "1s")


class Desk:
    """A store with a vault, a broker, and the command run beside the service's code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/dlq.db"
        self.engine = open_database(self.url)
        Migrations(self.engine).upgrade()
        self.home = DeadLetterStore(self.engine)
        self.broker_url = f"sqlite:///{folder}/broker.db"
        self.broker = connect(self.broker_url)
        self.broker.create_topic("orders")
        self.key_file = folder / "master.key"
        self.key_file.write_text(MASTER.hex())
        self.key = ("--master-key-file", str(self.key_file))
        self.module = f"shop_{abs(hash(str(folder)))}"

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run the command on the store; never a traceback."""
        said = shell("dlq", *args, "--database", self.url, cwd=self.folder)
        assert "Traceback" not in said.stderr + said.stdout, said
        return said

    def json(self, *args: str) -> Any:
        """Run the command for a script."""
        return json.loads(self.run(*args, "--json").stdout)

    def replay(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Replay without asking, and without waiting for a consumer."""
        return self.run("replay", *args, *SEND, "--broker", self.broker_url)

    def seal(self, number: int = 1, **more: Any) -> str:
        """Dead-letter a message with an encrypted name; return its id."""
        origin = CaptureSettings(
            vault=Vault(self.engine, MASTER), fields=("name",), subject="$.customer"
        )
        made = letter(number, payload=BODY, origin=origin, **more)
        self.home.put(made)
        return made.dlq_id

    def code(self, text: str) -> str:
        """Write the service's code; return the name of its module."""
        (self.folder / f"{self.module}.py").write_text(text)
        return self.module

    @property
    def group(self) -> str:
        """The id of the one failure group."""
        (found,) = self.json("groups")
        return str(found["group_id"])

    @property
    def plan(self) -> Any:
        """The newest plan."""
        (found,) = Plans(self.engine).latest(limit=1)
        return found


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """Open a desk on SQLite."""
    made = Desk(tmp_path)
    yield made
    made.broker.close()
    made.engine.dispose()


WANTS_ADA = """
import msgspec

class Order(msgspec.Struct):
    customer: str
    name: str
    n: int

def bill(order: Order) -> None:
    if order.name != "Ada":
        raise ValueError(f"who is {order.name}?")

def tells(order: Order) -> None:
    raise ValueError(f"cannot bill {order.name}")

class Strict(msgspec.Struct):
    name: int

def strict(order: Strict) -> None: ...

def louder(order: dict) -> dict:
    return {**order, "name": order["name"].upper()}
"""


def test_a_simulation_opens_sealed_fields_with_the_key_and_never_shows_them(desk: Desk) -> None:
    """Without the key nothing is guessed: the messages were not tried, and it says so."""
    desk.seal()
    module, group = desk.code(WANTS_ADA), desk.group
    blind = desk.run("simulate", group, "--handler", f"{module}:bill")
    assert blind.returncode == 1
    assert "1 were not tried" in blind.stdout
    assert "--master-key-file" in blind.stdout
    assert "0 would pass; nobody knows about the others" in blind.stdout
    seeing = desk.run("simulate", group, "--handler", f"{module}:bill", *desk.key)
    assert (seeing.returncode, "all 1 would pass" in seeing.stdout) == (0, True)
    failing = desk.run("simulate", group, "--handler", f"{module}:tells", *desk.key)
    assert failing.returncode == 1
    assert "ValueError" in failing.stdout
    assert "withheld" in failing.stdout
    for said in (blind, seeing, failing):
        assert "Ada" not in said.stdout + said.stderr
        assert MARK not in said.stdout + said.stderr


def test_a_dry_run_checks_sealed_payloads_with_the_key_and_never_shows_them(desk: Desk) -> None:
    """The count of what could not be read is told apart from what is invalid."""
    desk.seal()
    module = desk.code(WANTS_ADA)
    look = ("replay", desk.group, "--dry-run", "--handler")
    found = desk.json(*look, f"{module}:bill")
    assert (found["valid"], found["invalid"], found["unread"]) == (0, 0, 1)
    found = desk.json(*look, f"{module}:bill", *desk.key)
    assert (found["valid"], found["invalid"], found["unread"]) == (1, 0, 0)
    said = desk.run(*look, f"{module}:strict", *desk.key)
    assert "0 valid, 1 invalid" in said.stdout
    assert "withheld" in said.stdout
    assert "Ada" not in said.stdout + said.stderr
    assert desk.run(*look, f"{module}:bill", "--master-key-file", "nowhere").returncode == 2


def test_an_edit_of_a_sealed_field_is_sealed_too(desk: Desk) -> None:
    """In the payload and in the difference; without the key it is refused."""
    name = desk.seal()
    fixed = desk.folder / "fixed.json"
    fixed.write_bytes(BODY.replace(b"Ada", b"Grace"))
    change = ("edit", name, "--payload-file", str(fixed), "--reason", "typo")
    refused = desk.run(*change)
    assert refused.returncode == 2
    assert "--master-key-file" in refused.stderr
    said = desk.run(*change, *desk.key)
    assert said.returncode == 0
    assert "Grace" not in said.stdout
    with desk.engine.connect() as db:
        (row,) = db.execute(select(revision)).all()
    assert MARK.encode() in bytes(row.payload)
    assert b"Grace" not in bytes(row.payload)
    assert "Grace" not in row.difference
    assert desk.replay("--id", name, *desk.key).returncode == 6
    assert b"Grace" in _sent(desk)
    desk.run("forget", "c-1", "--reason", "erasure", "--yes")
    with desk.engine.connect() as db:
        kept = "".join(
            str(bytes(one.payload)) + one.difference for one in db.execute(select(revision))
        )
    assert "Grace" not in kept


def test_a_transform_works_on_the_value_and_never_on_its_cipher(desk: Desk) -> None:
    """With the key it is opened and sealed again; without it nothing is changed."""
    desk.seal()
    module, group = desk.code(WANTS_ADA), desk.group
    change = ("edit", group, "--transform", f"{module}:louder@1", "--reason", "fix", "--yes")
    refused = desk.run(*change)
    assert refused.returncode != 0
    with desk.engine.connect() as db:
        assert db.execute(select(revision)).all() == []
    said = desk.run(*change, *desk.key)
    assert said.returncode == 0
    assert "ADA" not in said.stdout
    assert desk.replay(group, *desk.key).returncode == 6
    assert json.loads(_sent(desk))["name"] == "ADA"


def test_a_target_that_is_missing_claims_nothing(desk: Desk) -> None:
    """The same messages can be replayed at once, to the right topic."""
    desk.home.put(letter(1))
    said = desk.replay("--topic", "orders", "--to-topic", "nowhere")
    assert said.returncode == 2
    assert "nowhere" in said.stderr
    assert Plans(desk.engine).latest() == []
    assert desk.replay("--topic", "orders").returncode == 6


def test_nothing_that_can_be_sent_makes_no_plan_and_says_why(desk: Desk) -> None:
    """Each try would leave another empty plan behind."""
    name = desk.seal()
    with desk.engine.begin() as db:
        db.execute(update(message).values(replayable=False))
    said = desk.replay("--id", name)
    assert said.returncode == 2
    assert "none of the 1 messages can be sent" in said.stderr
    assert Plans(desk.engine).latest() == []


def test_no_plan_is_said_to_be_none(desk: Desk) -> None:
    """And not by an empty table."""
    assert desk.run("plans", "list").stdout == "no plan has been made yet\n"
    assert desk.run("plans", "list", "--open").stdout == "no plan is open\n"
    assert desk.json("plans", "list") == []


def test_a_moment_that_rounds_to_the_year_10000_stops_nothing(desk: Desk) -> None:
    """Neither one that is stored now, nor one that an older version stored."""
    last = datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)
    made = letter(1)
    late = msgspec.structs.replace(made, message=msgspec.structs.replace(made.message, time=last))
    desk.home.put(late)
    look = ("replay", "--topic", "orders", "--dry-run")
    assert desk.json(*look)["count"] == 1
    with desk.engine.begin() as db:
        assert db.execute(select(message.c.event_at)).scalar_one() < last.timestamp()
        db.execute(update(message).values(event_at=last.timestamp()))
    assert desk.json(*look)["count"] == 1
    assert desk.run("show", made.dlq_id).returncode == 0
    assert desk.replay("--topic", "orders").returncode == 6


def test_what_a_failed_sending_says_to_a_script_is_json(desk: Desk) -> None:
    """The words for people are on the other stream."""
    desk.home.put(letter(1))
    terms = ReplayOptions(policy=StopPolicy(), to_topic="nowhere")
    plan = freeze(desk.engine, Selection(topic="orders"), terms, ADA).plan
    resume = ("plans", "resume", plan.short, "--reason", "x", "--broker", desk.broker_url)
    said = desk.run(*resume, "--json")
    assert said.returncode == 2
    found = json.loads(said.stdout)
    assert (found["plan"], found["ending"], found["sent"]) == (plan.id, "failed", 0)
    assert "nowhere" in found["reason"]
    assert "nowhere" in said.stderr


def test_a_plan_is_found_by_every_start_of_what_the_list_shows(desk: Desk) -> None:
    """The short form is the end of the id, whose start is only the time."""
    desk.home.put(letter(1))
    desk.replay("--topic", "orders")
    short = desk.plan.short
    for text in (short, short[:5], desk.plan.id[:13], desk.plan.id):
        assert desk.run("plans", "show", text).returncode == 0, text


def test_a_plan_whose_sender_died_says_so_and_how_to_go_on(desk: Desk) -> None:
    """It is not shown as if it were being sent."""
    desk.home.put(letter(1))
    desk.replay("--topic", "orders")
    with desk.engine.begin() as db:  # as after kill -9
        gone = {"state": "ramping", "owner": "vm:21221", "until": 1.0, "sent": 0}
        db.execute(update(plan_table).values(**gone))
    said = desk.run("plans", "show", desk.plan.short).stdout
    assert "its sender vm:21221 is gone" in said
    assert f"plans resume {desk.plan.short}" in said
    assert "no sender" in desk.run("plans", "list").stdout
    with desk.engine.begin() as db:
        db.execute(update(plan_table).values(until=4e9))
    assert "sent by vm:21221" in desk.run("plans", "show", desk.plan.short).stdout


def test_late_confirmations_end_the_plan_when_it_is_verified(desk: Desk) -> None:
    """And not before every message has an outcome."""
    desk.home.put(letter(1))
    desk.replay("--topic", "orders")
    assert desk.run("verify", desk.plan.short).returncode == 6
    assert desk.plan.state == "running"
    with desk.engine.begin() as db:
        db.execute(update(item).values(state="confirmed", live=None))
    assert desk.run("verify", desk.plan.short).returncode == 0
    assert desk.plan.state == "done"
    assert desk.json("plans", "list", "--open") == []


def test_what_failed_again_is_named_by_its_error(desk: Desk) -> None:
    """Not by the hash of its kind."""
    first = letter(1, failed(KeyError("price")))
    desk.home.put(first)
    desk.replay("--topic", "orders")
    other = letter(2, failed(RuntimeError("other bug")))
    desk.home.put(other)
    with desk.engine.begin() as db:
        kind = select(message.c.fingerprint).where(message.c.message_id == other.message.id)
        again = {"state": "failed_again", "live": None, "again": db.execute(kind).scalar_one()}
        db.execute(update(item).values(**again))
    assert "RuntimeError: other bug" in desk.run("plans", "show", desk.plan.short).stdout


def test_the_name_of_a_row_is_whole_however_narrow_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is what the next command is given."""
    monkeypatch.setattr(display.out, "width", 40)
    row = ("97f5dd9f", "stopped", "many words that can be wrapped", "a reason of some length")
    display.print_table(("plan", "state", "what", "why"), [row], whole=2)
    shown = capsys.readouterr().out
    assert "97f5dd9f" in shown
    assert "stopped" in shown


def _sent(desk: Desk) -> bytes:
    """Return the last payload on the replay topic."""
    source = desk.broker.source(["orders.billing.replay"], group="looker")
    found: list[Any] = []
    while not found:
        found += source.poll(100, 0.5)
    source.close()
    return found[-1].message.payload or b""
