"""A handler with `@participant`: each step is done or undone once, whatever comes when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.consumer import HandlerEnding
from holdfast.db import open_database
from holdfast.errors import ConfigurationError
from holdfast.sagas import StepFailed, participant
from holdfast.testing import wait_until
from tests.saga_shop.office import Office, command

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
TICKET = b'{"ticket":"12A, call 1"}'


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/office.db"
    return str(request.getfixturevalue(request.param).database("saga_office"))


@pytest.fixture
def office(url: str) -> Iterator[Office]:
    """Open an office."""
    office = Office(open_database(url))
    yield office
    office.close()


def test_an_undo_of_nothing_does_nothing_and_is_answered(office: Office) -> None:
    """However often it comes."""
    for number in range(2):
        assert office.handle(command(f"u{number}", "undo")).ending is HandlerEnding.HANDLED
    assert (office.calls, office.effects()) == (0, [])
    assert [answer for answer, _ in office.replies()] == ["done", "done"]


def test_a_do_that_comes_after_its_undo_is_refused(office: Office) -> None:
    """Of any attempt; the saga hears that it failed for good."""
    office.handle(command("u", "undo"))
    for attempt in (1, 2):
        office.handle(command(f"d{attempt}", attempt=attempt))
    assert (office.calls, office.effects()) == (0, [])
    assert [answer for answer, _ in office.replies()] == ["done", "failed", "failed"]


def test_a_do_that_comes_again_is_answered_with_the_first_reply(office: Office) -> None:
    """As the same message, and as the next attempt."""
    first = command("d1")
    for message in (first, first, command("d2", attempt=2)):
        office.handle(message)
    assert office.effects() == [("booked", 1)]
    assert office.replies() == [("done", TICKET)] * 3


def test_what_was_done_is_undone_once(office: Office) -> None:
    """And stays undone when the do comes again."""
    office.handle(command("d1"))
    for attempt in (1, 2):
        office.handle(command(f"u{attempt}", "undo", attempt))
    office.handle(command("d2", attempt=2))
    assert office.effects() == [("booked", 1), ("freed", 1)]
    assert [answer for answer, _ in office.replies()] == ["done", "done", "done", "failed"]


def test_an_attempt_that_failed_keeps_those_before_it_from_being_done(office: Office) -> None:
    """Its own writes are rolled back; a later attempt may pass."""
    office.failing += [StepFailed("busy", again=True)]
    office.handle(command("d2", attempt=2))
    office.handle(command("d1", attempt=1))
    assert office.effects() == []
    office.handle(command("d3", attempt=3))
    assert office.effects() == [("booked", 3)]
    assert [answer for answer, _ in office.replies()] == [
        "failed-for-now", "failed-for-now", "done"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("moment", "happened"),
    [("handler", []), ("commit", []), ("acknowledge", [("booked", 1)])],
)
def test_a_process_that_is_killed_leaves_all_of_it_or_nothing(
    url: str, moment: str, happened: list[tuple[str, int]]
) -> None:
    """Effect, mark and reply: the command comes again, and is carried out once all the same."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "tests.saga_shop.office", url, moment, "d1", "do", "1"]
    done = subprocess.run(
        argv, cwd=ROOT, env=environment, timeout=120, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    office = Office(open_database(url))
    assert office.effects() == happened
    replies = [("done", TICKET)] if happened else []
    assert office.replies() == replies
    wait_until(
        lambda: office.handle(command("d1")).ending is HandlerEnding.HANDLED,
        deadline=60, what="the dead process is given up",
    )  # fmt: skip
    assert office.effects() == [("booked", 1)]
    assert office.replies() == [("done", TICKET)]
    office.close()


def test_a_handler_without_a_session_is_told_what_it_lacks() -> None:
    """When it is called outside of a consumer, too."""

    @participant
    def book(seat: dict[str, str]) -> None: ...

    with pytest.raises(ConfigurationError, match="take a session: Session"):
        book({"name": "12A"})
