"""Running the `holdfast` command within the test's own process: no second to wait for imports."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING
from unittest.mock import patch

from holdfast.cli import display, main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.console import Console


def shell(
    *args: str,
    cwd: Path | None = None,
    given: str = "",
    terminal: int | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run `holdfast` with *args* in the folder *cwd*, with *given* on its standard input.

    Its output goes into a pipe, or to a *terminal* without colours that is so many columns wide.
    """
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with ExitStack() as stack:
        stack.enter_context(chdir(os.curdir if cwd is None else cwd))
        stack.enter_context(patch.dict(os.environ, environment))
        for console in (display.out, display.err):
            stack.enter_context(_shown(console, terminal))
        stdin = io.TextIOWrapper(io.BytesIO(given.encode()))
        stack.enter_context(patch.object(sys, "stdin", stdin))
        stack.enter_context(_own_logging())
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        try:
            main(list(args))
        except SystemExit as end:
            code = end.code
    number = code if isinstance(code, int) else 0 if code is None else 1
    return subprocess.CompletedProcess(args, number, out.getvalue(), err.getvalue())


@contextmanager
def _shown(console: Console, terminal: int | None) -> Iterator[None]:
    """Let tables be as wide as they like, or as the terminal is; the tests' own has no say."""
    width = 200 if terminal is None else terminal
    forced = {"_width": width, "_force_terminal": terminal is not None, "_color_system": None}
    with ExitStack() as stack:
        for name, value in forced.items():
            stack.enter_context(patch.object(console, name, value))
        yield


@contextmanager
def _own_logging() -> Iterator[None]:
    """Undo what the command does to the logging of its process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in ("holdfast", "kafka", "pika", "nats")}
    try:
        # The command removes, and closes, the handlers that it finds.
        root.handlers[:] = []
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        for name, before in levels.items():
            logging.getLogger(name).setLevel(before)
