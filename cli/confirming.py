"""Asking before acts that nobody can undo: what goes is shown, and a script says --yes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from holdfast.cli.display import say
from holdfast.cli.exits import EXIT_NOT_FOUND
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

LARGE = 100
"""From here on the count is typed, not a letter."""


def confirm(
    what: str, *, count: int = 1, shown: Sequence[str] = (), yes: bool, as_json: bool = False
) -> None:
    """Go on only when somebody agrees to *what*; a script, which is not asked, says --yes.

    *shown* is what goes, line by line. From 100 on the *count* is typed.
    """
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        told = f" ({'; '.join(shown)})" if shown else ""
        raise ConfigurationError(f"{what}{told}: nobody is here to ask; add --yes")
    for line in shown:
        say(line)
    if count < LARGE:
        if typer.confirm(f"{what}?", err=True):
            return
    else:
        typed = typer.prompt(f"{what}? Type the number {count} to go on", err=True)
        if str(typed).replace(",", "").strip() == str(count):
            return
    say("left as it is")
    raise SystemExit(EXIT_NOT_FOUND)
