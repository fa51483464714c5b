"""SQL of others, looked at for what would end a transaction that is not theirs.

One pass from the left, in time linear in the text: comments, quoted texts and names are
stepped over, so that a COMMIT behind them is seen and one within them is not.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST: Final = 300  # of a statement: its first words say what it is
_MARK: Final = re.compile(r"--|/\*|[;'\"`#]|\$(?:[^\W\d]\w{0,62})?\$")
_NESTED: Final = re.compile(r"/\*|\*/")
_STOP: Final = re.compile(r"['\"`\\]")
_VERSION: Final = re.compile(r"!\d{0,6}")
_ENDS: Final = re.compile(
    r"(COMMIT|END|ABORT|BEGIN|START TRANSACTION|PREPARE TRANSACTION|XA|"
    r"ROLLBACK(?! (?:WORK |TRANSACTION )?TO\b)|SET (?:SESSION |@@(?:SESSION\.)?)?AUTOCOMMIT)\b",
    re.IGNORECASE,
)
_ENDS_ON_MYSQL: Final = re.compile(
    r"((?:CREATE|DROP)(?! TEMPORARY)|ALTER|RENAME|TRUNCATE|GRANT|REVOKE|LOCK|UNLOCK|"
    r"(?:ANALYZE|OPTIMIZE|REPAIR) (?:LOCAL |NO_WRITE_TO_BINLOG )?TABLES?)\b",
    re.IGNORECASE,
)
"""What commits the transaction in passing there."""
_BODY: Final = frozenset({"BEGIN", "END"})


def ends_transaction(sql: str, *, mysql: bool = False) -> str | None:
    """Return the words in *sql* that end a transaction or begin another; None if there are none.

    Savepoints may pass, and so may the BEGIN and END of a body that is being created.
    """
    creates = False
    for number, words in enumerate(_statements(sql, mysql=mysql)):
        found = _ENDS.match(words) or (_ENDS_ON_MYSQL.match(words) if mysql else None)
        if not number:
            creates = words[:6].upper() == "CREATE"
        verb = "" if found is None else found[1].upper()
        if verb and not (number and creates and verb in _BODY):
            return verb
    return None


def _statements(sql: str, *, mysql: bool) -> Iterator[str]:
    """Yield the first words of each statement, parted by single spaces."""
    if not (";" in sql or "--" in sql or "/*" in sql or (mysql and "#" in sql)):
        yield _words(sql)
        return
    pieces: list[str] = []
    last = at = 0
    while found := _MARK.search(sql, at):
        mark, begin = found[0], found.start()
        if mark == "#" and not mysql:
            at = found.end()
            continue
        at = _behind(sql, found, mysql=mysql)
        pieces.append(sql[last:begin])
        last = at
        if mark == ";":
            yield _words("".join(pieces))
            pieces.clear()
        elif mark not in ("--", "/*", "#"):
            pieces.append("''")
        else:
            pieces.append(" ")
    yield _words("".join([*pieces, sql[last:]]))


def _words(text: str) -> str:
    return " ".join(text.lstrip()[: _MOST * 4].split())[:_MOST]


def _behind(sql: str, found: re.Match[str], *, mysql: bool) -> int:
    """Return where that goes on which *found* begins; what has no end goes to the very end."""
    mark, at = found[0], found.end()
    match mark:
        case ";":
            return at
        case "--" | "#":
            return _after(sql, "\n", at)
        case "/*" if mysql and (version := _VERSION.match(sql, at)):
            return version.end()  # a comment that MySQL runs; its end is no word
        case "/*":
            return _after(sql, "*/", at) if mysql else _behind_comment(sql, at)
        case "'" | '"' | "`":
            escapes = mysql or sql[found.start() - 1 : found.start()] in ("e", "E")
            return _behind_quote(sql, mark, at) if escapes else _after(sql, mark, at)
        case _:
            return _after(sql, mark, at)


def _after(sql: str, mark: str, at: int) -> int:
    end = sql.find(mark, at)
    return len(sql) if end < 0 else end + len(mark)


def _behind_comment(sql: str, at: int) -> int:
    """Return the end of a comment; in PostgreSQL it may hold others."""
    depth = 1
    while depth and (found := _NESTED.search(sql, at)):
        depth += 1 if found[0] == "/*" else -1
        at = found.end()
    return len(sql) if depth else at


def _behind_quote(sql: str, quote: str, at: int) -> int:
    """Return the end of a text in which a backslash takes the meaning from a quote."""
    while found := _STOP.search(sql, at):
        at = found.end() + (found[0] == "\\")
        if found[0] == quote:
            return at
    return len(sql)
