"""Settings from a TOML file, below flags and environment.

database = "postgresql+psycopg://shop@db/shop"
broker = "kafka://broker:9092"

[relay]
engine = "lease"
lease-seconds = 10
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from holdfast.errors import ConfigurationError

SHARED = ("database", "broker")
TABLES = ("relay", "doctor", "cdc")
_NOT_SETTINGS = {"config", "help"}
_TAKEN_OVER = {"doctor": ("relay", ("slot", "publication"))}
"""What a command takes from another's table, so that both speak of the same thing."""


def load(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's settings the defaults of the command at hand."""
    if path is not None and not context.resilient_parsing:
        known = {str(option.name) for option in context.command.params} - _NOT_SETTINGS
        context.default_map = settings(path, str(context.info_name), known)
    return path


def settings(path: Path, command: str, known: Iterable[str]) -> dict[str, Any]:
    """Return what *path* sets for *command*; a key that nobody reads is an error."""
    content = _read(path)
    _refuse_unknown(path, "", content, (*SHARED, *TABLES))
    known = set(known)
    named = _table(path, content, command)
    _refuse_unknown(path, f"[{command}] ", named, known)
    shared = {name: content[name] for name in SHARED if name in content and name in known}
    other, names = _TAKEN_OVER.get(command, (command, ()))
    theirs = _table(path, content, other)
    return shared | {name: theirs[name] for name in names if name in theirs} | named


def _table(path: Path, content: dict[str, Any], name: str) -> dict[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise ConfigurationError(f"{path}: {name} is not a table: write [{name}]")
    return {key.replace("-", "_"): value for key, value in table.items()}


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
