"""Many rows of one insert as one statement of PostgreSQL: each column travels as one text.

A statement for each row costs driver and server three times as much, also in a pipeline. The rows
are taken apart by the server, and are the same whichever way they go: only values of Python's
plain types go so, into columns of the plain type that is theirs, by the same casts.
"""

from __future__ import annotations

from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from sqlalchemy import Table, bindparam, cast, func, insert, literal_column, select
from sqlalchemy.types import (
    BigInteger,
    Boolean,
    Double,
    Float,
    Integer,
    SmallInteger,
    String,
    Text,
    Unicode,
    UnicodeText,
)

from holdfast.db.sql import Inseparable, column_text, executed

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

_KINDS: dict[type, type] = {
    Integer: int, SmallInteger: int, BigInteger: int, String: str, Text: str, Unicode: str,
    UnicodeText: str, Boolean: bool, Float: float, Double: float,
}  # fmt: skip
"""What a column of each type must be given; nothing is done to it on its way then."""
_MOST_TEXT = 4 << 20  # characters of one statement: they are in memory several times


def inserted_by_columns(db: Connection, statement: Any, rows: list[dict[str, Any]]) -> bool:
    """Whether *rows* of the plain insert *statement* were inserted, by one statement in order.

    If not, nothing was done: they are to be inserted as they are. All have the same names.
    """
    if db.dialect.name != "postgresql" or db.dialect.is_async or db.dispatch.before_execute:
        return False  # who listens expects the statement that was said
    if "schema_translate_map" in db.get_execution_options():
        return False
    mapper = statement._propagate_attrs.get("plugin_subject")  # nothing public tells
    names = tuple(rows[0])
    found = _by_columns(statement.table if mapper is None else mapper, names)
    if found is None:
        return False
    by_columns, kinds = found
    texts: dict[str, Any] = {}
    size = 0
    for number, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        values = list(map(itemgetter(name), rows))
        if set(map(type, values)) != {kind}:
            return False
        try:
            text = column_text(values if kind is str else list(map(str, values)))
        except Inseparable:
            return False
        size += len(text or "")
        texts[_place(number)] = text
    if size > _MOST_TEXT:
        return False
    executed(db, by_columns, texts)
    return True


@lru_cache(maxsize=500)
def _by_columns(target: Any, names: tuple[str, ...]) -> tuple[Any, tuple[type, ...]] | None:
    """Return the insert into *target*, a table or what maps one, and what its columns hold.

    None where a row would be more than what it says: a default of Python's, a value that its
    column changes, a version, a subclass.
    """
    table = getattr(target, "local_table", target)
    if not isinstance(table, Table) or not set(names) <= set(table.columns.keys()):
        return None
    columns = table.columns
    if table is not target:
        if target.inherits or target.polymorphic_on is not None:
            return None
        if target.version_id_col is not None:
            return None
        if any(target.columns.get(name) is not columns[name] for name in names):
            return None
    if any(one.default is not None for one in columns if one.key not in names):
        return None
    kinds = tuple(_KINDS.get(type(columns[name].type)) for name in names)
    if not all(kinds):
        return None
    places = [_place(number) for number in range(len(names))]
    end = func.chr(literal_column("31"))
    texts = [func.string_to_array(bindparam(place, type_=Text()), end) for place in places]
    given = func.unnest(*texts).table_valued(*places).render_derived(name="given")
    values = [
        cast(given.c[place], type(columns[name].type)())
        for place, name in zip(places, names, strict=True)
    ]
    by_columns = insert(table).from_select(list(names), select(*values), include_defaults=False)
    return by_columns, tuple(kind for kind in kinds if kind is not None)


def _place(number: int) -> str:
    return f"c{number}"
