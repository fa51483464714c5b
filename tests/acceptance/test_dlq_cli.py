"""`holdfast dlq` answers clearly, exits with stable codes, and obeys no text of a message."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select, update

from holdfast.cli import main
from holdfast.cli.migrations import Migrations
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterStore, capture
from holdfast.dlq.replay import Plans
from holdfast.dlq.store.schema import audit, message, revision
from holdfast.message import Message

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOSTILE = "\x1b]0;owned\x07\x1b[31m [red]markup[/red] \u202e" + "x" * 5000


class Desk:
    """An operator's desk: a store with dead letters, and the command."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = f"sqlite:///{folder}/dlq.db"
        self.broker = f"sqlite:///{folder}/broker.db"
        self.engine = open_database(self.url)
        Migrations(self.engine).upgrade()
        self.home = DeadLetterStore(self.engine)
        self._capsys = capsys

    def fail(self, count: int, error: Exception, *, payload: bytes | None = None) -> None:
        """Dead-letter *count* messages with *error*."""
        batch = []
        for number in range(count):
            body = b'{"number": %d, "total": "12"}' % number if payload is None else payload
            made = Message.new("orders", body, key=f"k{number}")
            batch.append(capture(made, _raised(error), group="billing", handler="shop.bill"))
        self.home.put_all(batch)

    def run(self, *args: str) -> tuple[int, str, str]:
        """Run the command; return exit code, output and errors."""
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["dlq", *args, "--database", self.url])
        said = self._capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    def json(self, *args: str) -> Any:
        """Run the command for a script."""
        return json.loads(self.run(*args, "--json")[1])

    def group(self) -> str:
        """Return the short id of the only group."""
        (found,) = self.json("groups")
        return str(found["group_id"][:6])


def _raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as raised:
        return raised


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Desk]:
    """Open a desk on SQLite."""
    made = Desk(tmp_path, capsys)
    yield made
    made.engine.dispose()


def test_hostile_text_never_reaches_the_terminal(desk: Desk) -> None:
    """Escape sequences, markup and marks of direction come out as plain codes, everywhere."""
    desk.fail(1, ValueError(HOSTILE), payload=b"\xff\xfe\x00 not text \x1b[2J")
    group = desk.group()
    for args in (("stats",), ("groups",), ("show", group), ("explain", group), ("list",),
                 ("replay", group, "--dry-run"), ("groups", "--json"), ("list", "--json"),
                 ("show", group, "--json")):  # fmt: skip
        code, said, _ = desk.run(*args)
        assert code == 0, args
        assert not set(said) & set("\x1b\x07\u202e\x00"), args
    assert "[red]markup[/red]" in desk.run("show", group)[1]
    assert "base64" in desk.run("show", group)[1]


def test_an_unknown_or_ambiguous_name_is_refused_with_the_choice(desk: Desk) -> None:
    """Exit 1 where nothing answers, 2 where more must be written."""
    desk.fail(30, ValueError("bad"))
    code, _, said = desk.run("replay", "zzzz", "--dry-run")
    assert code == 1
    assert "holdfast dlq groups" in said
    code, _, said = desk.run("show", "ab")
    assert code in (1, 2)
    code, _, said = desk.run("plans", "show", "nothing")
    assert code == 1
    assert "plans list" in said
    with desk.engine.begin() as db:
        ids = db.execute(select(message.c.dlq_id).limit(2)).scalars().all()
        for number, old in enumerate(ids):
            same = f"aaaa{number}{old[5:]}"
            db.execute(update(message).where(message.c.dlq_id == old).values(dlq_id=same))
    code, _, said = desk.run("show", "aaaa")
    assert code == 2
    assert "write more" in said


