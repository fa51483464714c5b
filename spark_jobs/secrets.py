"""Secrets stay where they are: specs name them, and whoever connects reads them there.

`${NAME}` in a URL stands for an environment variable and `${file:/path}` for the content of a
file, of the machine that connects. So a plan, an event log or a web page of Spark shows the name
alone. A URL with a password in it is refused where it would travel.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Callable

_REFERENCE = re.compile(r"\$\{(file:)?([^}]{1,1000})\}")


def revealed(text: str) -> str:
    """Return *text* with its references replaced by what they stand for on this machine."""
    return _REFERENCE.sub(_value, text)


def hidden(text: str) -> tuple[str, Callable[[str], str]]:
    """Return *text* with a plain word for each reference, and what puts those back into a part.

    So a URL can be taken apart although a path is in its password.
    """
    found: list[str] = []

    def kept(reference: re.Match[str]) -> str:
        found.append(reference[0])
        return f"~{len(found) - 1}~"

    def shown(part: str) -> str:
        for number, reference in enumerate(found):
            part = part.replace(f"~{number}~", reference)
        return part

    return _REFERENCE.sub(kept, text), shown


def _value(found: re.Match[str]) -> str:
    name = found[2]
    if found[1]:
        try:
            return Path(name).read_text().strip()
        except OSError as error:
            raise ConfigurationError(
                f"${{file:{name}}}: this machine cannot read it ({error.strerror}): executors need "
                "the file, too"
            ) from error
    value = os.environ.get(name)
    if value is None:
        raise ConfigurationError(
            f"${{{name}}}: this machine has no such environment variable; for executors add --conf "
            f"spark.executorEnv.{name}=… or set it where they start"
        )
    return value


def require_no_secret(url: str) -> str:
    """Return *url* if it may be shown as it is; raise `ConfigurationError` if it has a secret."""
    bare = _REFERENCE.sub("", url)
    if mask(bare).replace("***", "") != bare:  # a reference alone leaves nothing behind the stars
        raise ConfigurationError(
            f"{mask(url)}: its secret would be in Spark's plan; write ${{NAME}} for an environment "
            "variable, or ${file:/path}, of the machines that connect"
        )
    return url
