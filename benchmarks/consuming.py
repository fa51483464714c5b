"""One consumer process with dedup and effect in PostgreSQL: ours, a loop by hand, FastStream's.

Started as users start theirs, it handles so many messages of a topic and prints its rate and
the CPU seconds of each message as JSON, from the first message handled to the last.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from contextlib import nullcontext
from datetime import datetime  # noqa: TC003 - mapped by annotation
from typing import TYPE_CHECKING, Any, NamedTuple

import confluent_kafka
import psycopg
from profiles import profiled
from sqlalchemy import DateTime, insert
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from holdfast.consumer import Batches, Consumer
from holdfast.idempotency import idempotent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

BATCH = 200
SEEN = (
    "INSERT INTO seen (id, handled_at) SELECT id, now() FROM unnest(%s::text[]) AS id"
    " ON CONFLICT DO NOTHING RETURNING id"
)
ENTER = "INSERT INTO entries (number, document) VALUES (%s, %s)"


class Base(DeclarativeBase):
    """The tables of the handlers."""


class Entry(Base):
    """The effect of a message."""

    __tablename__ = "entries"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]
    document: Mapped[str]


class Seen(Base):
    """What the loop by hand has handled."""

    __tablename__ = "seen"
    id: Mapped[str] = mapped_column(primary_key=True)
    handled_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


class Place(NamedTuple):
    """Where the messages are and where the effects go."""

    kafka: str
    database: str
    topic: str

    @property
    def group(self) -> str:
        """A group of its own for each database."""
        return self.database.rpartition("/")[2]


class Stopwatch:
    """The time and the CPU from the first message to the last of *count*."""

    def __init__(self, count: int) -> None:
        self._left = self._count = count
        self._begun: tuple[float, float] | None = None
        self.found: dict[str, float] = {}

    def handled(self, count: int = 1) -> bool:
        """Note that *count* messages are being handled; return whether they are the last."""
        if self._begun is None:
            self._begun = time.perf_counter(), _cpu()
            self._count -= count
        self._left -= count
        return self._left <= 0

    def end(self) -> None:
        """Note what was found."""
        assert self._begun is not None
        seconds, cpu = time.perf_counter() - self._begun[0], _cpu() - self._begun[1]
        self.found = {"rate": self._count / seconds, "cpu": cpu / self._count}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# -- ours ------------------------------------------------------------------------------


def ours(kind: str, place: Place, watch: Stopwatch) -> None:
    """Run a `Consumer` with its defaults."""
    consumer = Consumer(
        f"kafka+confluent://{place.kafka}", group=place.group, database=place.database
    )

    def noted(count: int = 1) -> None:
        if watch.handled(count):
            watch.end()
            consumer.stop()

    def single(order: dict[str, Any], session: Session) -> None:
        session.execute(insert(Entry), {"number": order["n"], "document": order["text"]})
        noted()

    def added(order: dict[str, Any], session: Session) -> None:
        session.add(Entry(number=order["n"], document=order["text"]))
        noted()

    def listed(orders: list[dict[str, Any]], session: Session) -> None:
        rows = [{"number": order["n"], "document": order["text"]} for order in orders]
        session.execute(insert(Entry), rows)
        noted(len(orders))

    def timed(body: bytes, session: Session) -> None:
        row = {"number": int(body[:6]), "document": repr(time.monotonic())}
        session.execute(insert(Entry), row)
        noted()

    kinds: dict[str, tuple[Callable[..., None], Batches | int | None]] = {
        "single": (single, None),
        "timed": (timed, None),
        "batch": (added, BATCH),
        "batch-execute": (single, BATCH),
        "lists": (listed, Batches(size=BATCH, whole=True)),
    }
    handler, batch = kinds[kind]
    consumer.on(place.topic, batch=batch)(idempotent(handler))
    consumer.run()


# -- by hand ---------------------------------------------------------------------------


def by_hand(kind: str, place: Place, watch: Stopwatch) -> None:
    """Run what a good engineer writes: dedup and effect in one transaction, offsets after it."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": place.kafka,
            "group.id": place.group,
            "auto.offset.reset": "earliest",
            "enable.auto.offset.store": False,
        }
    )
    consumer.subscribe([place.topic])
    size = 1 if kind == "single" else BATCH
    dsn = place.database.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(dsn) as db:
        for records in _polled(consumer, size):
            is_last = watch.handled(len(records))
            orders = {_id(record): json.loads(record.value()) for record in records}
            with db.transaction():
                new = [row[0] for row in db.execute(SEEN, [list(orders)])]
                if len(new) == 1:
                    db.execute(ENTER, values(orders[new[0]]))
                elif new:
                    rows = [values(orders[id_]) for id_ in new]
                    db.cursor().executemany(ENTER, rows)
            for record in _last(records):
                consumer.store_offsets(record)  # after the commit; the client tells Kafka
            if is_last:
                watch.end()
                break
    consumer.close()


def _polled(consumer: Any, size: int) -> Iterator[list[Any]]:
    while True:
        found = consumer.consume(size, 0)
        if not found and (one := consumer.poll(1.0)) is not None:
            found = [one]
        records = [record for record in found if record.error() is None]
        if records:
            yield records


def values(order: dict[str, Any]) -> tuple[int, str]:
    """Return the row of *order*."""
    return order["n"], order["text"]


def _id(record: Any) -> str:
    return next(value.decode() for name, value in record.headers() if name == "ce_id")


def _last(records: Iterable[Any]) -> Iterable[Any]:
    """Return the last record of each partition."""
    return {record.partition(): record for record in records}.values()


# -- FastStream ------------------------------------------------------------------------


def on_faststream(_kind: str, place: Place, watch: Stopwatch) -> None:
    """Run it on FastStream, which has one transaction for each message."""
    from faststream_peer import run

    run(place, watch)


def main() -> None:
    """Run one side."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("side", "kind", "kafka", "database", "topic"):
        parser.add_argument(name)
    parser.add_argument("count", type=int)
    parser.add_argument("--profile", help="a file for where the CPU of all threads went")
    given = parser.parse_args()
    watch = Stopwatch(given.count)
    side = {"ours": ours, "hand": by_hand, "faststream": on_faststream}[given.side]
    with profiled(given.profile) if given.profile else nullcontext():
        side(given.kind, Place(given.kafka, given.database, given.topic), watch)
    print(json.dumps(watch.found))


if __name__ == "__main__":
    main()