def test_a_replay_says_what_it_lacks(desk: Desk) -> None:
    """A reason, a broker, somebody to ask, a rate that can be read; nothing is planned."""
    desk.fail(3, ValueError("bad"))
    group = desk.group()
    cases = (
        ((group,), "--reason"),
        ((group, "--reason", "x"), "--broker"),
        ((group, "--reason", "x", "--broker", desk.broker), "--yes"),
        ((group, "--dry-run", "--rate", "quick"), "500/s"),
        ((group, "--dry-run", "--ramp", "50%,10%"), "rising"),
        ((), "nothing is selected"),
    )
    for args, hint in cases:
        dry = ("--dry-run",) if not args else ()
        code, _, said = desk.run("replay", *args, *dry)
        assert code == 2, args
        assert hint in said, args
    assert Plans(desk.engine).latest() == []


def test_a_handler_that_cannot_be_imported_is_named(desk: Desk, tmp_path: Path) -> None:
    """Missing module, missing function, broken module, wrong form: each with its cause."""
    desk.fail(1, ValueError("bad"))
    group = desk.group()
    (tmp_path / "broken_shop.py").write_text("1 / 0\n")
    sys.path.insert(0, str(tmp_path))
    try:
        for name, hint in (
            ("no_such_shop:bill", "no_such_shop"),
            ("json:no_such_function", "no_such_function"),
            ("broken_shop:bill", "ZeroDivisionError"),
            ("nonsense", "module:function"),
            ("json:__name__", "not a function"),
        ):
            code, _, said = desk.run("simulate", group, "--handler", name)
            assert code == 2, name
            assert hint in said, name
            assert "Traceback" not in said
    finally:
        sys.path.remove(str(tmp_path))


def bill(order: dict[str, Any]) -> None:
    """Accept orders whose total is a number."""
    if not isinstance(order["total"], int):
        raise TypeError("total is no number")


def cents(order: dict[str, Any]) -> dict[str, Any]:
    """Repair an order."""
    return {**order, "total": int(order["total"]) * 100}


def test_an_edit_keeps_the_original_and_stores_the_difference(desk: Desk, tmp_path: Path) -> None:
    """A single letter from a file; a group by a function with a version; both are audited."""
    desk.fail(3, TypeError("total is no number"))
    group, module = desk.group(), __name__
    first = desk.json("list")[0]["dlq_id"]
    fixed = tmp_path / "fixed.json"
    fixed.write_bytes(b'{"number": 0, "total": 1200}')
    code, said, _ = desk.run("edit", first[:12], "--payload-file", str(fixed), "--reason", "OPS-1")
    assert code == 0
    assert "1200" in said
    fixed.write_bytes(b"{nonsense")
    assert desk.run("edit", first, "--payload-file", str(fixed), "--reason", "x")[0] == 2
    name = f"{module}:cents"
    code, _, said = desk.run("edit", group, "--transform", name, "--reason", "x", "--yes")
    assert code == 2
    assert "@1" in said
    assert desk.run("simulate", group, "--handler", f"{module}:bill")[0] == 1
    code, said, _ = desk.run(
        "edit", group, "--transform", f"{name}@1", "--handler", f"{module}:bill",
        "--reason", "cents", "--yes",
    )  # fmt: skip
    assert code == 0
    assert desk.run("simulate", group, "--handler", f"{module}:bill")[0] == 0
    with desk.engine.connect() as db:
        originals = db.execute(select(message.c.payload)).scalars().all()
        edits = db.execute(select(revision.c.revision, revision.c.transform)).all()
    assert all(b'"12"' in bytes(payload) for payload in originals)
    assert sorted(tuple(edit) for edit in edits) == [
        (1, ""), (1, f"{name}@1"), (1, f"{name}@1"), (2, f"{name}@1"),
    ]  # fmt: skip
    assert {entry["action"] for entry in desk.json("audit")} == {"edit", "transform"}


