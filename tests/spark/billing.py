"""A group that handles replayed messages: dedup, effects and outcome in one transaction."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import Column, Integer, MetaData, String, Table, insert, select

from holdfast.brokers import connect
from holdfast.db.engine import open_database
from holdfast.dlq.replay import confirmed_all, is_for, original

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

metadata = MetaData()
effects = Table(
    "spark_effect",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("message_id", String(64)),
    Column("message_key", String(64)),
    Column("number", Integer),
)


class Billing:
    """Handles what comes by one topic, many messages in a transaction."""

    def __init__(self, url: str, broker: str, topic: str, group: str) -> None:
        self._url = url
        self._broker = broker
        self._topic = topic
        self.group = group
        self.copies: Counter[str] = Counter()

    @contextmanager
    def running(self) -> Iterator[Billing]:
        """Consume in a thread of its own."""
        stop, trouble = threading.Event(), list[BaseException]()

        def work() -> None:
            engine = open_database(self._url)
            try:
                with (
                    closing(connect(self._broker)) as broker,
                    closing(broker.source([self._topic], group=self.group)) as source,
                ):
                    while not stop.is_set():
                        deliveries = source.poll(500, 0.1)
                        mine = [original(one.message) for one in deliveries
                                if is_for(one.message, self.group)]  # fmt: skip
                        if mine:
                            self._handle(engine, mine)
                        source.accept(deliveries)
            except BaseException as error:  # noqa: BLE001 - told to the test
                trouble.append(error)
            finally:
                engine.dispose()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join()
        if trouble:
            raise trouble[0]

    def _handle(self, engine: Engine, messages: list) -> None:  # type: ignore[type-arg]
        self.copies.update(one.id for one in messages)
        with engine.begin() as db:
            ids = [one.id for one in messages]
            known = set(
                db.execute(
                    select(effects.c.message_id).where(effects.c.message_id.in_(ids))
                ).scalars()
            )
            rows = []
            for one in messages:
                if one.id not in known:
                    known.add(one.id)
                    number = msgspec.json.decode(one.payload or b"{}")["n"]
                    rows.append({"message_id": one.id, "message_key": one.key_text,
                                 "number": number})  # fmt: skip
            if rows:
                db.execute(insert(effects), rows)
            confirmed_all(db, messages)


def in_order(engine: Engine) -> dict[str | None, list[int]]:
    """Return the numbers that took effect, by key, in the order in which they did."""
    found: dict[str | None, list[int]] = defaultdict(list)
    with engine.connect() as db:
        for row in db.execute(select(effects).order_by(effects.c.seq)):
            found[row.message_key].append(row.number)
    return dict(found)


def check_effects(store: Engine, billing: Billing, count: int, most_copies: int) -> None:
    """Check that all was delivered, little of it twice, and took effect once and in order."""
    assert set(billing.copies) == {f"{billing.group}-{n:06}" for n in range(count)}
    assert billing.copies.total() - count <= most_copies
    found = in_order(store)
    assert sum(map(len, found.values())) == count
    found.pop(None)
    assert all(numbers == sorted(numbers) for numbers in found.values())
    assert found["hot"] == list(range(1, count, 2))
