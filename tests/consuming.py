"""A consumer on the embedded broker and a database, run in a thread of the test."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import Column, Integer, MetaData, String, Table, insert, select

from holdfast import Message
from holdfast.brokers import connect
from holdfast.consumer import Consumer, create_tables
from holdfast.consumer.schema import held, held_key
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.dlq.replay import ReplayOptions, Selection, StopPolicy, freeze
from holdfast.dlq.store.schema import message as letters
from holdfast.headers import ReplayHeaders, replay_topic
from holdfast.idempotency.schema import attempt, start
from holdfast.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.orm import Session

    from holdfast.ports import Broker

_tables = MetaData()
effects = Table(
    "effects", _tables, Column("seq", Integer, primary_key=True), Column("what", String(100))
)


class Bench:
    """One broker, one database, and what is to be seen in them."""

    def __init__(
        self,
        folder: Path,
        url: str,
        *,
        group: str = "g",
        database: bool = True,
        broker: Broker | None = None,
    ) -> None:
        self.broker_file = f"{folder}/broker.db"
        embedded = f"sqlite:///{self.broker_file}?session=5"
        self.broker = connect(embedded) if broker is None else broker
        self.engine = open_database(url)
        create_tables(self.engine)
        _tables.create_all(self.engine)
        self.group = group
        self._database = database
        self.broker.create_topic("orders", partitions=2)

    def consumer(self, **options: Any) -> Consumer:
        """Return a consumer that looks after parked messages often."""
        chosen = {"due_seconds": 0.05, "takeover_seconds": 2.0, "workers": 4, **options}
        database = self.engine if self._database else None
        return Consumer(self.broker, group=self.group, database=database, **chosen)

    def publish(self, *payloads: Any, key: str | None = "k", topic: str = "orders") -> list[str]:
        """Publish *payloads* under one key, text as it is; return the message ids."""
        messages = [Message.new(topic, _body(payload), key=key) for payload in payloads]
        self.send(*messages)
        return [message.id for message in messages]

    def send(self, *messages: Message) -> None:
        """Publish *messages* as they are."""
        sink = self.broker.sink()
        assert not [result.error for result in sink.publish(messages) if result.error]
        sink.close()

    def replay(self, letter: Any, body: bytes) -> None:
        """Send *letter* again, by a plan of its own."""
        terms = ReplayOptions(policy=StopPolicy(canary=0, ramp=()))
        chosen = Selection(consumer_group=self.group)
        plan = freeze(self.engine, chosen, terms, Operator(actor="ada", reason="fixed")).plan
        marks = ReplayHeaders(group=self.group, plan=plan.id, dlq_id=letter.dlq_id, topic="orders")
        copy = Message.new(
            replay_topic("orders", self.group), body, key="k", ids=lambda: letter.message_id
        )
        self.send(copy.with_(headers=marks.stamped(copy.headers)))

    def note(self, session: Session, what: str) -> None:
        """Make an effect in the handler's transaction."""
        session.execute(insert(effects).values(what=what))

    def close(self) -> None:
        """Let go of the database, once no handler that was left behind uses it any more."""
        until(lambda: self.engine.pool.checkedout() == 0, "every connection given back")  # type: ignore[attr-defined]
        self.broker.close()
        self.engine.dispose()

    @property
    def effects(self) -> list[str]:
        """The committed effects, in order."""
        return [row.what for row in self._rows(effects)]

    @property
    def letters(self) -> list[Any]:
        """The dead letters."""
        return self._rows(letters)

    @property
    def held(self) -> list[Any]:
        """The parked messages."""
        return self._rows(held)

    @property
    def held_keys(self) -> list[Any]:
        """The keys that wait."""
        return self._rows(held_key)

    @property
    def attempts(self) -> list[Any]:
        """The attempt ledger."""
        return self._rows(attempt)

    @property
    def marks(self) -> list[Any]:
        """The start marks."""
        return self._rows(start)

    @property
    def lag(self) -> int:
        """How many messages of the group are not acknowledged."""
        return sum(self.broker.lag(self.group, ["orders"]).values())

    def _rows(self, table: Table) -> list[Any]:
        with self.engine.connect() as db:
            order = list(table.primary_key.columns)
            return list(db.execute(select(table).order_by(*order)))


def _body(payload: Any) -> bytes:
    if isinstance(payload, bytes):
        return payload
    return payload.encode() if isinstance(payload, str) else json.dumps(payload).encode()


@contextmanager
def running(consumer: Consumer) -> Iterator[Consumer]:
    """Run *consumer* in a thread until the block ends; what it raises is raised here."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            consumer.run()
        except BaseException as error:  # noqa: BLE001 - told to the test
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield consumer
    finally:
        consumer.stop()
        thread.join(60)
        assert not thread.is_alive(), "the consumer did not stop"
    if raised:
        raise raised[0]


def until(condition: Any, what: str) -> None:
    """Wait for *condition* with a deadline that suits a busy machine."""
    wait_until(condition, deadline=60, what=what)
