"""Commands whose module is imported only when they are called, so that the others start fast.

Options that belong together, declared once as a frozen dataclass.

A command takes the group as one parameter, `wanted: LetterFilter`, and `grouped` gives its fields
to the command line as if they had been written out.
"""

from __future__ import annotations

import inspect
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_type_hints

import typer
import typer.main
from typer.core import TyperGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return *command* with the options of its groups as parameters of its own."""
    signature = inspect.signature(command, eval_str=True)
    groups = {
        one.name: one.annotation
        for one in signature.parameters.values()
        if isinstance(one.annotation, type) and is_dataclass(one.annotation)
    }
    if not groups:
        return command

    @wraps(command)
    def run(*args: Any, **given: Any) -> Any:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        return command(*args, **given)

    written = list(_written(signature, groups))
    run.__signature__ = inspect.Signature(written)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in written}
    return run


def _written(signature: inspect.Signature, groups: dict[str, Any]) -> Iterator[inspect.Parameter]:
    for one in signature.parameters.values():
        if one.name not in groups:
            yield one
            continue
        kind = groups[one.name]
        hints = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield inspect.Parameter(
                field.name, one.KEYWORD_ONLY, default=default, annotation=hints[field.name]
            )


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
    panel: str | None = None
    """Under which heading of --help it stands."""

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
        single.command(self.name, epilog=epilog)(grouped(target))
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
        app.command(late.name, help=late.summary, epilog=epilog, rich_help_panel=late.panel)(stub)
