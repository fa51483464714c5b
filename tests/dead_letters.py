"""Databases with dead-letter tables, opened once per module and emptied for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, func, select

from holdfast.clock import SYSTEM_CLOCK
from holdfast.db.engine import open_database
from holdfast.dlq import capture, create_tables
from holdfast.dlq.store.schema import metadata
from holdfast.headers import EMPTY
from holdfast.message import Message

if TYPE_CHECKING:
    import pytest
    from sqlalchemy.engine import Engine

    from holdfast.dlq import DeadLetter

KINDS = ("sqlite", "postgres", "mariadb")


def opened(request: pytest.FixtureRequest, folder: Any) -> Engine:
    """Return a database of the kind that *request* asks for, with its tables."""
    if request.param == "sqlite":
        url = f"sqlite:///{folder}/dlq.db"
    else:
        url = request.getfixturevalue(request.param).database("dlq")
    engine = open_database(url)
    create_tables(engine)
    return engine


def emptied(engine: Engine) -> Engine:
    """Return *engine* with nothing in its tables."""
    with engine.begin() as db:
        for table in reversed(metadata.sorted_tables):
            db.execute(delete(table))
    return engine


def failed(error: BaseException) -> BaseException:
    """Return *error* as raised here, with a frame of the application's own."""
    try:
        raise error  # noqa: TRY301 - here, to have a frame here
    except BaseException as raised:  # noqa: BLE001
        return raised


def letter(number: int = 1, error: BaseException | None = None, **more: Any) -> DeadLetter:
    """Return a dead letter of message *number*."""
    clock = more.pop("clock", SYSTEM_CLOCK)
    made = Message.new(
        more.pop("topic", "orders"),
        more.pop("payload", b'{"n": 1}'),
        key=more.pop("key", f"k{number}"),
        headers=more.pop("headers", EMPTY),
        ids=lambda: f"id-{number}",
        now=clock.now,
    )
    return capture(
        made,
        failed(ValueError("bad order")) if error is None else error,
        group=more.pop("group", "billing"),
        handler=more.pop("handler", "shop.bill"),
        clock=clock,
        **more,
    )


def count(engine: Engine, table: Any) -> int:
    """Return the number of rows of *table*."""
    with engine.connect() as db:
        return db.execute(select(func.count()).select_from(table)).scalar_one()
