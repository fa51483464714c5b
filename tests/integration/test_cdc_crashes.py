"""A capture that is killed again and again loses nothing and keeps each key's order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.testing import check_nothing_lost, check_order_per_key, wait_until
from tests.cdc.source import Source, captured

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Postgres

CAPTURE = Path(__file__).parents[1] / "cdc" / "capture.py"


@pytest.fixture
def source(postgres: Postgres, request: pytest.FixtureRequest) -> Iterator[Source]:
    """Yield a database of its own; its slot goes with it."""
    with captured(postgres, request.node.name) as source:
        yield source


class Captures:
    """Capture processes, one after the other, and what they published."""

    def __init__(self, source: Source, path: Path) -> None:
        self._source = source
        self._path = path

    def start(self, moment: str = "never", nth: int = 0) -> subprocess.Popen[bytes]:
        """Start a process that dies at the *moment*."""
        given = [self._source.url, self._source.server, str(self._path), moment, str(nth)]
        return subprocess.Popen([sys.executable, str(CAPTURE), *given])

    def killed(self, moment: str, nth: int) -> None:
        """Run a process until it has died there."""
        process = self.start(moment, nth)
        try:
            assert process.wait(90) == -9
        finally:
            process.kill()
            process.wait()

    def seen(self) -> list[tuple[int, Any]]:
        """Return key and state of every change in the order of their arrival; None is deleted."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        told = [(op, key["id"], after) for op, key, after in map(json.loads, lines) if op]
        return [(key, None if after is None else after["name"]) for _, key, after in told]


def test_a_capture_killed_at_the_worst_moments_loses_nothing(
    source: Source, tmp_path: Path
) -> None:
    """In the snapshot, between it and the stream, and around publishing and confirming."""
    captures = Captures(source, tmp_path / "published")
    source.run("INSERT INTO item SELECT n, 'v0' FROM generate_series(1, 12) AS n")
    captures.killed("after", 2)  # in the middle of the snapshot: it starts again
    source.run("DELETE FROM item WHERE id = 12")
    captures.killed("before", 2)
    captures.killed("kept", 1)
    assert {(n, "v0") for n in range(1, 12)} <= set(captures.seen())
    sent: list[tuple[int, Any]] = []
    for number, (moment, nth) in enumerate([("before", 1), ("after", 2), ("told", 1)], 1):
        for key in range(1, 9):
            source.run(f"UPDATE item SET name = 'v{number}' WHERE id = {key}")  # noqa: S608
            sent.append((key, f"v{number}"))
        captures.killed(moment, nth)
    source.run("DELETE FROM item WHERE id IN (1, 2)")
    sent += [(1, None), (2, None)]
    last = captures.start()
    try:
        wait_until(lambda: set(sent) <= set(captures.seen()), deadline=90, what="all is published")
        last.terminate()
        assert last.wait(90) == 0
    finally:
        last.kill()
        last.wait()
    check_nothing_lost(sent, captures.seen())
    check_order_per_key(sent, captures.seen())
    assert dict(captures.seen()) == {  # the last state of each, as in the table
        1: None, 2: None, **dict.fromkeys(range(3, 9), "v3"), **dict.fromkeys(range(9, 12), "v0"),
    }  # fmt: skip
