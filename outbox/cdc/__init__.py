"""Change data capture: plain tables as streams of change events, in Debezium's form."""

from typing import TYPE_CHECKING

from holdfast.extras import lazily

if TYPE_CHECKING:
    from holdfast.outbox.cdc.engine import Cdc

__all__ = ["Cdc"]

__getattr__ = lazily(__name__, {"engine": "Cdc"}, module="psycopg", extra="postgres")
