"""The member that dies on purpose leaves exactly what its moment says."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from holdfast.brokers import connect
from holdfast.message import Message
from holdfast.testing.member import Log

if TYPE_CHECKING:
    from pathlib import Path

BODIES = [b"a", b"b", b"c"]


def died(folder: Path, *options: str) -> Log:
    """Run a member over three messages to its death, and return its notes."""
    url = f"sqlite:///{folder}/broker.db"
    broker = connect(url)
    broker.create_topic("t")
    sink = broker.sink()
    sink.publish([Message.new("t", body, key=b"k") for body in BODIES])
    sink.close()
    broker.close()
    log = folder / "log"
    command = [sys.executable, "-m", "holdfast.testing.member", url, "t", "g", str(log)]
    ended = subprocess.run([*command, *options], capture_output=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    return Log(log)


@pytest.mark.programs
@pytest.mark.parametrize(
    ("moment", "received", "handled", "accepted"),
    [
        ("received", BODIES[:2], BODIES[:1], BODIES[:1]),
        ("handled", BODIES[:2], BODIES[:2], BODIES[:1]),
        ("accepted", BODIES[:2], BODIES[:2], BODIES[:2]),
    ],
)
def test_it_dies_at_the_moment_of_the_message(
    moment: str,
    received: list[bytes],
    handled: list[bytes],
    accepted: list[bytes],
    tmp_path: Path,
) -> None:
    """What came before is on disk, and nothing after it happened."""
    log = died(tmp_path, "--moment", moment, "--nth", "2")
    assert log.bodies("received") == received
    assert log.bodies("handled") == handled
    assert log.bodies("accepted") == accepted


@pytest.mark.programs
def test_it_can_leave_messages_unaccepted(tmp_path: Path) -> None:
    """The first is handled and not settled, the others are."""
    log = died(tmp_path, "--moment", "accepted", "--nth", "3", "--unaccepted", "1")
    assert log.bodies("handled") == BODIES
    assert log.bodies("accepted") == BODIES[1:]


def test_notes_that_were_cut_short_are_no_notes(tmp_path: Path) -> None:
    """A line without its end was being written when the writer died."""
    path = tmp_path / "log"
    path.write_text("joined \nreceived 61\nreceived 6")
    assert Log(path).bodies("received") == [b"a"]
    assert Log(path).bodies("joined") == [b""]
    assert Log(tmp_path / "none").bodies("received") == []
