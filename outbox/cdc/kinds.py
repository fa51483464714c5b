"""The types of columns: domains are what they are made of, and arrays are of something."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.outbox.cdc.values import array, scalar
from holdfast.sql import statements

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Engine

_DOMAIN = "d"
_UNSET = -1


class Kinds:
    """Finds how to read a type, by the catalog where its number alone does not tell.

    The stream names the type of a column as it was declared and a query that of the values,
    so a domain must be looked through: its key would differ between the two.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sql = statements("holdfast.outbox.cdc", "postgresql")["kind"]
        self._known: dict[tuple[int, int], Callable[[str], Any]] = {}

    def converter(self, kind: int, modifier: int) -> Callable[[str], Any]:
        """Return what turns the text of a column of type *kind* (its oid) into a JSON value."""
        known = self._known.get((kind, modifier))
        if known is None:
            known = scalar(kind, modifier) or self._found(kind, modifier)
            self._known[kind, modifier] = known
        return known

    def _found(self, kind: int, modifier: int) -> Callable[[str], Any]:
        with self._engine.connect() as db:
            found = db.execute(self._sql, {"oid": kind}).first()
        if found is None:  # dropped since
            return str
        if found.typtype == _DOMAIN:
            own = modifier if found.typtypmod == _UNSET else found.typtypmod
            return self.converter(found.base, own)
        return array(self.converter(found.element, modifier)) if found.element else str
