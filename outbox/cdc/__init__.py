"""Change data capture: plain tables as streams of change events, in Debezium's form."""

from holdfast.extras import driver

driver("psycopg", extra="postgres")  # the modules below need it

from holdfast.outbox.cdc.engine import Cdc  # noqa: E402

__all__ = ["Cdc"]
