"""Plain inserts of the handlers of a batch, sent together: one statement for many messages.

A handler that adds one row to one table says the same statement for each message of its batch,
and a handler of lists says it with many rows. What it says is kept until anything else is said, or
somebody looks at what came of it: the order of the statements never changes. An error then shows
late, perhaps in the handler of another message. So the transaction is lost with it, whoever
swallowed it, and the batch runs again without this.
"""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy.sql.dml import Insert
from sqlalchemy.types import TypeDecorator, UserDefinedType

from holdfast.errors import Transient

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST = 1_000
_PLAIN = frozenset({
    int, str, bool, float, bytes, type(None), Decimal, date, datetime, time, timedelta, UUID
})  # fmt: skip
"""Values that nobody can change while they are kept."""
_BARE = ({"table"}, {"table", "_propagate_attrs"})
"""What an insert consists of that says nothing but its table."""


class SentTogether(Transient):
    """Inserts that were sent together failed, or somebody asks what came of one of them."""

    def __init__(self) -> None:
        super().__init__(
            "the inserts of a batch were sent together, and one of them failed or its result is "
            "asked for too late: the batch runs again, one statement after the other"
        )


class InsertBuffer:
    """Keeps inserts of rows into one table, and sends them by one statement."""

    def __init__(
        self,
        execute: Callable[[Any, Any], Any],
        insert_many: Callable[[Any, list[dict[str, Any]]], bool],
    ) -> None:
        self._execute = execute
        self._insert_many = insert_many
        """A shorter way for many rows, which may refuse."""
        self._statement: Any = None
        self._names: tuple[str, ...] = ()
        self._rows: list[dict[str, Any]] = []
        self._round = 0
        self.is_spoilt = False
        """Whether the transaction must not commit: what was kept is lost."""

    def kept(self, statement: Any, given: Any) -> LateResult | None:
        """Keep an insert of one row or many; None, and nothing is kept, if it cannot wait."""
        if type(statement) is not Insert or statement.__dict__.keys() not in _BARE or not given:
            return None
        rows = given if type(given) is list else [given]
        first = rows[0]
        if type(first) is not dict or not first:
            return None
        for row in rows:
            if type(row) is not dict or not _PLAIN.issuperset(map(type, row.values())):
                return None
            if row is not first and row.keys() != first.keys():
                return None
        names = tuple(first)
        same = self._rows and statement.table is self._statement.table and names == self._names
        if not same:
            if not can_wait(statement.table, names):
                return None
            self.send()
            self._statement, self._names = statement, names
        elif len(self._rows) + len(rows) > _MOST:
            self.send()
        place = len(self._rows)
        self._rows += [row.copy() for row in rows]
        return LateResult(self, self._round, place, None if rows is not given else len(rows))

    def send(self) -> None:
        """Send what is kept."""
        rows, self._rows = self._rows, []
        self._round += 1
        if len(rows) > 1:
            self._say_many(rows)
        elif rows:
            self._say(rows[0])

    def result(self, round_: int, place: int, count: int | None) -> Any:
        """Return what comes of the insert at *place*, by a statement of its own.

        *count* is of how many rows it was; None: of one that stood by itself.
        """
        if round_ != self._round:
            self.is_spoilt = True
            raise SentTogether
        rows = self._rows
        self._rows = rows[:place]
        self.send()
        after = place + (1 if count is None else count)
        found = self._say(rows[place] if count is None else rows[place:after])
        self._rows = rows[after:]
        self.send()
        return found

    def _say_many(self, rows: list[dict[str, Any]]) -> None:
        try:
            is_done = self._insert_many(self._statement, rows)
        except BaseException:
            self.is_spoilt = True
            raise
        if not is_done:
            self._say(rows)

    def _say(self, rows: Any) -> Any:
        try:
            return self._execute(self._statement, rows)
        except BaseException:
            self.is_spoilt = True
            raise


class LateResult:
    """The result of an insert that is kept; it is sent once somebody asks for anything of it."""

    def __init__(self, buffer: InsertBuffer, round_: int, place: int, count: int | None) -> None:
        self._buffer, self._round, self._place, self._count = buffer, round_, place, count
        self._found: Any = None

    def __getattr__(self, name: str) -> Any:
        """Return what the real result has."""
        if self._found is None:
            self._found = self._buffer.result(self._round, self._place, self._count)
        return getattr(self._found, name)

    def __iter__(self) -> Any:
        """Return what the real result does: an insert has no rows."""
        return iter(self.all())


@lru_cache(maxsize=500)
def can_wait(table: Any, names: tuple[str, ...]) -> bool:
    """Whether a row of *names* is the same whenever it is sent.

    Not where a function of the user's fills a column or changes a value: it may look at the
    message that is being handled.
    """
    return not any(
        isinstance(column.type, TypeDecorator | UserDefinedType)
        or (column.key not in names and getattr(column.default, "is_callable", False))
        for column in getattr(table, "columns", ())
    )
