"""What an operator agrees to is what is done, and who did it can be told."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import update

from holdfast.dlq import capture, close
from holdfast.dlq.protection.vault import MARK
from holdfast.dlq.replay import Plans, original
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.schema import plan as plan_table
from holdfast.dlq.store.schema import message as letters
from holdfast.headers import Headers
from holdfast.testing import wait_until
from tests.acceptance.test_dlq_cli_more import SEND, Desk, consumer
from tests.dead_letters import count, failed, letter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """Open a desk on SQLite."""
    made = Desk(tmp_path)
    yield made
    made.close()


class Slow(io.StringIO):
    """Somebody at a terminal who thinks for a while, during which something happens."""

    def __init__(self, text: str, meanwhile: Callable[[], Any]) -> None:
        super().__init__(text)
        self._meanwhile = meanwhile

    def isatty(self) -> bool:
        """Say that somebody is here."""
        return True

    def readline(self, *args: Any) -> str:
        """Let it happen, then answer."""
        self._meanwhile()
        return super().readline(*args)


def test_what_fails_while_the_question_is_open_is_not_sent(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """She agreed to three; the plan has three, and not the later ones of their keys."""
    desk.home.put_all([letter(n) for n in range(3)])

    def meanwhile() -> None:
        desk.home.put_all([letter(n, key=f"k{n % 5}") for n in range(10, 30)])

    arguments = [text for text in SEND if text != "--yes"]
    with monkeypatch.context() as patch:
        patch.setattr(io, "TextIOWrapper", lambda *_: Slow("y\n", meanwhile))
        said = desk.run("replay", "--topic", "orders", "--broker", desk.broker_url, *arguments)
    assert "Replay 3 messages" in said.stderr
    (plan,) = Plans(desk.engine).latest()
    assert (plan.total, plan.sent) == (3, 3)
    assert len(desk.sent()) == 3


def test_only_the_manifest_of_the_dry_run_is_sent(desk: Desk) -> None:
    """By its hash; if something came or went since, nothing is planned."""
    desk.home.put_all([letter(n) for n in range(3)])
    found = desk.json("replay", "--topic", "orders", "--canary", "0", "--dry-run")
    desk.home.put(letter(9))
    said = desk.replay("--topic", "orders", "--manifest", found["hash"][:12])
    assert said.returncode == 2
    assert "look again with --dry-run" in said.stderr
    assert Plans(desk.engine).latest() == []
    found = desk.json("replay", "--topic", "orders", "--canary", "0", "--dry-run")
    assert desk.replay("--topic", "orders", "--manifest", found["hash"][:12]).returncode == 6
    assert len(desk.sent()) == 4


def test_a_flag_only_lowers_the_size_above_which_somebody_else_looks(desk: Desk) -> None:
    """The environment's number is a ceiling; what waits is said in JSON, too."""
    desk.home.put_all([letter(n) for n in range(3)])
    said = desk.replay(
        "--topic", "orders", "--approve-above", "1000000", "--json", HOLDFAST_APPROVE_ABOVE="2"
    )
    assert said.returncode == 8
    assert json.loads(said.stdout)["ending"] == "waits for approval"
    assert desk.sent() == []
    (plan,) = Plans(desk.engine).latest()
    made_by = ("--actor", plan.created_by, "--reason", "mine")
    refused = desk.run("plans", "approve", plan.short, *made_by)
    assert (refused.returncode, "--actor" in refused.stderr) == (2, False)
    as_bob = ("plans", "approve", plan.short, "--actor", "bob", "--reason", "x")
    refused = desk.run(*as_bob)
    assert (refused.returncode, "--shared-account" in refused.stderr) == (2, True)
    assert desk.run(*as_bob, HOLDFAST_SHARED_ACCOUNT="1").returncode == 0
    entries = {entry["action"]: entry for entry in desk.audited()}
    approval = entries["replay.approve"]
    assert approval["actor"] == "bob"
    assert approval["detail"]["account"] == entries["replay.plan"]["detail"]["account"]
    assert "@" in approval["detail"]["account"]
    desk.home.put_all([letter(n) for n in range(10, 12)])
    said = desk.replay("--id", letter(10).dlq_id, "--approve-above", "0")
    assert said.returncode == 8


@pytest.mark.parametrize("written", ["1_000", " 50", "many", "-1"])
def test_a_ceiling_that_nobody_can_read_is_refused(desk: Desk, written: str) -> None:
    """With or without the flag; to ignore it would let every plan go."""
    desk.home.put(letter(1))
    for flags in ((), ("--approve-above", "5")):
        said = desk.replay("--topic", "orders", *flags, HOLDFAST_APPROVE_ABOVE=written)
        assert said.returncode == 2, said
        assert "HOLDFAST_APPROVE_ABOVE" in " ".join(said.stderr.split())
    assert Plans(desk.engine).latest() == []


