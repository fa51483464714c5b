"""Options of one database on a table or an index, given without importing that database's dialect.

SQLAlchemy checks such an option when it is given, and imports the dialect for it: a quarter of
what importing a consumer costs beside SQLAlchemy, also for databases that it never meets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from sqlalchemy import Index, MetaData, Table

Construct = TypeVar("Construct", Table, Index)


def with_options(construct: Construct, **options: Any) -> Construct:
    """Return *construct* with *options*, as `sqlite_autoincrement`; they are there when asked for.

    Who asks, a compiler, a copy or Alembic, sees no difference from options given at once; one
    that its dialect does not know is refused then.
    """
    construct.__dict__["dialect_options"] = _Pending(construct, options)
    return construct


class _Pending(Mapping[str, Any]):
    """Takes the place of a construct's options until somebody looks at them."""

    def __init__(self, construct: Table | Index, options: Mapping[str, Any]) -> None:
        self._construct = construct
        self._options = options

    def _given(self) -> Mapping[str, Any]:
        construct = self._construct
        if construct.__dict__.get("dialect_options") is self:
            # Those of another, made in the usual way: nobody may see them half made.
            if isinstance(construct, Index):
                other: Table | Index = Index("other", **self._options)
            else:
                other = Table("other", MetaData(), **self._options)
            construct.__dict__["dialect_options"] = other.dialect_options
        given: Mapping[str, Any] = construct.dialect_options
        return given

    def __getitem__(self, dialect: str) -> Any:
        return self._given()[dialect]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given())

    def __len__(self) -> int:
        return len(self._given())
