"""A member that dies where it is told to: `python -m holdfast.testing.member --help`.

The conformance kit runs it as a process of its own, and kills it as the kernel would.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.ports import Delivery, Source

Moment = Literal["received", "handled", "accepted"]
"""A message was handed out; its effect is on disk; its accept is flushed."""

_LIMIT = 10
_TIMEOUT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What a member does until it dies at *moment* of its *nth* message.

    Without a moment it holds what it receives until somebody kills it.
    """

    moment: Moment | None = None
    nth: int = 1
    unaccepted: frozenset[int] = frozenset()
    """Which messages (from 1) it handles and leaves unsettled."""


def live(
    source: Source,
    life: Life,
    note: Callable[[str, Delivery | None], None],
    die: Callable[[], NoReturn],
) -> NoReturn:
    """Handle messages one after the other, note each moment, and die as *life* has it."""
    number = 0
    is_member = False

    def reach(moment: Moment, delivery: Delivery) -> None:
        note(moment, delivery)
        if (moment, number) == (life.moment, life.nth):
            die()

    while True:
        deliveries = source.poll(_LIMIT, _TIMEOUT)
        if not is_member and source.assignment():
            is_member = True
            note("joined", None)
        for delivery in deliveries:
            number += 1
            reach("received", delivery)
            if life.moment is None:
                continue
            reach("handled", delivery)
            if number not in life.unaccepted:
                source.accept([delivery])
                source.flush()
                reach("accepted", delivery)


class Log:
    """Notes on disk, which survive the death of their writer."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, moment: str, delivery: Delivery | None) -> None:
        """Append one line, and return when it is on disk."""
        body = b"" if delivery is None else delivery.body or b""
        with self._path.open("a") as file:
            file.write(f"{moment} {body.hex()}\n")
            file.flush()
            os.fsync(file.fileno())

    def bodies(self, moment: str) -> list[bytes]:
        """Return the bodies noted at *moment*, in order."""
        if not self._path.exists():
            return []
        lines = self._path.read_text().splitlines(keepends=True)
        noted = [line.split() for line in lines if line.endswith("\n")]
        return [bytes.fromhex("".join(rest)) for own, *rest in noted if own == moment]


def kill_myself() -> NoReturn:
    """Die at once, without a chance to clean up."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit("SIGKILL did not kill")


def main(arguments: Sequence[str]) -> NoReturn:
    """Join the group and live as told."""
    from holdfast.brokers import connect

    parser = argparse.ArgumentParser(prog="holdfast.testing.member", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("topic")
    parser.add_argument("group")
    parser.add_argument("log", type=Path)
    parser.add_argument("--moment", choices=get_args(Moment))
    parser.add_argument("--nth", type=int, default=1)
    parser.add_argument("--unaccepted", type=int, nargs="*", default=[])
    parser.add_argument("--settings", type=json.loads, default={})
    given = parser.parse_args(arguments)
    source = connect(given.url).source([given.topic], group=given.group, **given.settings)
    life = Life(moment=given.moment, nth=given.nth, unaccepted=frozenset(given.unaccepted))
    live(source, life, Log(given.log).note, kill_myself)


if __name__ == "__main__":
    main(sys.argv[1:])
