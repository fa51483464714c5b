"""What an operator agrees to is what is done, and who did it can be told."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.dlq.replay import Plans
from tests.acceptance.test_dlq_cli_more import SEND, Desk
from tests.dead_letters import letter

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
    assert "Replay 3 messages" in said.stdout
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
    assert (
        desk.run("plans", "approve", plan.short, "--actor", "bob", "--reason", "x").returncode == 0
    )
    entries = {entry["action"]: entry for entry in desk.audited()}
    approval = entries["replay.approve"]
    assert approval["actor"] == "bob"
    assert approval["detail"]["account"] == entries["replay.plan"]["detail"]["account"]
    assert "@" in approval["detail"]["account"]
    desk.home.put_all([letter(n) for n in range(10, 12)])
    said = desk.replay("--id", letter(10).dlq_id, "--approve-above", "0")
    assert said.returncode == 8


def test_nothing_due_is_no_failure(desk: Desk) -> None:
    """A timer that asks every minute is quiet."""
    said = desk.replay("--due")
    assert (said.returncode, said.stdout) == (0, "nothing is due for a retry\n")
    assert json.loads(desk.replay("--due", "--json").stdout)["ending"] == "nothing due"