def test_acts_are_audited_and_a_changed_record_is_detected(desk: Desk) -> None:
    """Acknowledge, mute and discard; then somebody edits the record."""
    desk.fail(2, ValueError("bad"))
    group = desk.group()
    assert desk.run("ack", group, "--reason", "mine", "--owner", "ada", "--actor", "bob")[0] == 0
    assert desk.run("mute", group, "--for", "4h", "--reason", "deploy")[0] == 0
    assert desk.run("mute", group, "--for", "soon", "--reason", "deploy")[0] == 2
    code, _, said = desk.run("discard", group, "--reason", "test data")
    assert (code, "--yes" in said) == (2, True)
    assert desk.run("discard", group, "--reason", "test data", "--yes")[0] == 0
    assert desk.json("groups") == []
    assert desk.run("discard", group, "--reason", "again", "--yes")[0] == 1
    assert desk.run("audit", "--verify")[0] == 0
    with desk.engine.begin() as db:
        db.execute(update(audit).where(audit.c.seq == 1).values(reason="somebody else's"))
    code, said, _ = desk.run("audit", "--verify")
    assert code == 1
    assert "row 1" in said


def test_an_export_is_json_lines_in_plain_ascii(desk: Desk, tmp_path: Path) -> None:
    """Bytes as base64, so that nothing is lost on the way."""
    desk.fail(3, ValueError(HOSTILE), payload=b"\xff\x00")
    to = tmp_path / "letters.jsonl"
    assert desk.run("export", "--to", str(to))[0] == 0
    lines = [json.loads(line) for line in to.read_text("ascii").splitlines()]
    assert [line["payload_base64"] for line in lines] == ["/wA="] * 3
    assert desk.run("export", "--to", str(tmp_path / "letters.xml"))[0] == 2


@pytest.mark.parametrize("name", ["letters.jsonl", "letters.parquet"])
def test_an_export_is_private_without_credentials_and_audited(
    desk: Desk, tmp_path: Path, name: str
) -> None:
    """Nobody else may read the file; credentials leave only when they are asked for."""
    made = Message.new("orders", b"{}", key="k", headers={"authorization": "Bearer s3cr3t"})
    desk.home.put(capture(made, ValueError("bad"), group="billing", handler="shop.bill"))
    to = tmp_path / name
    to.write_text("")
    to.chmod(0o644)
    assert desk.run("export", "--to", str(to), "--reason", "for the vendor")[0] == 0
    assert to.stat().st_mode & 0o777 == 0o600
    assert b"s3cr3t" not in to.read_bytes()
    assert b"authorization" in to.read_bytes()
    (entry,) = desk.json("audit")
    assert (entry["action"], entry["reason"]) == ("export", "for the vendor")
    assert entry["detail"]["to"] == str(to)
    assert desk.run("export", "--to", str(to), "--with-credentials")[0] == 0
    assert b"s3cr3t" in to.read_bytes()
    assert desk.json("audit")[0]["detail"]["with_credentials"] is True


def test_an_export_takes_the_filters_of_the_list(desk: Desk) -> None:
    """What is seen is what is written."""
    desk.fail(3, ValueError("a"))
    desk.fail(2, KeyError("b"))
    for filters, found in ((("--error", "KeyError"), 2), (("--key", "k0"), 2),
                           (("--class", "unknown"), 5), (("--tenant", "x"), 0)):  # fmt: skip
        assert len(desk.json("list", *filters)) == found
        assert len(desk.run("export", *filters)[1].splitlines()) == found
    assert desk.run("export", "--class", "bogus")[0] == 2


def test_a_database_without_tables_is_told_apart_from_an_empty_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the command that makes them."""
    with pytest.raises(SystemExit) as ended:
        main(["dlq", "groups", "--database", f"sqlite:///{tmp_path}/empty.db"])
    assert ended.value.code == 2
    assert "holdfast db upgrade" in capsys.readouterr().err


def test_an_envelope_of_a_newer_version_is_shown_and_not_replayed(desk: Desk) -> None:
    """It is kept whole; the replay sets it aside and says why."""
    desk.fail(1, ValueError("bad"))
    with desk.engine.begin() as db:
        db.execute(update(message).values(schema_version=99, replayable=False))
    found = desk.json("replay", desk.group(), "--dry-run")
    assert found["count"] == 0
    assert found["aside"] == {"skipped": 1}
    assert desk.run("show", desk.group())[0] == 0


def test_the_help_lists_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts can rely on them."""
    with pytest.raises(SystemExit):
        main(["dlq", "--help"])
    assert "Exit codes" in capsys.readouterr().out
