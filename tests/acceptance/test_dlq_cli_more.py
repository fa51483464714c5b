"""`holdfast dlq`, the rarer acts: each says what it did, is audited, and does nothing by halves."""

from __future__ import annotations

import base64
import io
import json
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from pyarrow import parquet
from sqlalchemy import insert, select, update

from holdfast.brokers import connect
from holdfast.cli.migrations import Migrations
from holdfast.db.engine import open_database
from holdfast.dlq import CaptureSettings, DeadLetterStore, DeadLetterTopic
from holdfast.dlq.protection.vault import MARK, Vault
from holdfast.dlq.replay import Plans, confirmed
from holdfast.dlq.replay.schema import plan as plan_table
from holdfast.dlq.store.rows import letter_of
from holdfast.dlq.store.schema import message as letters
from holdfast.dlq.store.schema import revision
from holdfast.errors import UnknownTopic
from holdfast.testing import wait_until
from tests.dead_letters import count, failed, letter
from tests.shell import shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MASTER = bytes(range(32))
TOPIC = "orders.billing.dlq"
BODY = b'{"customer": "c-1", "name": "Ada", "n": 1}'
SEND = ("--reason", "fixed", "--yes", "--canary", "0", "--ramp", "", "--patience", "1s")


class Desk:
    """An operator's desk: a store, a broker, and the command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.looks = 0
        self.url = f"sqlite:///{folder}/dlq.db"
        self.broker_url = f"sqlite:///{folder}/broker.db"
        self.engine = open_database(self.url)
        Migrations(self.engine).upgrade()
        self.home = DeadLetterStore(self.engine)
        self.broker = connect(self.broker_url)
        self.broker.create_topic("orders")
        self.key_file = folder / "master.key"
        self.key_file.write_text(MASTER.hex())

    def close(self) -> None:
        """Close the store and the broker."""
        self.broker.close()
        self.engine.dispose()

    def run(self, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the command on the store; never a traceback."""
        said = shell("dlq", *args, "--database", self.url, **environment)
        assert "Traceback" not in said.stderr + said.stdout, said
        return said

    def replay(self, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Replay without asking, and without waiting for a consumer."""
        return self.run("replay", *args, *SEND, "--broker", self.broker_url, **environment)

    def json(self, *args: str) -> Any:
        """Run the command for a script."""
        return json.loads(self.run(*args, "--json").stdout)

    def states(self) -> dict[str, str]:
        """Return the states of the dead letters by their message."""
        with self.engine.connect() as db:
            rows = db.execute(select(letters.c.message_id, letters.c.state))
            return {row.message_id: row.state for row in rows}

    def sent(self, topic: str = "orders.billing.replay") -> list[bytes]:
        """Return every payload on *topic*, in order, as a group gets them that is new."""
        self.looks += 1
        group, found = f"looker-{self.looks}", list[bytes]()
        try:
            wanted = sum(self.broker.lag(group, [topic]).values())
        except UnknownTopic:
            return []
        source = self.broker.source([topic], group=group)
        try:
            while len(found) < wanted:
                found += [one.message.payload or b"" for one in source.poll(100, 0.5)]
        finally:
            source.close()
        return found

    def audited(self) -> list[dict[str, Any]]:
        """Return the audit trail, which must be whole."""
        assert self.run("audit", "--verify").returncode == 0
        found: list[dict[str, Any]] = self.json("audit")
        return found

    def notes(self) -> list[tuple[str, str]]:
        """Return what the newest plan says of the messages that it set aside."""
        (plan,) = Plans(self.engine).latest(limit=1)
        return [(one["state"], one["note"]) for one in self.json("plans", "show", plan.id)["notes"]]

    def seal(self, number: int = 1, customer: str = "c-1", **more: Any) -> str:
        """Dead-letter a message of *customer* with an encrypted name; return its id."""
        origin = CaptureSettings(
            vault=Vault(self.engine, MASTER), fields=("name",), subject="$.customer"
        )
        body = BODY.replace(b"c-1", customer.encode())
        made = letter(number, payload=body, origin=origin, **more)
        self.home.put(made)
        return made.dlq_id


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """Open a desk on SQLite."""
    made = Desk(tmp_path)
    yield made
    made.close()


class Terminal(io.StringIO):
    """Somebody who types."""

    def isatty(self) -> bool:
        """Say that somebody is here."""
        return True


@contextmanager
def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> Iterator[None]:
    """Type *text* at whatever the command asks."""
    with monkeypatch.context() as patch:
        patch.setattr(io, "TextIOWrapper", lambda *_: Terminal(text))
        yield


def test_collecting_twice_stores_each_dead_letter_once(desk: Desk) -> None:
    """From the topic until it is empty; another collector group finds the same ones again."""
    home = DeadLetterTopic.on(desk.broker)
    for number in range(3):
        home.put(letter(number))
    home.close()
    collect = ("collect", TOPIC, "--broker", desk.broker_url, "--once")
    first, second = desk.run(*collect), desk.run(*collect)
    again = desk.run(*collect, "--collector", "another")
    assert [said.returncode for said in (first, second, again)] == [0, 0, 0]
    assert "collected 3 dead letters, 0 of them without" in first.stdout
    assert "collected 0 dead letters" in second.stdout
    assert "collected 3 dead letters" in again.stdout
    assert desk.states() == {f"id-{number}": "pending" for number in range(3)}
    (group,) = desk.json("groups")
    assert group["total"] == 3
    with desk.engine.connect() as db:
        assert set(db.execute(select(letters.c.occurrences)).scalars()) == {1}


def test_collecting_what_is_no_envelope_keeps_it_all_the_same(desk: Desk) -> None:
    """As a group of its own, for people to look at."""
    desk.broker.create_topic(TOPIC)
    sink = desk.broker.sink()
    sink.publish([letter(1).message.with_(topic=TOPIC)])
    sink.close()
    said = desk.run("collect", TOPIC, "--broker", desk.broker_url, "--once")
    assert (said.returncode, "1 of them without envelope" in said.stdout) == (0, True)
    assert count(desk.engine, letters) == 1
    (group,) = desk.json("groups")
    assert "unreadable envelope" in group["title"]


def test_only_closed_dead_letters_are_pruned(desk: Desk) -> None:
    """Also an open one whose time is over stays; each deletion is audited."""
    made = [letter(number) for number in range(4)]
    desk.home.put_all(made)
    for number in (0, 1):
        name = made[number].dlq_id
        done = desk.run("discard", "--id", name, "--reason", "test data", "--yes")
        assert done.returncode == 0
    with desk.engine.begin() as db:
        db.execute(update(letters).values(closed_at=letters.c.closed_at - 86400 * 10))
        open_ = letters.c.message_id == "id-3"
        db.execute(update(letters).where(open_).values(expires_at=1.0))
    assert "deleted 0 closed" in desk.run("prune").stdout
    assert "deleted 0 closed" in desk.run("prune", "--older-than", "11d").stdout
    said = desk.run("prune", "--older-than", "9d", "--actor", "ada", "--yes")
    assert "deleted 2 closed dead letters and 0 plans; 2 letters are left" in said.stdout
    assert desk.states() == {"id-2": "pending", "id-3": "pending"}
    (entry,) = [entry for entry in desk.audited() if entry["action"] == "prune"]
    assert (entry["actor"], entry["reason"]) == ("ada", "older than 9d")
    assert desk.run("prune", "--older-than", "soon").returncode == 2


def test_what_was_fixed_by_hand_is_closed_and_counted_apart(desk: Desk) -> None:
    """Neither a replay nor a loss, and told as such; it cannot be parked as well."""
    made = [letter(number) for number in range(3)]
    desk.home.put_all(made)
    act = ("discard", "--id", made[0].dlq_id, "--fixed", "--reason", "booked by hand", "--yes")
    assert desk.run(*act, "--park").returncode == 2
    done = desk.run(*act, "--actor", "ada")
    assert (done.returncode, done.stdout.strip()) == (0, "1 messages are fixed by hand")
    assert desk.states() == {"id-0": "confirmed", "id-1": "pending", "id-2": "pending"}
    (entry,) = desk.audited()
    assert (entry["action"], entry["actor"]) == ("fix", "ada")
    assert desk.json("stats")["resolved_by"] == {"replay": 0, "discard": 0, "park": 0, "fix": 1}
    assert "1 fixed by hand" in desk.run("stats").stdout


def test_forgetting_a_subject_erases_its_fields_and_no_others(desk: Desk) -> None:
    """With the master key, too; what is left of the plan goes out, and an edit saves the letter."""
    gone = desk.seal(1, "c-1")
    desk.seal(2, "c-2")
    assert desk.run("forget", "c-1", "--reason", "erasure 7").returncode == 2  # nobody to ask
    said = desk.run("forget", "c-1", "--reason", "erasure 7", "--actor", "dpo", "--yes")
    assert said.returncode == 0
    assert desk.run("forget", "c-1", "--reason", "again", "--yes").returncode == 1
    said = desk.replay("--topic", "orders", "--master-key-file", str(desk.key_file))
    assert said.returncode == 6, said
    ((state, note),) = desk.notes()
    assert (state, "forgotten" in note, "edit" in note) == ("skipped", True, True)
    assert [json.loads(payload)["customer"] for payload in desk.sent()] == ["c-2"]
    first, *_ = [entry for entry in desk.audited() if entry["actor"] == "dpo"]
    assert (first["action"], first["reason"]) == ("forget", "erasure 7")
    assert "c-1" not in first["subject"]

    fixed = desk.folder / "fixed.json"
    fixed.write_bytes(BODY.replace(b"Ada", b"(erased)"))
    args = ("--payload-file", str(fixed), "--reason", "erased by hand")
    assert desk.run("edit", gone, *args).returncode == 0
    assert desk.replay("--id", gone).returncode == 6
    assert b"(erased)" in desk.sent()[-1]


@pytest.mark.parametrize("key", ["none", "wrong", "right"])
def test_a_sealed_letter_is_sent_opened_or_not_at_all(desk: Desk, key: str) -> None:
    """Set aside with what follows of its key; the rest of the plan goes on."""
    desk.seal(1, key="same")
    desk.home.put(letter(2, key="same", payload=b'"after it"'))
    desk.home.put(letter(3, key="other", payload=b'"free"'))
    if key == "wrong":
        desk.key_file.write_text(bytes(32).hex())
    args = () if key == "none" else ("--master-key-file", str(desk.key_file))
    assert desk.replay("--topic", "orders", *args).returncode == 6
    sent = desk.sent()
    assert not any(MARK.encode() in payload or b"***" in payload for payload in sent)
    if key == "right":
        found = [json.loads(payload) for payload in sent]
        assert len(found) == 3
        assert found.index(json.loads(BODY)) < found.index("after it")
        return
    assert sent == [b'"free"']
    skipped, held = desk.notes()
    assert (skipped[0], held[0]) == ("skipped", "held")
    assert "master key" in skipped[1]
    if key == "none":
        assert "--master-key-file" in skipped[1]
        # Nothing of it is claimed: another plan sends it, with the key.
        said = desk.replay("--key", "same", "--master-key-file", str(desk.key_file))
        assert said.returncode == 6
        found = [json.loads(payload) for payload in desk.sent()]
        assert found == ["free", json.loads(BODY), "after it"]


def test_a_sealed_field_that_an_edit_has_spoiled_is_set_aside(desk: Desk) -> None:
    """It is no reason for a traceback, nor to send what nobody can read."""
    for number, text in enumerate((f"{MARK}???", f"{MARK}AA==", f"{MARK}{'A' * 80}")):
        name = desk.seal(number, key=f"k{number}")
        spoiled = desk.folder / "spoiled.json"
        spoiled.write_text(json.dumps({"customer": "c-1", "name": text}))
        args = ("--payload-file", str(spoiled), "--reason", "typo")
        refused = desk.run("edit", name, *args, "--master-key-file", str(desk.key_file))
        assert refused.returncode == 2
        assert "encrypted field name was changed" in refused.stderr
        with desk.engine.begin() as db:  # as a program of somebody else's might have left it
            payload = spoiled.read_bytes()
            own = letters.c.dlq_id == name
            db.execute(update(letters).where(own).values(payload=payload))
    said = desk.replay("--topic", "orders", "--master-key-file", str(desk.key_file))
    assert said.returncode == 7
    assert [state for state, _ in desk.notes()] == ["skipped"] * 3
    assert desk.sent() == []


@pytest.mark.parametrize(
    "wrong", [("--master-key-file", "no-such-file"), ("--broker", "nowhere://host")]
)
def test_wrong_settings_leave_no_plan_behind(desk: Desk, wrong: tuple[str, str]) -> None:
    """Exit 2 means that nothing was done: the same messages can be replayed at once."""
    desk.home.put(letter(1))
    said = desk.run("replay", "--topic", "orders", *SEND, "--broker", desk.broker_url, *wrong)
    assert said.returncode == 2
    assert wrong[1].partition(":")[0] in said.stderr
    assert Plans(desk.engine).latest() == []
    assert desk.replay("--topic", "orders").returncode == 6


def test_due_means_what_triage_put_down_for_now(desk: Desk) -> None:
    """Neither what is due later nor what waits for people; and each retry is counted once."""
    for number in (1, 2):
        desk.home.put(letter(number, failed(TimeoutError("slow"))))
    desk.home.put(letter(3, failed(KeyError("bug"))))
    said = desk.replay("--due")
    assert said.returncode == 0
    assert "nothing is due" in said.stdout
    assert Plans(desk.engine).latest() == []
    now = letters.c.message_id == "id-1"
    with desk.engine.begin() as db:
        put_down = select(letters.c.message_id).where(letters.c.due_at.is_not(None))
        assert set(db.execute(put_down).scalars()) == {"id-1", "id-2"}
        db.execute(update(letters).where(now).values(due_at=1.0))
    assert desk.json("replay", "--due", "--dry-run")["count"] == 1
    assert desk.replay("--due").returncode == 6
    assert len(desk.sent()) == 1
    with desk.engine.connect() as db:
        row = db.execute(select(letters.c.due_at, letters.c.retries).where(now)).one()
    assert tuple(row) == (None, 1)
    assert desk.replay("--due").returncode == 0


def test_exported_lines_hold_everything_that_the_store_holds(desk: Desk) -> None:
    """Another store filled from them has the very same dead letters."""
    desk.home.put(letter(1, payload=b"\xff\x00", headers=letter(1).message.headers))
    desk.home.put(letter(2, payload=None, key=None))
    desk.seal(3)
    to = desk.folder / "letters.jsonl"
    said = desk.run("export", "--to", str(to))
    assert (said.returncode, "exported 3" in said.stderr) == (0, True)
    assert desk.run("export").stdout == to.read_text("ascii")
    other = open_database(f"sqlite:///{desk.folder}/other.db")
    try:
        Migrations(other).upgrade()
        with other.begin() as db:
            db.execute(insert(letters), [_row(line) for line in to.read_text().splitlines()])
        assert _letters(other) == _letters(desk.engine)
    finally:
        other.dispose()


def _row(line: str) -> dict[str, Any]:
    row = json.loads(line)
    for name in ("message_key", "payload"):
        text = row.pop(f"{name}_base64")
        row[name] = None if text is None else base64.b64decode(text)
    for name in ("headers", "envelope", "history"):
        row[name] = json.dumps(row[name])
    return dict(row)


def _letters(engine: Any) -> list[Any]:
    with engine.connect() as db:
        return [letter_of(row) for row in db.execute(select(letters).order_by("seq")).mappings()]


def test_an_export_that_cannot_be_written_is_refused_with_the_cause(desk: Desk) -> None:
    """No folder, no such state."""
    desk.home.put(letter(1))
    nowhere = str(desk.folder / "nowhere" / "letters.jsonl")
    for args, hint in ((("--to", nowhere), "No such file"), (("--state", "opne"), "pending")):
        said = desk.run("export", *args)
        assert said.returncode == 2, args
        assert hint in said.stderr


def test_parquet_without_its_package_names_the_extra(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves no empty file."""
    desk.home.put(letter(1))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    to = desk.folder / "letters.parquet"
    said = desk.run("export", "--to", str(to))
    assert said.returncode == 2
    assert "pyarrow" in said.stderr
    assert "holdfast[parquet]" in said.stderr
    assert not to.exists()


@pytest.mark.parametrize("number", [0, 3])
def test_parquet_holds_the_same_rows(desk: Desk, number: int) -> None:
    """Also a file without rows is a file."""
    desk.home.put_all([letter(one) for one in range(number)])
    to = desk.folder / "letters.parquet"
    assert desk.run("export", "--to", str(to)).returncode == 0
    with desk.engine.connect() as db:
        rows = [dict(row) for row in db.execute(select(letters).order_by("seq")).mappings()]
    assert parquet.read_table(to).to_pylist() == rows


def test_the_editor_makes_a_revision_or_leaves_all_as_it_is(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed file is stored; an unchanged one, a failed or a missing editor changes nothing."""
    made = letter(1, payload=b'{"total": 12}')
    desk.home.put(made)
    script = desk.folder / "edit.py"
    script.write_text(
        "import pathlib, sys\n"
        "file = pathlib.Path(sys.argv[1])\n"
        "assert file.stat().st_mode & 0o077 == 0 and file.suffix == '.json'\n"
        "file.write_text(file.read_text().replace('12', '1200'))\n"
    )
    args = ("edit", made.dlq_id, "--reason", "cents")
    python = sys.executable
    assert "--payload-file" in desk.run(*args, EDITOR=f"{python} {script}").stderr  # nobody here
    with typed(monkeypatch, ""):
        for editor, code in (("true", 1), ("false", 2), ("no-such-editor", 2)):
            said = desk.run(*args, EDITOR=editor, VISUAL="")
            assert said.returncode == code, said
        assert count(desk.engine, revision) == 0
        said = desk.run(*args, EDITOR=f"{python} {script}", VISUAL="")
    assert said.returncode == 0, said
    assert '+  "total": 1200' in said.stdout
    with desk.engine.connect() as db:
        assert db.execute(select(revision.c.payload)).scalars().all() == [b'{"total": 1200}']
        assert db.execute(select(letters.c.payload)).scalars().all() == [b'{"total": 12}']
    assert [entry["action"] for entry in desk.audited()] == ["edit"]
    assert desk.replay("--id", made.dlq_id).returncode == 6
    assert desk.sent() == [b'{"total": 1200}']


def test_a_large_act_asks_for_the_count(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong number, a yes or no answer at all does nothing; the right one does it."""
    desk.home.put_all([letter(number) for number in range(120)])
    (group,) = desk.json("groups")
    act = ("discard", group["group_id"], "--reason", "test data")
    for answer in ("12\n", "y\n", "119\n", ""):
        with typed(monkeypatch, answer):
            said = desk.run(*act)
        assert said.returncode == 1, answer
        assert "Type the number 120" in said.stderr
    assert set(desk.states().values()) == {"pending"}
    assert desk.audited() == []
    with typed(monkeypatch, "120\n"):
        assert desk.run(*act).returncode == 0
    assert set(desk.states().values()) == {"discarded"}


def test_what_nobody_confirmed_can_be_sent_again(desk: Desk) -> None:
    """Marked as unknown, the plan aborted, a new plan: the command says so."""
    desk.home.put(letter(1))
    assert desk.replay("--topic", "orders").returncode == 6
    (plan,) = Plans(desk.engine).latest()
    said = desk.run("verify", plan.short, "--overdue")
    assert said.returncode == 6
    assert f"plans abort {plan.short}" in said.stdout
    assert desk.json("plans", "show", plan.short)["items"] == {"unknown": 1}
    said = desk.replay("--topic", "orders")
    assert said.returncode == 2
    assert "abort" in said.stderr
    assert desk.run("plans", "abort", plan.short, "--reason", "send again").returncode == 0
    assert desk.replay("--topic", "orders").returncode == 6
    assert len(desk.sent()) == 2


@contextmanager
def consumer(desk: Desk) -> Iterator[None]:
    """Handle and confirm what comes, as the group does."""
    stop = threading.Event()

    def work() -> None:
        source = desk.broker.source(["orders.billing.replay"], group="billing")
        while not stop.is_set():
            batch = source.poll(10, 0.1)
            if batch:
                with desk.engine.begin() as db:
                    for one in batch:
                        confirmed(db, one.message)
                source.accept(batch)
        source.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(("number", "flags"), [(signal.SIGINT, ()), (signal.SIGTERM, ("--json",))])
def test_a_signal_pauses_a_replay_and_it_says_how_to_go_on(
    desk: Desk, number: signal.Signals, flags: tuple[str, ...]
) -> None:
    """A real process, interrupted while it waits for its canary; resumed, all is confirmed."""
    desk.home.put_all([letter(number) for number in range(3)])
    # Where SIGINT is ignored, as in a shell's background, Python would not listen to it either.
    code = ("import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "from holdfast.cli import main; main()")  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, "dlq", "replay", "--topic", "orders", "--yes",
         "--canary", "1", "--ramp", "", "--patience", "2m", "--reason", "fixed",
         "--database", desk.url, "--broker", desk.broker_url, *flags],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            wait_until(
                lambda: _sent(desk) == 1 or process.poll() is not None,
                deadline=120,
                what="the canary is out",
            )
            process.send_signal(number)
            said, _ = process.communicate(timeout=120)
        finally:
            if process.poll() is None:
                process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    (plan,) = Plans(desk.engine).latest()
    if flags:
        found = json.loads(said)
        assert (found["plan"], found["ending"]) == (plan.id, "interrupted")
        said = found["reason"]
    assert f"holdfast dlq plans resume {plan.short}" in said
    assert (plan.state, plan.owner, plan.sent) == ("paused", None, 1)
    with consumer(desk):
        done = desk.run(
            "plans", "resume", plan.short, "--reason", "went on", "--broker", desk.broker_url
        )
    assert (done.returncode, "all 3 confirmed" in done.stdout) == (0, True), done
    assert set(desk.states().values()) == {"confirmed"}
    actions = [entry["action"] for entry in desk.audited()]
    assert {"replay.plan", "replay.pause", "replay.resume"} <= set(actions)


def _sent(desk: Desk) -> int:
    with desk.engine.connect() as db:
        return db.execute(select(plan_table.c.sent)).scalar() or 0


def test_the_help_names_every_exit_code() -> None:
    """Of the group of commands, where people look first."""
    said = " ".join(shell("dlq", "--help").stdout.split())
    for code in ("0 done", "1 nothing", "2 fix", "3 database", "5 the replay", "6 sent", "7 done",
                 "8 paused", "130 interrupted"):  # fmt: skip
        assert code in said, code
