"""The consumer's connections: as many as its threads need at once, and no new ones after that."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from sqlalchemy import event

from holdfast import Message
from holdfast.brokers import connect
from holdfast.consumer import Consumer, create_tables
from holdfast.db.engine import open_database
from tests.consuming import running, until

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from tests.servers import Postgres

WORKERS, ROUNDS = 12, 3


def test_connections_that_were_needed_at_once_are_kept(postgres: Postgres) -> None:
    """A pool of SQLAlchemy's own size would close all but five, and open them again each time."""
    url = postgres.database("consumer_pool")
    engine = open_database(url)
    create_tables(engine)
    engine.dispose()
    broker = connect("memory:", partitions=1)
    broker.create_topic("orders")
    consumer = Consumer(broker, group="billing", database=url, workers=WORKERS)
    together, opened = threading.Barrier(WORKERS), []
    assert consumer.context.store is not None
    own = consumer.context.store.engine
    event.listen(own, "connect", lambda *_: opened.append(1))

    @consumer.on("orders", ordered=False)
    def handle(order: int, session: Session) -> None:
        session.connection()
        together.wait(60)

    sink = broker.sink()
    with running(consumer):
        for _ in range(ROUNDS):
            sink.publish([Message.new("orders", b"1") for _ in range(WORKERS)])
            until(lambda: not any(broker.lag("billing", ["orders"]).values()), "acknowledged")
    own.dispose()
    assert WORKERS <= len(opened) <= WORKERS + 3