def test_failures_while_no_sender_lives_stop_the_next_one(desk: Desk) -> None:
    """A real process, killed at a gate; what it had sent fails, and nothing follows it."""
    desk.home.put_all([letter(n) for n in range(40)])
    with subprocess.Popen(
        [sys.executable, "-P", "-c", "from holdfast.cli import main; main()", "dlq", "replay",
         "--topic", "orders", "--yes", "--canary", "0", "--ramp", "50%", "--patience", "2m",
         "--reason", "fixed", "--database", desk.url, "--broker", desk.broker_url],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            wait_until(lambda: any(plan.sent == 20 for plan in Plans(desk.engine).latest()),
                       deadline=120, what="it waits at its gate")  # fmt: skip
        finally:
            process.kill()
    (plan,) = Plans(desk.engine).latest()
    assert plan.state == "ramping"
    with desk.engine.begin() as db:  # its lease has run out
        db.execute(update(plan_table).values(until=1.0))
    _fail_again(desk, 20)
    resume = ("plans", "resume", plan.short, "--reason", "x", "--broker", desk.broker_url)
    said = desk.run(*resume)
    assert said.returncode == 5, said
    assert "20 of the last 20 failed again" in said.stdout
    assert "forgiven" not in said.stdout
    assert len(desk.sent()) == 20
    with consumer(desk):
        said = desk.run(*resume)
    assert said.returncode == 7, said
    assert "20 failures since the last resume are forgiven" in said.stdout
    assert "make a new one with  holdfast dlq replay" in said.stdout


def _fail_again(desk: Desk, wanted: int) -> None:
    """Be the group, whose handler is as broken as before."""
    source = desk.broker.source(["orders.billing.replay"], group="billing")
    seen = 0
    while seen < wanted:
        batch = source.poll(100, 0.5)
        for one in batch:
            error = failed(ValueError("bad order"))
            again = capture(original(one.message), error, group="billing", handler="shop.bill")
            desk.home.put(again)
        source.accept(batch)
        seen += len(batch)
    source.close()


def test_nothing_due_is_no_failure(desk: Desk) -> None:
    """A timer that asks every minute is quiet."""
    said = desk.replay("--due")
    assert (said.returncode, said.stdout) == (0, "nothing is due for a retry\n")
    assert json.loads(desk.replay("--due", "--json").stdout)["ending"] == "nothing due"


def test_encrypted_fields_are_shown_as_stars(desk: Desk) -> None:
    """To people and to scripts; it is said for whom they are encrypted."""
    made = desk.seal(1)
    said = desk.run("show", made).stdout
    assert "encrypted for c-1: name" in said
    assert '"name": "***"' in said
    found = desk.json("show", made)["letter"]
    assert '"name": "***"' in found["payload"]["text"]
    assert found["encrypted"] == ["name"]
    for output in (said, json.dumps(found)):
        assert MARK not in output


def test_foreign_text_cannot_pass_for_a_line_of_ours(desk: Desk) -> None:
    """Every line of an error, a header or a payload is marked."""
    forged = "no\nplan 12345678: confirmed"
    headers = Headers([("x-note", forged.encode())])
    desk.home.put(letter(1, failed(ValueError(forged)), payload=forged.encode(), headers=headers))
    (found,) = desk.json("list")
    lines = desk.run("show", found["dlq_id"]).stdout.splitlines()
    assert sum("plan 12345678" in line for line in lines) >= 3
    assert not [line for line in lines if line.lstrip().startswith("plan 12345678")]


@pytest.mark.parametrize("command", ["list", "groups", "replay"])
def test_a_filter_that_is_no_text_is_refused(desk: Desk, command: str) -> None:
    """A byte that is not UTF-8, as the shell hands it on."""
    more = ("--dry-run",) if command == "replay" else ()
    said = desk.run(command, "--topic", "\udcff", *more)
    assert said.returncode == 2
    assert "is not UTF-8" in said.stderr


def test_an_export_whose_reader_has_enough_ends_quietly(desk: Desk) -> None:
    """As `head` does."""
    desk.home.put_all([letter(n, payload=b"x" * 500) for n in range(300)])
    command = [sys.executable, "-c", "from holdfast.cli import main; main()", "dlq", "export"]
    with subprocess.Popen(
        [*command, "--to", "-", "--database", desk.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


def test_every_discarded_id_is_in_the_audit_and_what_a_plan_has_is_counted(desk: Desk) -> None:
    """However many there are; the rest of a group is said to be left alone."""
    desk.home.put_all([letter(n) for n in range(1203)])
    (group,) = desk.json("groups")
    chosen = letter(0).dlq_id
    assert desk.replay("--id", chosen).returncode == 6
    said = desk.run("discard", group["group_id"], "--reason", "test data", "--yes")
    assert "1,202 messages are discarded" in said.stdout
    assert "1 belong to a plan and were left alone" in said.stdout
    parts = [entry["detail"] for entry in desk.audited() if entry["action"] == "discard"]
    assert sorted(part["part"] for part in parts) == ["1 of 2", "2 of 2"]
    ids = {dlq_id for part in parts for dlq_id in part["ids"]}
    assert ids == {letter(n).dlq_id for n in range(1, 1203)}


def test_a_plan_is_pruned_after_the_last_of_its_letters(desk: Desk) -> None:
    """Not before, and never one that has not ended."""
    desk.home.put_all([letter(n) for n in range(2)])
    desk.replay("--topic", "orders")
    (plan,) = Plans(desk.engine).latest()
    assert "0 plans" in desk.run("prune", "--older-than", "0s", "--yes").stdout
    with desk.engine.begin() as db:
        db.execute(update(plan_table).values(state="done", ended_at=1.0))
    assert "0 plans" in desk.run("prune", "--older-than", "0s", "--yes").stdout
    with desk.engine.begin() as db:
        ids = [letter(n).dlq_id for n in range(2)]
        close(db, ids, "confirmed", actor="ada", reason="seen")
        db.execute(update(letters).values(closed_at=1.0))
    said = desk.run("prune", "--older-than", "0s", "--yes").stdout
    assert "deleted 2 closed dead letters and 1 plans" in said
    assert Plans(desk.engine).latest() == []
    assert count(desk.engine, item) == 0
    assert plan.total == 2
    last = desk.audited()[0]
    assert (last["action"], last["subject"]) == ("prune", f"plan {plan.id}")


def test_every_act_answers_in_json(desk: Desk) -> None:
    """So that a script need not read sentences."""
    desk.seal(1)
    desk.home.put_all([letter(n) for n in range(2, 5)])
    group = letter_group(desk, letter(2).dlq_id)
    why = ("--reason", "OPS-12")
    assert desk.json("ack", group, *why)["state"] == "acknowledged"
    assert desk.json("mute", group, "--for", "4h", *why)["state"] == "muted"
    assert desk.json("note", group, "no VAT since Monday")["note"] == "no VAT since Monday"
    edit = desk.json("edit", letter(2).dlq_id, "--header", "x-note=1", *why)
    assert edit["revision"] == 1
    said = desk.run("resolve", group, *why)
    assert (said.returncode, "pending" in said.stderr) == (2, True)
    desk.replay("--id", letter(2).dlq_id)
    (plan,) = Plans(desk.engine).latest()
    assert desk.json("plans", "pause", plan.short, *why)["state"] == "paused"
    assert desk.json("plans", "abort", plan.short, *why)["state"] == "aborted"
    assert desk.json("discard", "--id", letter(3).dlq_id, *why, "--yes")["count"] == 1
    assert desk.json("reopen", "--id", letter(3).dlq_id, *why, "--yes")["count"] == 1
    assert desk.json("forget", "c-1", *why, "--yes") == {"subject": "c-1", "forgotten": True}
    assert desk.json("prune", "--dry-run") == {"would_delete": 0}
    assert desk.json("prune")["deleted"] == 0
    assert desk.json("regroup", *why, "--yes") == []
    assert desk.json("discard", group, *why, "--yes")["state"] == "discarded"
    assert desk.json("resolve", group, *why)["state"] == "resolved"


def letter_group(desk: Desk, dlq_id: str) -> str:
    """Return the failure group of a letter."""
    return str(desk.json("explain", dlq_id)["group_id"])


def test_the_command_tells_a_new_problem_once(desk: Desk, tmp_path: Path) -> None:
    """To a program without a shell; whom to tell must be said."""
    desk.home.put(letter(1, failed(RuntimeError("odd"))))
    assert "--webhook" in desk.run("alerts").stderr
    program = tmp_path / "tell.py"
    heard_in = tmp_path / "heard"
    program.write_text(
        f"import sys; open({str(heard_in)!r}, 'a').write(sys.stdin.read() + chr(10))"
    )
    run = ("alerts", "--run", f"{sys.executable} {program}")
    assert [desk.json(*run)["told"] for _ in range(2)] == [1, 0]
    (heard,) = heard_in.read_text().splitlines()
    assert "odd" in json.loads(heard)["title"]
