"""Where an error becomes text: bounded, without secrets, fit for every store and log.

Texts of exceptions quote what their raisers had in hand: payloads, passwords, statements
with their parameters. Whatever is stored or logged about an error comes through here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Callable

REDACTED: Final = "***"
MOST_TEXT: Final = 2_000
"""Characters kept of an exception's text."""
_MOST_LOOKED_AT: Final = 4_000
_SQL: Final = "\n[SQL: "
_BACKGROUND: Final = "\n(Background on this error at: "
# Bounded repeats: hostile text costs linear time.
_SECRETS: Final = re.compile(
    r"(?i)(?P<lead>\b[a-z0-9_.-]{0,40}(?:password|passwd|secret|token|api[_-]?key|credential)"
    r"[a-z0-9_.-]{0,40}[\"']?[ ]{0,3}[:=][ ]{0,3})(?:\"[^\"\n]{0,500}\"?|'[^'\n]{0,500}'?"
    r"|[^ ,;&\n\"')}]{1,500})"
    r"|(?P<bearer>\b(?:bearer|basic)[ ]{1,3})[A-Za-z0-9._~+/=-]{8,2000}"
    r"|(?P<jwt>\beyJ[A-Za-z0-9_-]{5,1000}+\.)[A-Za-z0-9_-]{5,2000}(?:\.[A-Za-z0-9_-]{0,1000})?"
)


def scrubbed(text: str, *, most: int = _MOST_LOOKED_AT) -> str:
    """Return *text*, cut if it is too long, without passwords, tokens, URL secrets and SQL."""
    text = without_sql(text[:most])
    if "://" in text or "=" in text:
        text = mask(text)
    return _SECRETS.sub(_hidden, text)


def without_sql(text: str) -> str:
    """Return *text* without the statements and parameters that SQLAlchemy adds to an error."""
    begin = text.find(_SQL)
    if begin < 0:
        return text
    pieces, last = [], 0
    while begin >= 0:
        pieces.append(text[last:begin])
        end = text.find(_BACKGROUND, begin)
        # The parameters of a text that was cut have no end.
        last = len(text) if end < 0 else _line_end(text, end + 1)
        begin = text.find(_SQL, last)
    return "".join([*pieces, text[last:]])


def text_of(error: BaseException, redact: Callable[[str], str] = scrubbed) -> str:
    """Return what *error* says: capped, without secrets, on terms that every store takes."""
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - a broken __str__ must not hide the failure
        text = f"<{type(error).__name__} whose text cannot be made: {type(broken).__name__}>"
    # Cut before any expression looks at it: its length is the sender's choice.
    cut = without_sql(text[: MOST_TEXT * 2])
    return clean(redact(cut))[:MOST_TEXT] + ("…" if len(text) > MOST_TEXT else "")


def told(error: BaseException, redact: Callable[[str], str] = scrubbed) -> str:
    """Return kind and text of *error*, as a log line or a table keeps them."""
    text = text_of(error, redact)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def type_name(error: BaseException) -> str:
    """Return module and name of the error's class, without the module for built-in ones."""
    kind = type(error)
    module, name = str(kind.__module__), str(kind.__qualname__)
    return name[:255] if module == "builtins" else f"{module}.{name}"[:255]


def clean(text: str) -> str:
    """Return *text* without control characters, which terminals obey, nor lone surrogates."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else _visible(char) for char in text)


def _visible(char: str) -> str:
    code = ord(char)
    return "\t" if char == "\t" else f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _hidden(found: re.Match[str]) -> str:
    return f"{found['lead'] or found['bearer'] or ''}{REDACTED}"


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end
