"""Leases in rows: who works on a row, until when, fenced by an epoch, timed by the database.

A lease is three columns that a table already has: `owner` (who), `until` (POSIX seconds by the
database's clock; 0 once given back) and `epoch` (grows with every lease, never falls). A table may
do without owner or epoch. Whoever holds an epoch writes only where the row still has it: a holder
that was asleep while another took over changes nothing any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, and_, cast, literal, or_, select, update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from holdfast.db.clock import database_now

if TYPE_CHECKING:
    from sqlalchemy import Column, ColumnElement
    from sqlalchemy.engine import Connection

_MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseState:
    """What a row says of its lease; it is held while `remaining` is above 0."""

    owner: str | None
    epoch: int
    remaining: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseColumns:
    """The columns of one table that hold a lease, and what is done to them.

    Every method joins the caller's transaction; *where* says which row, or which rows. What an
    update changes besides the lease is given as *values*, so that both happen or neither.
    """

    until: Column[Any]
    owner: Column[Any] | None = None
    epoch: Column[Any] | None = None
    rows_return: bool = False
    """Whether rows are deleted and come again: then an epoch begins above all that were."""

    def is_free(self) -> ColumnElement[bool]:
        """Whether nobody holds the row: it was given back, or its holder gave no sign in time."""
        over = self.until <= database_now()
        return over if self.owner is None else or_(self.owner.is_(None), over)

    def is_held_by(self, *, owner: Any = None, epoch: Any = None) -> ColumnElement[bool]:
        """Whether the row is still that owner's, at that epoch; also after its time has run out.

        It may have run out with nobody there to take over: then nothing was lost.
        """
        mine: list[ColumnElement[bool]] = []
        if self.owner is not None and owner is not None:
            mine.append(self.owner == owner)
        if self.epoch is not None and epoch is not None:
            mine.append(self.epoch == epoch)
        if not mine:
            raise TypeError("say whose lease it is, by its owner or its epoch")
        return and_(*mine)

    def taken(self, *, seconds: Any, owner: Any = None) -> dict[Any, Any]:
        """Return the values of a row that is taken for *seconds* from now."""
        values: dict[Any, Any] = {self.until: database_now() + seconds}
        if self.owner is not None:
            values[self.owner] = owner
        if self.epoch is not None:
            following = self.epoch + 1
            values[self.epoch] = _greater(following, _now_us()) if self.rows_return else following
        return values

    def renewed(self, *, seconds: Any) -> dict[Any, Any]:
        """Return the values of a row that is kept for *seconds* from now."""
        return {self.until: database_now() + seconds}

    def released(self) -> dict[Any, Any]:
        """Return the values of a row that is given back; the epoch stays, so that it only grows."""
        values: dict[Any, Any] = {self.until: 0.0}
        if self.owner is not None:
            values[self.owner] = None
        return values

    def look(self, db: Connection, where: ColumnElement[bool]) -> LeaseState | None:
        """Return the lease of the one row *where* says; None if there is no such row."""
        owner = literal(None) if self.owner is None else self.owner
        epoch = literal(0) if self.epoch is None else self.epoch
        left = self.until - database_now()
        row = db.execute(select(owner, epoch, left).where(where)).one_or_none()
        if row is None:
            return None
        return LeaseState(owner=row[0], epoch=row[1], remaining=float(row[2]))

    def take(
        self,
        db: Connection,
        where: ColumnElement[bool],
        *,
        seconds: float,
        owner: str | None = None,
        **values: Any,
    ) -> bool:
        """Take the row for *seconds*, unless another holds it; of rivals one gets it."""
        changed = {**self.taken(seconds=seconds, owner=owner), **self._own(values)}
        return self._changed(db, and_(where, self.is_free()), changed) > 0

    def renew(
        self,
        db: Connection,
        where: ColumnElement[bool],
        *,
        seconds: float,
        owner: str | None = None,
        epoch: int | None = None,
        **values: Any,
    ) -> int:
        """Make leases of *owner* at *epoch* last *seconds* from now; return how many there are.

        One that was given back stays so: a renewal on its way would lock out the next holder.
        """
        mine = and_(where, self.is_held_by(owner=owner, epoch=epoch), self.until > 0)
        return self._changed(db, mine, {**self.renewed(seconds=seconds), **self._own(values)})

    def verify(
        self,
        db: Connection,
        where: ColumnElement[bool],
        *,
        owner: str | None = None,
        epoch: int | None = None,
    ) -> bool:
        """Whether the row is still that owner's, at that epoch; it is locked until the commit.

        So what the caller writes with it commits only under its lease.
        """
        mine = and_(where, self.is_held_by(owner=owner, epoch=epoch))
        return db.execute(select(self.until).where(mine).with_for_update()).first() is not None

    def release(
        self,
        db: Connection,
        where: ColumnElement[bool],
        *,
        owner: str | None = None,
        epoch: int | None = None,
        **values: Any,
    ) -> int:
        """Give back what is *owner*'s at *epoch*, so that the next need not wait."""
        mine = and_(where, self.is_held_by(owner=owner, epoch=epoch))
        return self._changed(db, mine, {**self.released(), **self._own(values)})

    def _own(self, values: dict[str, Any]) -> dict[Any, Any]:
        return {self.until.table.c[name]: value for name, value in values.items()}

    def _changed(self, db: Connection, where: ColumnElement[bool], values: dict[Any, Any]) -> int:
        changed: int = db.execute(update(self.until.table).where(where).values(values)).rowcount
        return changed


def _now_us() -> ColumnElement[int]:
    return cast(database_now() * _MICROSECONDS, BigInteger)


class _greater(FunctionElement[int]):  # noqa: N801 - reads as the SQL function it is
    type = BigInteger()
    inherit_cache = True


@compiles(_greater)
def _greatest(element: Any, compiler: Any, **how: Any) -> str:
    return f"greatest({compiler.process(element.clauses, **how)})"


@compiles(_greater, "sqlite")
def _sqlite_greatest(element: Any, compiler: Any, **how: Any) -> str:
    return f"max({compiler.process(element.clauses, **how)})"
