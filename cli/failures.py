"""Failures as one sentence and a stable exit code, never a traceback."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from rich.text import Text
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from holdfast.cli.display import err, plain
from holdfast.errors import DependencyDown, HoldfastError, NotFound, Transient
from holdfast.outbox.outages import is_outage
from holdfast.urls import mask

EXIT_NOT_FOUND = 1
"""Nothing answers to what was asked for, or the answer is no."""
EXIT_FIX = 2
"""The command or its settings must change; nothing was done."""
EXIT_DOWN = 3
"""The database or the broker is down; the same command may work later."""
EXIT_UNFINISHED = 4
"""The relay ended before it was done; what is left is published later."""
EXIT_INTERRUPTED = 130


class Unfinished(HoldfastError):
    """A signal ended the work before it was done; nothing is lost, and it can be gone on with."""


class LeftBehind(HoldfastError):
    """The work is done as far as it can be; something was parked or waits for a person."""


# Connection errors carry no SQLSTATE in psycopg, so the server's own words decide.
_WRONG = re.compile(
    r"authentication failed|no password supplied|no pg_hba\.conf entry|does not exist|"
    r"unable to open database file|permission denied",
    re.IGNORECASE,
)
_MYSQL_WRONG = {1044, 1045, 1049, 1698}  # access denied, unknown database


def is_expected(error: Exception) -> bool:
    """Whether *error* is one that a sentence explains, and no fault of this program."""
    return isinstance(error, HoldfastError | SQLAlchemyError) or _is_no_text(error)


def _is_no_text(error: BaseException) -> bool:
    """Whether a byte on the command line that is not UTF-8 came to where text is needed."""
    return isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason


def is_wrong(error: Exception) -> bool:
    """Whether a database *error* says that the settings are wrong, not that it is down."""
    if not isinstance(error, OperationalError):
        passes = isinstance(error, DBAPIError) and is_outage(error)
        return isinstance(error, SQLAlchemyError) and not passes
    origin: Any = error.orig
    code = origin.args[0] if origin is not None and origin.args else None
    return code in _MYSQL_WRONG or _WRONG.search(str(origin)) is not None


def sentence(error: BaseException) -> str:
    """Return what *error* says in one line, without secrets, statements or links."""
    text = str(error)
    if isinstance(error, UnicodeEncodeError):
        text = f"{error.object!r} is not UTF-8: write it in the terminal's own encoding"
    if isinstance(error, DBAPIError) and error.orig is not None:
        words = error.orig.args[-1] if error.orig.args else error.orig
        text = f"the database says: {words}"
    lines = (line.strip() for line in mask(text).splitlines())
    return plain(" ".join(line for line in lines if line))


def exit_code(error: Exception) -> int:
    """Return the exit code that tells a script what to do about *error*."""
    if isinstance(error, NotFound | LeftBehind):
        return EXIT_NOT_FOUND
    if isinstance(error, Unfinished):
        return EXIT_UNFINISHED
    if isinstance(error, DependencyDown | Transient):
        return EXIT_DOWN
    if isinstance(error, HoldfastError) or is_wrong(error) or _is_no_text(error):
        return EXIT_FIX
    return EXIT_DOWN


def fail(error: Exception) -> NoReturn:
    """Say what is wrong and end."""
    err.print(Text.assemble(("holdfast: ", "bold red"), sentence(error)), soft_wrap=True)
    raise SystemExit(exit_code(error))
