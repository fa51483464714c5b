"""Failures as one sentence and a stable exit code, never a traceback."""

from __future__ import annotations

from typing import NoReturn

from rich.text import Text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from holdfast.cli.display import break_lines, err, plain
from holdfast.cli.exits import EXIT_DOWN, EXIT_FIX, EXIT_NOT_FOUND, EXIT_UNFINISHED
from holdfast.db.errors import is_wrong
from holdfast.errors import DependencyDown, HoldfastError, NotFound, Transient
from holdfast.urls import mask


class Unfinished(HoldfastError):
    """A signal ended the work before it was done; nothing is lost, and it can be gone on with."""


class RowsLeft(HoldfastError):
    """The work is done as far as it can be; something was parked or waits for a person."""


def is_expected(error: Exception) -> bool:
    """Whether *error* is one that a sentence explains, and no fault of this program."""
    return isinstance(error, HoldfastError | SQLAlchemyError) or _is_no_text(error)


def _is_no_text(error: BaseException) -> bool:
    """Whether a byte on the command line that is not UTF-8 came to where text is needed."""
    return isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason


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
    if isinstance(error, NotFound | RowsLeft):
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
    start = "holdfast: "
    first, *rest = break_lines(f"{start}{sentence(error)}", on=err)
    err.print(Text.assemble((start, "bold red"), first.removeprefix(start)), soft_wrap=True)
    for line in rest:
        err.print(Text(line), soft_wrap=True)
    raise SystemExit(exit_code(error))
