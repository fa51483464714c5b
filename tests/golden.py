"""Screens that are kept as files: what people see is compared byte for byte.

`screens` runs the command in a terminal of 80 columns and compares what it prints with a file of
`tests/acceptance/golden`. `pytest --update-golden` writes the files anew; look at the difference
before you commit it.

`frozen` stops every clock of the process at `NOW`, that of SQLite too, counts ids instead of
drawing them, and names the host. Nothing in a screen then depends on the machine: no width, zone,
colour, locale.
"""

from __future__ import annotations

import itertools
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from holdfast.clock import SystemClock
from holdfast.ids import Uuid7
from tests.shell import shell

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parent / "acceptance" / "golden"
NOW = datetime(2026, 11, 18, 3, 0, 0, tzinfo=UTC)
"""An eighth of a day: a Julian date holds it exactly, so no age is off by a second."""
_JULIAN = 2440587.5 + NOW.timestamp() / 86400.0
_WIDTH = 80


class Screens:
    """The command in a folder with a database `shop.db` and a broker `broker.db`."""

    def __init__(self, folder: Path, *, update: bool) -> None:
        self.folder = folder
        self.urls = {
            "HOLDFAST_DATABASE": "sqlite:///shop.db",
            "HOLDFAST_BROKER": "sqlite:///broker.db",
            "HOLDFAST_WITHIN": "120s",  # a busy machine is no other screen
        }
        self._update = update

    def run(self, *words: str, terminal: int | None = _WIDTH) -> str:
        """Return what the command *words* shows, with its exit code if that is not 0."""
        done = shell(*words, cwd=self.folder, terminal=terminal, **self.urls)
        assert "Traceback" not in done.stderr
        shown = f"$ holdfast {' '.join(words)}\n{done.stdout}"
        if done.stderr:
            shown += f"[standard error]\n{done.stderr}"
        return shown if done.returncode == 0 else f"{shown}[exit code {done.returncode}]\n"

    def check(self, name: str, *words: str) -> None:
        """Compare what the command *words* shows with the file *name*; or write the file."""
        shown, file = self.run(*words), FOLDER / f"{name}.txt"
        if self._update:
            FOLDER.mkdir(exist_ok=True)
            file.write_text(shown, encoding="utf-8", newline="\n")
        assert file.exists(), f"no {file.name}: run pytest with --update-golden, and look at it"
        assert shown.encode() == file.read_bytes(), f"{file.name}: is the new screen better?"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer `--update-golden`."""
    parser.addoption(
        "--update-golden", action="store_true", help="write the screens of tests/acceptance/golden"
    )


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[datetime]:
    """Stop the clocks at `NOW`, those of SQLite's connections too, and count ids."""
    numbers = itertools.count(1)
    monkeypatch.setattr(SystemClock, "now", lambda _: NOW)
    monkeypatch.setattr(socket, "gethostname", lambda: "host-1")
    monkeypatch.setattr(Uuid7, "__call__", lambda _: _counted(next(numbers)))
    event.listen(Engine, "connect", _stopped)
    yield NOW
    event.remove(Engine, "connect", _stopped)


@pytest.fixture
def screens(frozen: datetime, tmp_path: Path, request: pytest.FixtureRequest) -> Screens:
    """Return the command in a new folder, at `NOW`."""
    return Screens(tmp_path, update=request.config.getoption("update_golden"))


def _counted(number: int) -> str:
    """Return an id whose first and last characters tell it from the others."""
    return f"{number:04x}6d01-8694-739b-aea5-966c26f8{number:04x}"


def _stopped(connection: Any, _record: object) -> None:
    if hasattr(connection, "create_function"):  # SQLite's
        connection.create_function("julianday", 1, lambda _: _JULIAN)
