"""The column types of every table: the same meaning on PostgreSQL, MySQL, MariaDB and SQLite.

Migrations spell their types out: they say what was, and this says what is.
"""

from __future__ import annotations

from sqlalchemy import BINARY, BigInteger, Integer, LargeBinary, String, Text, Uuid

from holdfast.db.text import NAME


# MySQL's own, spelled here: its dialect takes long to import, and few use it.
class _LongBlob(LargeBinary):
    __visit_name__ = "LONGBLOB"


class _LongText(Text):
    __visit_name__ = "LONGTEXT"


Sequence = BigInteger().with_variant(Integer, "sqlite")
"""A number that the database counts up: SQLite does so for a plain INTEGER key alone."""
UniqueId = Uuid(native_uuid=False).with_variant(Uuid(), "postgresql")
"""A UUID. MariaDB's own and MySQL's CHAR would differ by the URL's first word; CHAR does for both.
"""
Bytes = LargeBinary().with_variant(_LongBlob, "mysql", "mariadb")
"""Content of any length."""
Document = Text().with_variant(_LongText(collation="utf8mb4_bin"), "mysql", "mariadb")
"""Text of any length, in which case and accents count."""


def name(length: int = NAME) -> String:
    """Return the type of a text that is looked up by: MySQL's own would merge case and accents."""
    own = String(length, collation="utf8mb4_bin")
    return String(length).with_variant(own, "mysql", "mariadb")


def hex_digest(length: int) -> String:
    """Return the type of a digest that is written in hexadecimal."""
    own = String(length, collation="ascii_bin")
    return String(length).with_variant(own, "mysql", "mariadb")


def fixed_bytes(length: int) -> LargeBinary:
    """Return the type of exactly *length* bytes, short enough for a key."""
    return LargeBinary(length).with_variant(BINARY(length), "mysql", "mariadb")
