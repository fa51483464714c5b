"""Arrow schemas for what tasks return, from the DDL that Spark is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.extras import driver

if TYPE_CHECKING:
    import pyarrow as pa

_KINDS = {"int": "int32", "bigint": "int64", "string": "string", "boolean": "bool_",
          "binary": "binary", "double": "float64"}  # fmt: skip


def schema_of(ddl: str) -> pa.Schema:
    """Return the schema of rows that Spark knows by *ddl*: plain names with plain types."""
    pyarrow = driver("pyarrow", extra="spark")
    pairs = (text.split() for text in ddl.split(","))
    return pyarrow.schema([(name, getattr(pyarrow, _KINDS[kind])()) for name, kind in pairs])
