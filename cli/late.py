"""Commands whose module is imported only when they are called, so that the others start fast."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
import typer.main
from typer.core import TyperGroup

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Late:
    """A command: its name, where it is, and its line in --help.

    *target* is `module:function`, or `module:app` for a Typer application, which becomes a
    group. The example at the end of a function's --help is *example*, or else its module's
    EXAMPLE.
    """

    name: str
    target: str
    summary: str
    example: str | None = None

    def load(self) -> Any:
        """Import the command and return it as Typer's parser knows it."""
        module_name, _, attribute = self.target.partition(":")
        module = import_module(module_name)
        target = getattr(module, attribute)
        if isinstance(target, typer.Typer):
            group = typer.main.get_group(target)
            group.name = self.name
            return _flowing(group)
        single = typer.Typer(add_completion=False)
        epilog = f"Example: {self.example}" if self.example else module.EXAMPLE
        single.command(self.name, epilog=epilog)(target)
        return _flowing(typer.main.get_command(single))


def _flowing(command: Any) -> Any:
    """Let the terminal break the lines of --help, not the source: paragraphs flow."""
    if command.help:
        paragraphs = inspect.cleandoc(command.help).split("\n\n")
        command.help = "\n\n".join(" ".join(each.split("\n")) for each in paragraphs)
    for inner in getattr(command, "commands", {}).values():
        _flowing(inner)
    return command


class LateGroup(TyperGroup):
    """Shows commands by their lines in the table, and imports the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command that *args* name, imported now."""
        name, command, rest = super().resolve_command(ctx, args)
        late = getattr(getattr(command, "callback", None), "late", None)
        return name, command if late is None else late.load(), rest


def add_late(app: typer.Typer, commands: Iterable[Late]) -> None:
    """Add *commands* to *app*, in their order in --help."""
    for late in commands:

        def stub() -> None:
            """Stand for the command until it is called."""

        stub.late = late  # type: ignore[attr-defined]
        epilog = None if late.example is None else f"Example: {late.example}"
        app.command(late.name, help=late.summary, epilog=epilog)(stub)
