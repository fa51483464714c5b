"""Named SQL in files: visible, reviewable, never assembled from strings."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from sqlalchemy import TextClause, text

from holdfast.errors import ConfigurationError

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


@cache
def statements(package: str, dialect: str) -> dict[str, TextClause]:
    """Return the statements of *package*'s `sql/<dialect>.sql`, by the names given there.

    MariaDB uses MySQL's file. A statement starts after a line `-- name: its_name`.
    """
    name = "mysql" if dialect == "mariadb" else dialect
    path = files(package).joinpath("sql", f"{name}.sql")
    if not path.is_file():
        raise ConfigurationError(
            f"{package} does not support the database {dialect!r}: use PostgreSQL, MySQL, "
            "MariaDB or SQLite"
        )
    parts = _NAME.split(path.read_text())[1:]
    return {key: text(body.strip()) for key, body in zip(parts[::2], parts[1::2], strict=True)}
