"""Long work shows how far it is and how long it takes, on a terminal and nowhere else."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import update

from holdfast.cli import display
from holdfast.dlq import DeadLetterTopic
from holdfast.dlq.store.schema import message
from tests import shell
from tests.acceptance.test_dlq_replay_cli import Desk
from tests.dead_letters import letter

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

CODE = """
def passes(order: dict) -> None: ...

def more(order: dict) -> dict:
    return {**order, "n": 2}
"""


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """Open a desk with three dead letters."""
    made = Desk(tmp_path)
    made.code(CODE)
    made.home.put_all([letter(n) for n in range(3)])
    yield made
    made.broker.close()
    made.engine.dispose()


def _simulate(desk: Desk) -> subprocess.CompletedProcess[str]:
    return desk.run("simulate", desk.group, "--handler", f"{desk.module}:passes")


def _edit(desk: Desk) -> subprocess.CompletedProcess[str]:
    return desk.run("edit", desk.group, "--transform", f"{desk.module}:more@1", "--reason", "x",
                    "--yes")  # fmt: skip


def _export(desk: Desk) -> subprocess.CompletedProcess[str]:
    return desk.run("export", "--to", str(desk.folder / "all.jsonl"))


def _prune(desk: Desk) -> subprocess.CompletedProcess[str]:
    with desk.engine.begin() as db:
        db.execute(update(message).values(state="confirmed", closed_at=1.0, closed_by="ada"))
    return desk.run("prune", "--yes")


def _collect(desk: Desk) -> subprocess.CompletedProcess[str]:
    home = DeadLetterTopic.on(desk.broker)
    for number in range(10, 13):
        home.put(letter(number))
    return desk.run("collect", "orders.billing.dlq", "--once", "--broker", desk.broker_url)


@pytest.mark.parametrize(
    ("work", "word"),
    [
        (_simulate, "tried"),
        (_edit, "edited"),
        (_export, "exported"),
        (_prune, "deleted"),
        (_collect, "collected"),
    ],
)
def test_long_work_shows_how_far_it_is(
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Desk], subprocess.CompletedProcess[str]],
    word: str,
) -> None:
    """The bar is on the error stream, so that a script reads what it always did."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(shell, "_shown", lambda *_: nullcontext())  # this terminal is its own
    monkeypatch.setattr(display.err, "_force_terminal", True)
    monkeypatch.setattr(display.err, "is_interactive", True)
    monkeypatch.setattr(display.err, "width", 120)
    said = work(desk)
    assert said.returncode == 0, said
    assert f"3 of 3 {word}" in said.stderr
    assert f"3 of 3 {word}" not in said.stdout


def test_elsewhere_nothing_is_drawn(desk: Desk) -> None:
    """A log file needs no bars."""
    assert _simulate(desk).stderr == ""


def test_a_dry_run_says_how_long_it_takes_also_without_a_rate(desk: Desk) -> None:
    """By a rate that it names."""
    look = ("replay", "--topic", "orders", "--dry-run")
    assert "at 500/s, say" in desk.run(*look).stdout
    found = desk.json(*look)
    assert (found["seconds"], found["assumed_rate"]) == (3 / 500, 500)
    found = desk.json(*look, "--rate", "1/m")
    assert (found["seconds"], found["assumed_rate"]) == (180, None)
