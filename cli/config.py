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
    own = content.get(command, {})
    if not isinstance(own, dict):
        raise ConfigurationError(f"{path}: {command} is not a table: write [{command}]")
    named = {name.replace("-", "_"): value for name, value in own.items()}
    _refuse_unknown(path, f"[{command}] ", named, known)
    shared = {name: content[name] for name in SHARED if name in content and name in known}
    return shared | named


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
