"""README's own programs, run in every way that it names: a message that comes again has one effect.

The programs are taken from the page as they stand there.
"""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.brokers import connect
from tests.servers.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.message import Message

README = Path(__file__).parents[2] / "README.md"
HOLDFAST = Path(sys.executable).with_name("holdfast")
BROKER = "sqlite:///broker.db"


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write README's programs into an empty folder; let the service and the relay do their part."""
    monkeypatch.chdir(tmp_path)
    named = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    for name, block in named.findall(README.read_text()):
        (tmp_path / name).write_text(block)
    run(sys.executable, "service.py")
    run(HOLDFAST, "relay", "--once", "--database", "sqlite:///shop.db", "--broker", BROKER)
    return tmp_path


def run(*command: str | Path) -> str:
    """Run *command* to its end; it must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def environment() -> dict[str, str]:
    """Let programs import what lies beside them, as they do for everybody."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}


def as_script() -> None:
    """Run the consumer as README does."""
    run(sys.executable, "billing.py")


def as_module() -> None:
    """Run it as a module."""
    run(sys.executable, "-m", "billing")


def by_path() -> None:
    """Run it as a script from somewhere else."""
    run(sys.executable, str(Path("billing.py").resolve()))


def by_command() -> None:
    """Run it as README says that it runs in production, until nothing is left."""
    with subprocess.Popen(
        [HOLDFAST, "consume", "billing:billing"], stderr=subprocess.DEVNULL, env=environment()
    ) as process:
        try:
            wait_until(lambda: not any(connect(BROKER).lag("billing", ["orders"]).values()),
                       "all is settled")  # fmt: skip
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0


def published() -> Message:
    """Return the event that the service published."""
    with source("onlooker") as deliveries:
        return next(deliveries).message


class source:  # noqa: N801 - reads as what it opens
    """The deliveries of the topic, to a group of our own."""

    def __init__(self, group: str) -> None:
        self._source = connect(BROKER).source(["orders"], group=group)

    def __enter__(self) -> Iterator[object]:
        return self._polled()

    def __exit__(self, *_: object) -> None:
        self._source.close()

    def _polled(self) -> Iterator[object]:
        while True:
            yield from self._source.poll(10, 1.0)


def send_again(message: Message) -> None:
    """Put the same event on the topic once more, as a relay that was killed does."""
    sink = connect(BROKER).sink()
    sink.publish([message])
    sink.close()


def charges() -> int:
    """Count what was charged."""
    with sqlite3.connect("billing.db") as db:
        return int(db.execute("SELECT count(*) FROM charges").fetchone()[0])


@pytest.mark.parametrize(
    "ways",
    [(as_script, by_command, as_module), (by_command, by_path)],
    ids=lambda ways: " then ".join(way.__name__ for way in ways),
)
@pytest.mark.usefixtures("shop")
def test_a_redelivered_message_is_charged_once_however_the_program_is_started(
    ways: tuple[Callable[[], None], ...],
) -> None:
    event = published()
    for way in ways:
        way()
        assert charges() == 1
        send_again(event)
    ways[0]()
    assert charges() == 1
