"""Settings from a TOML file, below flags and environment.

database = "postgresql+psycopg://shop@db/shop"
broker = "kafka://broker:9092"

[relay]
engine = "lease"
lease = "10s"

[dlq.replay]
canary = 50
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from holdfast.errors import ConfigurationError

SHARED = ("database", "broker", "group", "topic", "actor", "reason", "json", "yes")
"""Options that mean the same in every command; at the top of the file they are for all."""
_TAKEN_OVER: dict[tuple[str, ...], tuple[tuple[str, ...], tuple[str, ...]]] = {
    (command,): (("relay",), ("slot", "publication")) for command in ("doctor", "status")
}
"""What a command takes from another's table, so that both speak of the same thing."""


def load(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's settings the defaults of the command at hand."""
    if path is not None and not context.resilient_parsing:
        context.default_map = _settings(path, _read(path), context)
    return path


def _settings(path: Path, content: dict[str, Any], context: typer.Context) -> dict[str, Any]:
    """Return what *content* sets for the command; a key that nobody reads is an error."""
    options = {
        name.lstrip("-").replace("-", "_"): option
        for option in context.command.params
        for name in option.opts
        if name.startswith("--") and option.name not in ("config", "help")
    }
    groups, words = _way(context)
    tables = [sorted(group.commands) for group in groups]
    _refuse_unknown(path, "", content, (*SHARED, *tables[0]))
    for depth in range(1, len(words)):
        within = _table(path, content, words[:depth])
        _refuse_unknown(path, f"[{'.'.join(words[:depth])}] ", within, tables[depth])
    own = _plain(_table(path, content, words))
    _refuse_unknown(path, f"[{'.'.join(words)}] ", own, options)
    other, names = _TAKEN_OVER.get(tuple(words), (tuple(words), ()))
    theirs = _plain(_table(path, content, other))
    found = {name: content[name] for name in SHARED if name in content and name in options}
    found |= {name: theirs[name] for name in names if name in theirs}
    found |= own
    return {str(options[name].name): _given(options[name], one) for name, one in found.items()}


def _way(context: typer.Context) -> tuple[list[Any], list[str]]:
    """Return the groups from the first to that of the command, and the words that lead there."""
    groups: list[Any] = []
    words: list[str] = []
    at: Any = context
    while at.parent is not None:
        words.insert(0, str(at.info_name))
        groups.insert(0, at.parent.command)
        at = at.parent
    return groups, words


def _given(option: Any, value: Any) -> Any:
    """Return *value* as the option takes it: one that may repeat takes a list."""
    return [value] if option.multiple and not isinstance(value, list) else value


def _plain(table: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in table.items()}


def _table(path: Path, content: dict[str, Any], words: Iterable[str]) -> dict[str, Any]:
    table, way = content, ""
    for word in words:
        way = f"{way}.{word}" if way else word
        found = table.get(word, {})
        if not isinstance(found, dict):
            raise ConfigurationError(f"{path}: {way} is not a table: write [{way}]")
        table = found
    return table


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from error


def _refuse_unknown(path: Path, table: str, keys: Iterable[str], known: Iterable[str]) -> None:
    for key in keys:
        if key not in known:
            raise ConfigurationError(
                f"{path}: {table}{key} is unknown; known: {', '.join(sorted(known))}"
            )
