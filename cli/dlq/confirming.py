"""Asking before large or final acts: the count is typed, not a letter."""

from __future__ import annotations

import sys

import typer

from holdfast.cli.display import say
from holdfast.cli.failures import EXIT_NOT_FOUND
from holdfast.errors import ConfigurationError

LARGE = 100
"""From here on the count is typed."""


def confirm(count: int, what: str, *, yes: bool) -> None:
    """Go on only when somebody agrees; a script says --yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigurationError(f"{what}: nobody is here to ask; add --yes")
    if count < LARGE:
        if typer.confirm(f"{what}?"):
            return
    else:
        typed = typer.prompt(f"{what}? Type the number {count} to go on")
        if str(typed).replace(",", "").strip() == str(count):
            return
    say("left as it is")
    raise SystemExit(EXIT_NOT_FOUND)
